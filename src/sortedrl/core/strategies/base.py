"""The interface of all schedules: what to load, what to start and in which order, when to harvest, what to keep.

A strategy holds settings only and decides by the `SchedulerState`. The controller calls, in this order:

    to_load     how many prompts to load now
    key         position of a waiting rollout in the queue (the lowest key starts first, equal ones in load order)
    may_start   may the head of the queue take the free slot?
    started     the head of the queue was started
    enough      is it time to harvest?
    take        the update batches of this harvest, as lists of groups
    certain     before that, only with streaming: the ready groups that are sure to be in them

The base class has the rules that most schedules share: the cohort gate, load order, one update per harvest, and a
staleness bound that is kept by waiting.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from sortedrl.core.buffer import Buffer, Group, Key
from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.expectation import Expectation, expected_length
from sortedrl.core.prompts import Prompts
from sortedrl.core.rollout import Rollout
from sortedrl.core.schedule import Schedule

BACKLOG_UPDATES = 4  # of rollouts in their environments, and of rollouts without a score


class Sweep(NamedTuple):
    """The elevator's place: sweeps are numbered, even ones rise and odd ones fall by expected length."""

    number: int = 0
    position: float = 0.0  # expected length of the rollout that was started last


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
    must_finish: set[Group] = field(default_factory=set)  # incomplete groups that the coming update waits for: `is_due`
    long_round: bool | None = None  # tail batching: whether the last start of this harvest was a regeneration
    # Dynamic sampling (core/dynamic_sampling.py)
    filters: bool = False  # complete groups that teach nothing leave the buffer
    kept_fraction: float = 1.0  # of the rollouts that were judged last
    joined_cohort: int = 0  # at the current gate: older ones come before it
    filtered_rewards: list[tuple[int, float]] = field(default_factory=list)  # since the last batch: cohort and reward
    prompts_per_cohort: int = field(init=False)  # the schedule's, or all prompts of the epoch
    update_size: int = field(init=False)  # rollouts for one update
    # How many rollouts may be in their environments, or without a score, before no further one is opened. Each update's
    # worth of them makes the rollouts opened next about one update older.
    backlog_limit: int = field(init=False)
    longest_wait_updates: int = field(init=False)  # elevator: `max_wait_updates`, or two sweeps up and down the window

    def __post_init__(self) -> None:
        self.prompts_per_cohort = self.schedule.prompts_per_cohort or len(self.prompts.dataset)
        self.update_size = self.schedule.rollouts_needed
        self.backlog_limit = max(self.slots, BACKLOG_UPDATES * self.update_size)
        window = self.prompts_per_cohort * self.schedule.rollouts_per_prompt
        two_sweeps = 4 * math.ceil(window / self.schedule.rollouts_per_update)
        self.longest_wait_updates = self.schedule.max_wait_updates or two_sweeps

    def expected(self, rollout: Rollout) -> float:
        """Expected length of the rollout, or of the longest member of its group with `whole_groups`."""
        if not self.schedule.whole_groups:
            return expected_length(rollout, self.expectation)
        return max(expected_length(member, self.expectation) for member in self.buffer.group_of(rollout).members)

    @property
    def free_slots(self) -> int:
        return self.slots - len(self.buffer.running)

    @property
    def obtainable(self) -> float:
        """Rollouts that this harvest can get without starting more: behind the current gate, in groups
        without a waiting member. Those that a filter has not judged count with the fraction that it keeps."""
        here = self.buffer.here
        return here.ready + self.kept_fraction * (here.started - here.ready)

    @property
    def untrained_here(self) -> int:
        """Untrained rollouts behind the current gate."""
        return self.buffer.here.untrained

    @property
    def ready(self) -> int:
        """Ready rollouts, in complete groups, behind the current gate."""
        return self.buffer.here.ready


@dataclass(frozen=True)
class Strategy:
    name: str
    keeps_tokens: ClassVar[bool] = False  # of aborted rollouts
    gated: ClassVar[bool] = True  # rollouts of the next cohort are trained on after all of this one
    works_ahead: ClassVar[bool] = False  # gated, but rollouts of the next cohort may start before the end of this one
    reorders: ClassVar[bool] = False  # keys change between harvests
    discards_surplus: ClassVar[bool] = False  # ready groups that are not taken are filtered
    # All tokens of a batch are of one version, so every ready rollout is trained on now.
    on_policy: ClassVar[bool] = False
    oversubscribe: ClassVar[float | None] = None  # the default of the schedule's setting; None: unlimited

    def check(self, schedule: Schedule) -> None:
        """Raise a ConfigurationError for settings that this strategy cannot honor."""
        if self.keeps_tokens:
            return
        stale = "trains on a cohort in several updates, whose number is the staleness"
        stale = "trains on no stale token, so there is nothing to bound" if self.on_policy else stale
        lost = "keeps no tokens of aborted rollouts, so those generated while the learner steps would be lost"
        for key, without, why in (("max_staleness", None, stale), ("overlap", False, lost)):
            if (value := getattr(schedule, key)) != without:
                fix = "Leave it out, or use a partial mode."
                raise ConfigurationError(key, value, f"mode {self.name} {why}", fix)

    @property
    def uses_expectation(self) -> bool:
        """Whether it orders waiting rollouts by expected length."""
        return False

    @property
    def can_stream(self) -> bool:
        """Whether groups are certain to be in the coming update before the harvest ends."""
        return type(self).take is Strategy.take or type(self).certain is not Strategy.certain

    def check_filter(self) -> None:
        """Raise a ConfigurationError if this strategy cannot filter groups."""

    def to_load(self, s: SchedulerState) -> int:
        if self.gated:
            is_enough = s.buffer.untrained > 0 and not self.is_short(s)
            return 0 if is_enough else prompts_closing_epoch(s, self.cohort_size(s))
        missing = s.free_slots - s.buffer.never_started
        return max(0, -(-missing // s.schedule.rollouts_per_prompt))

    def cohort_size(self, s: SchedulerState) -> int:
        """Prompts of the next cohort, in modes with a gate."""
        return s.prompts_per_cohort

    def is_short(self, s: SchedulerState) -> bool:
        """Whether filtered groups left so few rollouts behind the gate that the next cohort must join them."""
        return s.filters and s.untrained_here < self.min_after_filter(s)

    def min_after_filter(self, s: SchedulerState) -> int:
        """Rollouts that a filter must leave of a cohort."""
        return s.update_size

    def key(self, rollout: Rollout, s: SchedulerState) -> Key:
        return (0,)

    def may_start(self, rollout: Rollout, s: SchedulerState) -> bool:
        """The oversubscribe cap. It does not apply to the last batch, nor to members of a started group."""
        if self.has_backlog(s) and self._opens_more(rollout, s):
            return False
        cap, size = s.schedule.oversubscribe or self.oversubscribe, self.next_update_size(s)
        if cap is None or s.obtainable < math.ceil(cap * size) or self.rollouts_left(s) <= size:
            return True
        return completes_a_group(rollout, s) or self.waits_for(s.buffer.group_of(rollout), s)

    def waits_for(self, group: Group, s: SchedulerState) -> bool:
        """Whether the coming update cannot be handed out without this group, unless it is rejected or filtered."""
        return group in s.must_finish

    def has_backlog(self, s: SchedulerState) -> bool:
        """Whether so many rollouts are in their environments, or without a score, that no further one is opened."""
        return False

    def _opens_more(self, rollout: Rollout, s: SchedulerState) -> bool:
        """Whether its start would open one more rollout that nothing waits for yet: it has no tokens, and neither its
        group nor the coming update needs it."""
        group = s.buffer.group_of(rollout)
        return not (rollout.segments or completes_a_group(rollout, s) or self.waits_for(group, s))

    def enough(self, s: SchedulerState) -> bool:
        return s.ready >= self.next_update_size(s) and not s.must_finish

    def take(self, s: SchedulerState) -> list[list[Group]]:
        """One batch: the ready groups that were complete first, up to what the update wants, and all that are due;
        on-policy, all ready ones. These were `certain` before: who takes others overrides that, too, to be streamed."""
        return [self.certain(s)]

    def certain(self, s: SchedulerState) -> list[Group]:
        """The groups of the coming batch that are ready already, however this harvest continues.

        None of them can leave again: a complete group stays complete, the order is that of completion, and the need
        never falls below the rollouts that are ready (if rollouts are rejected, it becomes all that are left). Older
        cohorts that are not ready keep their places."""
        batch: list[Group] = []
        older_missing = [group for group in s.must_finish if is_of_older_cohort(group, s)]
        rollouts, room = 0, self.next_update_size(s) - sum(len(group.members) for group in older_missing)
        for group in sorted(s.buffer.ready_here(), key=lambda group: not is_of_older_cohort(group, s)):
            if self.on_policy or rollouts < room or is_due(group, s):
                batch.append(group)
                rollouts += len(group.members)
        return batch

    def started(self, rollout: Rollout, key: Key, s: SchedulerState) -> None:
        """A rollout was started from the queue, where it had this key: note in `s` what later decisions depend on."""

    def rollouts_left(self, s: SchedulerState) -> int:
        """Untrained rollouts for this and later harvests: of this cohort, or of all data without a cohort gate."""
        not_loaded = 0 if self.gated else s.prompts.remaining * s.schedule.rollouts_per_prompt
        return s.untrained_here + not_loaded

    def next_update_size(self, s: SchedulerState) -> int:
        """Rollouts that the coming update wants. With a filter, it gets them from the next cohort if need be."""
        if self.gated and s.filters and (s.prompts.remaining or len(s.buffer.gates) > 1):
            return self.min_after_filter(s)
        return update_size_of(self.rollouts_left(s), s.update_size)


def update_size_of(left: int, per_update: int) -> int:
    """Rollouts in the coming update: `per_update`, or all that are left if fewer than half an update would remain."""
    return per_update if 2 * (left - per_update) >= per_update else left


def updates_left(left: int, per_update: int) -> int:
    count = 0
    while left > 0:
        left -= update_size_of(left, per_update)
        count += 1
    return count


def prompts_closing_epoch(s: SchedulerState, count: int) -> int:
    """`count`, or the whole rest of the epoch if fewer than half an update would remain after `count`. With a filter,
    an update may cross the end of an epoch: only the last one is closed."""
    in_epoch = s.prompts.remaining_in_epoch or len(s.prompts.dataset)  # none left: the next epoch starts
    if s.filters and s.prompts.remaining > in_epoch:
        return count
    rest = (in_epoch - count) * s.schedule.rollouts_per_prompt
    return in_epoch if 0 < 2 * rest < s.update_size else count


def completes_a_group(rollout: Rollout, s: SchedulerState) -> bool:
    """Whether other members of its group were started: a group is of no use until it is complete."""
    group = s.buffer.group_of(rollout)
    return len(group.members) > 1 and group.is_started


def is_due(group: Group, s: SchedulerState) -> bool:
    """Whether the group must be in the coming update: it would exceed the staleness bound in a later one, or a later
    cohort has joined its own."""
    bound, oldest = s.schedule.max_staleness, group.oldest_version
    is_overdue = bound is not None and oldest is not None and s.version + 1 - oldest > bound
    return is_overdue or is_of_older_cohort(group, s)


def is_of_older_cohort(group: Group, s: SchedulerState) -> bool:
    return group.cohort < s.joined_cohort


def due_and_incomplete(s: SchedulerState) -> set[Group]:
    """What the coming update must wait for."""
    if s.schedule.max_staleness is None and not s.joined_cohort:
        return set()
    return {group for group in s.buffer.groups() if group.missing and group.gate == s.buffer.gate and is_due(group, s)}
