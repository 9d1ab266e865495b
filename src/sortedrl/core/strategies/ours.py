"""Our additions to the paper's modes: planning by expected length, lookahead, and the elevator."""

from dataclasses import dataclass
from typing import ClassVar

from sortedrl.core.buffer import Group, Key
from sortedrl.core.rollout import Rollout
from sortedrl.core.strategies.base import SchedulerState, Sweep, completes_a_group, prompts_closing_epoch, updates_left
from sortedrl.core.strategies.paper import NEW, OnPolicy, Partial

WAITED_TOO_LONG, IN_SWEEP = 0, 1


@dataclass(frozen=True)
class PlannedOnPolicy(OnPolicy):
    """Shortest expected length first, and no more rollouts started than the update needs.

    With the default oversubscribe of 1.0 the members of a batch are fixed before sampling: nothing is aborted, no
    token is wasted, and short responses are not favored."""

    reorders: ClassVar[bool] = True
    uses_expectation: ClassVar[bool] = True
    oversubscribe: ClassVar[float | None] = 1.0

    def key(self, rollout: Rollout, s: SchedulerState) -> Key:
        return (s.expected(rollout),)

    def waits_for(self, group: Group, s: SchedulerState) -> bool:
        """With a filter, nothing is aborted at a cap of 1 either: an update has all started groups that are kept."""
        return super().waits_for(group, s) or (self._aborts_nothing(s) and group.is_started)

    def enough(self, s: SchedulerState) -> bool:
        if not super().enough(s):
            return False
        here, head = s.buffer.here, s.buffer.head()
        is_between_two = here.started > here.ready or (head is not None and completes_a_group(head, s))
        return not (self._aborts_nothing(s) and is_between_two)

    def _aborts_nothing(self, s: SchedulerState) -> bool:
        return s.filters and (s.schedule.oversubscribe or self.oversubscribe) == 1.0


@dataclass(frozen=True)
class PlannedPartial(Partial):
    """Aborted rollouts first, then shortest expected length first."""

    reorders: ClassVar[bool] = True
    uses_expectation: ClassVar[bool] = True

    def key_of_new(self, rollout: Rollout, group: Group, s: SchedulerState) -> Key:
        return (group.gate, NEW, s.expected(rollout))


@dataclass(frozen=True)
class LookaheadPartial(Partial):
    """Slots that a drain leaves empty start the next cohort, one cohort ahead.

    Rollouts of the next cohort never count toward the current harvest. Under a staleness bound they start only if the
    remaining updates of the current cohort do not exceed the bound."""

    works_ahead: ClassVar[bool] = True

    def to_load(self, s: SchedulerState) -> int:
        may_look_ahead = s.free_slots > 0 and s.buffer.waiting == 0 and len(s.buffer.gates) < 2 and self._in_time(s)
        return prompts_closing_epoch(s, self.cohort_size(s)) if may_look_ahead else super().to_load(s)

    def may_start(self, rollout: Rollout, s: SchedulerState) -> bool:
        ahead = s.buffer.group_of(rollout).gate != s.buffer.gate
        if ahead and not rollout.segments and not self._in_time(s):
            return False
        return super().may_start(rollout, s)

    def _in_time(self, s: SchedulerState) -> bool:
        bound = s.schedule.max_staleness
        return bound is None or updates_left(s.untrained_here, s.update_size) + s.learning <= bound


@dataclass(frozen=True)
class ElevatorPartial(Partial):
    """No cohort is drained. Freed slots are refilled from a window of waiting prompts, in a sweep
    short -> long -> short by expected length; rollouts that waited for too many updates start first.

    A batch is the first `rollouts_per_update` rollouts to finish. Neighbors in the sweep finish at about the same
    time, so batches stay sorted and fresh."""

    gated: ClassVar[bool] = False
    reorders: ClassVar[bool] = True
    uses_expectation: ClassVar[bool] = True

    def to_load(self, s: SchedulerState) -> int:
        return max(0, s.prompts_per_cohort - s.buffer.never_started // s.schedule.rollouts_per_prompt)

    def has_backlog(self, s: SchedulerState) -> bool:
        """Also of the scores: without a cohort gate, a reward that is slower than the engine would let finished
        rollouts pile up, older with every update."""
        return s.buffer.finished >= s.backlog_limit or super().has_backlog(s)

    def key_of_new(self, rollout: Rollout, group: Group, s: SchedulerState) -> Key:
        if s.updates - rollout.loaded_at_update >= s.longest_wait_updates:
            return (group.gate, NEW, WAITED_TOO_LONG)
        expected = s.expected(rollout)
        number, position = s.sweep
        rises = number % 2 == 0
        if expected < position if rises else expected > position:  # passed: the next sweep reaches it
            number, rises = number + 1, not rises
        return (group.gate, NEW, IN_SWEEP, number, expected if rises else -expected)

    def started(self, rollout: Rollout, key: Key, s: SchedulerState) -> None:
        if key[1:3] == (NEW, IN_SWEEP):
            number, signed_length = key[3:]
            s.sweep = Sweep(int(number), abs(signed_length))
