"""Digests of problems and dataset rows, from which a resumed run finds those that changed since it started."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

DIGITS = 8  # per problem: a checkpoint has them all, so that an error can name the problem that changed


def digests(problems: Iterable[Any]) -> str:
    """`DIGITS` hexadecimal digits per problem, equal in every process for equal content."""
    return "".join(map(_digest, problems))


def why_changed(names: Sequence[str], now: str, before: str, what: str) -> str | None:
    """How the problems with these names and digests differ from earlier ones; None if they do not."""
    old, new = _split(before), _split(now)
    if len(old) != len(new):
        return f"there are {len(new)} {what}, but there were {len(old)} when the run started"
    changed = [name for name, was, is_now in zip(names, old, new, strict=True) if was != is_now]
    if not changed:
        return None
    if sorted(old) == sorted(new):
        return f"the {what} are in another order than when the run started"
    return f"{len(changed)} of {len(new)} {what} changed since the run started, the first is {changed[0]!r}"


def _split(text: str) -> list[str]:
    return [text[place : place + DIGITS] for place in range(0, len(text), DIGITS)]


def _digest(problem: Any) -> str:
    try:
        content = _content(problem)
    except RecursionError:  # an answer that contains itself: only the texts count
        content = tuple(text for text in _values(problem) if isinstance(text, str))
    data = repr(content).encode("utf-8", "backslashreplace")
    return hashlib.blake2b(data, digest_size=DIGITS // 2).hexdigest()


def _values(problem: Any) -> list[Any]:
    return [getattr(problem, field.name) for field in fields(problem)] if is_dataclass(problem) else []


def _content(value: Any) -> Any:
    """The value, made of types whose text is the same in every process.

    The text of any other object may contain its address or the order of a set, so only its type counts.
    """
    if value is None or isinstance(value, str | bytes | bool | int | float):
        return value
    if isinstance(value, Enum):
        return type(value).__name__, value.name
    if isinstance(value, Mapping):
        return dict, sorted((repr(_content(key)), _content(inner)) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return [_content(inner) for inner in value]
    if isinstance(value, set | frozenset):
        return set, sorted(repr(_content(inner)) for inner in value)
    if is_dataclass(value):
        return type(value).__name__, [_content(inner) for inner in _values(value)]
    if callable(as_list := getattr(value, "tolist", None)):  # numbers and arrays of numpy and torch
        return _content(as_list())
    return type(value).__name__
