"""The ledger: every move of a rollout, made in the buffer and recorded in the event log by one call.

SlotClock   stamps events, numbers slots, counts the tokens that a request made
Ledger      moves rollouts between states
"""

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sortedrl.core import events
from sortedrl.core.batch import Batch
from sortedrl.core.buffer import FINISHED, RUNNING, Group, Key
from sortedrl.core.engine_protocol import Engine
from sortedrl.core.events import EventLog
from sortedrl.core.rollout import Rollout
from sortedrl.core.scoring import Score
from sortedrl.core.strategies.base import SchedulerState, Strategy


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

    def take_slot(self, rollout: Rollout) -> int:
        """The slot number that the rollout gets."""
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

    `on_complete` is called with each group whose last member has its reward: dynamic sampling may discard it.
    `release(rollout id)` is called when a rollout needs its environment no longer: it has a reward, its tokens were
    dropped, or it was rejected. The moves between two turns are in turns.py."""

    def __init__(self, state: SchedulerState, strategy: Strategy, clock: SlotClock, log: EventLog) -> None:
        self.state = state
        self.strategy = strategy
        self.clock = clock
        self.log = log
        self.on_complete: Callable[[Group], None] = lambda group: None
        self.release: Callable[[int], None] = lambda id: None
        self._phase = self._refill = ""

    def key(self, rollout: Rollout) -> Key:
        """The rollout's place in the queue of waiting rollouts. What the coming update waits for is first."""
        s = self.state
        if s.must_finish and s.buffer.group_of(rollout) in s.must_finish:
            return (-1,)
        return self.strategy.key(rollout, s)

    # The log

    def note(self, kind: Callable[..., events.Event], *fields: Any) -> None:
        """Log what happens now."""
        self.log.append(kind(self.clock.now(), *fields))

    def mark_phase(self, phase: str) -> None:
        """Log the phase that starts now, unless it is the current one."""
        if phase != self._phase:
            self._phase = phase
            self.note(events.Phase, phase)

    def mark_refill(self, why: str, *, again: bool = False) -> None:
        """Log whether free slots get work from now on, if that has changed or it must be stated `again`."""
        if again or why != self._refill:
            self._refill = why
            self.note(events.Gate, why)

    # Into the engine and out of it

    def start(self) -> Rollout:
        """The first waiting rollout goes to the engine."""
        s = self.state
        rollout, key = s.buffer.start()
        self.strategy.started(rollout, key, s)
        return self._submit(rollout)

    def resume(self) -> Rollout:
        """The rollout whose environment answered first goes back to the engine. No strategy decides on it."""
        rollout = next(iter(self.state.buffer.returning.values()))
        self.state.buffer.move(rollout, RUNNING)
        return self._submit(rollout)

    def _submit(self, rollout: Rollout) -> Rollout:
        rollout.expected = float(self.state.expected(rollout))  # an expectation may return any kind of number
        self.clock.submit(rollout)
        at, prompt_tokens, prefix = self.clock.now(), len(rollout.prompt.tokens), rollout.length
        self.log.append(events.Submitted(at, rollout.id, rollout.attempt, prompt_tokens, prefix, rollout.expected))
        return rollout

    def take_slot(self, rollout: Rollout, at: float) -> None:
        self.log.append(events.Started(at, rollout.id, self.clock.take_slot(rollout)))

    def lose_slot(self, rollout: Rollout, at: float, recompute: int) -> None:
        """It waits in the engine's queue again."""
        self.clock.free_slot(rollout)
        self.log.append(events.Preempted(at, rollout.id, recompute))

    def finish(self, rollout: Rollout, at: float, *, truncated: bool) -> None:
        """It ended in the engine, or in its environment."""
        made = self.clock.leave(rollout) if rollout.state is RUNNING else 0
        rollout.truncated = truncated
        self.state.buffer.move(rollout, FINISHED)
        self.log.append(events.Finished(at, rollout.id, made, rollout.length, truncated))
        self.state.expectation.observe(rollout)

    def abort(self, rollout: Rollout, at: float) -> None:
        """The engine stopped it: it waits again, with its tokens if the mode keeps them."""
        made, length = self.clock.leave(rollout), rollout.length
        dropped = self.state.buffer.put_back(rollout, keep=self._can_resume(rollout), key=self.key)
        self.log.append(events.Aborted(at, rollout.id, made, length, dropped))
        if dropped:
            self.release(rollout.id)

    def fail(self, rollout: Rollout, at: float, reason: str, *, keep: bool) -> None:
        """The engine lost it: it waits again, or is rejected after `max_retries`. `keep`: its tokens are valid."""
        made = self.clock.leave(rollout)
        dropped = self.state.buffer.put_back(rollout, keep=keep and self._can_resume(rollout), key=self.key)
        self.log.append(events.Failed(at, rollout.id, made, dropped, reason))
        if dropped:
            self.release(rollout.id)
        self.may_try_again(rollout, reason)

    def _can_resume(self, rollout: Rollout) -> bool:
        """Without room for another token it cannot, as if its engine did not report the end."""
        return self.strategy.keeps_tokens and self.state.schedule.room_for(rollout) > 0

    def may_try_again(self, rollout: Rollout, reason: str, *, counts: bool = True) -> bool:
        """Count a failure of it; after more than `max_retries` it is rejected."""
        rollout.failures += counts
        if rollout.failures <= self.state.schedule.max_retries:
            return True
        times = "1 time" if rollout.failures == 1 else f"{rollout.failures} times"
        self.reject(rollout, f"failed {times}, last: {reason}")
        return False

    # After the engine

    def score(self, scored: Score) -> None:
        """Take in a score. Without a usable reward the rollout is rejected, or regenerated if its turns were lost. The
        score of an old attempt is ignored."""
        rollout = self.state.buffer.unscored.get(scored.rollout_id)
        if rollout is None or scored.attempt not in (None, rollout.attempt):
            return
        reward, error = scored.outcome()
        if scored.attempt is None and rollout.attempt:  # it may be that of an earlier attempt
            error = "no attempt in its score, but it was regenerated: a scorer passes attempt=rollout.attempt"
        if error is None:
            group = self.state.buffer.score(rollout, reward, scored.detail)
            self.note(events.Scored, rollout.id, reward)
            self.release(rollout.id)
            self._note_if_complete(group)
            return
        rollout.failures += scored.is_lost and scored.counts
        if scored.is_lost and rollout.failures <= self.state.schedule.max_retries:
            self.regenerate(rollout, error)
        else:
            self.reject(rollout, f"{events.NO_REWARD}{error}")

    def regenerate(self, rollout: Rollout, reason: str) -> None:
        """Drop the tokens of a rollout that is not in the engine; it waits again."""
        dropped = self.state.buffer.put_back(rollout, keep=False, key=self.key)
        self.note(events.Regenerated, rollout.id, dropped, reason)
        self.release(rollout.id)

    def reject(self, rollout: Rollout, reason: str) -> None:
        """For good."""
        group = self.state.buffer.group_of(rollout)
        self.note(events.Rejected, rollout.id, self.state.buffer.reject(rollout), reason)
        self.release(rollout.id)
        self._note_if_complete(group)

    def _note_if_complete(self, group: Group) -> None:
        if not group.missing:
            self.state.must_finish.discard(group)
            if group.members:
                self.on_complete(group)

    def train(self, batch: Batch, groups: Sequence[Group]) -> None:
        """`groups` go to the learner as `batch`."""
        self.log.append(events.updated(self.clock.now(), batch))
        for group in groups:
            self.state.buffer.train(group)
        self.state.filtered_rewards.clear()
        self.forget_expectations(batch)

    def forget_expectations(self, rollouts: Iterable[Rollout]) -> None:
        """Of prompts that are not loaded again."""
        s, per_prompt = self.state, self.state.schedule.rollouts_per_prompt
        if per_prompt == 1 or s.schedule.whole_groups:
            for rollout in rollouts:
                if s.prompts.epoch_of(rollout.id // per_prompt) >= s.prompts.epochs - 1:
                    s.expectation.forget(rollout.prompt.id)
