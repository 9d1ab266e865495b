"""Scoring runs in parallel with generation: a rollout is submitted when it finishes, its reward is collected later."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple, Protocol

from sortedrl.core.rollout import Rollout

MAX_REWARD = 1e6  # absolute value: sums of larger squares could overflow float32
MAX_REASON_CHARACTERS = 300
SCORE_CHECK_SECONDS = 0.05  # between two checks for scores while the engine generates
SCORE_WAIT_STEP_SECONDS = 0.25  # the longest wait for a score before interrupts are checked


class Scored(NamedTuple):
    """`error`: why there is no reward, for example an exception or a timeout.

    `attempt` is the rollout's when it was submitted: a score of an earlier attempt is ignored. `is_lost`: its
    environment cannot bring back its turns, so it is regenerated; `counts` as in `Answer`.
    """

    rollout_id: int
    reward: float | None
    detail: Any = None
    error: str | None = None
    attempt: int = 0
    is_lost: bool = False
    counts: bool = True


class Scorer(Protocol):
    """A scorer that makes `engine.poll` return when a score arrives sets an attribute `wakes_engine = True`. With any
    other scorer the controller polls only briefly while scores are pending."""

    @property
    @abstractmethod
    def pending(self) -> int:
        """How many were submitted and not yet collected."""

    @abstractmethod
    def submit(self, rollout: Rollout) -> None:
        """Start scoring the rollout as it is now. Must not block, and must not raise errors of the reward function."""

    @abstractmethod
    def collect(self) -> list[Scored]:
        """Finished scores, in any order; never blocks."""

    @abstractmethod
    def wait(self, timeout_seconds: float) -> None:
        """Block until something can be collected or the time is up."""


class Awaited(Protocol):
    """A scorer or the environments: work that goes on beside generation."""

    @property
    def pending(self) -> int: ...

    def wait(self, timeout_seconds: float) -> None: ...


def poll_deadline(awaited: Awaited, now: Callable[[], float], until: float | None) -> float | None:
    """Until when to poll the engine, at most `until`: only briefly while something may arrive meanwhile."""
    if not awaited.pending or _wakes_engine(awaited):
        return until
    soon = now() + SCORE_CHECK_SECONDS
    return soon if until is None else min(soon, until)


def wait_briefly(awaited: Awaited, seconds: float) -> None:
    """Wait for something to arrive, in steps that are short enough to notice an interrupt."""
    seconds = max(0.0, seconds)  # the clock may have passed the deadline since it was checked
    awaited.wait(seconds if _wakes_engine(awaited) else min(seconds, SCORE_WAIT_STEP_SECONDS))


def _wakes_engine(awaited: Awaited) -> bool:
    return bool(getattr(awaited, "wakes_engine", False))


class ScoreAtOnce:
    """Calls the reward function inside `submit`: deterministic, for cheap rewards."""

    def __init__(self, reward: Callable[[Rollout], float]) -> None:
        self._reward = reward
        self._done: list[Scored] = []

    @property
    def pending(self) -> int:
        return len(self._done)

    def submit(self, rollout: Rollout) -> None:
        try:
            self._done.append(Scored(rollout.id, as_reward(self._reward(rollout)), attempt=rollout.attempt))
        except (Exception, SystemExit) as error:
            self._done.append(Scored(rollout.id, None, error=reason_of(error), attempt=rollout.attempt))

    def collect(self) -> list[Scored]:
        done, self._done = self._done, []
        return done

    def wait(self, timeout_seconds: float) -> None:
        del timeout_seconds


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
