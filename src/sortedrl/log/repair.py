"""Makes an event log with missing lines consistent, so that every fold can read it.

Folds rely on what the controller guarantees: a run has a start, a rollout is loaded before it is submitted, submitted
before it starts, and leaves its slot before another takes it. Where a damaged line breaks such a chain, the missing
event is inferred from later events if possible; otherwise the orphaned events are left out. An intact log is returned
unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_args

from sortedrl.core import events
from sortedrl.core.events import Event

UNKNOWN_MODE = "unknown mode"
EMPTY_PHASES = ("weights", "end")  # the engine is empty then, even with overlap
_OF_A_HARVEST = frozenset({events.HarvestBegan, events.Submitted, events.Started})
_OF_A_ROLLOUT = frozenset(kind for kind in get_args(Event) if "rollout" in kind._fields)


@dataclass(frozen=True, slots=True)
class Repair:
    """`put_back`: events inferred from later ones; `left_out`: orphaned events."""

    log: list[Event]
    put_back: int
    left_out: int


def repaired(log: Sequence[Event]) -> Repair:
    repairer = _Repairer(log)
    repairer.take_all()
    return Repair(repairer.out, repairer.put_back, repairer.left_out)


def consistent(log: Sequence[Event]) -> list[Event]:
    """Make a log that may have been recovered from damage readable by every fold."""
    return repaired([event for event in log if not isinstance(event, events.Lost)]).log


class _Repairer:
    def __init__(self, log: Sequence[Event]) -> None:
        self._log = log
        self.out: list[Event] = []
        self.put_back = self.left_out = 0
        self._overlap = False
        self._slots = 0
        self._phase = ""
        self._learns_since: float | None = None  # an update whose learner phase has not been seen yet
        self._gone: set[int] = set()
        self._loaded = 0  # rollouts below this number are loaded
        self._cohort = -1
        self._kept: dict[int, int] = {}  # rollouts in the engine -> prefix tokens at submit
        self._in_environment: dict[int, int] = {}  # rollouts in their environments -> tokens
        self._slot_of: dict[int, int] = {}
        self._holder: dict[int, int] = {}  # rollout by slot
        if log and not isinstance(log[0], events.RunBegan):
            self._slots = self._most_slots
            self._put_back(events.RunBegan(log[0].at, self._slots, UNKNOWN_MODE, {}))

    def take_all(self) -> None:
        handlers: dict[type, Callable[[Any], bool]] = {
            events.RunBegan: self._on_run,
            events.SlotsChanged: self._on_slots_changed,
            events.Loaded: self._on_loaded,
            events.Phase: self._on_phase,
            events.Submitted: self._on_submitted,
            events.Started: self._on_started,
            events.Preempted: self._on_preempted,
            events.Finished: self._on_finished,
            events.TurnEnded: self._on_turn_ended,
            events.Aborted: self._on_left,
            events.Failed: self._on_left,
            events.Observed: self._on_observed,
            events.EnvironmentFailed: self._on_environment_failed,
            events.Scored: self._on_after_the_engine,
            events.Regenerated: self._on_after_the_engine,
            events.Rejected: self._on_rejected,
            events.Updated: self._on_updated,
        }
        gone, keep = self._gone, self.out.append
        event: Any
        for event in self._log:
            kind = type(event)
            if kind in _OF_A_ROLLOUT:
                is_gone = event.rollout in gone  # what was trained on or rejected has no further events
            else:
                is_gone = kind is events.Updated and not gone.isdisjoint(event.rollouts)
            if is_gone:
                self.left_out += 1
                continue
            if self._learns_since is not None or (self._phase != "harvest" and kind in _OF_A_HARVEST):
                self._repair_phase(event)
            handler = handlers.get(kind)
            if handler is None or handler(event):
                keep(event)
            else:
                self.left_out += 1

    # What an intact log never asks for

    @cached_property
    def _most_slots(self) -> int:
        return 1 + max((event.slot for event in self._log if isinstance(event, events.Started)), default=0)

    @cached_property
    def _firsts(self) -> list[int]:
        return [event.first for event in self._log if isinstance(event, events.Loaded)]

    @cached_property
    def _ids(self) -> int:
        return 1 + max((event.rollout for event in self._log if isinstance(event, events.Submitted)), default=-1)

    # One handler per kind of event: puts back what must have come before, and returns False for an orphaned event

    def _on_run(self, event: events.RunBegan) -> bool:
        self._overlap = bool(event.settings.get("overlap"))
        self._slots = event.slots
        return True

    def _on_slots_changed(self, event: events.SlotsChanged) -> bool:
        self._slots = event.slots
        return True

    def _on_loaded(self, event: events.Loaded) -> bool:
        self._load_up_to(event.first, event.at)
        self._loaded, self._cohort = event.first + event.rollouts, event.cohort
        return True

    def _on_phase(self, event: events.Phase) -> bool:
        self._phase = event.phase
        if event.phase in EMPTY_PHASES or (event.phase != "harvest" and not self._overlap):
            self._end_all(event.at, self._kept)
        return True

    def _on_submitted(self, event: events.Submitted) -> bool:
        rollout = event.rollout
        self._load_up_to(rollout + 1, event.at)
        if rollout in self._kept:
            self._end(rollout, event.at, event.prefix)
        tokens = self._in_environment.pop(rollout, None)
        if tokens is not None:
            observed = max(1, event.prefix - tokens)
            self._put_back(events.Observed(event.at, rollout, observed, event.prefix))
        self._kept[rollout] = event.prefix
        return True

    def _on_started(self, event: events.Started) -> bool:
        rollout, slot = event.rollout, event.slot
        if rollout not in self._kept or rollout in self._slot_of:
            return False
        if slot >= self._slots:  # the run was resumed with more slots
            self._slots = self._most_slots
            self._put_back(events.SlotsChanged(event.at, self._slots))
        if slot in self._holder:
            self._end_all(event.at, [self._holder[slot]])
        self._slot_of[rollout] = slot
        self._holder[slot] = rollout
        return True

    def _on_preempted(self, event: events.Preempted) -> bool:
        if event.rollout not in self._slot_of:
            return False
        del self._holder[self._slot_of.pop(event.rollout)]
        return True

    def _on_finished(self, event: events.Finished) -> bool:
        if self._in_environment.pop(event.rollout, None) is not None:
            return True
        return self._on_left(event)

    def _on_turn_ended(self, event: events.TurnEnded) -> bool:
        if not self._on_left(event):
            return False
        self._in_environment[event.rollout] = event.length
        return True

    def _on_left(self, event: events.Finished | events.TurnEnded | events.Aborted | events.Failed) -> bool:
        if event.rollout not in self._kept:
            return False
        self._leave(event.rollout)
        return True

    def _on_observed(self, event: events.Observed) -> bool:
        return self._in_environment.pop(event.rollout, None) is not None

    def _on_environment_failed(self, event: events.EnvironmentFailed) -> bool:
        return event.rollout in self._in_environment

    def _on_after_the_engine(self, event: events.Scored | events.Regenerated | events.Rejected) -> bool:
        self._in_environment.pop(event.rollout, None)
        self._load_up_to(event.rollout + 1, event.at)
        return True

    def _on_rejected(self, event: events.Rejected) -> bool:
        self._gone.add(event.rollout)
        return self._on_after_the_engine(event)

    def _on_updated(self, event: events.Updated) -> bool:
        self._gone.update(event.rollouts)
        self._load_up_to(1 + max(event.rollouts, default=-1), event.at)
        for rollout, length in zip(event.rollouts, event.lengths, strict=True):
            if rollout in self._kept:
                self._finish(rollout, event.at, length)
        if self._phase != "learner" and not self._overlap:
            self._learns_since = event.at
        return True

    # Repairs

    def _repair_phase(self, event: Event) -> None:
        """The learner steps after an update, and only a harvest submits and starts."""
        if self._learns_since is not None and not isinstance(event, events.Phase):
            self._enter("learner", self._learns_since)
        self._learns_since = None
        if self._phase != "harvest" and type(event) in _OF_A_HARVEST:
            self._enter("harvest", event.at)

    def _enter(self, phase: str, at: float) -> None:
        self._phase = phase
        if phase != "harvest":
            self._end_all(at, self._kept)
        self._put_back(events.Phase(at, phase))

    def _put_back(self, event: Event) -> None:
        self.put_back += 1
        self.out.append(event)

    def _load_up_to(self, count: int, at: float) -> None:
        """Rollouts are numbered in load order: a gap in the numbers is a missing `Loaded` line."""
        if count > self._loaded:
            end = min((first for first in self._firsts if first > self._loaded), default=max(self._ids, count))
            self._cohort += 1
            self._put_back(events.Loaded(at, self._cohort, self._loaded, end - self._loaded, ()))
            self._loaded = end
            self._load_up_to(count, at)

    def _end_all(self, at: float, rollouts: Iterable[int]) -> None:
        for rollout in list(rollouts):
            self._end(rollout, at, self._kept[rollout])

    def _end(self, rollout: int, at: float, length: int) -> None:
        """Its end is missing, so it must have been aborted. `length` is the last known length."""
        made = max(0, length - self._kept[rollout])
        self._leave(rollout)
        self._put_back(events.Aborted(at, rollout, made, length, 0))

    def _finish(self, rollout: int, at: float, length: int) -> None:
        made = max(0, length - self._kept[rollout])
        self._leave(rollout)
        self._put_back(events.Finished(at, rollout, made, length, False))

    def _leave(self, rollout: int) -> None:
        del self._kept[rollout]
        slot = self._slot_of.pop(rollout, None)
        if slot is not None:
            del self._holder[slot]
