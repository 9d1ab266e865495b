"""The mailbox between the scheduler and the agent loop workers: a small Ray actor.

Workers report what happens to their rollouts; the scheduler waits for reports and collects them. A rollout in a worker
is identified by its `dispatch` number: every submit gets a new one, so reports of different attempts cannot be
confused. The actor timestamps reports as they arrive; it lives on the scheduler's node, whose monotonic clock is shared
by all processes, so timestamps and `VerlEngine.now()` are on one clock.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Iterable
from typing import Any, NamedTuple

import ray


class Started(NamedTuple):
    dispatch: int


class Made(NamedTuple):
    """Tokens from a server, all sampled under `version`."""

    dispatch: int
    tokens: array[int]
    logprobs: array[float]
    version: int


class Finished(NamedTuple):
    dispatch: int
    truncated: bool


class Aborted(NamedTuple):
    dispatch: int


class Failed(NamedTuple):
    """Before the rollout finished: it is lost. After: it has no score."""

    dispatch: int
    reason: str


class Scored(NamedTuple):
    """Its trajectories are in the TransferQueue, under `keys`."""

    dispatch: int
    reward: float
    keys: tuple[str, ...]


Report = Started | Made | Finished | Aborted | Failed | Scored


class Exchange:
    def __init__(self) -> None:
        self._reports: list[tuple[float, Report]] = []
        self._stopped: set[int] = set()
        self._news = asyncio.Event()

    # For the workers

    async def start(self, dispatch: int) -> bool:
        """Whether this rollout may go to a server; if so, it counts as started."""
        if dispatch in self._stopped:
            return False
        await self.report([Started(dispatch)])
        return True

    async def is_stopped(self, dispatch: int) -> bool:
        return dispatch in self._stopped

    async def report(self, reports: Iterable[Report]) -> None:
        now = time.monotonic()
        for report in reports:
            self._reports.append((now, report))
            if isinstance(report, Aborted | Finished | Failed):
                self._stopped.discard(report.dispatch)
        self._news.set()

    # For the scheduler

    async def abort(self, dispatches: Iterable[int]) -> None:
        self._stopped.update(dispatches)

    async def collect(self, timeout_seconds: float) -> list[tuple[float, Report]]:
        """New reports, or none after the timeout."""
        if not self._reports and timeout_seconds > 0:
            try:
                await asyncio.wait_for(self._news.wait(), timeout_seconds)
            except TimeoutError:
                return []
        self._news.clear()
        reports, self._reports = self._reports, []
        return reports


def open_exchange() -> Any:
    """Create an exchange on this node. It lives as long as its last handle."""
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        node_id=ray.get_runtime_context().get_node_id(), soft=False
    )
    # Every running rollout may have one call in flight: at scale far more than Ray's default of 1000.
    options = ray.remote(Exchange).options(num_cpus=0, max_concurrency=65536, scheduling_strategy=here)
    return options.remote()
