"""Scoring runs beside generation: a rollout is handed over when it finishes, its reward is collected later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from sortedrl.core.rollout import Rollout


class Scored(NamedTuple):
    """`error` says why there is no reward: the scorer raised or ran out of time.

    `attempt` is the rollout's when it was submitted: a score that comes after the rollout was redone is void.
    """

    rollout_id: int
    reward: float | None
    detail: Any = None
    error: str | None = None
    attempt: int = 0


class Scorer(Protocol):
    @property
    def pending(self) -> int:
        """How many were submitted and not yet collected."""

    def submit(self, rollout: Rollout) -> None:
        """Begin to score the rollout as it is now; must not block and must not raise for what the reward does."""

    def collect(self) -> list[Scored]:
        """What is done, in no particular order; never blocks."""

    def wait(self, timeout_seconds: float) -> None:
        """Block until something can be collected or the time is up."""


class ScoreAtOnce:
    """Calls the reward inside `submit`: deterministic, for cheap rewards."""

    def __init__(self, reward: Callable[[Rollout], float]) -> None:
        self._reward = reward
        self._done: list[Scored] = []

    @property
    def pending(self) -> int:
        return len(self._done)

    def submit(self, rollout: Rollout) -> None:
        try:
            self._done.append(Scored(rollout.id, float(self._reward(rollout)), attempt=rollout.attempt))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            self._done.append(Scored(rollout.id, None, error=reason, attempt=rollout.attempt))

    def collect(self) -> list[Scored]:
        done, self._done = self._done, []
        return done

    def wait(self, timeout_seconds: float) -> None:
        del timeout_seconds
