"""Keeps the engine busy during a harvest: starts rollouts in the strategy's order, waits, and moves what engine,
environments and scorer report into the buffer."""

from sortedrl.core import events
from sortedrl.core.buffer import Group
from sortedrl.core.dynamic_sampling import DynamicSampling, FilteredLoader
from sortedrl.core.engine_checks import CheckedEngine
from sortedrl.core.engine_protocol import Engine, Request, Sampling
from sortedrl.core.engine_reports import apply
from sortedrl.core.group_filter import GroupFilter
from sortedrl.core.ledger import Ledger
from sortedrl.core.loading import PromptLoader
from sortedrl.core.rollout import Rollout
from sortedrl.core.scoring import Scorer
from sortedrl.core.seeds import derive_seed
from sortedrl.core.strategies.decisions import StrategyError, batches_of, require_loading
from sortedrl.core.streaming import Streaming
from sortedrl.core.turns import Environments, Turns, limit_of_cut
from sortedrl.core.waiting import EnginePolls, LateScores, poll_deadline, wait_briefly

OPEN, DRAIN, HELD_BACK = events.GATES


class Generation:
    """Moves rollouts between the buffer and the engine. After `is_interrupted` nothing new is scored."""

    def __init__(
        self,
        engine: Engine,
        scorer: Scorer,
        environments: Environments | None,
        sampling: Sampling,
        ledger: Ledger,
        streaming: Streaming,
        group_filter: GroupFilter | None,
    ) -> None:
        self.engine = CheckedEngine(engine)
        self._polls = EnginePolls(self.engine)
        self.scorer = scorer
        self.sampling = sampling
        self.ledger = ledger
        self.dynamic_sampling = None if group_filter is None else DynamicSampling(group_filter, ledger)
        self.loader = FilteredLoader(ledger, self.dynamic_sampling) if self.dynamic_sampling else PromptLoader(ledger)
        self.scores = LateScores(ledger, scorer)
        score = self._submit_for_scoring
        self.turns = None if environments is None else Turns(environments, ledger, engine.now, score)
        self.is_interrupted = False
        self._streaming = streaming
        self._strategy = ledger.strategy
        self._state = ledger.state
        self._schedule = ledger.state.schedule
        self._buffer = ledger.state.buffer

    def load(self) -> None:
        """At the start of a harvest."""
        if not self.loader.load():
            require_loading(self._strategy, self._state)

    def fill(self) -> None:
        """Start waiting rollouts in the strategy's order until no slot is free."""
        requests: list[Request] = []
        refill = OPEN
        while len(self._buffer.running) < self._state.slots:
            if self._buffer.returning:
                requests.append(self._request(self.ledger.resume()))
                continue
            loaded = self.loader.load()
            head = self._buffer.head()
            if head is None:
                if loaded:  # and every rollout of it was rejected
                    continue
                refill = DRAIN
                break
            if not self._strategy.may_start(head, self._state):
                refill = HELD_BACK
                break
            requests.append(self._request(self.ledger.start()))
        self.ledger.mark_refill(refill)  # before the engine's clock moves: a slot in prefill is not empty
        if requests:
            self.engine.submit(requests)

    def _request(self, rollout: Rollout) -> Request:
        prefix = tuple([segment.copy() for segment in rollout.segments])  # the rollout's own segments grow
        room = self._schedule.room_for(rollout)
        seed = rollout.seed if self._schedule.keep_seed else derive_seed(rollout.seed, rollout.attempt)
        return Request(rollout.id, rollout.prompt, prefix, room, seed, self.sampling)

    def advance(self, until: float | None = None) -> None:
        """Wait for the engine, or for an answer of an environment or a score if nothing runs; not past the moment when
        the learner may be free."""
        until = self._streaming.deadline(self.engine.now, until)
        between_turns = self.turns if self._buffer.in_environment else None
        if self._buffer.running or (between_turns and self.scorer.pending):
            until = between_turns.poll_until(until) if between_turns else until
            self._poll(poll_deadline(self.scorer, self.engine.now, until))
        elif between_turns:
            between_turns.wait(until)
        elif self.scorer.pending:
            wait_briefly(self.scorer, self._schedule.score_wait_seconds if until is None else until - self.engine.now())
        elif until is not None or self.scores.late:
            self._poll(self.engine.now() + self._schedule.score_wait_seconds if until is None else until)
        else:
            raise StrategyError(
                f"mode {self._strategy.name}: no rollout is running or being scored, but enough() is false with "
                f"{self._state.ready} ready, and may_start() starts none of the {self._buffer.waiting} that wait"
            )
        self.collect()

    def _poll(self, until: float | None) -> None:
        apply(self._polls.poll(until, self._buffer.running), self.ledger, self._response_ended)

    def _response_ended(self, rollout: Rollout, at: float, truncated: bool) -> None:
        rollout.has_environment = self.turns is not None
        if self.turns is not None and not truncated:
            self.turns.end_turn(rollout, at)
            return
        if truncated:
            rollout.ended_by = limit_of_cut(self._schedule, rollout)
        self.ledger.finish(rollout, at, truncated=truncated)
        self._submit_for_scoring(rollout)

    def _submit_for_scoring(self, rollout: Rollout) -> None:
        if not self.is_interrupted:  # else it is saved without a score and scored on resume
            self.scorer.submit(rollout)

    def collect(self) -> None:
        """Take in what environments and scorer have."""
        if self.turns is not None:
            self.turns.collect()
        self.scores.collect()

    def abort_running(self) -> None:
        """Abort all that run. Modes that keep no tokens drop rollouts between two turns as well."""
        if self._buffer.running:
            apply(self.engine.abort(list(self._buffer.running)), self.ledger, self._response_ended)
            now = self.ledger.clock.now()
            for rollout in list(self._buffer.running.values()):
                self.ledger.abort(rollout, now)
        if self.turns is not None and not self._strategy.keeps_tokens:
            self.turns.drop()

    def take(self) -> list[list[Group]]:
        """The batches of this harvest, at its end."""
        batches = batches_of(self._strategy, self._state)
        if self.dynamic_sampling is not None and self._strategy.discards_surplus:
            self.dynamic_sampling.discard_surplus(batches)
        return batches
