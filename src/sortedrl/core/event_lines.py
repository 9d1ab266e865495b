"""An event as one line of JSON, and back: the event's name, then its fields."""

from __future__ import annotations

import io
import json
import math
import types
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple, TextIO, get_args, get_origin, get_type_hints

from sortedrl.core.events import (
    GATES,
    Aborted,
    Event,
    Finished,
    Gate,
    Observed,
    Scored,
    Started,
    Submitted,
    TurnEnded,
    Updated,
)

_TYPES: dict[str, type] = {kind.__name__: kind for kind in get_args(Event)}
_WITH_COLUMNS = frozenset(kind for kind in _TYPES.values() if "tuple" in str(kind.__annotations__))
_PLAIN_TYPES: dict[Any, set[type]] = {int: {int}, float: {float, int}, str: {str}}  # of decoded values, by field type
_JSON = json.JSONDecoder()


def _template(kind: type) -> str:
    """Format of an event of plain numbers: the most frequent events bypass the JSON encoder."""
    fields = ",".join(f'"{name}":%r' for name in kind._fields)  # type: ignore[attr-defined]
    return f'{{"event":"{kind.__name__}",{fields}}}\n'


_OF_NUMBERS: dict[type, str] = {kind: _template(kind) for kind in (Submitted, Started, Aborted, TurnEnded, Observed)}
_SCORED = _template(Scored)
_FINISHED = _template(Finished).removesuffix("%r}\n")


class JsonLines:
    """A sink that writes one JSON object per line: the event's name, then its fields."""

    def __init__(self, file: TextIO) -> None:
        self._write = file.write
        self._encode = json.JSONEncoder(separators=(",", ":")).encode

    def __call__(self, event: Event) -> None:
        template = _OF_NUMBERS.get(type(event))
        if template is not None:
            self._write(template % event)
        elif isinstance(event, Finished):
            truncated = "true" if event.truncated else "false"
            self._write(f"{_FINISHED % event[:-1]}{truncated}}}\n")
        elif isinstance(event, Scored):
            self._write(_SCORED % (event.at, event.rollout, float(event.reward)))  # a reward may be any kind of number
        else:
            self._write(self._encode({"event": type(event).__name__} | event._asdict()) + "\n")


def written(log: Iterable[Event]) -> str:
    """The log as text, one line per event."""
    file = io.StringIO()
    write = JsonLines(file)
    for event in log:
        write(event)
    return file.getvalue()


def decode(line: str) -> Event:
    fields = _from_json(line)
    kind: Any = _TYPES[fields.pop("event")]
    if kind in _WITH_COLUMNS:
        fields = {name: _frozen(value) for name, value in fields.items()}
    event: Event = kind._make(fields.values()) if tuple(fields) == kind._fields else kind(**fields)
    return event


def _from_json(line: str) -> Any:
    """As `json.loads`, and faster for the lines that `JsonLines` writes."""
    if line.startswith("{"):
        value, end = _JSON.raw_decode(line)
        if line[end:] == "\n":
            return value
    return _JSON.decode(line)


def _frozen(value: Any) -> Any:
    return tuple([_frozen(one) if type(one) is list else one for one in value]) if isinstance(value, list) else value


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
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Damage(number, "not an event")
    types_of = (type(event), *map(type, event))
    if types_of not in _SEEN_TO_FIT:
        if not all(fits(value) for value, fits in zip(event, _checks()[type(event)], strict=True)):
            return Damage(number, f"{type(event).__name__} with a wrong value")
        if type(event) not in _WITH_COLUMNS:
            _SEEN_TO_FIT.add(types_of)
    if isinstance(event, Gate) and event.why not in GATES:
        return Damage(number, "Gate with a wrong value")
    if not math.isfinite(event.at):
        return Damage(number, f"{type(event).__name__} without a time")
    if isinstance(event, Updated) and len({len(column) for column in event[4:]}) != 1:
        return Damage(number, "Updated with columns of different lengths")
    return event


_SEEN_TO_FIT: set[tuple[type, ...]] = set()  # an event and its fields; columns depend on more than their type


@cache
def _checks() -> dict[type, tuple[Callable[[Any], bool], ...]]:
    """One test per field, by event type."""
    return {kind: tuple(map(_check_of, get_type_hints(kind).values())) for kind in _TYPES.values()}


def _check_of(hint: Any) -> Callable[[Any], bool]:
    """A test of a decoded value against a field's type."""
    if hint in _PLAIN_TYPES:
        plain_types = _PLAIN_TYPES[hint]
        return lambda value: type(value) in plain_types
    if hint is Any:
        return lambda value: True
    origin, inner = get_origin(hint), get_args(hint)
    if origin is types.UnionType:
        options = [_check_of(option) for option in inner]
        return lambda value: any(fits(value) for fits in options)
    if origin is tuple:
        count = None if inner[1:] == (...,) else len(inner)
        content = _check_of_content(inner[0])
        return lambda value: type(value) is tuple and (count is None or len(value) == count) and content(value)
    plain = origin or hint
    return lambda value: type(value) is plain


def _check_of_content(hint: Any) -> Callable[[Any], bool]:
    """A test of a column, whose values have this type."""
    plain = _PLAIN_TYPES.get(hint)
    if plain is not None:
        return lambda column: plain.issuperset(map(type, column))
    fits = _check_of(hint)
    return lambda column: all(map(fits, column))
