"""The ledger: every move of a rollout, made in the buffer and recorded in the event log by one call.

SlotClock   stamps events, numbers slots, counts the tokens that a request made
Ledger      moves rollouts between states
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence

from sortedrl.core import events
from sortedrl.core.batch import Batch
from sortedrl.core.buffer import RUNNING, Group, Key
from sortedrl.core.engine import Engine
from sortedrl.core.events import EventLog
from sortedrl.core.rollout import Rollout
from sortedrl.core.scoring import Score
from sortedrl.core.strategies.base import SchedulerState, Strategy
from sortedrl.core.wording import counted

SURPLUS = "surplus"  # a reason of `Filtered`


class SlotClock:
    """Stamps events with the engine's time, numbers its slots, and counts tokens since submission.

    Invariants: stamps never go back, even if an engine reports late or a run is resumed. A slot number belongs to at
    most one rollout, and the lowest free number is given out first."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._offset = 0.0
        self._last_stamp = -math.inf
        self._free_slots = list(range(engine.slots))
        self._slot_of: dict[int, int] = {}  # by rollout id
        self._submitted_length: dict[int, int] = {}  # by rollout id

    def now(self) -> float:
        return self.stamp(self._engine.now())

    def stamp(self, at: float) -> float:
        """The time of an event that happened at `at` on the engine's clock."""
        at += self._offset
        if at > self._last_stamp:
            self._last_stamp = at
        return self._last_stamp

    def continue_from(self, last_time: float) -> None:
        """Stamp the next event at `last_time` or later: a resumed run continues the clock of its log."""
        self._offset = last_time - self._engine.now()
        self._last_stamp = last_time  # rounding of the offset must not move the clock back

    def submit(self, rollout: Rollout) -> None:
        self._submitted_length[rollout.id] = rollout.length

    def slot_of(self, rollout: Rollout) -> int | None:
        return self._slot_of.get(rollout.id)

    def take_slot(self, rollout: Rollout) -> int | None:
        """The slot number that the rollout gets; None if all slots are taken."""
        if not self._free_slots:
            return None
        slot = self._slot_of[rollout.id] = heapq.heappop(self._free_slots)
        return slot

    def free_slot(self, rollout: Rollout) -> None:
        """Free the rollout's slot, if it has one."""
        slot = self._slot_of.pop(rollout.id, None)
        if slot is not None:
            heapq.heappush(self._free_slots, slot)

    def leave(self, rollout: Rollout) -> int:
        """The rollout leaves the engine; returns how many tokens it made since it was submitted."""
        self.free_slot(rollout)
        return rollout.length - self._submitted_length.pop(rollout.id)


class Ledger:
    """Invariant: the buffer, the slot clock and the event log agree after every call.

    `release(rollout id)` is called when a rollout needs its environment no longer: it has a reward, its tokens were
    dropped, or it was rejected."""

    def __init__(
        self,
        state: SchedulerState,
        strategy: Strategy,
        clock: SlotClock,
        log: EventLog,
        release: Callable[[int], None] | None = None,
    ) -> None:
        self.state = state
        self.strategy = strategy
        self.clock = clock
        self.log = log
        self._release = release
        self._phase = self._refill = ""

    def key(self, rollout: Rollout) -> Key:
        """The rollout's place in the queue of waiting rollouts. Older cohorts, if a later one joined, are first."""
        s = self.state
        if s.filter is not None and self.strategy.gated and s.is_of_older_cohort(s.buffer.group_of(rollout)):
            return (-1,)
        return self.strategy.key(rollout, s)

    def mark_phase(self, phase: str) -> None:
        """Log the phase that starts now, unless it is the current one."""
        if phase != self._phase:
            self._phase = phase
            self.log.append(events.Phase(self.clock.now(), phase))

    def mark_refill(self, why: str, *, again: bool = False) -> None:
        """Log whether free slots get work from now on, if that has changed or it must be stated `again`."""
        if again or why != self._refill:
            self._refill = why
            self.log.append(events.Gate(self.clock.now(), why))

    # Into the engine and out of it

    def start(self) -> Rollout:
        """The first waiting rollout goes to the engine."""
        s = self.state
        rollout, key = s.buffer.start()
        self.strategy.started(rollout, key, s)
        return self._submit(rollout)

    def resume(self) -> Rollout:
        """The rollout whose environment answered first goes back to the engine. No strategy decides on it."""
        return self._submit(self.state.buffer.resume())

    def _submit(self, rollout: Rollout) -> Rollout:
        rollout.expected = float(self.state.expected(rollout))  # an expectation may return any kind of number
        self.clock.submit(rollout)
        self.log.append(
            events.Submitted(
                self.clock.now(),
                rollout.id,
                rollout.attempt,
                len(rollout.prompt.tokens),
                rollout.length,
                rollout.expected,
            )
        )
        return rollout

    def end_turn(self, rollout: Rollout, at: float) -> None:
        """It leaves its slot and goes to its environment."""
        made = self.clock.leave(rollout)
        self.state.buffer.end_turn(rollout)
        self.log.append(events.TurnEnded(at, rollout.id, made, rollout.length))

    def finish(self, rollout: Rollout, at: float, *, truncated: bool) -> None:
        """It ended in the engine, or in its environment."""
        made = self.clock.leave(rollout) if rollout.state is RUNNING else 0
        self.state.buffer.finish(rollout, truncated=truncated)
        self.log.append(events.Finished(at, rollout.id, made, rollout.length, truncated))
        self.state.expectation.observe(rollout)

    def abort(self, rollout: Rollout, at: float) -> None:
        """The engine stopped it: it waits again, with its tokens if the mode keeps them."""
        made, length = self.clock.leave(rollout), rollout.length
        dropped = self.state.buffer.put_back(rollout, keep=self.strategy.keeps_tokens, key=self.key)
        self.log.append(events.Aborted(at, rollout.id, made, length, dropped))
        if dropped:
            self._release_environment(rollout)

    def fail(self, rollout: Rollout, at: float, reason: str, *, keep: bool = True) -> None:
        """The engine lost it: it waits again, or is rejected after `max_retries`. `keep`: its tokens are valid."""
        schedule = self.state.schedule
        made = self.clock.leave(rollout)
        rollout.failures += 1
        can_resume = keep and self.strategy.keeps_tokens and schedule.room_for(rollout) > 0
        dropped = self.state.buffer.put_back(rollout, keep=can_resume, key=self.key)
        self.log.append(events.Failed(at, rollout.id, made, dropped, reason))
        if dropped:
            self._release_environment(rollout)
        if rollout.failures > schedule.max_retries:
            self.reject(rollout, f"failed {counted(rollout.failures, 'time')}, last: {reason}")

    # In its environment

    def observe(self, rollout: Rollout, tokens: Sequence[int]) -> None:
        """Its environment answered: it waits for a slot."""
        self.state.buffer.observe(rollout, tokens)
        self.log.append(events.Observed(self.clock.now(), rollout.id, len(tokens), rollout.length))

    def fail_environment(self, rollout: Rollout, reason: str, *, counts: bool = True) -> bool:
        """Its environment failed. Whether it may be asked again: after `max_retries` failures it is rejected."""
        rollout.failures += counts
        self.log.append(events.EnvironmentFailed(self.clock.now(), rollout.id, reason))
        self._release_environment(rollout)
        if rollout.failures <= self.state.schedule.max_retries:
            return True
        self.reject(rollout, f"failed {counted(rollout.failures, 'time')}, last: {reason}")
        return False

    def _release_environment(self, rollout: Rollout) -> None:
        if self._release is not None:
            self._release(rollout.id)

    # After the engine

    def score(self, scored: Score) -> None:
        """Take in a score. Without a usable reward the rollout is rejected, or regenerated if its turns were lost. The
        score of an old attempt is ignored."""
        buffer = self.state.buffer
        rollout = buffer.awaiting_score(scored.rollout_id, scored.attempt)
        if rollout is None:
            return
        reward, error = scored.outcome()
        if error is not None:
            rollout.failures += scored.is_lost and scored.counts
            if scored.is_lost and rollout.failures <= self.state.schedule.max_retries:
                self.regenerate(rollout, error)
            else:
                self.reject(rollout, f"{events.NO_REWARD}{error}")
            return
        group = buffer.score(rollout, reward, scored.detail)
        self.log.append(events.Scored(self.clock.now(), rollout.id, reward))
        self._release_environment(rollout)
        self._note_if_complete(group)

    def regenerate(self, rollout: Rollout, reason: str) -> None:
        """Drop the tokens of a rollout that is not in the engine; it waits again."""
        dropped = self.state.buffer.regenerate(rollout, self.key)
        self.log.append(events.Regenerated(self.clock.now(), rollout.id, dropped, reason))
        self._release_environment(rollout)

    def regenerate_incomplete_groups(self) -> None:
        """Drop the scored members of groups that are not complete: their tokens are those of the old weights."""
        for group in list(self.state.buffer.groups()):
            if group.missing:
                for rollout in group.members:
                    if rollout.reward is not None:
                        self.regenerate(rollout, "unfinished members of its group")

    def reject(self, rollout: Rollout, reason: str) -> None:
        """For good."""
        group = self.state.buffer.group_of(rollout)
        dropped = self.state.buffer.reject(rollout)
        self.log.append(events.Rejected(self.clock.now(), rollout.id, dropped, reason))
        self._release_environment(rollout)
        self._note_if_complete(group)

    def train(self, batch: Batch, groups: Sequence[Group]) -> None:
        """`groups` go to the learner as `batch`."""
        rollouts = batch.rollouts
        self.log.append(
            events.Updated(
                at=self.clock.now(),
                update=batch.update,
                harvest=batch.harvest,
                version=batch.version,
                rollouts=tuple([r.id for r in rollouts]),
                lengths=tuple([r.length for r in rollouts]),
                rewards=tuple([r.reward or 0.0 for r in rollouts]),
                segments=tuple([tuple([(g.version, len(g.tokens)) for g in r.segments]) for r in rollouts]),
                waited=tuple([batch.update - r.loaded_at_update for r in rollouts]),
            )
        )
        for group in groups:
            self.state.buffer.train(group)
        self.state.filtered_rewards.clear()
        self._forget_expectations(batch)

    def discard_surplus(self, batches: Sequence[Sequence[Group]]) -> None:
        """Filter the ready groups that are in no batch."""
        taken = {group.id for batch in batches for group in batch}
        ready = [group for number in self.state.buffer.gates for group in self.state.buffer.ready_groups(number)]
        for group in ready:
            if group.id not in taken:
                self._filter(group, SURPLUS)

    def _filter(self, group: Group, reason: str) -> None:
        s, rollouts = self.state, tuple(group.members)
        rewards = [rollout.reward or 0.0 for rollout in rollouts]
        s.filtered_rewards += [(rollout.cohort, reward) for rollout, reward in zip(rollouts, rewards, strict=True)]
        s.buffer.filter(group)
        self.log.append(
            events.Filtered(
                at=self.clock.now(),
                rollouts=tuple([rollout.id for rollout in rollouts]),
                tokens=sum(rollout.policy_length for rollout in rollouts),
                reason=reason,
                reward=sum(rewards) / len(rewards),
            )
        )
        self._forget_expectations(rollouts)

    def _forget_expectations(self, rollouts: Iterable[Rollout]) -> None:
        """Of prompts that are not loaded again."""
        s, per_prompt = self.state, self.state.schedule.rollouts_per_prompt
        if per_prompt == 1 or s.schedule.whole_groups:
            for rollout in rollouts:
                if s.prompts.is_in_last_epoch(rollout.id // per_prompt):
                    s.expectation.forget(rollout.prompt.id)

    def _note_if_complete(self, group: Group) -> None:
        if group.missing:
            return
        self.state.must_finish.discard(group.id)
        if self.state.filter is not None and group.members:
            reason = self.state.filter.decide(group.members)
            place = group.id // self.state.schedule.rollouts_per_prompt
            self.state.filter.note(group.members[0].prompt.id, self.state.prompts.epoch_of(place), is_kept=not reason)
            if reason:
                self._filter(group, reason)
                self.state.filter.check_fraction()
