"""The length-aware controller: an iterator of update batches.

    for batch in controller:                    # scored, sorted by length
        learner.step(batch)
        controller.publish(learner.weights())   # version + 1; the engine continues under it

One harvest, top to bottom:

    Prompts --load--> Buffer --start--> Engine --finished--> Scorer --ready--> Buffer --take--> batch
                        ^                  |
                        +------ stop ------+     tokens kept (partial) or dropped (on-policy)

What the controller guarantees, whatever the strategy:
- every rollout of a loaded prompt is in exactly one batch or rejected with a reason;
- a batch holds no token older than the mode allows: it raises `StaleTokens` rather than hand one out;
- a resumed rollout gets only what is left of its token budget;
- every change is in the event log before it can be seen outside.
"""

from __future__ import annotations

import heapq
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from sortedrl.core import engine as engine_changes
from sortedrl.core import events
from sortedrl.core.buffer import Buffer, Group, Key
from sortedrl.core.engine import Engine, Request, Sampling
from sortedrl.core.events import EventLog
from sortedrl.core.expectation import Expectation, SensedLengths
from sortedrl.core.prompts import Prompts
from sortedrl.core.rejections import NO_REWARD
from sortedrl.core.rollout import Prompt, Rollout, Segment
from sortedrl.core.schedule import Schedule
from sortedrl.core.scoring import Scorer, as_reward
from sortedrl.core.seeds import derive_seed, mixing
from sortedrl.core.strategies.base import SchedulerState, Strategy, is_overdue
from sortedrl.core.strategies.registry import strategy_named

OPEN, DRAIN, HELD_BACK = "open", "drain", "held back"
CARRY_ON_SECONDS = 0.05  # between two looks at a learner that steps beside the engine
SCORE_CHECK_SECONDS = 0.05  # between two looks at a scorer while the engine generates
SCORE_WAIT_STEP_SECONDS = 0.25  # an interrupt must not wait for a score
Result = TypeVar("Result")
_log = logging.getLogger(__name__)


class StaleTokens(RuntimeError):
    """A batch would have held tokens older than the mode allows: a defect of a strategy, never of the user."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One update: scored rollouts, shortest first. `version` is what the learner holds."""

    update: int
    harvest: int
    version: int
    rollouts: tuple[Rollout, ...]

    def __len__(self) -> int:
        return len(self.rollouts)

    def __iter__(self) -> Iterator[Rollout]:
        return iter(self.rollouts)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.rollouts))


class Controller:
    def __init__(
        self,
        engine: Engine,
        prompts: Prompts,
        scorer: Scorer,
        schedule: Schedule,
        *,
        strategy: Strategy | None = None,  # one of your own instead of `schedule.mode`
        expectation: Expectation | None = None,
        sampling: Sampling | None = None,
        log: EventLog | None = None,
        max_updates: int | None = None,
    ) -> None:
        self.engine = engine
        self.scorer = scorer
        self.schedule = schedule
        self.strategy = strategy or strategy_named(schedule.mode)
        self.strategy.check(schedule)
        self.log = log or EventLog()
        self.sampling = sampling or Sampling()
        self.scheduler_state = SchedulerState(
            schedule=schedule,
            slots=engine.slots,
            buffer=Buffer(),
            prompts=prompts,
            expectation=expectation or SensedLengths(first_guess=schedule.max_response_tokens / 4),
        )
        self._submitted_length: dict[int, int] = {}  # tokens that a running rollout had when it was submitted
        self._slot_of: dict[int, int] = {}
        self._free_slots = list(range(engine.slots))
        self._weights: tuple[Any, int] | None = None  # published, not yet in the engine
        self._batches_left = 0  # of the last harvest, not yet handed out
        self._seed_state = mixing(0, schedule.seed)
        self._next_id = 0
        self._prompts_loaded = 0
        self._cohorts_loaded = 0
        self._phase = ""
        self._gate = ""
        self._last_time = -math.inf
        self._clock_offset = 0.0  # a resumed run's clock goes on at the last event that counts
        self._max_updates = max_updates
        self._has_begun = False
        self._is_interrupted = False
        self._scorer_wakes_engine = bool(getattr(scorer, "wakes_engine", False))
        self.ignored_changes = 0  # reports of the engine about requests that do not run
        self._late_scores: list[int] = []  # rollouts whose scores alone hold up the harvest
        self._late_since = 0.0

    # The loop

    def __iter__(self) -> Iterator[Batch]:
        self._begin_run()
        self._collect_scores()  # of rollouts that `restore` handed to the scorer
        while self._has_more():
            batches = self._harvest()
            for place, groups in enumerate(batches, start=1):
                if self._has_more():
                    self._batches_left = len(batches) - place
                    yield self._hand_out(groups)
        self._abort_running()
        self.mark_phase("end")

    def _begin_run(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self.log.append(self.first_event())
            self.mark_phase("start")

    def first_event(self) -> events.RunBegan:
        """What every log of this run begins with."""
        return events.RunBegan(self._now(), self.scheduler_state.slots, self.strategy.name, asdict(self.schedule))

    def _has_more(self) -> bool:
        s = self.scheduler_state
        at_end = self._max_updates is not None and s.updates >= self._max_updates
        return not (at_end or self._is_interrupted) and bool(s.prompts.remaining or s.buffer.untrained)

    def publish(self, weights: Any = None) -> int:
        """The learner's weights changed: the engine continues under them. Returns the new version.

        At most once for each batch: a bound on staleness counts on it.

        They reach the engine when the next harvest begins (at once with `overlap`), so several updates on one harvest
        cost one weight update. Whoever uses the engine before that, such as an evaluation, calls `update_engine` first.
        """
        self.scheduler_state.version += 1
        self.scheduler_state.learning = False
        self._weights = (weights, self.scheduler_state.version)
        self.log.append(events.Published(self._now(), self.scheduler_state.version))
        if self.schedule.overlap:
            self.update_engine()
        return self.scheduler_state.version

    def update_engine(self) -> bool:
        """Give the engine the newest published weights now; False: it has them already, and nothing was done.

        Not while requests other than the controller's own are in the engine.
        """
        if self._weights is None:
            return False
        self._abort_running()
        self.mark_phase("weights")
        weights, version = self._weights
        self.engine.update_weights(weights, version)
        self._weights = None
        if self.schedule.overlap:
            self._gate = OPEN  # what was stopped waits for its slots
            self.log.append(events.Gate(self._now(), OPEN))
            self.mark_phase("harvest")
        return True

    @property
    def engine_is_behind(self) -> bool:
        """Whether weights are published that the engine does not have yet."""
        return self._weights is not None

    @property
    def harvest_is_used_up(self) -> bool:
        """Whether no further batch comes from the last harvest: to wait with a weight update saves nothing now.

        False after an interrupt: what comes next is a checkpoint, which needs no engine.
        """
        return not self._is_interrupted and (self._batches_left == 0 or not self._has_more())

    def interrupt(self) -> None:
        """End the iteration soon, even within a harvest; what runs is stopped as at a harvest. For signal handlers."""
        self._is_interrupted = True

    def carry_on(self, until: float) -> None:
        """With `overlap`: generate until the engine's clock reads `until`, while the learner steps elsewhere."""
        self._require_overlap()
        while self.engine.now() < until:
            self._fill()
            self._advance(until)

    def carry_on_during(self, step: Callable[[], Result]) -> Result:
        """With `overlap`: generate while the learner's `step` runs in a thread of its own; what it returns.

        The engine is used from the calling thread alone. An error of the engine is raised when the step has ended,
        with the step's own error as a note; a KeyboardInterrupt at once.
        """
        self._require_overlap()
        stepping: Future[Result] = Future()
        threading.Thread(target=_fulfil, args=(stepping, step), name="learner", daemon=True).start()
        try:
            while not stepping.done():
                self.carry_on(until=self.engine.now() + CARRY_ON_SECONDS)
        except Exception as error:
            failure = stepping.exception()  # waits for the step
            if failure is not None:
                error.add_note(f"The learner's step failed, too: {failure!r}")
            raise
        return stepping.result()

    def _require_overlap(self) -> None:
        if not self.schedule.overlap:
            raise RuntimeError("the engine rests while the learner steps: set Schedule(overlap=True) to carry on")

    # One harvest

    def _harvest(self) -> list[list[Group]]:
        s = self.scheduler_state
        self._begin_harvest()
        while not self._has_enough():
            self._fill()
            if self._is_interrupted:
                self._abort_running()
                return []
            if not s.buffer.untrained:  # all that was left has been rejected
                return []
            if not (self._has_enough() or self._gave_up_on_late_scores()):
                self._advance()
        if not self.schedule.overlap:
            self._abort_running()
        self._wait_for_scores()
        return self.strategy.take(s)

    def _has_enough(self) -> bool:
        return self.scheduler_state.buffer.untrained > 0 and self.strategy.enough(self.scheduler_state)

    def _begin_harvest(self) -> None:
        s = self.scheduler_state
        self.update_engine()
        self._load_prompts()
        self.mark_phase("harvest")
        self.log.append(events.HarvestBegan(self._now(), s.harvests, s.version))
        s.harvests += 1
        s.last_key = ()
        s.learning = False
        s.must_finish = {
            group.id
            for group in (s.buffer.groups() if self.schedule.max_staleness is not None else ())
            if group.missing and group.gate == s.buffer.gate and is_overdue(group, s)
        }
        if self.strategy.reorders or s.must_finish or self.schedule.whole_groups:
            s.buffer.rekey(self._key)

    def _fill(self) -> None:
        """Give every free slot work, in the strategy's order."""
        s = self.scheduler_state
        requests: list[Request] = []
        why = OPEN
        while len(s.buffer.running) < s.slots:
            loaded = self._load_prompts()
            head = s.buffer.head()
            if head is None:
                if loaded:  # and all of it rejected
                    continue
                why = DRAIN
                break
            if not self.strategy.may_start(head, s):
                why = HELD_BACK
                break
            requests.append(self._start())
        if why != self._gate:  # logged before the engine's clock moves: prefill is no empty slot-time
            self._gate = why
            self.log.append(events.Gate(self._now(), why))
        if requests:
            self.engine.submit(requests)

    def _start(self) -> Request:
        s = self.scheduler_state
        rollout, key = s.buffer.start()
        s.last_key = key
        s.sweep = self.strategy.sweep_after(key) or s.sweep
        rollout.expected = s.expected(rollout)
        kept = len(rollout)
        self._submitted_length[rollout.id] = kept
        self.log.append(
            events.Submitted(
                self._now(), rollout.id, rollout.attempt, len(rollout.prompt.tokens), kept, rollout.expected
            )
        )
        return Request(
            id=rollout.id,
            prompt=rollout.prompt,
            prefix=tuple([segment.copy() for segment in rollout.segments])
            if kept
            else (),  # the rollout's own go on growing
            max_new_tokens=self.schedule.max_response_tokens - kept,
            seed=self._seed_of(rollout),
            sampling=self.sampling,
        )

    def _advance(self, until: float | None = None) -> None:
        """Wait for the engine, or for a score where the engine has nothing to do."""
        if self.scheduler_state.buffer.running:
            self._apply(self.engine.poll(self._next_look_at_scores(until)))
        elif self.scorer.pending:
            self._wait_for_score(self.schedule.score_wait_seconds if until is None else until - self.engine.now())
        elif until is not None:
            self._apply(self.engine.poll(until))
        else:
            raise RuntimeError(
                f"mode {self.strategy.name}: nothing runs, nothing is being scored, and the strategy starts nothing "
                f"although {self.scheduler_state.buffer.untrained} rollouts are left"
            )
        self._collect_scores()

    def _next_look_at_scores(self, until: float | None) -> float | None:
        """A score may complete the update while the engine has nothing to report: poll only briefly for it."""
        if self._scorer_wakes_engine or not self.scorer.pending:
            return until
        soon = self.engine.now() + SCORE_CHECK_SECONDS
        return soon if until is None else min(soon, until)

    def _wait_for_score(self, seconds: float) -> None:
        self.scorer.wait(seconds if self._scorer_wakes_engine else min(seconds, SCORE_WAIT_STEP_SECONDS))

    def _abort_running(self) -> None:
        s = self.scheduler_state
        if not s.buffer.running:
            return
        self._apply(self.engine.abort(list(s.buffer.running)))
        now = self._now()
        for rollout in list(s.buffer.running.values()):
            made, length = self._leave_slot(rollout), len(rollout)
            dropped = s.buffer.put_back(rollout, keep=self.strategy.keeps_tokens, key=self._key)
            self.log.append(events.Aborted(now, rollout.id, made, length, dropped))

    def _wait_for_scores(self) -> None:
        """What is finished and not scored: partial leaves it for later; on-policy waits for it, then regenerates it."""
        s = self.scheduler_state
        self._collect_scores()
        if self.strategy.keeps_tokens:
            return
        if s.buffer.finished:
            self.mark_phase("scores")
            deadline = self._now() + self.schedule.score_wait_seconds
            while s.buffer.finished and self._now() < deadline and self.scorer.pending:
                if self._is_interrupted:  # no batch follows: what is not scored is saved, and scored on resume
                    return
                self._wait_for_score(deadline - self._now())
                self._collect_scores()
            for rollout in s.buffer.unscored():
                self._regenerate(rollout, "no score in time")
        for group in list(s.buffer.groups()):
            if group.missing:
                for rollout in group.members:
                    if rollout.reward is not None:
                        self._regenerate(rollout, "unfinished members of its group")

    def _hand_out(self, groups: list[Group]) -> Batch:
        s = self.scheduler_state
        rollouts = sorted((m for group in groups for m in group.members), key=lambda m: (len(m), m.id))
        self._check_staleness(rollouts)
        batch = Batch(s.updates, s.harvests - 1, s.version, tuple(rollouts))
        self.log.append(
            events.Updated(
                at=self._now(),
                update=s.updates,
                harvest=batch.harvest,
                version=s.version,
                rollouts=tuple([m.id for m in rollouts]),
                lengths=tuple(map(len, rollouts)),
                rewards=tuple([m.reward or 0.0 for m in rollouts]),
                segments=tuple([tuple([(g.version, len(g)) for g in m.segments]) for m in rollouts]),
                waited=tuple([s.updates - m.loaded_at_update for m in rollouts]),
            )
        )
        for group in groups:
            s.buffer.train(group)
        per_prompt = self.schedule.rollouts_per_prompt
        if per_prompt == 1 or self.schedule.whole_groups:
            for rollout in rollouts:
                if s.prompts.is_in_last_epoch(rollout.id // per_prompt):
                    s.expectation.forget(rollout.prompt.id)
        s.updates += 1
        s.learning = True
        self.mark_phase("harvest" if self.schedule.overlap else "learner")
        return batch

    def _check_staleness(self, rollouts: Sequence[Rollout]) -> None:
        version, bound = self.scheduler_state.version, self.schedule.max_staleness
        if self.strategy.on_policy:
            bound = 0
        if bound is None:
            return
        for rollout in rollouts:
            oldest = rollout.oldest_version
            if oldest is not None and version - oldest > bound:
                raise StaleTokens(
                    f"rollout {rollout.id} has tokens of version {oldest}, the learner holds {version}, "
                    f"and mode {self.strategy.name} allows a staleness of {bound}"
                )

    # What the engine and the scorer report

    def _apply(self, changes: list[engine_changes.Change]) -> None:
        """Take in what the engine reports. A report that breaks the protocol costs its rollout, not the run: the
        engine is told to stop the request, and the rollout fails without its tokens."""
        broken: dict[int, str] = {}
        for change in changes:
            if change.id not in self.scheduler_state.buffer.running:
                self._note_ignored(change, "it does not run")
            elif change.id not in broken:
                reason = self._applied(change, self._stamp(change.at))
                if reason is not None:
                    broken[change.id] = reason
        if not broken:
            return
        later = self.engine.abort(list(broken))
        self._apply([change for change in later if change.id not in broken])
        for id, reason in broken.items():
            self._fail(
                self.scheduler_state.buffer.running[id], self._now(), f"the engine reported {reason}", keep=False
            )

    def _applied(self, change: engine_changes.Change, at: float) -> str | None:
        """Take one change in; what is wrong with it, if it must not be."""
        rollout = self.scheduler_state.buffer.running[change.id]
        slot = self._slot_of.get(rollout.id)
        if isinstance(change, engine_changes.Tokens):
            fault = self._fault_of(rollout, change.segment)
            if fault is not None:
                return fault
            rollout.append(change.segment)
        elif isinstance(change, engine_changes.Started):
            if slot is not None:
                self._note_ignored(change, "it has a slot")
                return None
            if not self._free_slots:
                return f"a start, and all {self.engine.slots} slots are taken"
            self._slot_of[rollout.id] = slot = heapq.heappop(self._free_slots)
            self.log.append(events.Started(at, rollout.id, slot))
        elif isinstance(change, engine_changes.Finished):
            self._finish(rollout, at, change.truncated)
        elif isinstance(change, engine_changes.Preempted):
            if slot is None:
                self._note_ignored(change, "it has no slot")
                return None
            heapq.heappush(self._free_slots, self._slot_of.pop(rollout.id))
            self.log.append(events.Preempted(at, rollout.id, change.recompute))
        else:
            self._fail(rollout, at, change.reason)
        return None

    def _fault_of(self, rollout: Rollout, segment: Segment) -> str | None:
        """Why this segment cannot be a part of this rollout."""
        limit = self.schedule.max_response_tokens
        if len(rollout) + len(segment) > limit:
            return f"{len(rollout) + len(segment)} tokens, and max_response_tokens is {limit}"
        if rollout.segments and segment.version < rollout.segments[-1].version:
            return f"tokens of version {segment.version} after tokens of version {rollout.segments[-1].version}"
        return segment.fault

    def _note_ignored(self, change: engine_changes.Change, reason: str) -> None:
        self.ignored_changes += 1
        if self.ignored_changes == 1:  # one line says enough about a broken engine
            _log.warning("%s of request %d is ignored: %s", type(change).__name__, change.id, reason)

    def _finish(self, rollout: Rollout, at: float, truncated: bool) -> None:
        s = self.scheduler_state
        made = self._leave_slot(rollout)
        s.buffer.finish(rollout, truncated=truncated)
        self.log.append(events.Finished(at, rollout.id, made, len(rollout), truncated))
        s.expectation.observe(rollout)
        if not self._is_interrupted:  # else it is saved without a score, and scored on resume
            self.scorer.submit(rollout)

    def _fail(self, rollout: Rollout, at: float, reason: str, *, keep: bool = True) -> None:
        s = self.scheduler_state
        made = self._leave_slot(rollout)
        rollout.failures += 1
        can_go_on = len(rollout) < self.schedule.max_response_tokens
        dropped = s.buffer.put_back(rollout, keep=keep and can_go_on and self.strategy.keeps_tokens, key=self._key)
        self.log.append(events.Failed(at, rollout.id, made, dropped, reason))
        if rollout.failures > self.schedule.max_retries:
            self._reject(rollout, f"failed {rollout.failures} times, last: {reason}")

    def _collect_scores(self) -> None:
        buffer = self.scheduler_state.buffer
        for scored in self.scorer.collect():
            rollout = buffer.awaiting_score(scored.rollout_id, scored.attempt)
            if rollout is None:
                continue
            try:
                reward, error = as_reward(scored.reward), scored.error
            except (TypeError, ValueError) as unfit:
                reward, error = 0.0, scored.error or str(unfit)
            if error is not None:
                self._reject(rollout, f"{NO_REWARD}{error}")
                continue
            buffer.score(rollout, reward, scored.detail)
            self.log.append(events.Scored(self._now(), rollout.id, reward))
            self._note_if_complete(buffer.group_of(rollout))

    def _regenerate(self, rollout: Rollout, reason: str) -> None:
        dropped = self.scheduler_state.buffer.regenerate(rollout, self._key)
        self.log.append(events.Regenerated(self._now(), rollout.id, dropped, reason))

    def _reject(self, rollout: Rollout, reason: str) -> None:
        s = self.scheduler_state
        group = s.buffer.group_of(rollout)
        dropped = s.buffer.reject(rollout)
        self.log.append(events.Rejected(self._now(), rollout.id, dropped, reason))
        self._note_if_complete(group)

    def _note_if_complete(self, group: Group) -> None:
        if not group.missing:
            self.scheduler_state.must_finish.discard(group.id)

    def _gave_up_on_late_scores(self) -> bool:
        """The last resort of a harvest that can only wait for scores, because nothing runs or because only those that
        the staleness bound wants in this update are missing: when none of them has come for long enough, these
        rollouts are restarted, and one that was restarted before is rejected."""
        s = self.scheduler_state
        if not (s.buffer.finished or self._late_scores):
            return False
        late: list[Rollout] = []
        if s.ready >= self.strategy.need(s):
            late = [r for r in s.buffer.unscored() if s.buffer.group_of(r).id in s.must_finish]
        elif not s.buffer.running:
            late = [r for r in s.buffer.unscored() if s.buffer.group_of(r).gate == s.buffer.gate]
        ids = [rollout.id for rollout in late]
        if ids != self._late_scores:
            self._late_scores, self._late_since = ids, self._now()
        if not late or self._now() < self._late_since + self.schedule.score_wait_seconds:
            return False
        for rollout in late:
            group = s.buffer.group_of(rollout)
            if rollout.forced_regenerations:
                self._reject(rollout, "no score in time, twice")
                continue
            rollout.forced_regenerations += 1
            self._regenerate(rollout, "no score in time, and the harvest cannot end without it")
            if not is_overdue(group, s):
                s.must_finish.discard(group.id)
        s.buffer.rekey(self._key)
        return True

    # Loading

    def _load_prompts(self) -> bool:
        s = self.scheduler_state
        count = self.strategy.to_load(s) if s.prompts.remaining else 0
        if count <= 0:
            return False
        prompts = s.prompts.take(count, within_epoch=self.strategy.gated)
        cohort = self._cohorts_loaded if self.strategy.gated else self._nominal_cohort()
        self._cohorts_loaded += 1
        self._prompts_loaded += len(prompts)
        per_prompt = self.schedule.rollouts_per_prompt
        self.log.append(
            events.Loaded(self._now(), cohort, self._next_id, len(prompts) * per_prompt, tuple(p.id for p in prompts))
        )
        for prompt in prompts:
            self._load_group(prompt, cohort)
        return True

    def _nominal_cohort(self) -> int:
        """Without a gate, prompts are numbered into cohorts as they come, for statistics over cohorts."""
        size = self.schedule.prompts_per_cohort or len(self.scheduler_state.prompts.dataset)
        return self._prompts_loaded // size

    def _load_group(self, prompt: Prompt, cohort: int) -> None:
        s = self.scheduler_state
        ids = range(self._next_id, self._next_id + self.schedule.rollouts_per_prompt)
        siblings = [
            Rollout(id, prompt, sibling, cohort, mixing(self._seed_state, id) >> 1, s.updates)
            for sibling, id in enumerate(ids)
        ]
        self._next_id += len(siblings)
        gate = cohort if self.strategy.gated else 0
        s.buffer.load(siblings, gate, compare=self.schedule.whole_groups, key=self._key)
        limit = self.schedule.max_prompt_tokens
        if limit is not None and len(prompt.tokens) > limit:
            for rollout in list(siblings):  # the set's own list, which shrinks with every member that is rejected
                self._reject(rollout, f"prompt of {len(prompt.tokens)} tokens, max_prompt_tokens is {limit}")

    # Checkpoints, taken between two batches

    def state(self) -> dict[str, Any]:
        """All that a later controller needs to go on: JSON-ready. Not while anything runs in the engine."""
        s = self.scheduler_state
        return {
            "mode": self.strategy.name,
            "buffer": s.buffer.state(),
            "prompts": s.prompts.state(),
            "expectation": s.expectation.state(),
            "version": s.version,
            "updates": s.updates,
            "harvests": s.harvests,
            "sweep": list(s.sweep),
            "next_id": self._next_id,
            "prompts_loaded": self._prompts_loaded,
            "cohorts_loaded": self._cohorts_loaded,
            "events": self.log.count,
        }

    def restore(self, state: dict[str, Any], *, last_time: float = 0.0) -> None:
        """Go on from `state`, in a log whose last event that counts was at `last_time`.

        The engine must hold the weights of `state["version"]`, under that version.
        """
        s = self.scheduler_state
        if state["mode"] != self.strategy.name:
            raise ValueError(f"the checkpoint was made in mode {state['mode']}, this run is {self.strategy.name}")
        self._clock_offset = last_time - self.engine.now()
        self._last_time = last_time  # rounding of the offset must not take the clock back
        self.log.count = state["events"]
        self._has_begun = True
        s.version, s.updates, s.harvests = state["version"], state["updates"], state["harvests"]
        s.sweep = (state["sweep"][0], state["sweep"][1])
        s.prompts.restore(state["prompts"])
        s.expectation.restore(state["expectation"])
        self._next_id, self._prompts_loaded = state["next_id"], state["prompts_loaded"]
        self._cohorts_loaded = state["cohorts_loaded"]
        s.buffer.restore(state["buffer"], {p.id: p for p in s.prompts.dataset}, self._key)
        for rollout in s.buffer.unscored():
            self.scorer.submit(rollout)

    # Small things

    def mark_phase(self, phase: str) -> None:
        """Tell the log what the run does from now on; a caller may mark a `checkpoint` or an `evaluation`."""
        self._begin_run()
        if phase != self._phase:
            self._phase = phase
            self.log.append(events.Phase(self._now(), phase))

    def _key(self, rollout: Rollout) -> Key:
        return self.strategy.key(rollout, self.scheduler_state)

    def _seed_of(self, rollout: Rollout) -> int:
        return rollout.seed if self.schedule.keep_seed else derive_seed(rollout.seed, rollout.attempt)

    def _leave_slot(self, rollout: Rollout) -> int:
        """Free its slot, if it has one; returns the tokens that it made since it was submitted."""
        slot = self._slot_of.pop(rollout.id, None)
        if slot is not None:
            heapq.heappush(self._free_slots, slot)
        return len(rollout) - self._submitted_length.pop(rollout.id)

    def _now(self) -> float:
        return self._stamp(self.engine.now())

    def _stamp(self, at: float) -> float:
        """Times in the log never go back, even if an engine reports late."""
        at += self._clock_offset
        if at > self._last_time:
            self._last_time = at
        return self._last_time


def _fulfil(promise: Future[Result], work: Callable[[], Result]) -> None:
    try:
        promise.set_result(work())
    except BaseException as error:
        promise.set_exception(error)
