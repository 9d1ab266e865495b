"""The length-aware controller: an iterator of update batches.

    for batch in controller:                    # scored, sorted by length
        learner.step(batch)
        controller.publish(learner.weights())   # version + 1; the engine continues under it

One harvest:

    Prompts --load--> Buffer --start--> Engine --finished--> Scorer --ready--> Buffer --take--> batch
                        ^                  |
                        +----- abort ------+     tokens kept (partial) or dropped (on-policy)

With environments, a response has several turns; between two of them it holds no slot (core/turns.py).
With `stream_to`, rollouts that are certain to be in the coming batch go to the learner while the rest is generated
(core/streaming.py).

Guarantees for every strategy:
- every rollout of a loaded prompt is in exactly one batch, rejected with a reason, or filtered with its group;
- a batch holds no token older than the mode allows: `StaleTokens` is raised instead;
- a resumed rollout gets only the rest of its token limit;
- every change is in the event log before it is visible outside.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from operator import attrgetter
from typing import Any, TypeVar

from sortedrl.core import events
from sortedrl.core.batch import Batch, StaleTokens, check_staleness
from sortedrl.core.buffer import Buffer, Group
from sortedrl.core.checkpoint import check_state, restore, saved
from sortedrl.core.configuration import checked_int, checked_slots
from sortedrl.core.engine_protocol import UNCHANGED, Engine, Sampling
from sortedrl.core.events import EventLog
from sortedrl.core.expectation import Expectation, SensedLengths
from sortedrl.core.generation import OPEN, Generation
from sortedrl.core.ledger import Ledger, SlotClock
from sortedrl.core.parts import Filter, check_parts, default_log, strategy_and_filter
from sortedrl.core.prompts import Prompts
from sortedrl.core.rollout import Rollout
from sortedrl.core.schedule import Schedule
from sortedrl.core.scoring import Scorer
from sortedrl.core.strategies.base import SchedulerState, Strategy, due_and_incomplete
from sortedrl.core.streaming import Accumulate, StreamedLearner, Streaming, run_beside
from sortedrl.core.turns import Environments

__all__ = ["Batch", "Controller", "StaleTokens"]

CARRY_ON_SECONDS = 0.05  # between two checks whether the learner's step has ended
Result = TypeVar("Result")
_log = logging.getLogger(__name__)


class Controller:
    """Iterate over it for batches, and call `publish` after each. What may be passed by name:

    environments   of rollouts with several turns
    strategy       your own, in place of `schedule.mode`
    filter_groups  your own, in place of `schedule.filter_groups`
    expectation    of lengths; by default from those seen in this run
    sampling       by default at temperature 1
    log            by default only a `RejectionWatch`, which warns and may stop the run
    max_updates    by default as many as the data gives
    stream_to      gets parts of the coming batch before the others, such as `learner.accumulate`"""

    def __init__(
        self,
        engine: Engine,
        prompts: Prompts,
        scorer: Scorer,
        schedule: Schedule,
        *,
        environments: Environments | None = None,
        strategy: Strategy | None = None,
        filter_groups: Filter | None = None,
        expectation: Expectation | None = None,
        sampling: Sampling | None = None,
        log: EventLog | None = None,
        max_updates: int | None = None,
        stream_to: Accumulate | StreamedLearner | None = None,
    ) -> None:
        check_parts(prompts=prompts, scorer=scorer, schedule=schedule, environments=environments, strategy=strategy)
        check_parts(expectation=expectation, sampling=sampling, log=log, stream_to=stream_to)
        self.engine = engine
        self.scorer = scorer
        self.schedule = schedule
        self.strategy, found = strategy_and_filter(schedule, strategy, filter_groups)
        self._filter_name = None if found is None else found.name
        self.log = log or default_log(schedule)
        self.buffer = Buffer()
        expectation = expectation or SensedLengths(first_guess=schedule.max_response_tokens / 4)
        self._state = SchedulerState(schedule, checked_slots(engine.slots), self.buffer, prompts, expectation)
        self._clock = SlotClock(engine)
        self._ledger = Ledger(self._state, self.strategy, self._clock, self.log)
        self._streaming = Streaming(stream_to, self._ledger)
        self.sampling = sampling or Sampling()
        self._generation = Generation(engine, scorer, environments, self.sampling, self._ledger, self._streaming, found)
        self._weights: tuple[Any, int] | None = None  # published, not yet in the engine
        self._unpublished: int | None = None  # batches handed out since the last `publish`, if it was called
        self._batches_left = 0  # of the last harvest, not yet handed out
        self._max_updates = None if max_updates is None else checked_int("max_updates", max_updates, 0)
        self._has_started = False

    # What callers may read

    @property
    def version(self) -> int:
        """Version of the learner's weights: how often `publish` was called."""
        return self._state.version

    @property
    def updates(self) -> int:
        """Batches handed out so far."""
        return self._state.updates

    @property
    def harvests(self) -> int:
        """Harvests started so far."""
        return self._state.harvests

    @property
    def running(self) -> Mapping[int, Rollout]:
        """Rollouts in the engine, in a slot or in its queue, by id. A live view: copy it before changes."""
        return self.buffer.running

    @property
    def live(self) -> Mapping[int, Rollout]:
        """Rollouts that were loaded and neither trained on nor rejected, by id. A live view."""
        return self.buffer.live

    @property
    def kept_fraction(self) -> float:
        """Of the rollouts that `filter_groups` judged last, at least 0.05; 1 without a filter."""
        return self._state.kept_fraction

    @property
    def engine_is_behind(self) -> bool:
        """Whether weights are published that the engine does not have yet."""
        return self._weights is not None

    @property
    def harvest_is_used_up(self) -> bool:
        """Whether no further batch comes from the last harvest, so that delaying the weight update saves nothing.

        False after an interrupt: a checkpoint comes next, and it needs no engine."""
        return not self._generation.is_interrupted and (self._batches_left == 0 or not self._has_more())

    # The loop

    def __iter__(self) -> Iterator[Batch]:
        self._start_run()
        if self._generation.turns is not None:
            self._generation.turns.ask_again()
        self._generation.collect()  # what `restore` submitted
        while self._has_more():
            batches = self._harvest()
            for place, groups in enumerate(batches, start=1):
                if self._has_more():
                    self._batches_left = len(batches) - place
                    yield self._hand_out(groups)
        self._generation.abort_running()
        self.mark_phase("end")
        if 0 < self.buffer.rejected == self.buffer.loaded and not self._state.prompts.remaining:
            _log.warning("the data ended without an update: all %s rollouts were rejected", f"{self.buffer.rejected:,}")

    def _start_run(self) -> None:
        if not self._has_started:
            self._has_started = True
            self.log.append(self.first_event())
            self.mark_phase("start")

    def first_event(self) -> events.RunBegan:
        """The first event of every log of this run."""
        settings, strategy = asdict(self.schedule) | {"filter_groups": self._filter_name}, self.strategy
        return events.RunBegan(self._clock.now(), self._state.slots, strategy.name, settings, gated=strategy.gated)

    def _has_more(self) -> bool:
        at_end = self._max_updates is not None and self.updates >= self._max_updates
        is_left = bool(self._state.prompts.remaining or self.buffer.untrained)
        return is_left and not (at_end or self._generation.is_interrupted)

    def publish(self, weights: Any = None) -> int:
        """The learner has new weights. Returns their version. Call it at most once per batch: the staleness bound
        relies on it, so with `max_staleness` a second call is refused.

        Without `weights`, the engine must decode with the learner's own module. An engine with a copy of the weights
        would continue with the old ones, so the call is refused; pass `UNCHANGED` if they are still the right ones.

        The weights reach the engine when the next harvest starts (at once with `overlap`), so that several updates
        from one harvest cost one weight update. To use the engine before that, as an evaluation does, call
        `update_engine` first."""
        s = self._state
        if self.schedule.max_staleness is not None and s.updates > 0 and self._unpublished == 0:
            why = "with max_staleness, each batch makes one version"
            fix = "Publish once per batch, after the last optimizer step."
            raise RuntimeError(f"publish was called twice after update {s.updates - 1}: {why}. {fix}")
        if weights is None and getattr(self.engine, "copies_weights", False):
            why = "the engine has its own copy and would continue with the old ones"
            fix = "Pass the learner's weights, or sortedrl.core.UNCHANGED if they have not changed."
            raise ValueError(f"publish() without weights: {why}. {fix}")
        self._unpublished = 0
        s.version += 1
        s.learning = False
        self._weights = (None if weights is UNCHANGED else weights, s.version)
        self.mark(events.Published, s.version)
        if self.schedule.overlap:
            self.update_engine()
        return s.version

    def update_engine(self) -> bool:
        """Give the engine the newest published weights now. Returns False, and does nothing, if it has them.

        Do not call it while the engine has requests that are not the controller's."""
        if self._weights is None:
            return False
        self._generation.abort_running()
        self.mark_phase("weights")
        weights, version = self._weights
        self._generation.engine.update_weights(weights, version)
        self._weights = None
        if self.schedule.overlap:
            self._ledger.mark_refill(OPEN, again=True)  # aborted rollouts wait for their slots
            self.mark_phase("harvest")
        return True

    def interrupt(self) -> None:
        """End the iteration soon, even within a harvest; running rollouts are aborted. For signal handlers."""
        self._generation.is_interrupted = True

    def carry_on(self, until: float) -> None:
        """With `overlap`: generate until the engine's clock reads `until`, while the learner steps elsewhere."""
        self._require_overlap()
        while self.engine.now() < until:
            self._generation.fill()
            self._generation.advance(until)

    def carry_on_during(self, step: Callable[[], Result]) -> Result:
        """With `overlap`: generate while the learner's `step` runs in its own thread; returns the result of `step`.

        Only the calling thread uses the engine. An engine error is raised after the step has ended, with an error of
        the step as a note; a KeyboardInterrupt is raised at once."""
        self._require_overlap()
        return run_beside(step, lambda: self.carry_on(until=self.engine.now() + CARRY_ON_SECONDS))

    def _require_overlap(self) -> None:
        if not self.schedule.overlap:
            raise RuntimeError("the engine is idle while the learner steps: set Schedule(overlap=True) to carry on")

    # One harvest

    def _harvest(self) -> list[list[Group]]:
        self._start_harvest()
        with self._streaming:
            while not self._has_enough():
                rejected_before = self.buffer.rejected
                self._generation.fill()
                if self._generation.is_interrupted:
                    self._generation.abort_running()
                    self._wait_for_learner()
                    return []
                if not self.buffer.untrained:  # every remaining rollout was rejected
                    return []
                self._streaming.hand_over()
                # Fewer are left to wait for, or a cohort has joined that has ready ones.
                may_suffice = self.buffer.rejected > rejected_before or self._state.filters
                if may_suffice and self._has_enough():
                    break
                if not self._generation.scores.give_up():
                    self._generation.advance()
            if not self.schedule.overlap:
                self._generation.abort_running()
            self._generation.scores.settle(lambda: self._generation.is_interrupted)
            self._wait_for_learner()
            return self._generation.take()

    def _wait_for_learner(self) -> None:
        """No batch is handed out while the learner works on a part of it. With `overlap` the engine carries on."""
        while self._streaming.is_working and self.schedule.overlap and not self._generation.is_interrupted:
            self.carry_on(until=self._streaming.next_check(self.engine.now()))
        if self._streaming.is_working:
            self.mark_phase("learner")
        self._streaming.wait()

    def _has_enough(self) -> bool:
        return self.buffer.untrained > 0 and self.strategy.enough(self._state)

    def _start_harvest(self) -> None:
        s = self._state
        s.long_round = None  # a new round: what it loads depends on its kind
        self.update_engine()
        self._generation.load()
        self.mark_phase("harvest")
        self.mark(events.HarvestBegan, s.harvests, s.version)
        s.harvests += 1
        s.learning = False
        s.must_finish = due_and_incomplete(s)
        if self.strategy.reorders or s.must_finish or self.schedule.whole_groups:
            s.buffer.rekey(self._ledger.key)

    def _hand_out(self, groups: list[Group]) -> Batch:
        s = self._state
        if self._unpublished == 1:  # once is enough
            _log.warning(
                "update %d is handed out, but no weights were published after the one before: staleness is wrong until "
                "you call controller.publish(weights) once per batch",
                s.updates,
            )
        self._unpublished = (self._unpublished or 0) + 1
        rollouts = sorted([m for group in groups for m in group.members], key=attrgetter("length", "id"))
        bound = 0 if self.strategy.on_policy else self.schedule.max_staleness
        check_staleness(rollouts, s.version, bound, self.strategy.name)
        complete = self._generation.loader.complete_cohorts(rollouts)
        batch = Batch(s.updates, s.harvests - 1, s.version, tuple(rollouts), complete, tuple(s.filtered_rewards))
        self._ledger.train(batch, groups)
        s.updates += 1
        s.learning = True
        self.mark_phase("harvest" if self.schedule.overlap else "learner")
        return batch

    # The log

    def mark_phase(self, phase: str) -> None:
        """Log the phase that starts now; a caller may mark a `checkpoint` or an `evaluation`."""
        self._start_run()
        self._ledger.mark_phase(phase)

    def mark(self, kind: Callable[..., events.Event], *fields: Any) -> None:
        """Log an event of the caller's now: `SettingsChanged` after `restore`, or `Drafted`."""
        self._ledger.note(kind, *fields)

    # Checkpoints, between two batches

    def state(self) -> dict[str, Any]:
        """A JSON-ready checkpoint. Raises an error while rollouts are in the engine."""
        return saved(self._generation) | {"unpublished": self._unpublished}

    def restore(self, state: dict[str, Any], *, last_time: float = 0.0) -> None:
        """Continue from `state`, in a log whose last event that counts has the time `last_time`.

        The engine must hold the weights of `state["version"]`: call `engine.update_weights(weights, state["version"])`
        before. Else the first tokens raise a ConfigurationError."""
        if self._has_started:
            raise RuntimeError("this controller has started: restore before its first batch, into a new Controller")
        check_state(state, self.strategy.name, self.schedule)
        self._clock.continue_from(last_time)
        self._has_started = True
        self._weights, self._unpublished = None, state.get("unpublished")  # sortedrl 0.3 did not save it
        restore(state, self._generation)
        for rollout in self.buffer.unscored.values():
            self.scorer.submit(rollout)
