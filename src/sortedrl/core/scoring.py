"""Scoring runs in parallel with generation: a rollout is submitted when it finishes, its reward is collected later."""

import json
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from sortedrl.core.rollout import Rollout
from sortedrl.core.user_values import as_reward
from sortedrl.core.wording import kind_of


class Score(NamedTuple):
    """`error`: why there is no reward, for example an exception or a timeout.

    `detail` is JSON-ready, since checkpoints have it. `attempt` is the rollout's when it was submitted: a score of an
    earlier attempt is ignored. `is_lost`: its environment cannot bring back its turns, so it is regenerated; `counts`
    as in `Answer`."""

    rollout_id: int
    reward: float | None
    detail: Any = None
    error: str | None = None
    attempt: int | None = None
    is_lost: bool = False
    counts: bool = True

    def outcome(self) -> tuple[float, str | None]:
        """The reward as a float, and why there is none."""
        try:
            return as_reward(self.reward), self.error
        except (TypeError, ValueError) as unfit:
            return 0.0, self.error or str(unfit)


def check_detail(giver: object, rollout_id: int, detail: Any) -> None:
    """Raise a TypeError for what no checkpoint could hold."""
    try:
        json.dumps(detail)
    except (TypeError, ValueError) as error:
        what = f"the detail of {type(giver).__name__}'s score of rollout {rollout_id} is {kind_of(detail)} ({error})"
        raise TypeError(f"{what}: make it of numbers, text, lists and dicts, as checkpoints are JSON") from None


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
    def collect(self) -> list[Score]:
        """Finished scores, in any order; never blocks."""

    @abstractmethod
    def wait(self, timeout_seconds: float) -> None:
        """Block until something can be collected or the time is up."""


class ScoreAtOnce:
    """Calls the reward function inside `submit`: deterministic, for cheap rewards."""

    def __init__(self, reward: Callable[[Rollout], float]) -> None:
        self._reward = reward
        self._done: list[Score] = []

    @property
    def pending(self) -> int:
        return len(self._done)

    def submit(self, rollout: Rollout) -> None:
        try:
            self._done.append(Score(rollout.id, as_reward(self._reward(rollout)), attempt=rollout.attempt))
        except (Exception, SystemExit) as error:
            from sortedrl.core.import_path import fault_in_your_code  # slow to import

            self._done.append(Score(rollout.id, None, error=fault_in_your_code(error), attempt=rollout.attempt))

    def collect(self) -> list[Score]:
        done, self._done = self._done, []
        return done

    def wait(self, timeout_seconds: float) -> None: ...
