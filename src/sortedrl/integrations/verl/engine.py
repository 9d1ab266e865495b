"""verl's rollout servers as an engine of the scheduler, and verl's rewards as its scorer.

Guarantees in addition to the engine protocol:
- at most `slots` rollouts are in verl at once (over all servers: vLLM max_num_seqs, SGLang max_running_requests); the
  others wait here, in order;
- every dispatch ends in one report (finished, aborted or failed), and `abort` returns only when all of its rollouts
  have reported, so that no late request can reach a server after an abort;
- the version of a segment is what the server reports, not what we expect.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray

from sortedrl.core import engine as core
from sortedrl.core.engine import Change, EngineDied, Request
from sortedrl.core.engine_base import EngineBase
from sortedrl.core.rollout import Rollout, Segment
from sortedrl.core.scoring import Scored
from sortedrl.integrations.verl import exchange as reports
from sortedrl.integrations.verl.agent import Ticket

_PATIENCE_SECONDS = 1.0  # for an abort to take effect, before late requests are let in and aborted again
_STOP_LIMIT_SECONDS = 300.0
_LONGEST_WAIT_SECONDS = 10.0


class Servers(Protocol):
    """The part of verl's CheckpointEngineManager that the engine uses."""

    def abort_replicas(self, reject_request: bool = False) -> Any: ...

    def resume_generation_replicas(self) -> Any: ...


Send = Callable[[Sequence[tuple[Request, Ticket]]], None]  # to the agent loop workers; must not wait for completion
Clear = Callable[[Collection[str]], None]  # trajectories that will not be trained on


@dataclass(slots=True)
class Dispatched:
    """A rollout in verl, or its result."""

    id: int
    keys: tuple[str, ...] = ()


class VerlEngine(EngineBase):
    def __init__(
        self,
        exchange: Any,
        servers: Servers,
        *,
        slots: int,
        send: Send,
        clear: Clear,
        check_workers: Callable[[], None],  # raises RayActorError if one is gone
        keeps_tokens: bool,
    ) -> None:
        self.slots = slots
        self.scores = VerlScores(self)
        self.version = 0  # of the servers' weights
        self._exchange = exchange
        self._servers = servers
        self._send = send
        self._clear = clear
        self._check_workers = check_workers
        self._keeps_tokens = keeps_tokens
        self._waiting: deque[Request] = deque()
        self._running: dict[int, int] = {}  # dispatch by request id
        self._dispatched: dict[int, Dispatched] = {}
        self._newest: dict[int, int] = {}  # dispatch by request id, including finished ones
        self._count = 0
        self._is_resting = False
        self._news: list[Change] = []  # not yet delivered

    def now(self) -> float:
        return time.monotonic()

    def submit(self, requests: Sequence[Request]) -> None:
        self._waiting.extend(requests)
        self._fill()

    def poll(self, until: float | None = None) -> list[Change]:
        while not self._news and (self._running or until is not None):
            wait = _LONGEST_WAIT_SECONDS if until is None else max(0.0, until - self.now())
            began = self.now()
            is_scored = self.receive(wait)
            if is_scored if until is None else self.now() >= until:  # the harvest may only be waiting for a score
                break
            if not self._news and self.now() - began >= _LONGEST_WAIT_SECONDS:
                self._check()
        self._fill()
        return self._take_news()

    def abort(self, ids: Sequence[int]) -> list[Change]:
        named = set(ids)
        self._waiting = deque(request for request in self._waiting if request.id not in named)
        pending = {id: dispatch for id, dispatch in self._running.items() if id in named}
        if pending:
            self._call(self._exchange.abort.remote(list(pending.values())))
            self._abort_until_ended(pending)
            if self._running:
                self.wake()
        self._fill()
        return self._take_news()

    def update_weights(self, weights: Any, version: int) -> None:
        """Only the version: verl has already synced the weights at the end of its step, for validation."""
        del weights
        if version != self.version:
            raise RuntimeError(f"the servers hold version {self.version}, but the scheduler continues under {version}")

    # For the scorer and the trainer

    def receive(self, timeout_seconds: float) -> bool:
        """Wait for reports; returns whether there are scores among them."""
        is_scored = False
        for at, report in self._call(self._exchange.collect.remote(timeout_seconds)):
            is_scored |= self._take(at, report)
        return is_scored

    def dispatch_of(self, id: int) -> int | None:
        return self._newest.get(id)

    def sleep(self) -> None:
        """No server takes requests until `wake`."""
        if not self._is_resting:
            self._servers.abort_replicas(reject_request=True)
            self._is_resting = True

    def wake(self) -> None:
        self._servers.resume_generation_replicas()
        self._is_resting = False

    def keys_of(self, rollout: Rollout) -> tuple[str, ...]:
        return self._dispatched[self._newest[rollout.id]].keys

    def forget_all_but(self, live: Collection[int]) -> None:
        """Forget rollouts that are gone, and drop their trajectories if they were not trained on."""
        for id in [id for id in self._newest if id not in live]:
            self._forget(self._newest.pop(id))

    def trained(self, rollouts: Iterable[Rollout]) -> None:
        """Hand their trajectories over to the trainer."""
        for rollout in rollouts:
            self._dispatched.pop(self._newest.pop(rollout.id), None)

    def state(self) -> dict[str, Any]:
        """JSON-ready. The trajectories themselves are in verl's checkpoint of the TransferQueue."""
        finished = {id: dispatch for id, dispatch in self._newest.items() if self._dispatched[dispatch].keys}
        return {
            "count": self._count,
            "keys": {str(id): list(self._dispatched[dispatch].keys) for id, dispatch in finished.items()},
            "rewards": {str(id): self.scores.reward_of(dispatch) for id, dispatch in finished.items()},
        }

    def restore(self, state: dict[str, Any], version: int) -> None:
        """Dispatch numbers continue, so that no key of the earlier run is reused."""
        self.version = version
        self._count = state["count"] + 1_000_000  # the rolled-back part may have used many
        for id, keys in state["keys"].items():
            self._newest[int(id)] = self._count
            self._dispatched[self._count] = Dispatched(int(id), tuple(keys))
            if state["rewards"][id] is not None:
                self.scores.arrived(self._count, state["rewards"][id], None)
            self._count += 1

    # Internals

    def _fill(self) -> None:
        batch: list[tuple[Request, Ticket]] = []
        while self._waiting and len(self._running) < self.slots:
            request = self._waiting.popleft()
            dispatch, self._count = self._count, self._count + 1
            if request.id in self._newest:
                self._forget(self._newest[request.id])
            self._newest[request.id] = self._running[request.id] = dispatch
            self._dispatched[dispatch] = Dispatched(request.id)
            batch.append((request, self._ticket(request, dispatch)))
        if batch:
            if self._is_resting:
                self.wake()
            self._send(batch)

    def _ticket(self, request: Request, dispatch: int) -> Ticket:
        kept = tuple((array("i", s.tokens), array("f", s.logprobs), s.version) for s in request.prefix)
        return Ticket(dispatch, request.max_new_tokens, kept, self._keeps_tokens)

    def _abort_until_ended(self, pending: dict[int, int]) -> None:
        """Abort until every pending rollout has reported its end.

        A server may hold a request that arrives after the abort until it is resumed. Such a request would be served
        later, so the servers are resumed and aborted again until it has returned.
        """
        deadline = self.now() + _STOP_LIMIT_SECONDS
        while True:
            self._servers.abort_replicas(reject_request=True)
            self._is_resting = True
            patience = self.now() + _PATIENCE_SECONDS
            while self._outstanding(pending) and self.now() < patience:
                self.receive(patience - self.now())
            if not self._outstanding(pending):
                return
            if self.now() > deadline:
                raise EngineDied(
                    f"{len(self._outstanding(pending))} rollouts did not end within {_STOP_LIMIT_SECONDS} s"
                )
            self.wake()

    def _outstanding(self, pending: dict[int, int]) -> list[int]:
        return [id for id, dispatch in pending.items() if self._running.get(id) == dispatch]

    def _take(self, at: float, report: reports.Report) -> bool:
        """Process a report; returns whether it is a score."""
        known = self._dispatched.get(report.dispatch)
        if known is None or self._newest.get(known.id) != report.dispatch:
            if isinstance(report, reports.Scored):
                self._clear(report.keys)  # regenerated in the meantime
            return False
        if isinstance(report, reports.Scored):
            known.keys = report.keys
            self.scores.arrived(report.dispatch, report.reward, None)
            return True
        if report.dispatch == self._running.get(known.id):
            self._news += self._changes(known.id, at, report)
        elif isinstance(report, reports.Failed):
            self.scores.arrived(report.dispatch, None, report.reason)
            return True
        return False

    def _take_news(self) -> list[Change]:
        news, self._news = self._news, []
        return news

    def _changes(self, id: int, at: float, report: reports.Report) -> list[Change]:
        if isinstance(report, reports.Started):
            return [core.Started(id, at)]
        if isinstance(report, reports.Made):
            return [core.Tokens(id, at, Segment(report.tokens.tolist(), report.logprobs.tolist(), report.version))]
        del self._running[id]
        if isinstance(report, reports.Finished):
            return [core.Finished(id, at, report.truncated)]
        if isinstance(report, reports.Failed):
            return [core.Failed(id, at, report.reason)]
        return []

    def _forget(self, dispatch: int) -> None:
        known = self._dispatched.pop(dispatch, None)
        self.scores.forget(dispatch)
        if known is not None and known.keys:
            self._clear(known.keys)

    def _check(self) -> None:
        """After a long silence: check the workers, since one that died sends no report for its rollouts."""
        try:
            self._check_workers()
        except ray.exceptions.RayActorError as error:
            raise EngineDied(f"an agent loop worker is gone: {error}") from None

    def _call(self, reference: Any) -> Any:
        try:
            return ray.get(reference)
        except ray.exceptions.RayActorError as error:
            raise EngineDied(f"the exchange is gone: {error}") from None


class VerlScores:
    """verl scores finished rollouts in the agent loop workers; this class waits for the rewards."""

    wakes_engine = True

    def __init__(self, engine: VerlEngine) -> None:
        self._engine = engine
        self._waiting: dict[int, tuple[int, int]] = {}  # by dispatch: rollout and attempt
        self._arrived: dict[int, tuple[float | None, str | None]] = {}

    @property
    def pending(self) -> int:
        return len(self._waiting)

    def submit(self, rollout: Rollout) -> None:
        dispatch = self._engine.dispatch_of(rollout.id)
        if dispatch is None:  # it finished, but the run was killed before it was scored
            dispatch = -1 - rollout.id
            self._arrived[dispatch] = (None, "the run ended before it was scored")
        self._waiting[dispatch] = (rollout.id, rollout.attempt)

    def collect(self) -> list[Scored]:
        done = [dispatch for dispatch in self._waiting if dispatch in self._arrived]
        return [self._scored(dispatch) for dispatch in done]

    def wait(self, timeout_seconds: float) -> None:
        deadline = self._engine.now() + timeout_seconds
        while not any(dispatch in self._arrived for dispatch in self._waiting) and self._engine.now() < deadline:
            self._engine.receive(deadline - self._engine.now())

    def wait_for_all(self, timeout_seconds: float) -> None:
        """Wait before a checkpoint: rollouts without a score would be lost with the run."""
        deadline = self._engine.now() + timeout_seconds
        while self._waiting.keys() - self._arrived.keys() and self._engine.now() < deadline:
            self._engine.receive(deadline - self._engine.now())

    def reward_of(self, dispatch: int) -> float | None:
        """Scores that the scheduler has not collected yet."""
        return self._arrived[dispatch][0] if dispatch in self._arrived else None

    def arrived(self, dispatch: int, reward: float | None, error: str | None) -> None:
        self._arrived[dispatch] = (reward, error)

    def forget(self, dispatch: int) -> None:
        self._waiting.pop(dispatch, None)
        self._arrived.pop(dispatch, None)

    def _scored(self, dispatch: int) -> Scored:
        rollout, attempt = self._waiting.pop(dispatch)
        reward, error = self._arrived.pop(dispatch)
        return Scored(rollout, reward, error=error, attempt=attempt)
