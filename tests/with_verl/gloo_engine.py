"""A checkpoint engine of verl on gloo, in place of nccl's: rank 0 of the learner broadcasts to all servers.

Registered by `actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=gloo_engine`. As nccl's it has a group
of its own, which spans training and rollout workers, and moves weights in buckets.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

_TIMEOUT = timedelta(seconds=60)
Named = tuple[str, torch.Tensor]


@CheckpointEngineRegistry.register("gloo")
class GlooCheckpointEngine(CheckpointEngine):
    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self.bucket_size = bucket_size
        self.is_master = is_master
        self.store: Any = None
        self.group: Any = None
        self.rank = -1

    def prepare(self) -> int | None:
        """The port of the store of rank 0."""
        if not self.is_master:
            return None
        tcp = {"timeout": _TIMEOUT, "wait_for_workers": False}
        self.store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, **tcp)
        return int(self.store.port)

    @classmethod
    def build_topology(cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]) -> Any:
        size = 1 + rollout_world_size
        of_actor = {
            "rank": [0, *[-1] * (actor_wg_world_size - 1)],
            "size": [size] * actor_wg_world_size,
            "port": [metadata[0]] * actor_wg_world_size,
        }
        of_rollout = {
            "rank": list(range(1, size)),
            "size": [size] * rollout_world_size,
            "port": [metadata[0]] * rollout_world_size,
        }
        return of_actor, of_rollout

    def init_process_group(self, rank: int, size: int, port: int) -> None:
        self.rank = rank
        if rank < 0:
            return
        if self.store is None:
            self.store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False, timeout=_TIMEOUT)
        self.group = torch.distributed.ProcessGroupGloo(self.store, rank, size, _TIMEOUT)

    def finalize(self) -> None:
        self.group = self.store = None

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        options = torch.distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self.group.broadcast([tensor], options).wait()
        return tensor

    def _send(self, bucket: list[Named], is_last: bool) -> None:
        meta = pickle.dumps(([(name, tensor.shape, tensor.dtype) for name, tensor in bucket], is_last))
        self._broadcast(torch.tensor([len(meta)]))
        self._broadcast(torch.frombuffer(bytearray(meta), dtype=torch.uint8))
        for _, tensor in bucket:
            self._broadcast(tensor)

    async def send_weights(self, weights: Iterator[Named], global_steps: int | None = None) -> dict[str, float]:
        bucket: list[Named] = []
        size = 0
        for name, weight in weights:
            if self.rank < 0:
                continue  # to gather a weight, all ranks take part
            bucket.append((name, weight.detach().float().cpu().contiguous()))
            size += bucket[-1][1].nbytes
            if size >= self.bucket_size:
                await asyncio.to_thread(self._send, bucket, False)
                bucket, size = [], 0
        if self.rank == 0:
            await asyncio.to_thread(self._send, bucket, True)
        return {"weights/sent": 1.0}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[Named]:
        is_last = False
        while not is_last:
            length = await asyncio.to_thread(self._broadcast, torch.zeros(1, dtype=torch.int64))
            raw = await asyncio.to_thread(self._broadcast, torch.zeros(int(length), dtype=torch.uint8))
            described, is_last = pickle.loads(raw.numpy().tobytes())
            for name, shape, dtype in described:
                yield name, await asyncio.to_thread(self._broadcast, torch.zeros(shape, dtype=dtype))
