"""Keeps the engine busy during a harvest: starts rollouts, waits, and takes in what engine, environments and scorer
report.

The strategy decides what starts (`fill`). Every report is validated and moved into the buffer by the ledger.
"""

from __future__ import annotations

from sortedrl.core import events
from sortedrl.core.buffer import Group
from sortedrl.core.engine import Engine, Request, Sampling
from sortedrl.core.engine_checks import CheckedEngine
from sortedrl.core.engine_reports import EngineReports
from sortedrl.core.late_scores import LateScores
from sortedrl.core.ledger import Ledger
from sortedrl.core.loading import PromptLoader
from sortedrl.core.rollout import Rollout
from sortedrl.core.scoring import Scorer, poll_deadline, wait_briefly
from sortedrl.core.seeds import derive_seed
from sortedrl.core.strategies.decisions import StrategyError, batches_of, require_loading
from sortedrl.core.streaming import Streaming
from sortedrl.core.turns import Environments, Turns

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
    ) -> None:
        self.engine = engine
        self.scorer = scorer
        self.sampling = sampling
        self.ledger = ledger
        self.loader = PromptLoader(ledger)
        self.late_scores = LateScores(ledger)
        self.reports = EngineReports(CheckedEngine(engine), ledger, ended=self._response_ended)
        self.turns: Turns | None = None
        if environments is not None:
            self.turns = Turns(environments, ledger, engine.now, self._submit_for_scoring)
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

    def take(self) -> list[list[Group]]:
        """The batches of this harvest, at its end."""
        return batches_of(self._strategy, self._state)

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
            self.reports.poll(poll_deadline(self.scorer, self.engine.now, until))
        elif between_turns:
            between_turns.wait(until)
        elif self.scorer.pending:
            wait_briefly(self.scorer, self._schedule.score_wait_seconds if until is None else until - self.engine.now())
        elif until is not None:
            self.reports.poll(until)
        else:
            raise StrategyError(
                self._strategy.name,
                f"no rollout is running or being scored, but enough() is false with {self._state.ready} ready, and "
                f"may_start() starts none of the {self._buffer.waiting} that wait",
            )
        self.collect()

    def _response_ended(self, rollout: Rollout, at: float, truncated: bool) -> None:
        has_nothing = not rollout.segments
        if has_nothing or not (truncated or rollout.ends_with_policy_token):
            # A learner cannot train on nothing, and an environment has nothing to answer.
            self.ledger.fail(rollout, at, f"the engine ended a {'response' if has_nothing else 'turn'} without a token")
            return
        rollout.has_environment = self.turns is not None
        if self.turns is not None and not truncated:
            self.turns.end_turn(rollout, at)
            return
        if truncated:
            rollout.ended_by = self._schedule.limit_of_cut(rollout)
        self.ledger.finish(rollout, at, truncated=truncated)
        self._submit_for_scoring(rollout)

    def collect(self) -> None:
        if self.turns is not None:
            self.turns.collect()
        self._collect_scores()

    def _submit_for_scoring(self, rollout: Rollout) -> None:
        if not self.is_interrupted:  # else it is saved without a score and scored on resume
            self.scorer.submit(rollout)

    def _collect_scores(self) -> None:
        for scored in self.scorer.collect():
            self.ledger.score(scored)

    def abort_running(self) -> None:
        """Abort all that run. Modes that keep no tokens drop rollouts between two turns as well."""
        if self._buffer.running:
            self.reports.abort(list(self._buffer.running))
            now = self.ledger.clock.now()
            for rollout in list(self._buffer.running.values()):
                self.ledger.abort(rollout, now)
        if self.turns is not None and not self._strategy.keeps_tokens:
            self.turns.drop()

    def wait_for_scores(self) -> None:
        """Finished rollouts without a score: partial modes keep them for later, on-policy modes wait, then regenerate
        them."""
        self._collect_scores()
        if self._strategy.keeps_tokens:
            return
        if self._buffer.finished:
            self.ledger.mark_phase("scores")
            deadline = self.ledger.clock.now() + self._schedule.score_wait_seconds
            while self._buffer.finished and self.ledger.clock.now() < deadline and self.scorer.pending:
                if self.is_interrupted:  # no batch follows: unscored rollouts are saved and scored on resume
                    return
                wait_briefly(self.scorer, deadline - self.ledger.clock.now())
                self._collect_scores()
            for rollout in self._buffer.unscored():
                self.ledger.regenerate(rollout, "no score in time")
        if self._schedule.whole_groups:
            self.ledger.regenerate_incomplete_groups()
