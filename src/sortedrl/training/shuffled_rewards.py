"""A control experiment: every rollout gets the reward of another one, so there is nothing to learn."""

from __future__ import annotations

from typing import Any

from sortedrl.core.environment import Answer, Environments
from sortedrl.core.rollout import Rollout
from sortedrl.core.scoring import Scored, Scorer
from sortedrl.core.seeds import derive_seed
from sortedrl.training.rewards import RewardSource

POOL = 256  # recent rewards to draw from


def shuffled(source: RewardSource, rewards: RewardPool) -> RewardSource:
    environments = source.environments
    return RewardSource(
        ShuffledRewards(source.scorer, rewards),
        None if environments is None else _ShuffledAnswers(environments, rewards),
    )


class RewardPool:
    """`recent`: rewards in the order in which they came, for checkpoints."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.recent: list[float] = []

    def other(self, rollout_id: int, attempt: int, reward: float) -> float:
        """A reward that was seen recently, this one included, in place of this one."""
        self.recent = [*self.recent[-POOL:], reward]
        return self.recent[derive_seed(self._seed, rollout_id, attempt) % len(self.recent)]


class ShuffledRewards:
    def __init__(self, scorer: Scorer, rewards: RewardPool) -> None:
        self._scorer = scorer
        self._rewards = rewards

    @property
    def pending(self) -> int:
        return self._scorer.pending

    def submit(self, rollout: Rollout) -> None:
        self._scorer.submit(rollout)

    def collect(self) -> list[Scored]:
        return [self._shuffled(scored) for scored in self._scorer.collect()]

    def wait(self, timeout_seconds: float) -> None:
        self._scorer.wait(timeout_seconds)

    def _shuffled(self, scored: Scored) -> Scored:
        if scored.reward is None:
            return scored
        return scored._replace(reward=self._rewards.other(scored.rollout_id, scored.attempt, scored.reward))


class _ShuffledAnswers:
    """Environments whose final rewards are shuffled."""

    def __init__(self, environments: Environments, rewards: RewardPool) -> None:
        self._environments = environments
        self._rewards = rewards
        self._attempts: dict[int, int] = {}  # by rollout id: numbers of calls start again when a run is resumed

    @property
    def pending(self) -> int:
        return self._environments.pending

    def submit(self, rollout: Rollout, call: int) -> None:
        self._attempts[rollout.id] = rollout.attempt
        self._environments.submit(rollout, call)

    def collect(self) -> list[Answer]:
        return [self._shuffled(answer) for answer in self._environments.collect()]

    def _shuffled(self, answer: Answer) -> Answer:
        if answer.reward is None:
            return answer
        attempt = self._attempts.get(answer.rollout_id, 0)  # none if it was canceled: then the answer does not count
        return answer._replace(reward=self._rewards.other(answer.rollout_id, attempt, answer.reward))

    def wait(self, timeout_seconds: float) -> None:
        self._environments.wait(timeout_seconds)

    def cancel(self, rollout_id: int) -> None:
        self._attempts.pop(rollout_id, None)
        self._environments.cancel(rollout_id)

    def state(self, rollout_id: int) -> Any:
        return self._environments.state(rollout_id)

    def restore(self, rollout: Rollout, state: Any) -> bool:
        return self._environments.restore(rollout, state)
