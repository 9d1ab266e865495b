"""Values and errors of code that users write: a reward that can be trained on, and texts for one line of a log."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

MAX_REWARD = 1e6  # absolute value: sums of larger squares could overflow float32
MAX_REASON_CHARACTERS = 300


def as_reward(value: Any, name: str = "the reward") -> float:
    """A number of any kind, or the one element of a tensor or an array, as a float that can be trained on.

    Anything else is a TypeError or a ValueError that names the type.
    """
    if type(value) is float and abs(value) <= MAX_REWARD:  # the common case, and isinstance(..., Real) is slow
        return value
    number = value
    if not isinstance(value, Real) and callable(getattr(value, "item", None)):
        try:
            number = value.item()
        except (ValueError, RuntimeError, TypeError):
            raise TypeError(f"{name} is {shown(value)} with several elements, not one number") from None
    if not isinstance(number, Real):
        raise TypeError(f"{name} is {shown(value)}, not a number{_hint(value)}")
    try:
        plain = float(number)
    except OverflowError:
        plain = math.inf
    if not math.isfinite(plain):
        raise ValueError(f"{name} is {plain} of type {type(value).__name__}, not a finite number")
    if abs(plain) > MAX_REWARD:
        raise ValueError(f"{name} is {plain:g} of type {type(value).__name__}, its size must be at most {MAX_REWARD:g}")
    return plain


def reason_of(error: BaseException) -> str:
    """An exception in one short line, even if its message raises an error."""
    name = type(error).__name__
    try:
        text = str(error)
    except BaseException as failure:
        return f"{name} (its message cannot be shown: {type(failure).__name__})"
    return one_line(f"{name}: {text}" if text else name)


def shown(value: Any) -> str:
    """A value for an error message: its type, and the value if that is short and safe to print."""
    kind = type(value).__name__
    if type(value) in (str, int, float, bool):
        part = value[:60] if isinstance(value, str) else value
        return f"{one_line(repr(part), 60)} of type {kind}"
    return "None" if value is None else f"a value of type {kind}"


def one_line(text: str, most: int = MAX_REASON_CHARACTERS) -> str:
    """Text for a log or a terminal: no line breaks, control characters or lone surrogates, limited in length."""
    words = " ".join(text[: 4 * most].split())
    plain = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in words)
    return plain if len(plain) <= most else f"{plain[: most - 3]}..."


def _hint(value: Any) -> str:
    kind = type(value).__name__
    if kind in ("coroutine", "async_generator"):
        return "; an async function is not awaited, make it a plain one"
    return "; use return, not yield" if kind == "generator" else ""
