"""Weights by NCCL, as far as a machine without CUDA shows: what the server gets, and what happens if one side fails.

In tests/with_vllm the server's own code takes part.
"""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install '.[dev]'")

from aiohttp import web

from nasty_server import NastyServer, ServerLoop
from sortedrl.engines.servers import base as server_base
from sortedrl.engines.servers import vllm as vllm_server
from sortedrl.engines.servers import weight_broadcast
from sortedrl.engines.servers.base import ServerPool
from sortedrl.engines.servers.vllm import VllmServerEngine
from sortedrl.engines.servers.weight_broadcast import BroadcastGroup, Receiver, WeightBroadcast, _both
from sortedrl.engines.servers.weight_handles import described
from weight_handles import fabricated


def test_the_server_is_told_every_weight_in_order() -> None:
    weights = {"a": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.zeros(4)}
    assert described(weights) == {"names": ["a", "b"], "dtype_names": ["bfloat16", "float32"], "shapes": [[2, 3], [4]]}


def test_both_sides_run_at_the_same_time() -> None:
    both = threading.Barrier(2, timeout=10)

    async def call() -> None:
        await asyncio.to_thread(both.wait)

    assert isinstance(asyncio.run(_both([call()], both.wait)), int)


def test_an_error_of_the_server_does_not_wait_for_nccl() -> None:
    in_nccl = threading.Event()

    async def refused() -> None:
        raise ValueError("no such weight")

    began = time.monotonic()
    with pytest.raises(ValueError, match="no such weight"):
        asyncio.run(_both([refused()], lambda: in_nccl.wait(20)))
    assert time.monotonic() - began < 15
    in_nccl.set()


def test_an_error_of_ours_does_not_wait_for_the_server() -> None:
    async def hangs() -> None:
        await asyncio.sleep(60)

    def fails() -> None:
        raise RuntimeError("NCCL")

    with pytest.raises(RuntimeError, match="NCCL"):
        asyncio.run(_both([hangs()], fails))


def test_our_own_part_has_a_deadline_once_the_server_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_broadcast, "OWN_PART_SECONDS", 0.05)
    in_nccl = threading.Event()

    async def succeeds() -> None:
        pass

    with pytest.raises(TimeoutError, match="the learner's part"):
        asyncio.run(_both([succeeds()], lambda: in_nccl.wait(20)))
    in_nccl.set()


class Server:
    """Notes what it is told. It `fails` at this route."""

    def __init__(self, workers: int, fails: str = "") -> None:
        self.receiver = Receiver(workers, self.transfer)
        self.told: list[str] = []
        self.workers = workers
        self.init: dict[str, Any] = {}
        self._fails = fails

    async def transfer(self, path: str, **body: Any) -> None:
        self.told.append(path)
        self.init |= body.get("init_info", {})
        if path == self._fails:
            raise ValueError(f"{path} failed")


ROUND = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
INIT = "/init_weight_transfer_engine"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the groups that the learner has joined."""
    sizes: list[int] = []
    monkeypatch.setattr(weight_broadcast, "_communicator", lambda port, size, device: sizes.append(size))
    monkeypatch.setattr(weight_broadcast, "_broadcast", lambda communicator, source: None)
    return sizes


def broadcast(group: BroadcastGroup, servers: list[Server], waits_for: int, leaves: int = 0) -> list[Any]:
    async def run() -> list[Any]:
        source = WeightBroadcast({"a": torch.zeros(2)}, group, waits_for)
        for _ in range(leaves):
            source.leave()
        return await asyncio.gather(*(source.send_to(s.receiver) for s in servers), return_exceptions=True)

    return asyncio.run(run())


def test_all_servers_are_in_one_group_that_is_opened_once(opened: list[int]) -> None:
    servers, group = [Server(4), Server(2), Server(1)], BroadcastGroup()
    for order in (servers, servers[::-1]):
        assert broadcast(group, order, waits_for=3) == [None] * 3
    assert opened == [8] and all(server.told == [INIT, *ROUND, *ROUND] for server in servers)
    ranks = sorted(rank for s in servers for rank in range(s.init["rank_offset"], s.init["rank_offset"] + s.workers))
    assert ranks == list(range(1, 8)) and {server.init["world_size"] for server in servers} == {8}


def test_the_group_is_opened_again_for_other_processes(opened: list[int]) -> None:
    first, second, group = Server(1), Server(1), BroadcastGroup()
    broadcast(group, [first, second], waits_for=2)
    broadcast(group, [first], waits_for=2, leaves=1)
    assert opened == [3, 2] and first.told == 2 * [INIT, *ROUND] and second.told == [INIT, *ROUND]


def test_a_server_that_does_not_come_is_not_waited_for_forever(
    opened: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_broadcast, "ARRIVAL_SECONDS", 0.05)
    server = Server(1)
    assert broadcast(BroadcastGroup(), [server], waits_for=2) == [None]
    assert opened == [2] and server.told == [INIT, *ROUND]


@pytest.mark.parametrize("route", [INIT, *ROUND])
def test_an_error_of_one_server_is_one_of_all_and_the_next_group_is_new(route: str, opened: list[int]) -> None:
    servers, group = [Server(1), Server(1, fails=route)], BroadcastGroup()
    assert [str(error) for error in broadcast(group, servers, waits_for=2)] == [f"{route} failed"] * 2
    assert broadcast(group, servers[:1], waits_for=1) == [None]


@pytest.mark.parametrize(("backend", "groups", "exports"), [("nccl", [4], 0), ("ipc", [], 4)])
def test_a_pool_of_servers_gets_its_weights_in_one_broadcast_or_each_its_own_handles(
    backend: str, groups: list[int], exports: int, opened: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch counts the readers of a handle, one: two would end below 0, and the memory would never count as free."""
    monkeypatch.setattr(vllm_server, "can_broadcast", lambda: True)
    monkeypatch.setattr(server_base, "are_on_one_gpu", lambda weights: True)
    monkeypatch.setattr(server_base, "exported", lambda weights: (made.append(1), nullcontext(fabricated()))[1])
    loop, told, made = ServerLoop(), Counter[str](), list[int]()
    servers = [NastyServer("vllm", loop.loop) for _ in range(2)]

    def answer(path: str, body: dict[str, Any]) -> Callable[[], Awaitable[web.Response]]:
        async def respond() -> web.Response:
            told[path] += 1
            return web.json_response(body)

        return respond

    for workers, server in enumerate(servers, start=1):
        config = server.answers()["/server_info"]["vllm_config"]
        config |= {"weight_transfer_config": {"backend": backend}, "parallel_config": {"tensor_parallel_size": workers}}
        server.routes |= {path: answer(path, {}) for path in (INIT, *ROUND)}
        env = {"VLLM_ALLOW_INSECURE_SERIALIZATION": True}
        server.routes["/server_info"] = answer("/server_info", {"vllm_config": config, "vllm_env": env})
    pool = ServerPool([VllmServerEngine(server.url, slots=2, eos_token_ids=[1]) for server in servers])
    for version in (1, 2):
        pool.update_weights({"a": torch.zeros(2)}, version)
    assert opened == groups and len(made) == exports and not pool.lost
    assert told == {"/server_info": 2, INIT: exports or 2, **dict.fromkeys(ROUND, 4)}
    assert all(server.weights.endswith("version-2") for server in servers)
    pool.close()
    for server in servers:
        server.close()
    loop.close()
