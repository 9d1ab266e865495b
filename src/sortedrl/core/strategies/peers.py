"""Schedules of other systems, re-implemented from their papers so that they run on the same engines.

None of this is the original code. Details that a paper leaves open are our choice.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from sortedrl.core.buffer import Group, Key
from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.rollout import Rollout
from sortedrl.core.schedule import Schedule
from sortedrl.core.strategies.base import SchedulerState, completes_a_group, prompts_closing_epoch
from sortedrl.core.strategies.paper import Baseline, OnPolicy, Partial


@dataclass(frozen=True)
class April(Partial):
    """APRIL: slots always full, abort when the update is ready, resume aborted rollouts first, no cohorts."""

    gated: ClassVar[bool] = False


@dataclass(frozen=True)
class TailBatching(OnPolicy):
    """RollPacker's tail batching: a short round starts 1.25x the rollouts it needs and sets aside those it aborts.
    When enough for an update are set aside, a long round runs exactly those to their end."""

    gated: ClassVar[bool] = False
    reorders: ClassVar[bool] = True
    surplus: ClassVar[float] = 1.25

    def check_filter(self) -> None:
        why = f"mode {self.name} sizes its rounds by what it set aside, which filtered groups would change"
        fix = "Leave it out, or use another mode, such as partial+elevator."
        raise ConfigurationError("filter_groups", True, why, fix)

    def to_load(self, s: SchedulerState) -> int:
        if self._long_round_is_due(s) if s.long_round is None else s.long_round:
            wanted = self.next_update_size(s) - s.buffer.untrained  # above 0 only if rollouts were rejected
        else:
            wanted = math.ceil(self.surplus * self.next_update_size(s)) - (s.buffer.untrained - self._set_aside(s))
        return max(0, -(-wanted // s.schedule.rollouts_per_prompt))

    def key(self, rollout: Rollout, s: SchedulerState) -> Key:
        regenerate = rollout.attempt > 0
        return (regenerate != self._long_round_is_due(s), regenerate)

    def may_start(self, rollout: Rollout, s: SchedulerState) -> bool:
        if self.rollouts_left(s) <= self.next_update_size(s) or completes_a_group(rollout, s):
            return True
        regenerate = rollout.attempt > 0
        if s.long_round is not None and regenerate != s.long_round:  # no rollout of the round's kind is waiting
            return s.obtainable < self.next_update_size(s)
        surplus = 1.0 if regenerate else self.surplus
        return s.obtainable < math.ceil(surplus * self.next_update_size(s))

    def started(self, rollout: Rollout, key: Key, s: SchedulerState) -> None:
        s.long_round = rollout.attempt > 0

    def _long_round_is_due(self, s: SchedulerState) -> bool:
        return self._set_aside(s) >= self.next_update_size(s)

    def _set_aside(self, s: SchedulerState) -> int:
        return s.buffer.waiting - s.buffer.never_started


@dataclass(frozen=True)
class FilterRounds(Baseline):
    """Dynamic sampling in rounds, as DAPO does it: an update's worth of prompts, wait for all of it, and the same again
    until the kept groups fill the update; what is left over is discarded. Without a filter it is the baseline.

    `refill`: after the first round, only so many times the prompts that are missing, as verl's V1 trainer does."""

    discards_surplus: ClassVar[bool] = True
    refill: int | None = None

    def to_load(self, s: SchedulerState) -> int:
        if not s.filters:
            return super().to_load(s)
        missing = s.update_size - s.ready
        if s.buffer.untrained > s.ready or missing <= 0:
            return 0
        count = -(-s.update_size // s.schedule.rollouts_per_prompt)
        if self.refill is not None and s.ready:
            count = self.refill * math.ceil(missing / s.schedule.rollouts_per_prompt)
        return prompts_closing_epoch(s, count)

    def take(self, s: SchedulerState) -> list[list[Group]]:
        """The first ones, in load order."""
        if not s.filters:
            return super().take(s)
        batch: list[Group] = []
        rollouts = 0
        for group in sorted(s.buffer.ready_here(), key=lambda group: group.id):
            if rollouts < s.update_size:
                batch.append(group)
                rollouts += len(group.members)
        return [batch]


@dataclass(frozen=True)
class AsyncPool(Partial):
    """An asynchronous pool as in AReaL: the engine never idles, and a rollout starts only while the started and
    untrained ones are at most `max_staleness + 1` updates' worth. Requires `overlap`."""

    gated: ClassVar[bool] = False

    def check(self, schedule: Schedule) -> None:
        if not schedule.overlap or schedule.max_staleness is None:
            found = f"overlap = {schedule.overlap}, max_staleness = {schedule.max_staleness}"
            why = f"an asynchronous pool needs overlap and a staleness bound ({found})"
            fix = "Set overlap = true and max_staleness, for example 4."
            raise ConfigurationError("mode", self.name, why, fix)

    def may_start(self, rollout: Rollout, s: SchedulerState) -> bool:
        assert s.schedule.max_staleness is not None
        if rollout.segments or rollout.attempt or completes_a_group(rollout, s):
            return True
        started_and_untrained = s.buffer.untrained - s.buffer.never_started
        return started_and_untrained < (s.schedule.max_staleness + 1) * s.update_size
