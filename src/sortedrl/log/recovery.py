"""Recovers an event log up to a checkpoint, even if it is damaged.

A checkpoint holds all that a run needs to resume; the log is the source of its metrics. A damaged log costs metrics,
never the run. Invariants: the recovered log has exactly as many events as the checkpoint counts, with `Lost` for lost
ones. It starts with `RunBegan`, and every rollout of a later event was loaded in it or before a gap in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sortedrl.core.events import Event, HarvestBegan, Loaded, Lost, Phase, RunBegan, Updated
from sortedrl.log.lines import Damage
from sortedrl.log.reading import counting_lines

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class RecoveredLog:
    """`events`: up to the checkpoint. `void`: how many events follow in the file."""

    events: list[Event]
    void: int
    is_damaged: bool

    @property
    def last_time(self) -> float:
        return max((event.at for event in self.events), default=0.0)

    @property
    def lost(self) -> int:
        return sum(isinstance(event, Lost) for event in self.events)


@dataclass(frozen=True, slots=True)
class CheckpointMark:
    """Where a checkpoint is in the log: how many events, harvests, updates and loaded rollouts precede it."""

    events: int
    harvests: int
    updates: int
    loaded: int

    @classmethod
    def of(cls, state: dict[str, Any]) -> CheckpointMark:
        """`state`: the controller's."""
        return cls(state["events"], state["harvests"], state["updates"], state["next_id"])

    def fits(self, lines: list[Event | Damage]) -> bool:
        """Whether the log starts with a run, and the checkpoint is at its count of events."""
        if len(lines) < self.events or not isinstance(lines[0], RunBegan):
            return False
        newest = lines[self.events - 1]
        return isinstance(newest, Phase) and newest.phase == "checkpoint"

    def precedes(self, line: Event | Damage) -> bool:
        """Whether the event certainly came after the checkpoint."""
        return (
            (isinstance(line, HarvestBegan) and line.harvest >= self.harvests)
            or (isinstance(line, Updated) and line.update >= self.updates)
            or (isinstance(line, Loaded) and line.first >= self.loaded)
        )


def recover(path: Path, mark: CheckpointMark, first: RunBegan) -> RecoveredLog:
    """The log up to a checkpoint; `first` replaces a lost first event."""
    lines = counting_lines(path) if path.exists() else []
    if lines and isinstance(lines[-1], Damage) and lines[-1].is_torn:
        lines.pop()  # a kill leaves one; `fits` checks whether the checkpoint counts it
    is_damaged = not mark.fits(lines) or any(isinstance(line, Damage) for line in lines)
    if not is_damaged:
        log = [line for line in lines if not isinstance(line, Damage)]
        return RecoveredLog(log[: mark.events], len(log) - mark.events, is_damaged=False)
    log = _with_lost(_fitted(lines, mark))
    if log and not isinstance(log[0], RunBegan):
        log = [Lost(event.at) if isinstance(event, RunBegan) else event for event in log]  # behind lines of damage
        log[0] = first._replace(at=log[0].at)
    if len(log) > 1:  # it ends where the checkpoint was written, so the next resume finds it in order
        log[-1] = Phase(log[-1].at, "checkpoint")
    _load_again(log, mark.loaded)
    return RecoveredLog(log, 0, is_damaged=True)


def _load_again(log: list[Event], loaded: int) -> None:
    """If the newest `Loaded` events are lost, one event for all of them replaces the last `Lost`."""
    newest = max((e for e in log if isinstance(e, Loaded)), key=lambda e: e.first, default=None)
    known, cohort = (newest.first + newest.rollouts, newest.cohort + 1) if newest else (0, 0)
    place = next((place for place in range(len(log) - 1, 0, -1) if isinstance(log[place], Lost)), None)
    if known < loaded and place is not None:
        log[place] = Loaded(log[place].at, cohort, known, loaded - known, ())


def _fitted(lines: list[Event | Damage], mark: CheckpointMark) -> list[Event | Damage]:
    """As many lines as the checkpoint counts: damage may have joined or split lines, so placeholders are added or
    removed.

    The checkpoint's place is found by the events: in the phase `checkpoint`, after its last update, and before any
    later event.
    """
    count = mark.events
    beyond = next((place for place, line in enumerate(lines) if mark.precedes(line)), len(lines))
    ends = _ends_of_checkpoint(lines[:beyond], mark.updates)
    kept = lines[: min(ends, key=lambda end: abs(end - count), default=min(count, beyond))]
    places = [place for place, line in enumerate(kept) if isinstance(line, Damage)]
    if len(kept) < count:
        place = places[0] if places else len(kept)
        kept[place:place] = [Damage(0, "lost")] * (count - len(kept))
    for place in reversed(places[: max(0, len(kept) - count)]):
        del kept[place]
    return kept[:count]


def _ends_of_checkpoint(lines: list[Event | Damage], updates: int) -> list[int]:
    """Places after the phase `checkpoint` starts, once `updates` updates are done."""
    ends, done = [], 0
    for place, line in enumerate(lines, start=1):
        if isinstance(line, Updated):
            done = line.update + 1
        elif isinstance(line, Phase) and line.phase == "checkpoint" and done == updates:
            ends.append(place)
    return ends


def _with_lost(lines: list[Event | Damage]) -> list[Event]:
    log: list[Event] = []
    at = next((line.at for line in lines if not isinstance(line, Damage)), 0.0)
    for line in lines:
        at = at if isinstance(line, Damage) else line.at
        log.append(Lost(at) if isinstance(line, Damage) else line)
    return log
