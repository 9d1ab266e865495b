"""The rollout buffer: every loaded rollout, its state, and its tokens so far.

It owns all state changes:

    load -> WAITING -> start -> RUNNING -> finish -> FINISHED -> score -> READY -> train -> TRAINED
               ^                   |                     |                  |
               +--- abort / fail --+----- regenerate ----+------------------+       any but TRAINED -> reject
                                                                            |
                                                            its group ------+-> FILTERED

Between two turns:  RUNNING -> end_turn -> ENVIRONMENT -> observe -> RETURNING -> resume -> RUNNING
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

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from sortedrl.core.checkpoint import restored_rollout, rollout_state
from sortedrl.core.rollout import Prompt, Rollout, State

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
        self.missing = len(members)
        self.waiting = 0

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


class GateCounts:
    """Counts of the untrained rollouts behind one gate."""

    __slots__ = ("cohorts", "ready", "ready_groups", "started", "untrained")

    def __init__(self) -> None:
        self.untrained = 0
        self.cohorts: dict[int, int] = {}  # untrained rollouts by cohort, oldest first
        self.started = 0  # in groups without a waiting member
        self.ready = 0  # in complete groups
        self.ready_groups: dict[int, Group] = {}  # complete groups by id, first completed first


class Buffer:
    def __init__(self) -> None:
        self.live: dict[int, Rollout] = {}
        self.running: dict[int, Rollout] = {}
        self.in_environment: dict[int, Rollout] = {}
        self.returning: dict[int, Rollout] = {}  # first answered first
        self.loaded = 0
        self.trained = 0
        self.rejected = 0
        self.filtered = 0
        self.never_started = 0  # waiting rollouts of which no token was ever sampled
        self.gate: int | None = None  # the lowest with untrained rollouts
        self.here = GateCounts()  # the counts behind it, all 0 if there is none
        self.gates: dict[int, GateCounts] = {}  # with untrained rollouts, lowest first
        self._queue: list[tuple[Key, int, Rollout]] = []
        self._finished: dict[int, Rollout] = {}
        self._groups: dict[int, Group] = {}  # by member id

    # Counts and lookups, for strategies

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def finished(self) -> int:
        """Finished and not scored."""
        return len(self._finished)

    @property
    def ready(self) -> int:
        """Ready rollouts, including those in incomplete groups."""
        between_turns = len(self.in_environment) + len(self.returning)
        return len(self.live) - len(self._queue) - len(self.running) - between_turns - len(self._finished)

    @property
    def untrained(self) -> int:
        return len(self.live)

    @property
    def last_gate(self) -> int | None:
        return next(reversed(self.gates), None)

    def ready_groups(self, gate: int) -> Iterable[Group]:
        """Complete groups behind this gate, first completed first."""
        return self.gates[gate].ready_groups.values() if gate in self.gates else ()

    def group_of(self, rollout: Rollout) -> Group:
        return self._groups[rollout.id]

    def groups(self) -> Iterator[Group]:
        """All live groups, oldest first."""
        return (group for member, group in self._groups.items() if group.members[0].id == member)

    def unscored(self) -> list[Rollout]:
        return list(self._finished.values())

    # The queue of waiting rollouts, lowest key first

    def head(self) -> Rollout | None:
        return self._queue[0][2] if self._queue else None

    def rekey(self, key: Callable[[Rollout], Key]) -> None:
        self._queue = [(key(rollout), rollout.id, rollout) for _, _, rollout in self._queue]
        heapq.heapify(self._queue)

    def _enqueue(self, rollout: Rollout, key: Key) -> None:
        rollout.state = WAITING
        self._count_waiting(rollout, 1)
        heapq.heappush(self._queue, (key, rollout.id, rollout))

    def _count_waiting(self, rollout: Rollout, change: int) -> None:
        if not rollout.segments and rollout.attempt == 0:
            self.never_started += change
        group = self._groups[rollout.id]
        was_started = not group.waiting
        group.waiting += change
        if was_started:
            self.gates[group.gate].started -= len(group.members)
        elif not group.waiting:
            self.gates[group.gate].started += len(group.members)

    # State changes

    def load(self, rollouts: list[Rollout], gate: int, *, whole_groups: bool, key: Callable[[Rollout], Key]) -> None:
        for members in [rollouts] if whole_groups else [[rollout] for rollout in rollouts]:
            group = Group(members[0].id, gate, members)
            group.waiting = len(members)
            for rollout in members:
                self.live[rollout.id] = rollout
                self._groups[rollout.id] = group
        self.loaded += len(rollouts)
        self._count_loaded(rollouts, gate)
        for rollout in rollouts:
            heapq.heappush(self._queue, (key(rollout), rollout.id, rollout))
            self.never_started += 1

    def start(self) -> tuple[Rollout, Key]:
        """Take the head of the queue."""
        key, _, rollout = heapq.heappop(self._queue)
        self._count_waiting(rollout, -1)
        rollout.state = RUNNING
        self.running[rollout.id] = rollout
        return rollout, key

    def end_turn(self, rollout: Rollout) -> None:
        del self.running[rollout.id]
        rollout.state = ENVIRONMENT
        self.in_environment[rollout.id] = rollout

    def observe(self, rollout: Rollout, tokens: Sequence[int]) -> None:
        del self.in_environment[rollout.id]
        rollout.observe(tokens)
        rollout.state = RETURNING
        self.returning[rollout.id] = rollout

    def resume(self) -> Rollout:
        """Take the first of the returning rollouts."""
        rollout = self.returning.pop(next(iter(self.returning)))
        rollout.state = RUNNING
        self.running[rollout.id] = rollout
        return rollout

    def finish(self, rollout: Rollout, *, truncated: bool) -> None:
        """From the engine, or from its environment."""
        self._leave(rollout)
        rollout.truncated = truncated
        rollout.state = FINISHED
        self._finished[rollout.id] = rollout

    def put_back(self, rollout: Rollout, *, keep: bool, key: Callable[[Rollout], Key]) -> int:
        """Back to waiting, with or without its tokens; returns how many were dropped."""
        self._leave(rollout)
        return self._wait_again(rollout, keep=keep, key=key)

    def regenerate(self, rollout: Rollout, key: Callable[[Rollout], Key]) -> int:
        """Drop the tokens of a rollout that is not in the engine; it waits again. Returns how many were dropped.

        Even a response without a token was an attempt: its score, if one comes, is not that of the next one."""
        self._leave(rollout)
        rollout.attempt += not rollout.policy_length
        return self._wait_again(rollout, keep=False, key=key)

    def awaiting_score(self, rollout_id: int, attempt: int) -> Rollout | None:
        """The rollout, or None if it no longer waits for the score of this attempt."""
        rollout = self._finished.get(rollout_id)
        return rollout if rollout is not None and rollout.attempt == attempt else None

    def score(self, rollout: Rollout, reward: float, detail: Any) -> Group:
        """Returns its group, which may be complete now."""
        del self._finished[rollout.id]
        rollout.state, rollout.reward, rollout.detail = READY, reward, detail
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
        if rollout.state is RUNNING:
            del self.running[rollout.id]
        elif rollout.state is WAITING:
            self._queue = [entry for entry in self._queue if entry[2] is not rollout]
            heapq.heapify(self._queue)
            self._count_waiting(rollout, -1)
        elif rollout.state is ENVIRONMENT:
            del self.in_environment[rollout.id]
        elif rollout.state is RETURNING:
            del self.returning[rollout.id]
        else:
            self._unfinish(rollout)

    def _wait_again(self, rollout: Rollout, *, keep: bool, key: Callable[[Rollout], Key]) -> int:
        rollout.reached = max(rollout.reached, rollout.policy_length)
        dropped = 0 if keep else rollout.drop_tokens()
        rollout.attempt += dropped > 0
        self._enqueue(rollout, key(rollout))
        return dropped

    def _unfinish(self, rollout: Rollout) -> None:
        if self._finished.pop(rollout.id, None) is None:
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
        at.cohorts[rollout.cohort] -= 1
        if not at.cohorts[rollout.cohort]:
            del at.cohorts[rollout.cohort]
        if not at.untrained:
            del self.gates[gate]
            self._note_lowest_gate()

    def _count_loaded(self, rollouts: list[Rollout], gate: int) -> None:
        at, cohort = self._gate_at(gate), rollouts[0].cohort
        at.untrained += len(rollouts)
        at.cohorts[cohort] = at.cohorts.get(cohort, 0) + len(rollouts)

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
        self.here.cohorts |= joining.cohorts

    def _gate_at(self, number: int) -> GateCounts:
        if number not in self.gates:
            self.gates[number] = GateCounts()
            self._note_lowest_gate()
        return self.gates[number]

    def _note_lowest_gate(self) -> None:
        self.gate = next(iter(self.gates), None)
        self.here = GateCounts() if self.gate is None else self.gates[self.gate]

    # Checkpoints, while no rollout is in the engine

    def state(self) -> dict[str, Any]:
        if self.running:
            raise RuntimeError(f"{len(self.running)} rollouts are in the engine: abort them before a checkpoint")
        return {
            "counts": [self.loaded, self.trained, self.rejected, self.filtered],
            "groups": [[group.id, group.gate, [rollout_state(m) for m in group.members]] for group in self.groups()],
            "ready": [group_id for gate in self.gates.values() for group_id in gate.ready_groups],
            "returning": list(self.returning),
        }

    def restore(self, state: dict[str, Any], prompts: dict[str, Prompt], key: Callable[[Rollout], Key]) -> None:
        self.loaded, self.trained, self.rejected, *filtered = state["counts"]
        self.filtered = sum(filtered)  # sortedrl 0.2 did not save it
        by_id: dict[int, Group] = {}
        for group_id, gate, members in state["groups"]:
            rollouts = [restored_rollout(fields, prompts) for fields in members]
            group = Group(group_id, gate, rollouts)
            group.missing = sum(rollout.state is not READY for rollout in rollouts)
            by_id[group.id] = group
            self._gate_at(gate).started += len(rollouts)
            self._count_loaded(rollouts, gate)
            for rollout in rollouts:
                self.live[rollout.id] = rollout
                self._groups[rollout.id] = group
                if rollout.state is FINISHED:
                    self._finished[rollout.id] = rollout
                elif rollout.state is ENVIRONMENT:
                    self.in_environment[rollout.id] = rollout
        for group_id in state["ready"]:
            self._note_if_complete(by_id[group_id])
        for rollout_id in state["returning"]:
            self.returning[rollout_id] = self.live[rollout_id]
        for rollout in self.live.values():  # after all groups exist: keys depend on other members
            if rollout.state is WAITING:
                self._enqueue(rollout, key(rollout))
