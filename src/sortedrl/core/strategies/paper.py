"""The schedules of the paper: its baselines, its two modes, and its ablations.

The paper's modes start all loaded rollouts (unlimited oversubscription) in load order and use no expected length.
The cohort gate and the harvest, which they share, are in `Strategy`.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from sortedrl.core.buffer import Group, Key
from sortedrl.core.rollout import Rollout
from sortedrl.core.strategies.base import (
    SchedulerState,
    Strategy,
    completes_a_group,
    is_of_older_cohort,
    update_size_of,
)

READY_UPDATES = 2  # of rollouts for a learner that is behind
RESUMED, COMPLETES_A_GROUP, NEW = 0, 1, 2  # the order in which partial modes start rollouts behind one gate


@dataclass(frozen=True)
class Baseline(Strategy):
    """Load one update, wait for all of it, train. `longest_first`: longest expected length first."""

    on_policy: ClassVar[bool] = True
    longest_first: bool = False

    @property
    def uses_expectation(self) -> bool:
        return self.longest_first

    def cohort_size(self, s: SchedulerState) -> int:
        missing = (s.update_size - s.ready) / s.kept_fraction - (s.untrained_here - s.ready)
        return max(1, math.ceil(missing / s.schedule.rollouts_per_prompt))

    def key(self, rollout: Rollout, s: SchedulerState) -> Key:
        return (-s.expected(rollout),) if self.longest_first else (0,)

    def next_update_size(self, s: SchedulerState) -> int:
        """All that is loaded. With a filter, more is loaded as soon as this cannot make an update."""
        return max(self.rollouts_left(s), super().next_update_size(s))


@dataclass(frozen=True)
class CohortAtOnce(Baseline):
    """Load a cohort, wait for all of it, then several updates: the later ones are stale.

    `order` splits the cohort by length instead of load order: the paper's "sorting after the fact". The later a rollout
    is trained on, the staler it is, so `ascending` ages long rollouts and `descending` short ones."""

    on_policy: ClassVar[bool] = False
    order: Literal["load", "ascending", "descending"] = "load"

    def cohort_size(self, s: SchedulerState) -> int:
        return s.prompts_per_cohort

    def min_after_filter(self, s: SchedulerState) -> int:
        return -(-s.update_size // 2)

    def take(self, s: SchedulerState) -> list[list[Group]]:
        ready = sorted(s.buffer.ready_here(), key=lambda group: (not is_of_older_cohort(group, s), self._place(group)))
        batches: list[list[Group]] = []
        left = sum(len(group.members) for group in ready)
        missing = 0
        for group in ready:
            if missing <= 0:
                batches.append([])
                missing = update_size_of(left, s.update_size)
            batches[-1].append(group)
            missing -= len(group.members)
            left -= len(group.members)
        return batches

    def _place(self, group: Group) -> float:
        if self.order == "load":
            return group.id
        length = max(map(len, group.members))
        return length if self.order == "ascending" else -length


@dataclass(frozen=True)
class OnPolicy(Strategy):
    """The paper's on-policy mode: aborted rollouts lose their tokens and are regenerated under the new weights."""

    on_policy: ClassVar[bool] = True

    def key(self, rollout: Rollout, s: SchedulerState) -> Key:
        return (rollout.attempt > 0,)


@dataclass(frozen=True)
class UngatedOnPolicy(OnPolicy):
    """Ablation: prompts are loaded whenever a slot is free, so aborted rollouts start last."""

    gated: ClassVar[bool] = False


@dataclass(frozen=True)
class Partial(Strategy):
    """The paper's partial mode: aborted rollouts keep their tokens and are resumed, most tokens first."""

    keeps_tokens: ClassVar[bool] = True

    def has_backlog(self, s: SchedulerState) -> bool:
        """Of the environments, or (with overlap and without a cohort gate) of the learner: if one of these is slower
        than the engine, every free slot would open one more rollout, and all of them get older. `oversubscribe` sets
        another bound."""
        if s.schedule.oversubscribe is not None:
            return False
        if s.learning and not self.gated:
            may_be_ready = s.update_size * min(READY_UPDATES, s.schedule.max_staleness or READY_UPDATES)
            if s.ready >= may_be_ready:
                return True
        return len(s.buffer.in_environment) >= s.backlog_limit

    def key(self, rollout: Rollout, s: SchedulerState) -> Key:
        group = s.buffer.group_of(rollout)
        if rollout.segments:
            return (group.gate, RESUMED, -rollout.length)
        if len(group.members) > 1 and completes_a_group(rollout, s):
            return (group.gate, COMPLETES_A_GROUP)
        return self.key_of_new(rollout, group, s)

    def key_of_new(self, rollout: Rollout, group: Group, s: SchedulerState) -> Key:
        """The key of a rollout without tokens, whose group was not started; it begins with the gate and `NEW`."""
        return (group.gate, NEW)
