"""Where the scheduler and the agent loop workers meet: a small Ray actor.

Workers report what happens to their rollouts; the scheduler collects it, waiting where there is nothing. A rollout in
a worker is known by its `dispatch` number: every submit gives a new one, so a report of an earlier attempt can never be
taken for one of a later. The actor stamps reports as they arrive; it lives on the scheduler's node, whose monotonic
clock is common to all processes, so stamps and `VerlEngine.now()` are on one clock.
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
    """Tokens that a server made, all under `version`."""

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
    """Before it finished: the rollout is lost. After: it has no score."""

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
        """May this rollout go to a server? Noted as started if so."""
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
        """What was reported since, or nothing when the time is up."""
        if not self._reports and timeout_seconds > 0:
            try:
                await asyncio.wait_for(self._news.wait(), timeout_seconds)
            except TimeoutError:
                return []
        self._news.clear()
        reports, self._reports = self._reports, []
        return reports


def open_exchange() -> Any:
    """A new exchange on this node. It ends with its last handle."""
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        node_id=ray.get_runtime_context().get_node_id(), soft=False
    )
    # Every running rollout may hold one call for an instant: far more than Ray's default of 1000 at scale.
    options = ray.remote(Exchange).options(num_cpus=0, max_concurrency=65536, scheduling_strategy=here)
    return options.remote()
