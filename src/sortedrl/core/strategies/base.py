"""The one interface of all schedules: what to load, what to start and in which order, when to harvest, what to keep.

A strategy is a value: it holds settings only and answers from the `SchedulerState`. The controller asks it, at every
change, these questions in this order:

    to_load     how many prompts to load now
    key         where a waiting rollout stands in the queue (lowest starts first)
    may_start   may the head of the queue take the free slot?
    enough      is it time to harvest?
    take        the update batches of this harvest, as lists of groups

The base class answers with the rules that most schedules share: the cohort gate, load order, one update a harvest,
and the staleness bound by waiting.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from sortedrl.core.buffer import Buffer, Group, Key
from sortedrl.core.expectation import Expectation, expected_length
from sortedrl.core.prompts import Prompts
from sortedrl.core.rollout import Rollout
from sortedrl.core.schedule import ConfigurationError, Schedule


class Sweep(NamedTuple):
    """The elevator's place: sweeps are numbered, even ones rise and odd ones fall by expected length."""

    number: int = 0
    position: float = 0.0  # expected length of the rollout that was started last

    @property
    def rises(self) -> bool:
        return self.number % 2 == 0


@dataclass(slots=True)
class SchedulerState:
    """What a strategy decides by. The controller keeps it up to date; a strategy changes it in `started` only."""

    schedule: Schedule
    slots: int
    buffer: Buffer
    prompts: Prompts
    expectation: Expectation
    version: int = 0  # of the learner
    updates: int = 0
    harvests: int = 0  # started
    learning: bool = False  # a batch is with the learner: with overlap, tokens sampled now are older by its update
    sweep: Sweep = field(default_factory=Sweep)  # elevator: where it is
    long_round: bool | None = None  # tail batching: whether the last start of this harvest was a regeneration
    must_finish: set[int] = field(default_factory=set)  # ids of sets that the staleness bound wants in this update

    def state(self) -> dict[str, Any]:
        """JSON-ready. Raises an error while rollouts are in the engine."""
        return {
            "buffer": self.buffer.state(),
            "prompts": self.prompts.state(),
            "expectation": self.expectation.state(),
            "version": self.version,
            "updates": self.updates,
            "harvests": self.harvests,
            "sweep": list(self.sweep),
        }

    def restore(self, state: dict[str, Any], key: Callable[[Rollout], Key]) -> None:
        """`key`: the strategy's, for the queue of waiting rollouts."""
        self.version, self.updates, self.harvests = state["version"], state["updates"], state["harvests"]
        self.sweep = Sweep(*state["sweep"])
        self.prompts.restore(state["prompts"])
        self.expectation.restore(state["expectation"])
        prompts = {prompt.id: prompt for prompt in self.prompts.dataset}
        self.buffer.restore(state["buffer"], prompts, key)  # last: keys depend on all the rest

    def expected(self, rollout: Rollout) -> float:
        """Expected length of its group: the longest member's."""
        if not self.schedule.whole_groups:
            return expected_length(rollout, self.expectation)
        return max(expected_length(member, self.expectation) for member in self.buffer.group_of(rollout).members)

    @property
    def free_slots(self) -> int:
        return self.slots - len(self.buffer.running)

    @property
    def in_hand(self) -> int:
        """Rollouts that this harvest can have without starting more: running, finished or ready, in groups of which no
        member waits, behind the current gate."""
        gate = self.buffer.gate
        return 0 if gate is None else self.buffer.begun_at(gate)

    @property
    def untrained_here(self) -> int:
        """Rollouts that a harvest can still reach: untrained behind the current gate."""
        gate = self.buffer.gate
        return 0 if gate is None else self.buffer.untrained_at(gate)

    @property
    def ready(self) -> int:
        """Ready rollouts, in complete groups, behind the current gate."""
        gate = self.buffer.gate
        return 0 if gate is None else self.buffer.ready_at(gate)


@dataclass(frozen=True)
class Strategy:
    name: str
    keeps_tokens: ClassVar[bool] = False  # of what is stopped
    gated: ClassVar[bool] = True  # a cohort is trained on before the next is loaded
    reorders: ClassVar[bool] = False  # keys change between harvests
    on_policy: ClassVar[bool] = False  # a batch is of one version, so all that is ready is trained on now
    oversubscribe: ClassVar[float | None] = None  # unless the schedule sets it; None: unlimited

    def check(self, schedule: Schedule) -> None:
        """Raise a ConfigurationError for settings that this strategy cannot honor."""
        if self.keeps_tokens:
            return
        if schedule.max_staleness is not None:
            raise ConfigurationError(
                "max_staleness",
                schedule.max_staleness,
                f"mode {self.name} keeps no tokens of stopped rollouts, so there is nothing to bound",
                "Leave it out, or use a partial mode.",
            )
        if schedule.overlap:
            raise ConfigurationError(
                "overlap",
                schedule.overlap,
                f"mode {self.name} must not train on tokens of older weights, so the engine has to rest",
                "Leave it out, or use a partial mode.",
            )

    def to_load(self, s: SchedulerState) -> int:
        if self.gated:
            return 0 if s.buffer.untrained else prompts_closing_epoch(s, cohort_prompts(s))
        missing = s.free_slots - s.buffer.never_started
        return max(0, -(-missing // s.schedule.rollouts_per_prompt))

    def key(self, rollout: Rollout, s: SchedulerState) -> Key:
        return (rollout.id,)

    def may_start(self, rollout: Rollout, s: SchedulerState) -> bool:
        """The oversubscribe cap. It is off for the last batch, and lets a set that was started be completed."""
        cap = s.schedule.oversubscribe or self.oversubscribe
        if cap is None or s.in_hand < math.ceil(cap * self.wanted(s)) or self.reachable(s) <= self.wanted(s):
            return True
        return completes_a_group(rollout, s) or s.buffer.group_of(rollout).id in s.must_finish

    def enough(self, s: SchedulerState) -> bool:
        return s.ready >= self.wanted(s) and not s.must_finish

    def take(self, s: SchedulerState) -> list[list[Group]]:
        """One batch, first completed first. Overdue sets are in it in any case, and all that is ready on-policy."""
        assert s.buffer.gate is not None
        batch: list[Group] = []
        rollouts, wanted = 0, self.wanted(s)
        for group in s.buffer.ready_groups(s.buffer.gate):
            if self.on_policy or rollouts < wanted or is_overdue(group, s):
                batch.append(group)
                rollouts += len(group.members)
        return [batch]

    def started(self, rollout: Rollout, key: Key, s: SchedulerState) -> None:
        """A rollout was started from the queue, where it had this key: note in `s` what later decisions depend on."""

    def reachable(self, s: SchedulerState) -> int:
        """Untrained rollouts that this and later harvests can reach before the next cohort."""
        return (
            s.untrained_here if self.gated else s.untrained_here + s.prompts.remaining * s.schedule.rollouts_per_prompt
        )

    def wanted(self, s: SchedulerState) -> int:
        """Rollouts that the coming update wants."""
        return update_size(self.reachable(s), s.schedule.rollouts_needed)


def update_size(left: int, per_update: int) -> int:
    """Rollouts for the coming update: all that is left where the last batch would be less than half an update."""
    return per_update if 2 * (left - per_update) >= per_update else left


def updates_left(left: int, per_update: int) -> int:
    count = 0
    while left > 0:
        left -= update_size(left, per_update)
        count += 1
    return count


def cohort_prompts(s: SchedulerState) -> int:
    return s.schedule.prompts_per_cohort or len(s.prompts.dataset)


def prompts_per_update(s: SchedulerState) -> int:
    return -(-s.schedule.rollouts_per_update // s.schedule.rollouts_per_prompt)


def prompts_closing_epoch(s: SchedulerState, count: int) -> int:
    """`count`, or all that is left of the epoch where the rest would not fill half an update."""
    in_epoch = s.prompts.remaining_in_epoch or len(s.prompts.dataset)  # none left: the next epoch begins
    rest = (in_epoch - count) * s.schedule.rollouts_per_prompt
    return in_epoch if 0 < 2 * rest < s.schedule.rollouts_needed else count


def completes_a_group(rollout: Rollout, s: SchedulerState) -> bool:
    """Is it a member of a group that was started? What there is of a set is of no use without the rest."""
    group = s.buffer.group_of(rollout)
    return len(group.members) > 1 and group.begun


def is_overdue(group: Group, s: SchedulerState) -> bool:
    """Would the set exceed the staleness bound if the coming update went without it?"""
    bound, oldest = s.schedule.max_staleness, group.oldest_version
    return bound is not None and oldest is not None and s.version + 1 - oldest > bound


def overdue_and_unfinished(s: SchedulerState) -> set[int]:
    """Ids of the groups that the coming update must wait for, because of the staleness bound."""
    if s.schedule.max_staleness is None:
        return set()
    groups = s.buffer.groups()
    return {group.id for group in groups if group.missing and group.gate == s.buffer.gate and is_overdue(group, s)}
