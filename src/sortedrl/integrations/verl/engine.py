"""verl's rollout servers as an engine of the scheduler.

Guarantees in addition to the engine protocol:
- at most `slots` requests are at the servers at once (over all servers: vLLM max_num_seqs, SGLang
  max_running_requests); the others wait here, in order;
- a request is one stay in a slot. The agent loop behind it goes on: a turn that ended or was aborted leaves it waiting
  for the next request of its rollout, which continues it if the tokens match, and otherwise starts another loop;
- every stay ends in one report, and `abort` returns only when all of its rollouts have left the servers, so that no
  late request can reach a server after an abort;
- the version of a segment is what the server reports, not what we expect.
"""

import time
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray

from sortedrl.core import engine as core
from sortedrl.core.engine import Change, EngineBase, EngineDied, Request
from sortedrl.core.rollout import Rollout, Segment
from sortedrl.integrations.verl import exchange as reports
from sortedrl.integrations.verl.loops import AgentLoopTurns, SchedulerLoop, VerlScores
from sortedrl.integrations.verl.worker_loop import Ticket

_PATIENCE_SECONDS = 1.0  # for an abort to take effect, before late requests are let in and aborted again
_STOP_LIMIT_SECONDS = 300.0
_LONGEST_WAIT_SECONDS = 10.0
WORKER_SECONDS = 300.0  # for an agent loop worker to answer, which it does at once unless its event loop is blocked
_SERVER = "a rollout server"
_WORKER = "an agent loop worker"
_IS_GONE = "is gone. Resume the run from its last checkpoint"
_NO_LOOP = "its agent loop is gone, and a response of several turns cannot be continued without it"


Send = Callable[[Sequence[tuple[Request, Ticket]]], None]  # to the agent loop workers; must not wait for completion
Clear = Callable[[Collection[str]], None]  # trajectories that will not be trained on
Sync = Callable[[int], None]  # the learner's weights to the servers, under this version


class VerlEngine(EngineBase):
    def __init__(
        self,
        exchange: Any,
        servers: Any,  # verl's CheckpointEngineManager: aborts and resumes its replicas
        workers: Any,  # agent.SortedAgentLoopManager
        *,
        slots: int,
        send: Send,
        clear: Clear,
        max_start_seconds: float,  # from a slot to the loop's call of `generate`
    ) -> None:
        self.slots = slots
        self.loops: dict[int, SchedulerLoop] = {}  # by rollout id
        self.scores = VerlScores(self.loops, self.wait_until)
        self.turns = AgentLoopTurns(self.loops, self.wait_until, self.cancel)
        self.version = 0  # of the servers' weights
        self._exchange = exchange
        self._servers = servers
        self._workers = workers
        self._send = send
        self._clear = clear
        self._max_start_seconds = max_start_seconds
        self._waiting: deque[Request] = deque()
        self._running: set[int] = set()  # ids of the requests that have a slot
        self._starting: dict[int, float] = {}  # by id of those that did not start yet: until when they must
        self._id_of: dict[int, int] = {}  # by dispatch, of the loops
        self._to_cancel: list[int] = []
        self._count = 0
        self._is_resting = False
        self._news: list[Change] = []  # not yet delivered

    def now(self) -> float:
        return time.monotonic()

    def submit(self, requests: Sequence[Request]) -> None:
        self._waiting.extend(requests)
        self._fill()

    def poll(self, until: float | None = None) -> list[Change]:
        self._send_cancels()
        while not self._news and (self._running or until is not None):
            if self.scores.has_scores or self.turns.has_answers:  # the harvest may only be waiting for these
                break
            if until is not None and self.now() >= until:
                break
            self.await_reports(_LONGEST_WAIT_SECONDS if until is None else until - self.now())
            self._fail_late_starts()
        self._fill()
        return self._take_news()

    def abort(self, ids: Sequence[int]) -> list[Change]:
        named = set(ids)
        self._waiting = deque(request for request in self._waiting if request.id not in named)
        pending = {self.loops[id].dispatch: id for id in named & self._running}
        if pending:
            inside = {pending[dispatch] for dispatch in self._call(self._exchange.abort.remote(list(pending)))}
            self.receive(0.0)  # what was reported before
            for id in (named & self._running) - inside:
                self._leave_slot(id)
            self._abort_until_ended(inside)
            if self._running and self._is_resting:
                self.wake()
        self._fill()
        return self._take_news()

    def update_weights(self, weights: Sync | None, version: int) -> None:
        """`weights` brings the learner's to the servers. Without it they must have this version already."""
        if weights is not None:
            with _alive(_SERVER):
                weights(version)
            self.version = version
        if version != self.version:
            raise RuntimeError(f"the servers hold version {self.version}, but the scheduler continues under {version}")

    # For the scorer and the environments

    def receive(self, timeout_seconds: float) -> None:
        """Wait for reports and take them in."""
        for at, report in self._call(self._exchange.collect.remote(timeout_seconds)):
            self._take(at, report)

    def await_reports(self, timeout_seconds: float) -> None:
        """Wait until something may have changed, at most `timeout_seconds`. Checks the workers after a long silence."""
        self._send_cancels()
        soonest = min(self._starting.values(), default=float("inf")) - self.now()
        began, wait = self.now(), max(0.0, min(timeout_seconds, soonest, _LONGEST_WAIT_SECONDS))
        self.receive(wait)
        if self.now() - began >= _LONGEST_WAIT_SECONDS:  # a worker that died sends no report for its rollouts
            with _alive(_WORKER):
                self._workers.wait_until_ready(WORKER_SECONDS)

    def wait_until(self, is_so: Callable[[], bool], timeout_seconds: float) -> None:
        deadline = self.now() + timeout_seconds
        while not is_so() and self.now() < deadline:
            self.await_reports(deadline - self.now())

    def cancel(self, id: int) -> None:
        """The rollout needs its agent loop no longer. The result of a loop stays until the rollout is gone."""
        if id in self.loops and not self.loops[id].has_result:
            self._drop(id)

    # For the trainer

    def sleep(self) -> None:
        """No server takes requests until `wake`."""
        self._send_cancels()
        if not self._is_resting:
            self._abort_servers()

    def wake(self) -> None:
        with _alive(_SERVER):
            self._servers.resume_generation_replicas()
        self._is_resting = False

    def forget_all_but(self, live: Collection[int]) -> None:
        """Forget rollouts that are gone, and drop their trajectories if they were not trained on."""
        for id in [id for id in self.loops if id not in live]:
            self._drop(id)

    def drop(self, ids: Collection[int]) -> None:
        """Forget these rollouts, and clear their trajectories now."""
        self._clear([key for id in ids for key in self.loops[id].keys])
        for id in ids:
            self.loops[id].keys = ()
            self._drop(id)

    def trained(self, rollouts: Iterable[Rollout]) -> None:
        """Hand their trajectories over to the trainer."""
        for rollout in rollouts:
            del self._id_of[self.loops.pop(rollout.id).dispatch]

    def state(self) -> dict[str, Any]:
        """JSON-ready. The trajectories themselves are in verl's checkpoint of the TransferQueue."""
        finished = {str(id): loop for id, loop in self.loops.items() if loop.keys}
        return {
            "count": self._count,
            "keys": {id: list(loop.keys) for id, loop in finished.items()},
            "rewards": {id: loop.score and loop.score[0] for id, loop in finished.items()},
            "metrics": {id: loop.metric for id, loop in finished.items()},
        }

    def restore(self, state: dict[str, Any], version: int) -> None:
        """Dispatch numbers continue, so that no key of the earlier run is reused."""
        self.version = version
        self._count = state["count"] + 1_000_000  # the rolled-back part may have used many
        for id, keys in state["keys"].items():
            loop = self._new_loop(int(id))
            loop.is_live, loop.has_ended, loop.outcome = False, True, reports.LoopEnded(loop.dispatch)
            loop.keys, reward = tuple(keys), state["rewards"][id]
            loop.score = None if reward is None else (reward, None)
            loop.metric = state.get("metrics", {}).get(id)  # sortedrl 0.2 did not save it

    # Slots

    def _fill(self) -> None:
        """Give free slots to waiting requests: to the agent loop that the rollout has, or to a new one."""
        limits: dict[int, int] = {}
        batch: list[tuple[Request, Ticket]] = []
        while self._waiting and len(self._running) < self.slots:
            request = self._waiting.popleft()
            dispatch = self._loop_to_continue(request)
            if dispatch is None:
                if any(segment.is_environment for segment in request.prefix):
                    self._news.append(core.RequestFailed(request.id, self.now(), _NO_LOOP))
                    continue
                dispatch = self._new_loop(request.id, request.prefix_length).dispatch
                batch.append((request, _ticket(request, dispatch)))
            self._running.add(request.id)
            self._starting[request.id] = self.now() + self._max_start_seconds
            limits[dispatch] = request.max_new_tokens
        self._send_cancels()
        if limits:
            if self._is_resting:
                self.wake()
            self._call(self._exchange.grant.remote(limits))
        if batch:
            with _alive(_WORKER):
                self._send(batch)

    def _loop_to_continue(self, request: Request) -> int | None:
        loop = self.loops.get(request.id)
        if loop is None or not loop.is_live or loop.has_ended or loop.length != request.prefix_length:
            return None
        return loop.dispatch

    def _new_loop(self, id: int, length: int = 0) -> SchedulerLoop:
        if id in self.loops:
            self._drop(id)
        dispatch, self._count = self._count, self._count + 1
        self._id_of[dispatch] = id
        self.loops[id] = SchedulerLoop(id, dispatch, length)
        return self.loops[id]

    def _leave_slot(self, id: int) -> None:
        self._running.remove(id)
        self._starting.pop(id, None)

    def _fail_late_starts(self) -> None:
        """A loop that does not call `generate` would hold its slot forever."""
        for id in [id for id, deadline in self._starting.items() if self.now() >= deadline]:
            self._leave_slot(id)
            self.cancel(id)
            limit = f"max_environment_seconds = {self._max_start_seconds:g}"
            reason = f"its agent loop did not call generate within {limit}"
            self._news.append(core.RequestFailed(id, self.now(), reason))

    def _abort_until_ended(self, pending: set[int]) -> None:
        """Abort until every pending rollout has left the servers.

        A server may hold a request that arrives after the abort until it is resumed. Such a request would be served
        later, so the servers are resumed and aborted again until it has returned.
        """
        deadline = self.now() + _STOP_LIMIT_SECONDS
        while pending & self._running:
            self._abort_servers()
            patience = self.now() + _PATIENCE_SECONDS
            while pending & self._running and self.now() < patience:
                self.receive(patience - self.now())
            left = len(pending & self._running)
            if left and self.now() > deadline:
                raise EngineDied(f"{left} rollouts did not end within {_STOP_LIMIT_SECONDS} s")
            if left:
                self.wake()

    def _abort_servers(self) -> None:
        with _alive(_SERVER):
            self._servers.abort_replicas(reject_request=True)
        self._is_resting = True

    # Reports

    def _take(self, at: float, report: reports.Report) -> None:
        if isinstance(report, reports.ServerFailed) and report.is_gone:  # before retries cost a rollout
            raise EngineDied(f"{_SERVER} {_IS_GONE}: {report.reason}")
        if report.dispatch not in self._id_of:
            if isinstance(report, reports.LoopScored):
                self._clear(report.keys)  # regenerated in the meantime
            return
        loop = self.loops[self._id_of[report.dispatch]]
        if isinstance(report, reports.LoopScored):
            loop.keys = report.keys
            loop.score, loop.metric = (report.reward, None), report.metric
        elif loop.id in self._running:
            self._news += self._changes(loop, at, report)
        elif isinstance(report, reports.LoopObserved):
            loop.length += len(report.tokens)
            loop.outcome = report
        elif isinstance(report, reports.LoopEnded):
            loop.is_live, loop.has_ended, loop.outcome = False, True, report
        elif isinstance(report, reports.LoopFailed):
            loop.is_live = False
            if loop.has_ended:
                loop.score = None, report.reason
            else:
                loop.outcome = report

    def _changes(self, loop: SchedulerLoop, at: float, report: reports.Report) -> list[Change]:
        """Of a rollout in a slot."""
        match report:
            case reports.TurnStarted():
                self._starting.pop(loop.id, None)
                return [core.RequestStarted(loop.id, at)]
            case reports.Made():
                loop.length += len(report.tokens)
                segment = Segment(report.tokens.tolist(), report.logprobs.tolist(), report.version)
                return [core.Tokens(loop.id, at, segment)]
            case reports.TurnFinished():
                self._leave_slot(loop.id)
                loop.turns += 1
                loop.has_ended = report.truncated
                return [core.RequestFinished(loop.id, at, report.truncated)]
            case reports.ServerFailed():
                self._leave_slot(loop.id)
                return [core.RequestFailed(loop.id, at, report.reason)]
            case reports.TurnAborted():
                self._leave_slot(loop.id)
            case reports.LoopFailed() | reports.LoopEnded():
                return self._ended_in_slot(loop, at, report)
        return []

    def _ended_in_slot(self, loop: SchedulerLoop, at: float, report: reports.Report) -> list[Change]:
        """The loop ended although it had asked for a turn, or before its first one."""
        self._leave_slot(loop.id)
        loop.is_live = False
        reason = f"its agent loop did not {'wait for' if loop.turns else 'call'} generate"
        if isinstance(report, reports.LoopFailed):
            reason = report.reason
        if not loop.turns:
            return [core.RequestFailed(loop.id, at, reason)]
        loop.outcome = reports.LoopFailed(report.dispatch, reason)
        return [core.RequestFinished(loop.id, at, truncated=False)]

    def _take_news(self) -> list[Change]:
        news, self._news = self._news, []
        return news

    # Loops that are no longer needed

    def _drop(self, id: int) -> None:
        """A loop that goes on is canceled, a result is cleared."""
        loop = self.loops.pop(id)
        del self._id_of[loop.dispatch]
        self.scores.forget(id)
        if loop.is_live:
            self._to_cancel.append(loop.dispatch)
        if loop.keys:
            self._clear(loop.keys)

    def _send_cancels(self) -> None:
        if not self._to_cancel:
            return
        canceled, self._to_cancel = self._to_cancel, []
        elsewhere = self._call(self._exchange.cancel.remote(canceled))
        if elsewhere:
            self._workers.stop_loops(elsewhere)

    def _call(self, reference: Any) -> Any:
        with _alive("the exchange"):
            return ray.get(reference)


@contextmanager
def _alive(what: str) -> Iterator[None]:
    """A part that is gone, or a worker that does not answer, ends the engine."""
    try:
        yield
    except ray.exceptions.RayActorError as error:
        raise EngineDied(f"{what} {_IS_GONE}: {error}") from None
    except ray.exceptions.GetTimeoutError:
        why = "a tool blocks its event loop, such as by time.sleep in an async def. Await there, then resume the run"
        raise EngineDied(f"{what} did not answer for {WORKER_SECONDS:g} s: {why}") from None


def _ticket(request: Request, dispatch: int) -> Ticket:
    return Ticket(dispatch, tuple((array("i", s.tokens), array("f", s.logprobs), s.version) for s in request.prefix))
