"""How a run scores its responses, in training and in evaluation: in this process or in workers, at once or beside."""

from __future__ import annotations

from typing import Literal

from sortedrl.core.rejections import RejectionWatch
from sortedrl.core.rollout import Rollout
from sortedrl.core.schedule import ConfigurationError
from sortedrl.core.scoring import Scored, Scorer
from sortedrl.core.seeds import derive_seed
from sortedrl.tasks.registry import is_built_in
from sortedrl.tasks.scoring import BackgroundScorer, DirectScorer, reward_function, reward_workers
from sortedrl.tasks.task import Reward
from sortedrl.tasks.workers import WorkerError, WorkerPool
from sortedrl.training.resources import Resources
from sortedrl.training.settings import ModelSettings

Scoring = Literal["at-once", "background"]
THREADS = 4  # for rewards in this process
SECONDS_BETWEEN_LOOKS = 0.25  # an interrupt must not wait for a score


class Rewards:
    """Rewards of built-in tasks run in this process; those of an import path in `reward_workers` processes, so that
    nothing that they do can end or block the run."""

    def __init__(self, settings: ModelSettings, resources: Resources, scoring: Scoring | None = None) -> None:
        built_in = is_built_in(settings.task)
        self._settings = settings
        self._scoring = scoring or ("at-once" if built_in else "background")
        self._pool = None if built_in or not settings.reward_workers else self._started_pool(resources)
        self._score = reward_function(resources.task, resources.tokenizer, pool=self._pool)
        self._scorers: list[BackgroundScorer] = []

    def _started_pool(self, resources: Resources) -> WorkerPool:
        settings = self._settings
        try:
            pool = reward_workers(
                resources.task, workers=settings.reward_workers, limit_seconds=settings.score_limit_seconds
            )
        except ValueError as error:
            raise ConfigurationError(
                "task",
                settings.task,
                f"the task {error}",
                "Or set --reward-workers 0: its reward then runs in this process, which it can block.",
            ) from None
        pool.start()
        return pool

    def require_ready(self) -> None:
        """Wait for the first worker: a module that cannot be imported there is an error before the run."""
        if self._pool is None:
            return
        try:
            self._pool.wait_until_ready()
        except WorkerError as error:
            raise ConfigurationError(
                "task",
                self._settings.task,
                str(error),
                "A reward is imported by each worker process: its module must not need what this process alone has.",
            ) from None

    def scorer(self) -> Scorer:
        """A new one: evaluation and training do not share what is pending."""
        if self._scoring == "at-once":
            return DirectScorer(self._score)
        if self._pool is not None:
            scorer = BackgroundScorer(self._score, threads=self._settings.reward_workers, limit_seconds=None)
        else:
            limit_seconds = self._settings.score_limit_seconds
            scorer = BackgroundScorer(self._score, threads=THREADS, limit_seconds=limit_seconds)
        self._scorers.append(scorer)
        return scorer

    def close(self) -> None:
        for scorer in self._scorers:
            scorer.close()
        if self._pool is not None:
            self._pool.close()


class ShuffledRewards:
    """A control experiment: every rollout gets the reward of another one, so there is nothing to learn."""

    def __init__(self, scorer: Scorer, seed: int, pool: int = 256) -> None:
        self._scorer = scorer
        self._seed = seed
        self._pool = pool
        self._seen: list[float] = []

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
        self._seen = [*self._seen[-self._pool :], scored.reward]
        other = derive_seed(self._seed, scored.rollout_id, scored.attempt) % len(self._seen)
        return scored._replace(reward=self._seen[other])


class EvaluationScores:
    """The scores of an evaluation. A response without one counts as wrong; `watch` raises if too many do."""

    def __init__(self, scorer: Scorer, watch: RejectionWatch) -> None:
        self._scorer = scorer
        self._watch = watch
        self._found: dict[int, Reward] = {}

    def submit(self, rollout: Rollout) -> None:
        self._scorer.submit(rollout)
        self._collect()

    def all(self) -> dict[int, Reward]:
        """Waits until all are scored; by rollout id, those without a score left out."""
        while self._scorer.pending:
            self._scorer.wait(SECONDS_BETWEEN_LOOKS)
            self._collect()
        return self._found

    def _collect(self) -> None:
        for scored in self._scorer.collect():
            if scored.reward is None:
                self._watch.count_rejected(scored.error or "no reward", "a response of the evaluation")
                continue
            self._watch.count_scored()
            self._found[scored.rollout_id] = Reward(scored.reward, **scored.detail)


def unscored_notice(watch: RejectionWatch) -> str | None:
    """What an evaluation has to say about responses without a score."""
    if not watch.rejected:
        return None
    responses = watch.rejected + watch.scored
    return (
        f"{watch.rejected} of {responses} responses of the evaluation got no score and count as wrong; "
        f"{watch.most_frequent()}"
    )
