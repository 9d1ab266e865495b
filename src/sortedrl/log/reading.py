"""Reading an event log. A resumed run made some of its events void; a kill or a full disk may have damaged it.

`read_events` has everything that was written, `without_rolled_back` what counts of it, and `read_intact` what counts
and can be read.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from sortedrl.core.errors import UserError
from sortedrl.core.events import FORMAT, READABLE_FORMATS, Event, Lost, RolledBack, RunBegan
from sortedrl.log.lines import Damage, decode, decoded_or_damage

if TYPE_CHECKING:
    from pathlib import Path


class UnknownFormat(UserError, RuntimeError):
    """The log was written by another version of sortedrl."""


class SeveralRuns(UserError, ValueError):
    """A log has the events of several runs: metrics of all of them together would be wrong."""


def read_events(path: Path) -> Iterator[Event]:
    """The events of a log file, including those that a rollback made void. Stops at a torn last line."""
    require_known_format(path)
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for line in file:
            if not line.endswith("\n"):
                return
            yield decode(line)


def without_rolled_back(events: Iterable[Event]) -> list[Event]:
    """The events that count, without void events, the `RolledBack` marks and the void time.

    Events after a mark move back in time by the gap between the last event that counts and the mark. Raises
    `SeveralRuns`.
    """
    log = events if isinstance(events, list) else list(events)
    count = Counter(map(type, log))
    is_one_run = count[RunBegan] == 0 or (count[RunBegan] == 1 and isinstance(log[0], RunBegan))
    if is_one_run and not count[RolledBack]:
        return log
    kept, earlier_runs = last_run(log)
    if earlier_runs:
        raise SeveralRuns(
            f"the event log has the events of {earlier_runs + 1} runs: give each run a log of its own. "
            "`sortedrl report` shows the last one"
        )
    return [event for event in kept if not isinstance(event, Damage)]


def handlers_of(fold: Any) -> dict[type, Callable[[Any], None]]:
    """The methods of a fold by the kind of event that they take: `_on_turn_ended` takes `TurnEnded`."""
    methods = {kind: "_on" + re.sub("([A-Z])", r"_\1", kind.__name__).lower() for kind in get_args(Event)}
    return {kind: getattr(fold, method) for kind, method in methods.items() if hasattr(fold, method)}


class IntactLog(NamedTuple):
    """Of the last run in a log: the events that count, in order of time, and the unreadable lines. Earlier runs are
    only counted, and so are lines that were unreadable when an earlier version resumed the run."""

    events: list[Event]
    damage: list[Damage]
    earlier_runs: int
    lost: int = 0

    @property
    def notice(self) -> str:
        """Empty if the log has one run."""
        several = f"it has the events of {self.earlier_runs + 1} runs, of which only the last one counts"
        return several if self.earlier_runs else ""


def read_intact(path: Path) -> IntactLog:
    """The readable part of a damaged log.

    An unreadable line keeps its place while reading: it was an event, and `RolledBack` counts events.
    """
    kept, earlier_runs = last_run(lines_of(path))
    of_kind = Counter(map(type, kept))
    damage: list[Damage] = []
    if of_kind[Damage] or of_kind[Lost]:
        damage = [line for line in kept if isinstance(line, Damage)]
        kept = [line for line in kept if not isinstance(line, (Damage, Lost))]
    return IntactLog(_in_order(kept), damage, earlier_runs, of_kind[Lost])  # type: ignore[arg-type]


def _in_order(log: list[Event]) -> list[Event]:
    """Where the mark of a rollback is lost, time goes back: an event is at the time of the one before it then."""
    times = [event.at for event in log]
    latest = list(accumulate(times, max))
    return log if times == latest else [event._replace(at=at) for event, at in zip(log, latest, strict=True)]


def last_run(lines: Iterable[Event | Damage]) -> tuple[list[Event | Damage], int]:
    """What counts of the last run, and how many runs before it are in the log and were not rolled back. Unreadable
    lines keep their places."""
    kept: list[Event | Damage] = []
    earlier_runs = 0
    void_seconds = earliest = 0.0  # no event after a rollback may precede the last one that counts, even by rounding
    for line in lines:
        if isinstance(line, RolledBack):
            del kept[max(0, len(kept) - line.events) :]  # a damaged log may have fewer
            earliest = next((event.at for event in reversed(kept) if not isinstance(event, Damage)), line.at)
            void_seconds = max(0.0, line.at - earliest)
            continue
        if isinstance(line, RunBegan) and not all(isinstance(one, Damage) for one in kept):
            kept.clear()
            void_seconds = 0.0
            earlier_runs += 1
        if void_seconds and not isinstance(line, Damage):
            line = line._replace(at=max(earliest, line.at - void_seconds))
        kept.append(line)
    return kept, earlier_runs


def lines_of(path: Path) -> Iterator[Event | Damage]:
    """The event in each line of the file, or its damage."""
    require_known_format(path)
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            yield decoded_or_damage(number, line)


def require_known_format(path: Path) -> None:
    """Raise `UnknownFormat` if another version wrote the log. A log whose first line is damaged passes."""
    try:
        with path.open(encoding="utf-8") as file:
            first = json.loads(file.readline())
    except (OSError, ValueError, RecursionError):
        return
    if not isinstance(first, dict) or first.get("event") != "RunBegan":
        return
    found = first.get("format", 1)
    if found not in READABLE_FORMATS:
        age = "an older" if type(found) is int and found < FORMAT else "a newer"
        raise UnknownFormat(
            f"{path} has event log format {found}, written by {age} sortedrl; this one reads format {FORMAT}. "
            "Use the version that wrote it, or start a new run"
        )
