"""Weights by NCCL against vLLM's own code, without NCCL: its rendezvous, its request formats and its workers' loop.

The one part that is replaced is the communicator: `StoreCommunicator` broadcasts through the rendezvous' own store, in
the order of the calls, as NCCL would. Not run on two GPUs.
"""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm")

from vllm.distributed.device_communicators import pynccl
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from sortedrl.engines.servers.weight_broadcast import BroadcastGroup, Receiver, WeightBroadcast


class StoreCommunicator:
    def __init__(self, group: StatelessProcessGroup, device: Any) -> None:
        self.group = group

    def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> None:
        got = self.group.broadcast(tensor, src)
        assert got.dtype == tensor.dtype and got.shape == tensor.shape
        tensor.copy_(got)


class Worker:
    """vLLM's engine of a worker with rank 0 in the server, on a CPU."""

    def __init__(self) -> None:
        self.loaded: dict[str, Tensor] = {}
        self.engine = object.__new__(NCCLWeightTransferEngine)
        self.engine.parallel_config = SimpleNamespace(data_parallel_index=0, data_parallel_rank=0, world_size=1, rank=0)
        self.engine.device = torch.device("cpu")
        self.engine.model = SimpleNamespace(load_weights=lambda pairs: self.loaded.update(pairs))

    async def transfer(self, path: str, **body: Any) -> None:
        if path == "/init_weight_transfer_engine":
            await asyncio.to_thread(self.engine.init_transfer_engine, self.engine.init_info_cls(**body["init_info"]))
        if path == "/update_weights":
            await asyncio.to_thread(self.engine.receive_weights, self.engine.update_info_cls(**body["update_info"]))


@pytest.fixture(autouse=True)
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynccl, "PyNcclCommunicator", StoreCommunicator)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(synchronize=lambda: None))


@pytest.mark.parametrize("servers", [1, 2])
def test_the_workers_of_all_servers_receive_every_weight(servers: int) -> None:
    weights = {
        "model.embed_tokens.weight": torch.randn(7, 4).to(torch.bfloat16),
        "model.layers.0.mlp.up_proj.weight": torch.randn(4, 6).T,  # not contiguous
        "lm_head.weight": torch.randn(7, 4),
    }
    workers = [Worker() for _ in range(servers)]
    group, receivers = BroadcastGroup(), [Receiver(1, worker.transfer) for worker in workers]

    async def update(sent: dict[str, Tensor]) -> None:
        source = WeightBroadcast(sent, group, servers)
        await asyncio.gather(*(source.send_to(receiver) for receiver in receivers))

    changed = {name: weight + 1 for name, weight in weights.items()}
    for sent in (weights, changed):
        asyncio.run(update(sent))
        for worker in workers:
            assert list(worker.loaded) == list(sent)
            assert all(torch.equal(worker.loaded[name], weight) for name, weight in sent.items())
