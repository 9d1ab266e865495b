"""The error for a wrong setting, and the checks of numbers that Python code passes without a command line."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

from sortedrl.core.errors import UserError
from sortedrl.core.wording import kind_of


class ConfigurationError(UserError, ValueError):
    """A setting that cannot work: its name, its value, why, and a fix to copy.

    `set_by` is the file that has it, where that is known; the command line finds out about its own flags and files."""

    set_by = ""

    def __init__(self, key: str, value: object, why: str, fix: str) -> None:
        self.key, self.value, self.why, self.fix = key, value, why, fix
        super().__init__(self.text())

    def text(self, set_by: str = "") -> str:
        set_by = self.set_by or set_by
        source = f" (set by {set_by})" if set_by else ""
        end = "" if self.why.endswith("?") else "."
        return f"{self.key} = {self.value!r}{source}: {self.why}{end} {self.fix}"

    def __reduce__(self) -> tuple[type[ConfigurationError], tuple[str, object, str, str]]:
        return type(self), (self.key, self.value, self.why, self.fix)


def checked_int(key: str, value: Any, least: int | None = None, hint: str = "") -> int:
    """The value as an int; JSON cannot write NumPy's."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        why = f"this is {kind_of(value)}, not a whole number"
        raise ConfigurationError(key, value, why, f"Set it to an int.{hint}")
    if least is not None and value < least:
        raise ConfigurationError(key, value, f"must be at least {least}", f"Set it to {least} or more.{hint}")
    return int(value)


def checked_slots(slots: Any) -> int:
    """The slots of an engine."""
    return checked_int("slots", slots, 1, hint=" Slots are vLLM's max_num_seqs and SGLang's max_running_requests.")


def checked_float(key: str, value: Any, fits: Callable[[float], bool], limits: str) -> float:
    """The value as a float; `limits` says which numbers fit."""
    if not isinstance(value, Real) or isinstance(value, bool):
        why = f"this is {kind_of(value)}, not a number"
        raise ConfigurationError(key, value, why, f"Set it to a number {limits}.")
    if not fits(float(value)):
        raise ConfigurationError(key, value, "out of range", f"Set it to a number {limits}.")
    return float(value)


def checked_fraction(key: str, value: Any) -> float:
    return checked_float(key, value, lambda x: 0 <= x <= 1, "from 0 to 1")


def checked_text(key: str, value: Any, what: str, fix: str) -> str:
    """The value, if it is text; `what` says what it names."""
    if not isinstance(value, str):
        raise ConfigurationError(key, value, f"this is {kind_of(value)}, not the name of {what}", fix)
    return value


def checked_texts(key: str, value: Any) -> tuple[str, ...]:
    """The value as a tuple of nonempty strings. Of one string, each letter would count."""
    fix = 'Pass a tuple of strings, such as ("\\n\\n",).'
    if not isinstance(value, list | tuple):
        raise ConfigurationError(key, value, f"this is {kind_of(value)}, not a tuple", fix)
    if not all(isinstance(text, str) and text for text in value):
        raise ConfigurationError(key, value, "an element is not a string, or empty", fix)
    return tuple(value)


def checked_bool(key: str, value: Any) -> bool:
    """The value as a bool. Text such as "False" would count as true."""
    if isinstance(value, str | bytes) or value not in (True, False):
        raise ConfigurationError(key, value, f"this is {kind_of(value)}, not a bool", "Set it to True or False.")
    return bool(value)
