"""The format version of an event log, and why a log is refused: another version wrote it, or several runs did."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from sortedrl.core.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = 2  # changes with any change of the events; 1 was that of sortedrl 0.1


class UnknownFormat(UserError, RuntimeError):
    """The log was written by another version of sortedrl."""


class SeveralRuns(UserError, ValueError):
    """A log has the events of several runs: metrics of all of them together would be wrong."""


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
    if found != FORMAT:
        age = "an older" if type(found) is int and found < FORMAT else "a newer"
        raise UnknownFormat(
            f"{path} has event log format {found}, written by {age} sortedrl; this one reads format {FORMAT}. "
            "Use the version that wrote it, or start a new run"
        )
