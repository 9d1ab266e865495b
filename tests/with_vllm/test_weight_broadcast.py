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

from sortedrl.engines.servers.weight_broadcast import BroadcastGroup, WeightBroadcast


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

    async def init(self, info: dict[str, Any]) -> None:
        read = self.engine.init_info_cls(**info)
        await asyncio.to_thread(self.engine.init_transfer_engine, read)

    async def receive(self, info: dict[str, Any]) -> None:
        read = self.engine.update_info_cls(**info)
        await asyncio.to_thread(self.engine.receive_weights, read)


@pytest.fixture(autouse=True)
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynccl, "PyNcclCommunicator", StoreCommunicator)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(synchronize=lambda: None))


def test_a_worker_of_vllm_receives_every_weight() -> None:
    weights = {
        "model.embed_tokens.weight": torch.randn(7, 4).to(torch.bfloat16),
        "model.layers.0.mlp.up_proj.weight": torch.randn(4, 6).T,  # not contiguous
        "lm_head.weight": torch.randn(7, 4),
    }
    worker, group = Worker(), BroadcastGroup(workers=1)

    async def update(source: WeightBroadcast) -> None:
        await group.open(source.device, worker.init)
        await group.send(source, worker.receive)

    asyncio.run(update(WeightBroadcast(weights)))
    assert list(worker.loaded) == list(weights)
    assert all(torch.equal(worker.loaded[name], weight) for name, weight in weights.items())
    changed = {name: weight + 1 for name, weight in weights.items()}
    asyncio.run(update(WeightBroadcast(changed)))
    assert all(torch.equal(worker.loaded[name], weight) for name, weight in changed.items())
