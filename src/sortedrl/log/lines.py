"""An event as one line of JSON, and back: the event's name, then its fields."""

from __future__ import annotations

import io
import json
import types
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import chain
from typing import Any, NamedTuple, TextIO, get_args, get_origin, get_type_hints

from sortedrl.core.events import (
    GATES,
    Aborted,
    Event,
    Finished,
    Gate,
    Loaded,
    Observed,
    RunBegan,
    Scored,
    SlotsChanged,
    Started,
    Streamed,
    Submitted,
    TurnEnded,
    Updated,
)

_TYPES: dict[str, type] = {kind.__name__: kind for kind in get_args(Event)}
_COLUMNS: dict[type, tuple[str, ...]] = {  # fields that are tuples, lists in JSON, by event type
    kind: columns
    for kind in _TYPES.values()
    if (columns := tuple(name for name, hint in get_type_hints(kind).items() if get_origin(hint) is tuple))
}
_PLAIN_TYPES: dict[Any, set[type]] = {int: {int}, float: {float, int}, str: {str}}  # of decoded values, by field type
_OF_FEW = (Gate, RunBegan, SlotsChanged, Loaded)  # kinds with values that are checked one by one
MOST = 10_000_000  # slots of a run, or rollouts that are loaded together
LARGEST = 1e100
_new: Any = tuple.__new__


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
    fields = json.loads(line)
    kind: Any = _TYPES[fields.pop("event")]
    for name in _COLUMNS.get(kind, ()):
        if type(fields[name]) is list:
            fields[name] = _frozen(fields[name])
    event: Event = _new(kind, fields.values()) if tuple(fields) == kind._fields else kind(**fields)
    return event


def _frozen(column: list[Any]) -> tuple[Any, ...]:
    """A column of plain values, or of lists of lists, as tuples. Any other one fits no event, as a tuple or a list."""
    if not column or type(column[0]) is not list:
        return tuple(column)
    try:
        return tuple([(*map(tuple, inner),) for inner in column])
    except TypeError:
        return tuple(column)


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
    kind = type(event)
    fits_all = all(fits(value) for value, fits in zip(event, _checks()[kind], strict=True))
    if not fits_all or (isinstance(event, _OF_FEW) and not _is_possible(event)):
        return Damage(number, f"{kind.__name__} with a wrong value")
    if not is_number(event.at):
        return Damage(number, f"{type(event).__name__} without a time")
    if isinstance(event, Updated):
        if not event.rollouts:
            return Damage(number, "Updated without a rollout")
        if len({len(column) for column in event[4:]}) != 1:
            return Damage(number, "Updated with columns of different lengths")
        if not all(map(is_number, event.rewards)):
            return Damage(number, "Updated with a reward that is not a finite number")
    elif isinstance(event, Streamed) and not is_number(event.seconds):
        return Damage(number, "Streamed with seconds that are not a finite number")
    return event


def is_number(value: Any) -> bool:
    """Whether it is a number that a run may write: sums and products of several are finite, too."""
    return type(value) in (int, float) and abs(value) < LARGEST


def _is_possible(event: Gate | RunBegan | SlotsChanged | Loaded) -> bool:
    """Whether folds can work with values of the right type."""
    if isinstance(event, Gate):
        return event.why in GATES
    if isinstance(event, Loaded):
        return event.first >= 0 and 0 <= event.rollouts <= MOST
    group = event.settings.get("rollouts_per_prompt", 1) if isinstance(event, RunBegan) else 1
    return 0 < event.slots <= MOST and type(group) is int and group > 0


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
    if origin is tuple and inner[1:] == (...,):
        content = _check_of_content(inner[0])
        return lambda value: type(value) is tuple and content(value)
    plain = origin or hint
    return lambda value: type(value) is plain


def _check_of_content(hint: Any) -> Callable[[Sequence[Any]], bool]:
    """A test of a column, whose values have this type. A column of tuples is tested as one column of all they have."""
    plain = _PLAIN_TYPES.get(hint)
    if plain is not None:
        return lambda column: plain.issuperset(map(type, column))
    inner = get_args(hint)
    sizes = None if inner[1:] == (...,) else {len(inner)}
    content = _check_of_content(inner[0])
    return lambda column: (
        {tuple}.issuperset(map(type, column))
        and (sizes is None or sizes.issuperset(map(len, column)))
        and content([*chain.from_iterable(column)])
    )
