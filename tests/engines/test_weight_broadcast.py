"""Weights by NCCL, as far as a machine without CUDA shows: what the server gets, and what happens if one side fails.

In tests/with_vllm the server's own code takes part.
"""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
import torch

from sortedrl.engines.servers import weight_broadcast
from sortedrl.engines.servers.weight_broadcast import BroadcastGroup, WeightBroadcast, _both


def test_the_server_is_told_every_weight_in_order() -> None:
    weights = {"a": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.zeros(4)}
    assert WeightBroadcast(weights).update_info() == {
        "names": ["a", "b"],
        "dtype_names": ["bfloat16", "float32"],
        "shapes": [[2, 3], [4]],
    }


def test_both_sides_run_at_the_same_time() -> None:
    both = threading.Barrier(2, timeout=10)

    async def call() -> None:
        await asyncio.to_thread(both.wait)

    assert isinstance(asyncio.run(_both(call(), both.wait)), int)


def test_an_error_of_the_server_does_not_wait_for_nccl() -> None:
    in_nccl = threading.Event()

    async def refused() -> None:
        raise ValueError("no such weight")

    began = time.monotonic()
    with pytest.raises(ValueError, match="no such weight"):
        asyncio.run(_both(refused(), lambda: in_nccl.wait(20)))
    assert time.monotonic() - began < 15
    in_nccl.set()


def test_an_error_of_ours_does_not_wait_for_the_server() -> None:
    async def hangs() -> None:
        await asyncio.sleep(60)

    def fails() -> None:
        raise RuntimeError("NCCL")

    with pytest.raises(RuntimeError, match="NCCL"):
        asyncio.run(_both(hangs(), fails))


def test_our_own_part_has_a_deadline_once_the_server_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_broadcast, "OWN_PART_SECONDS", 0.05)
    in_nccl = threading.Event()

    async def succeeds() -> None:
        pass

    with pytest.raises(TimeoutError, match="the learner's part"):
        asyncio.run(_both(succeeds(), lambda: in_nccl.wait(20)))
    in_nccl.set()


def test_the_group_is_opened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[int, int]] = []
    monkeypatch.setattr(weight_broadcast, "_communicator", lambda port, size, device: opened.append((port, size)) or 1)
    infos: list[dict[str, Any]] = []

    async def init(info: dict[str, Any]) -> None:
        infos.append(info)

    async def twice() -> None:
        group = BroadcastGroup(workers=4)
        await group.open("cpu", init)
        await group.open("cpu", init)

    asyncio.run(twice())
    ((port, size),) = opened
    assert infos == [{"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 5}]
    assert size == 5
