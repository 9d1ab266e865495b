"""The rollout buffer: every loaded rollout, its state, and its tokens so far.

It owns all state changes:

    load -> WAITING -> start -> RUNNING -> finish -> FINISHED -> score -> READY -> train -> TRAINED
               ^                   |                     |                  |
               +--- abort / fail --+----- regenerate ----+------------------+       any but TRAINED -> reject
                                                                            |
                                                            its group ------+-> FILTERED

Between two turns:  RUNNING -> move -> ENVIRONMENT -> move -> RETURNING -> resume -> RUNNING
                                                |                        |
                                                +-> finish               +-> regenerate (also from ENVIRONMENT)

Invariants after every change: loaded = waiting + running + in_environment + returning + finished + ready + trained +
rejected + filtered, and each rollout is trained on exactly once, rejected, or filtered. These leave the buffer, so it
holds live rollouts only. Rollouts in their environments and returning ones were started and are not in the queue: no
strategy starts them a second time, holds them back, or counts them as waiting.

A harvest takes whole groups: all responses to a prompt with `whole_groups`, otherwise each rollout is a group of one.
A group is ready when its last member is. Each group has a gate, the number of its cohort (0 for all groups if the
mode has no cohort gate): a harvest takes from the lowest gate that has untrained rollouts. When filtered groups leave
too few for an update, the next cohort joins the gate.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from sortedrl.core.rollout import Rollout, State

Key = tuple[float, ...]
# Names of their own: Python 3.11 takes longer for `State.WAITING` than for a call.
WAITING, RUNNING, ENVIRONMENT, RETURNING, FINISHED, READY, TRAINED, REJECTED, FILTERED = State


class Group:
    """Rollouts that are trained on together: `missing` of them are not ready, `waiting` of them wait for a slot."""

    __slots__ = ("gate", "id", "members", "missing", "waiting")

    def __init__(self, id: int, gate: int, members: list[Rollout]) -> None:
        self.id = id
        self.gate = gate
        self.members = members
        self.missing = self.waiting = len(members)

    @property
    def cohort(self) -> int:
        return self.members[0].cohort

    @property
    def oldest_version(self) -> int | None:
        versions = [v for v in (member.oldest_version for member in self.members) if v is not None]
        return min(versions, default=None)

    @property
    def is_started(self) -> bool:
        return any(member.state is not WAITING or member.segments for member in self.members)


@dataclass(slots=True)
class GateCounts:
    """Counts of the untrained rollouts behind one gate."""

    untrained: int = 0
    started: int = 0  # in groups without a waiting member
    ready: int = 0  # in complete groups
    ready_groups: dict[int, Group] = field(default_factory=dict)  # complete groups by id, first completed first


class Buffer:
    def __init__(self) -> None:
        self.live: dict[int, Rollout] = {}
        self.running: dict[int, Rollout] = {}
        self.in_environment: dict[int, Rollout] = {}
        self.returning: dict[int, Rollout] = {}  # first answered first
        self.unscored: dict[int, Rollout] = {}  # finished and not scored
        self.loaded = 0
        self.trained = 0
        self.rejected = 0
        self.filtered = 0
        self.never_started = 0  # waiting rollouts of which no token was ever sampled
        self.gate: int | None = None  # the lowest with untrained rollouts
        self.here = GateCounts()  # the counts behind it, all 0 if there is none
        self.gates: dict[int, GateCounts] = {}  # with untrained rollouts, lowest first
        self._queue: list[tuple[Key, int, Rollout]] = []
        self._groups: dict[int, Group] = {}  # by member id
        self._ready: dict[int, Rollout] = {}
        self._place_of = {
            RUNNING: self.running,
            ENVIRONMENT: self.in_environment,
            RETURNING: self.returning,
            FINISHED: self.unscored,
            READY: self._ready,
        }

    # Counts and lookups, for strategies

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def finished(self) -> int:
        """Finished and not scored."""
        return len(self.unscored)

    @property
    def ready(self) -> int:
        """Ready rollouts, including those in incomplete groups."""
        return len(self._ready)

    @property
    def untrained(self) -> int:
        return len(self.live)

    def ready_here(self) -> Iterable[Group]:
        """Complete groups behind the current gate, first completed first."""
        return self.here.ready_groups.values()

    def ready_groups(self) -> list[Group]:
        """All complete groups."""
        return [group for gate in self.gates.values() for group in gate.ready_groups.values()]

    def group_of(self, rollout: Rollout) -> Group:
        return self._groups[rollout.id]

    def groups(self) -> Iterator[Group]:
        """All live groups, oldest first."""
        return (group for member, group in self._groups.items() if group.members[0].id == member)

    # The queue of waiting rollouts, lowest key first

    def head(self) -> Rollout | None:
        return self._queue[0][2] if self._queue else None

    def rekey(self, key: Callable[[Rollout], Key]) -> None:
        self._queue = [(key(rollout), rollout.id, rollout) for _, _, rollout in self._queue]
        heapq.heapify(self._queue)

    def _count_waiting(self, rollout: Rollout, change: int) -> None:
        if not rollout.segments and rollout.attempt == 0:
            self.never_started += change
        group = self._groups[rollout.id]
        before = group.waiting
        group.waiting = before + change
        if not before:
            self.gates[group.gate].started -= len(group.members)
        elif not group.waiting:
            self.gates[group.gate].started += len(group.members)

    # State changes

    def load(self, rollouts: list[Rollout], gate: int, *, whole_groups: bool, key: Callable[[Rollout], Key]) -> None:
        members = [rollouts] if whole_groups else [[rollout] for rollout in rollouts]
        self.take_in([Group(group[0].id, gate, group) for group in members], key)
        self.loaded += len(rollouts)

    def take_in(self, groups: Iterable[Group], key: Callable[[Rollout], Key]) -> None:
        """New groups, or those of a checkpoint; none of them has a running rollout."""
        waiting: list[Rollout] = []
        for group in groups:
            for rollout in group.members:
                self.live[rollout.id] = rollout
                self._groups[rollout.id] = group
                if rollout.state is WAITING:
                    waiting.append(rollout)
                else:
                    self._place_of[rollout.state][rollout.id] = rollout
                    group.waiting -= 1
                    group.missing -= rollout.state is READY
            self._count_group(group)
        for rollout in waiting:  # after all groups: a key may depend on other members
            heapq.heappush(self._queue, (key(rollout), rollout.id, rollout))
            self.never_started += not rollout.segments and rollout.attempt == 0

    def start(self) -> tuple[Rollout, Key]:
        """Take the head of the queue."""
        key, _, rollout = heapq.heappop(self._queue)
        self._count_waiting(rollout, -1)
        rollout.state = RUNNING
        self.running[rollout.id] = rollout
        return rollout, key

    def move(self, rollout: Rollout, state: State) -> None:
        """A rollout that is neither waiting nor ready."""
        del self._place_of[rollout.state][rollout.id]
        rollout.state = state
        self._place_of[state][rollout.id] = rollout

    def put_back(self, rollout: Rollout, *, keep: bool, key: Callable[[Rollout], Key]) -> int:
        """Back to waiting, with or without its tokens; returns how many were dropped."""
        self._leave(rollout)
        rollout.reached = max(rollout.reached, rollout.policy_length)
        dropped = 0 if keep else rollout.drop_tokens()
        rollout.attempt += dropped > 0
        entry = key(rollout), rollout.id, rollout  # the key of a rollout that was started
        rollout.state = WAITING
        self._count_waiting(rollout, 1)
        heapq.heappush(self._queue, entry)
        return dropped

    def score(self, rollout: Rollout, reward: float, detail: Any) -> Group:
        """Returns its group, which may be complete now."""
        self.move(rollout, READY)
        rollout.reward, rollout.detail = reward, detail
        group = self._groups[rollout.id]
        group.missing -= 1
        self._note_if_complete(group)
        return group

    def train(self, group: Group) -> None:
        self._end(group, TRAINED)
        self.trained += len(group.members)

    def filter(self, group: Group) -> None:
        """Remove a complete group for good."""
        self._end(group, FILTERED)
        self.filtered += len(group.members)

    def _end(self, group: Group, state: State) -> None:
        gate = self.gates[group.gate]
        del gate.ready_groups[group.id]
        gate.ready -= len(group.members)
        gate.started -= len(group.members)
        for rollout in group.members:
            del self._ready[rollout.id]
            rollout.state = state
            self._release(rollout, group.gate)

    def reject(self, rollout: Rollout) -> int:
        """Remove the rollout for good; its group continues without it. Returns how many tokens were dropped."""
        group = self._groups[rollout.id]
        self._leave(rollout)
        rollout.state = REJECTED
        self.gates[group.gate].started -= not group.waiting
        self._release(rollout, group.gate)
        self.rejected += 1
        group.members.remove(rollout)
        group.missing -= 1
        if group.members:
            self._note_if_complete(group)
        return rollout.drop_tokens()

    def _leave(self, rollout: Rollout) -> None:
        """The place where its state puts it."""
        if rollout.state is WAITING:
            self._queue = [entry for entry in self._queue if entry[2] is not rollout]
            heapq.heapify(self._queue)
            self._count_waiting(rollout, -1)
            return
        del self._place_of[rollout.state][rollout.id]
        if rollout.state is READY:
            group = self._groups[rollout.id]
            if not group.missing:
                del self.gates[group.gate].ready_groups[group.id]
                self.gates[group.gate].ready -= len(group.members)
            group.missing += 1
            rollout.reward = rollout.detail = None

    def _note_if_complete(self, group: Group) -> None:
        if group.missing == 0:
            gate = self.gates[group.gate]
            gate.ready_groups[group.id] = group
            gate.ready += len(group.members)

    def _release(self, rollout: Rollout, gate: int) -> None:
        del self.live[rollout.id]
        del self._groups[rollout.id]
        at = self.gates[gate]
        at.untrained -= 1
        if not at.untrained:
            del self.gates[gate]
            self._note_lowest_gate()

    def _count_group(self, group: Group) -> None:
        if group.gate not in self.gates:
            self.gates[group.gate] = GateCounts()
            self._note_lowest_gate()
        at, size = self.gates[group.gate], len(group.members)
        at.untrained += size
        if not group.waiting:
            at.started += size
            self._note_if_complete(group)

    def join_next_gate(self) -> None:
        """What waits behind the second gate goes behind the first one. Keys may change with it: call `rekey`."""
        assert self.gate is not None
        number = list(self.gates)[1]
        joining = self.gates.pop(number)
        for group in self.groups():
            if group.gate == number:
                group.gate = self.gate
        self.here.untrained += joining.untrained
        self.here.started += joining.started
        self.here.ready += joining.ready
        self.here.ready_groups |= joining.ready_groups

    def _note_lowest_gate(self) -> None:
        self.gate = next(iter(self.gates), None)
        self.here = GateCounts() if self.gate is None else self.gates[self.gate]
