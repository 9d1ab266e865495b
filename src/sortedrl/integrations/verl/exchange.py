"""The mailbox and the gate between the scheduler and the agent loop workers: a small Ray actor.

Workers report what happens to their rollouts; the scheduler waits for reports and collects them. An agent loop in a
worker is identified by its `dispatch` number: every run of an agent loop gets a new one, so reports of different
attempts cannot be confused. The actor timestamps reports as they arrive; it lives on the scheduler's node, whose
monotonic clock is shared by all processes, so timestamps and `VerlEngine.now()` are on one clock.

The gate: no agent loop sends a request to a server unless the scheduler has granted it a slot. It waits in `enter`
before its first turn, between two turns, and after an abort.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import ray

from sortedrl.core.user_values import reason_of


class TurnStarted(NamedTuple):
    """It has its slot and goes to a server."""

    dispatch: int


class Made(NamedTuple):
    """Tokens from a server, all sampled under `version`."""

    dispatch: int
    tokens: array[int]
    logprobs: array[float]
    version: int


class TurnFinished(NamedTuple):
    """A turn ended and its slot is free. `truncated`: no token is left of the response's limit."""

    dispatch: int
    truncated: bool


class TurnAborted(NamedTuple):
    """Its agent loop left the server, and waits or was canceled."""

    dispatch: int


class ServerFailed(NamedTuple):
    """A server lost the request. Its agent loop waits, with the tokens so far. `is_gone`: so is the server."""

    dispatch: int
    reason: str
    is_gone: bool = False


class LoopObserved(NamedTuple):
    """The agent loop wants another turn. `tokens`: what it added to the context since the last one."""

    dispatch: int
    tokens: array[int]


class LoopEnded(NamedTuple):
    """The agent loop returned; its score follows."""

    dispatch: int


class LoopFailed(NamedTuple):
    """The agent loop raised an error. Before `LoopEnded` the rollout is lost, after it there is no score."""

    dispatch: int
    reason: str


class LoopScored(NamedTuple):
    """Its trajectories are in the TransferQueue, under `keys`."""

    dispatch: int
    reward: float
    keys: tuple[str, ...]
    metric: float | None = None  # by which its group is filtered, if it is not the reward


Report = (
    TurnStarted | Made | TurnFinished | TurnAborted | ServerFailed | LoopObserved | LoopEnded | LoopFailed | LoopScored
)
_LEAVES_ITS_SLOT = (TurnFinished, TurnAborted, ServerFailed, LoopEnded, LoopFailed)
_ENDS_THE_LOOP = (TurnAborted, LoopEnded, LoopFailed, LoopScored)


class Exchange:
    def __init__(self) -> None:
        self._reports: list[tuple[float, Report]] = []
        self._granted: dict[int, int] = {}  # max_new_tokens of dispatches that hold a slot
        self._inside: set[int] = set()  # dispatches at a server, or on the way to one
        self._at_the_gate: dict[int, asyncio.Event] = {}
        self._canceled: set[int] = set()
        self._news = asyncio.Event()

    # For the workers

    async def enter(self, dispatch: int, observation: array[int] | None = None) -> int | None:
        """Wait for a slot. Returns the most tokens that may be sampled in it; None: the rollout was canceled.

        A dispatch that enters while it is inside was aborted, and is reported as such.
        """
        if observation is not None:
            self._append(LoopObserved(dispatch, observation))
        if dispatch in self._inside:
            self._append(TurnAborted(dispatch))
        while dispatch not in self._granted or dispatch in self._canceled:
            if dispatch in self._canceled:
                self._canceled.discard(dispatch)
                return None
            self._at_the_gate[dispatch] = moved = asyncio.Event()
            await moved.wait()
            del self._at_the_gate[dispatch]
        self._inside.add(dispatch)
        self._append(TurnStarted(dispatch))
        return self._granted[dispatch]

    async def has_slot(self, dispatch: int) -> bool:
        return dispatch in self._granted

    async def report(self, reports: Iterable[Report]) -> None:
        for report in reports:
            self._append(report)
            if isinstance(report, _ENDS_THE_LOOP):
                self._canceled.discard(report.dispatch)

    def _append(self, report: Report) -> None:
        self._reports.append((time.monotonic(), report))
        if isinstance(report, _LEAVES_ITS_SLOT):
            self._inside.discard(report.dispatch)
            self._granted.pop(report.dispatch, None)
        self._news.set()

    # For the scheduler

    async def grant(self, limits: Mapping[int, int]) -> None:
        """Give slots to these dispatches, each for at most so many tokens."""
        self._granted.update(limits)
        self._move(limits)

    async def abort(self, dispatches: Iterable[int]) -> list[int]:
        """Take their slots back. Returns those at the servers, each of which will report that it left."""
        dispatches = list(dispatches)
        for dispatch in dispatches:
            self._granted.pop(dispatch, None)
        return [dispatch for dispatch in dispatches if dispatch in self._inside]

    async def cancel(self, dispatches: Iterable[int]) -> list[int]:
        """Their agent loops shall end. Returns those that do not wait at the gate: only their worker can stop them."""
        dispatches = list(dispatches)
        self._canceled.update(dispatches)
        elsewhere = [dispatch for dispatch in dispatches if dispatch not in self._at_the_gate]
        self._move(dispatches)
        return elsewhere

    def _move(self, dispatches: Iterable[int]) -> None:
        for dispatch in dispatches:
            if dispatch in self._at_the_gate:
                self._at_the_gate[dispatch].set()

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


def reason_for_report(error: BaseException) -> str:
    """An exception in one line. If a Ray actor raised it, this is its cause: Ray's own text starts with a traceback."""
    while isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, Exception):
        error = error.cause
    return reason_of(error)


def open_exchange() -> Any:
    """Create an exchange on this node. It lives as long as its last handle."""
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        node_id=ray.get_runtime_context().get_node_id(), soft=False
    )
    # Every live agent loop may have one call in flight: at scale far more than Ray's default of 1000.
    options = ray.remote(Exchange).options(num_cpus=0, max_concurrency=65536, scheduling_strategy=here)
    return options.remote()
