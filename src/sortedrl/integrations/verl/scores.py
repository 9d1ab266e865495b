"""verl's rewards as the scorer of the scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sortedrl.core.rollout import Rollout
from sortedrl.core.scoring import Scored

if TYPE_CHECKING:
    from sortedrl.integrations.verl.engine import VerlEngine


class VerlScores:
    """verl scores finished rollouts in the agent loop workers; this class waits for the rewards."""

    wakes_engine = True

    def __init__(self, engine: VerlEngine) -> None:
        self._engine = engine
        self._waiting: dict[int, tuple[int, int]] = {}  # by dispatch: rollout and attempt
        self._arrived: dict[int, tuple[float | None, str | None]] = {}

    @property
    def pending(self) -> int:
        return len(self._waiting)

    def submit(self, rollout: Rollout) -> None:
        dispatch = self._engine.dispatch_of(rollout.id)
        if dispatch is None:  # it finished, but the run was killed before it was scored
            dispatch = -1 - rollout.id
            self._arrived[dispatch] = (None, "the run ended before it was scored")
        self._waiting[dispatch] = (rollout.id, rollout.attempt)

    @property
    def has_scores(self) -> bool:
        return any(dispatch in self._arrived for dispatch in self._waiting)

    def collect(self) -> list[Scored]:
        done = [dispatch for dispatch in self._waiting if dispatch in self._arrived]
        return [self._scored(dispatch) for dispatch in done]

    def wait(self, timeout_seconds: float) -> None:
        deadline = self._engine.now() + timeout_seconds
        while not self.has_scores and self._engine.now() < deadline:
            self._engine.receive(deadline - self._engine.now())

    def wait_for_all(self, timeout_seconds: float) -> None:
        """Wait before a checkpoint: rollouts without a score would be lost with the run."""
        deadline = self._engine.now() + timeout_seconds
        while self._waiting.keys() - self._arrived.keys() and self._engine.now() < deadline:
            self._engine.receive(deadline - self._engine.now())

    def reward_of(self, dispatch: int) -> float | None:
        """Scores that the scheduler has not collected yet."""
        return self._arrived[dispatch][0] if dispatch in self._arrived else None

    def arrived(self, dispatch: int, reward: float | None, error: str | None) -> None:
        self._arrived[dispatch] = (reward, error)

    def forget(self, dispatch: int) -> None:
        self._waiting.pop(dispatch, None)
        self._arrived.pop(dispatch, None)

    def _scored(self, dispatch: int) -> Scored:
        rollout, attempt = self._waiting.pop(dispatch)
        reward, error = self._arrived.pop(dispatch)
        return Scored(rollout, reward, error=error, attempt=attempt)
