"""An event as one line of JSON, and back: the event's name, then its fields."""

import io
import json
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple, TextIO, get_args

from sortedrl.core import events
from sortedrl.core.events import Event

MOST = 10_000_000  # slots of a run, or rollouts that are loaded together
LARGEST = 1e100


def _template(kind: type) -> str:
    """Format of an event of plain numbers: the most frequent events bypass the JSON encoder."""
    fields = ",".join(f'"{name}":%r' for name in kind._fields)  # type: ignore[attr-defined]
    return f'{{"event":"{kind.__name__}",{fields}}}\n'


_OF_NUMBERS: dict[type, str] = {
    kind: _template(kind)
    for kind in (events.Submitted, events.Started, events.Aborted, events.TurnEnded, events.Observed)
}


class JsonLines:
    """A sink that writes one JSON object per line: the event's name, then its fields."""

    def __init__(self, file: TextIO) -> None:
        self._write = file.write
        self._encode = json.JSONEncoder(separators=(",", ":")).encode

    def __call__(self, event: Event) -> None:
        template = _OF_NUMBERS.get(type(event))
        if template is not None:
            self._write(template % event)
            return
        if isinstance(event, events.Scored):
            event = event._replace(reward=float(event.reward))  # it may be any kind of number
        self._write(self._encode({"event": type(event).__name__} | event._asdict()) + "\n")


def written(log: Iterable[Event]) -> str:
    """The log as text, one line per event."""
    file = io.StringIO()
    write = JsonLines(file)
    for event in log:
        write(event)
    return file.getvalue()


def decode(line: str) -> Event:
    """Of a line that names the event first. Raises ValueError, also if a field is missing or has another type."""
    name, _, fields = line.partition(",")
    decoded = _decoders().get(name) or _decoders().get(name.replace(": ", ":"))
    if decoded is None:
        raise ValueError("not an event")
    return decoded(f"{{{fields}", strict=True)


@cache
def _decoders() -> dict[str, Callable[..., Event]]:
    """By how a line starts."""
    from pydantic import TypeAdapter  # writing a log needs nothing but Python

    return {f'{{"event":"{kind.__name__}"': TypeAdapter(kind).validator.validate_json for kind in get_args(Event)}


class Damage(NamedTuple):
    """A line of a log that cannot be read; `line` counts from 1."""

    line: int
    why: str
    is_torn: bool = False  # the log ends within it, as that of a killed run may


def decoded_or_damage(number: int, line: str) -> Event | Damage:
    """The event in a line, with every field checked; `number` counts from 1."""
    if not line.endswith("\n"):
        return Damage(number, "the line is torn: the log ends within it", is_torn=True)
    try:
        event = decode(line)
    except ValueError:
        return Damage(number, "not an event")
    if not abs(event.at) < LARGEST:
        return Damage(number, f"{type(event).__name__} without a time")
    why_wrong = _WHY_WRONG.get(type(event))
    why = None if why_wrong is None else why_wrong(event)
    return event if why is None else Damage(number, f"{type(event).__name__} {why}")


def is_number(value: Any) -> bool:
    """Whether it is a number that a run may write: sums and products of several are finite, too."""
    return type(value) in (int, float) and abs(value) < LARGEST


def _why_wrong_update(event: events.Updated) -> str | None:
    if not event.rollouts:
        return "without a rollout"
    if len({len(column) for column in event[4:]}) != 1:
        return "with columns of different lengths"
    return None if all(map(is_number, event.rewards)) else "with a reward that is not a finite number"


def _why_wrong_slots(event: events.RunBegan | events.SlotsChanged) -> str | None:
    group = event.settings.get("rollouts_per_prompt", 1) if isinstance(event, events.RunBegan) else 1
    return None if 0 < event.slots <= MOST and type(group) is int and group > 0 else "with a wrong value"


_WHY_WRONG: dict[type, Callable[[Any], str | None]] = {  # values of the right type that no fold can work with
    events.Updated: _why_wrong_update,
    events.RunBegan: _why_wrong_slots,
    events.SlotsChanged: _why_wrong_slots,
    events.Gate: lambda event: None if event.why in events.GATES else "with a wrong value",
    events.Loaded: lambda event: None if event.first >= 0 and 0 <= event.rollouts <= MOST else "with a wrong value",
    events.Streamed: lambda event: None if is_number(event.seconds) else "with seconds that are not a finite number",
}
