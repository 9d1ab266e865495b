"""An event log up to a checkpoint, even if it is damaged.

The checkpoint is the truth: it holds all that a run needs to resume. The log is the source of its metrics, and damage
costs metrics, never the run. A torn last line is cut; any other line that cannot be read becomes one `Lost` event.
Nothing is reconstructed: folds ignore events whose earlier ones are lost. Invariant: what was recovered has as many
events as the checkpoint counts, so a later resume finds the log in order, and no loss is reported twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from sortedrl.core.events import Event, HarvestBegan, Lost, Phase, RunBegan
from sortedrl.log.atomic_write import write_atomically
from sortedrl.log.lines import Damage, written
from sortedrl.log.reading import last_run, lines_of

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class RecoveredLog:
    """The events up to the checkpoint, as many as it counts: those `kept` of the file, then `padding` in the place of
    those that are lost. `void`: how many follow `kept` in the file. `lost`: how many cannot be read any more."""

    kept: list[Event]
    padding: list[Event]
    void: int
    lost: int

    @property
    def events(self) -> list[Event]:
        return [*self.kept, *self.padding]

    @property
    def last_time(self) -> float:
        return max((event.at for event in self.events), default=0.0)


class CheckpointMark(NamedTuple):
    """Where a checkpoint is in the log: how many events and harvests precede it."""

    events: int
    harvests: int

    @classmethod
    def of(cls, state: dict[str, Any]) -> CheckpointMark:
        """`state`: the controller's."""
        return cls(state["events"], state["harvests"])

    def fits(self, lines: Sequence[Event | Damage]) -> bool:
        """Whether the log starts with a run, and the checkpoint is at its count of events."""
        if len(lines) < self.events or not isinstance(lines[0], RunBegan):
            return False
        return _is_checkpoint(lines[self.events - 1])

    def end_in(self, lines: Sequence[Event | Damage]) -> int:
        """How many lines precede it if lines were lost or doubled: it is the last one before the next harvest."""
        starts = [(i, line.harvest) for i, line in enumerate(lines) if isinstance(line, HarvestBegan)]
        end = next((i for i, harvest in starts if harvest >= self.harvests), len(lines))
        begin = max((i for i, _ in starts if i < end), default=0)
        return max((i + 1 for i in range(begin, end) if _is_checkpoint(lines[i])), default=end)


def _is_checkpoint(line: Event | Damage) -> bool:
    return isinstance(line, Phase) and line.phase == "checkpoint"


def recover(path: Path, mark: CheckpointMark, first: RunBegan) -> RecoveredLog:
    """The log up to a checkpoint; `first` is the run's first event. Without it nothing that follows can be understood.
    In the file, `Lost` takes the place of each line that cannot be read."""
    lines = list(lines_of(path)) if path.exists() else []
    if lines and isinstance(lines[-1], Damage) and lines[-1].is_torn:
        lines.pop()
    lost = sum(isinstance(line, Damage) for line in lines)
    if lost:
        lines = _replaced(path, lines)
    log: list[Any] = last_run(lines)[0]
    if mark.fits(log):
        return RecoveredLog(log[: mark.events], [], len(log) - mark.events, lost)
    kept = log[: mark.end_in(log)][: mark.events - 1]
    at = max((event.at for event in kept), default=first.at)
    padding: list[Event] = []
    if not kept or not isinstance(kept[0], RunBegan):
        kept, padding = [], [first._replace(at=at)]
    padding += [Lost(at)] * (mark.events - 1 - len(kept) - len(padding))
    padding.append(Phase(at, "checkpoint"))  # where the next resume finds it
    return RecoveredLog(kept, padding, len(log) - len(kept), lost + len(padding))


def _replaced(path: Path, lines: list[Event | Damage]) -> list[Event | Damage]:
    """The file gets `Lost` in the place of each unreadable line; all others stay as they are."""
    texts = path.read_bytes().decode("utf-8", errors="replace").split("\n")
    found: list[Event | Damage] = []
    at = 0.0
    for place, line in enumerate(lines):
        if isinstance(line, Damage):
            found.append(Lost(at))
            texts[place] = written([Lost(at)]).removesuffix("\n")
        else:
            found.append(line)
            at = line.at
    write_atomically(path, "".join(f"{text}\n" for text in texts[: len(lines)]))
    return found
