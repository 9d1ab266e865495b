"""Decodes many lines of an event log at once. Most are events of plain numbers, which takes less than half the time.

A line without its digits is its shape: the event, its fields, and which of them are floats. Lines of known shapes are
translated into lists of numbers and decoded together. Every other line is decoded by itself, and so are all of them if
a number is malformed. Invariant: the result is that of `decoded_or_damage`, line by line.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Iterable
from functools import cache, partial
from itertools import compress
from typing import Any, get_type_hints

from sortedrl.core.events import Aborted, Event, Finished, Loaded, Observed, Scored, Started, Submitted, TurnEnded
from sortedrl.log.lines import LARGEST, Damage, decoded_or_damage

_OF_NUMBERS = (Submitted, Started, Aborted, TurnEnded, Observed, Scored)
_NO_NUMBERS = str.maketrans("", "", string.digits + "-")
# Names become spaces: a digit among their letters is then a second number in its place, which is not JSON.
_ONLY_NUMBERS = str.maketrans('":{}\n', "  [],", string.ascii_letters + "_")
_ONE_PROMPT = re.compile(  # with printable ASCII, without escapes
    r'\{"event":"Loaded","at":((?:0|[1-9][0-9]{0,99})\.[0-9]{1,99}),"cohort":([1-9][0-9]{0,99}),'
    r'"first":([1-9][0-9]{0,99}),"rollouts":([1-9][0-9]{0,6}),"prompts":\["([ !#-\[\]-~]*)"\]\}\n'
).fullmatch
_Maker = Callable[[list[Any]], Event]


def decoded_text(text: str, first_line: int = 1) -> list[Event | Damage]:
    """The event in each line, or its damage; `first_line` is the number of the first one."""
    *lines, torn = text.split("\n")
    makers = [*map(_maker_by_shape().get, text.translate(_NO_NUMBERS).split("\n")[:-1])]
    of_numbers = _decoded("\n".join(compress(lines, makers)), filter(None, makers))
    if of_numbers is None:
        makers, of_numbers = [None] * len(lines), []
    following = iter(of_numbers).__next__
    found = [
        _alone(number, f"{lines[number - first_line]}\n") if make is None else following()
        for number, make in enumerate(makers, start=first_line)
    ]
    return [*found, _alone(first_line + len(lines), torn)] if torn else found


def _alone(number: int, line: str) -> Event | Damage:
    """As `decoded_or_damage`, and faster for a prompt that was loaded by itself, as most are in some modes."""
    found = _ONE_PROMPT(line)
    if found is None:
        return decoded_or_damage(number, line)
    at, cohort, first, rollouts, prompt = found.groups()
    return Loaded(float(at), int(cohort), int(first), int(rollouts), (prompt,))


def _decoded(lines: str, makers: Iterable[_Maker]) -> list[Event] | None:
    """The events in lines of known shapes; None if one of them has a malformed number, or an infinite time."""
    numbers = lines.replace('","at":', '"').replace(',"truncated":false}', "}").replace(',"truncated":true}', "}")
    if '"at"' in numbers:  # a number before it
        return None
    try:
        rows = json.loads(f"[{numbers.translate(_ONLY_NUMBERS)}]")
        found = [make(row) for make, row in zip(makers, rows, strict=True)]
    except (ValueError, TypeError):
        return None
    return found if all(map(LARGEST.__gt__, [abs(event.at) for event in found])) else None


@cache
def _maker_by_shape() -> dict[str, _Maker]:
    """What makes an event of the numbers in its line, by the shape of the line."""
    new: Any = tuple.__new__  # the shape has as many numbers as the event has fields
    found: dict[str, _Maker] = {_shape(kind): partial(new, kind) for kind in _OF_NUMBERS}
    finished: Any = Finished  # refuses a number too many, as one within true or false
    of_finished = _shape(Finished).removesuffix("}")
    found[f"{of_finished}false}}"] = lambda row: finished(*row, False)
    found[f"{of_finished}true}}"] = lambda row: finished(*row, True)
    return found


def _shape(kind: type) -> str:
    fields = [f'"{name}":{"." if hint is float else ""}' for name, hint in get_type_hints(kind).items()]
    return f'{{"event":"{kind.__name__}",{",".join(fields)}}}'
