"""What we add to the paper's modes: planning by expected length, lookahead, and the elevator."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from sortedrl.core.buffer import Key
from sortedrl.core.rollout import Rollout
from sortedrl.core.strategies.base import SchedulerState, cohort_prompts, prompts_closing_epoch, updates_left
from sortedrl.core.strategies.paper import OnPolicy, Partial


@dataclass(frozen=True)
class PlannedOnPolicy(OnPolicy):
    """Shortest expected first, and no more started than the update needs.

    At the default of exactly 1.0 the members of a batch are fixed before sampling: nothing is stopped, nothing is
    wasted, and short responses are not favored.
    """

    reorders: ClassVar[bool] = True
    oversubscribe: ClassVar[float | None] = 1.0

    def key(self, rollout: Rollout, s: SchedulerState) -> Key:
        return (s.expected(rollout), s.buffer.group_of(rollout).id, rollout.id)


@dataclass(frozen=True)
class PlannedPartial(Partial):
    """Resumes first, then shortest expected first."""

    reorders: ClassVar[bool] = True

    def place(self, rollout: Rollout, s: SchedulerState) -> Key:
        return (s.expected(rollout), s.buffer.group_of(rollout).id)


@dataclass(frozen=True)
class LookaheadPartial(Partial):
    """Slots that a drain leaves empty start the next cohort, one cohort deep.

    What is started ahead never counts toward the current harvest. Under a staleness bound it is started only where
    the current cohort's updates end in time.
    """

    def to_load(self, s: SchedulerState) -> int:
        may_look_ahead = (
            s.free_slots > 0 and s.buffer.waiting == 0 and s.buffer.last_gate == s.buffer.gate and self._in_time(s)
        )
        if s.buffer.untrained and not may_look_ahead:
            return 0
        return prompts_closing_epoch(s, cohort_prompts(s))

    def may_start(self, rollout: Rollout, s: SchedulerState) -> bool:
        ahead = s.buffer.group_of(rollout).gate != s.buffer.gate
        if ahead and not rollout.segments and not self._in_time(s):
            return False
        return super().may_start(rollout, s)

    def _in_time(self, s: SchedulerState) -> bool:
        bound = s.schedule.max_staleness
        return bound is None or updates_left(s.left, s.schedule.rollouts_needed) + s.learning <= bound


@dataclass(frozen=True)
class ElevatorPartial(Partial):
    """No cohort is drained. Freed slots are refilled from a window of waiting prompts, in a sweep
    short -> long -> short by expected length; what has waited too many updates comes first.

    Admission is gated, not training: a batch is the first `rollouts_per_update` to finish, and since neighbors in
    the sweep finish together, batches stay sorted and young.
    """

    gated: ClassVar[bool] = False
    reorders: ClassVar[bool] = True

    def to_load(self, s: SchedulerState) -> int:
        return max(0, cohort_prompts(s) - s.buffer.never_started // s.schedule.rollouts_per_prompt)

    def place(self, rollout: Rollout, s: SchedulerState) -> Key:
        if s.updates - rollout.loaded_at_update >= _longest_wait_updates(s):
            return (0,)
        expected = s.expected(rollout)
        sweep, position = s.sweep
        rising = sweep % 2 == 0
        if expected < position if rising else expected > position:
            sweep, rising = sweep + 1, not rising
        return (1, sweep, expected if rising else -expected, s.buffer.group_of(rollout).id)

    def sweep_after(self, key: Key) -> tuple[int, float] | None:
        return (int(key[3]), abs(key[4])) if key[1:3] == (2, 1) else None


def _longest_wait_updates(s: SchedulerState) -> int:
    """The elevator's bound on waiting: two full sweeps of the window (up, down, up, down) unless set."""
    if s.schedule.max_wait_updates is not None:
        return s.schedule.max_wait_updates
    window = cohort_prompts(s) * s.schedule.rollouts_per_prompt
    return 4 * math.ceil(window / s.schedule.rollouts_per_update)
