"""How a run scores its responses, in training and in evaluation: in this process or in workers, at once or beside.

A task has a reward function, or environments that answer the turns of a rollout and give its reward.
"""

from collections.abc import Iterable
from contextlib import ExitStack, closing
from typing import Literal, NamedTuple

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.rollout import Rollout
from sortedrl.core.scoring import Scorer
from sortedrl.core.seeds import derive_seed
from sortedrl.core.turns import Environments
from sortedrl.tasks.environment import EnvironmentTask, ServedEnvironments, ServedTask
from sortedrl.tasks.environment_host import Host, LocalHost
from sortedrl.tasks.environment_workers import WorkerHosts
from sortedrl.tasks.environments import TaskEnvironments
from sortedrl.tasks.registry import is_built_in
from sortedrl.tasks.scoring import BackgroundScorer, DirectScorer, reward_function, reward_workers
from sortedrl.tasks.task import Task
from sortedrl.tasks.tools import BUILT_IN_TOOLS
from sortedrl.tasks.worker_process import WorkerError
from sortedrl.tasks.workers import WorkerPool
from sortedrl.training.resources import Resources
from sortedrl.training.settings import ModelSettings, cannot_be_sent

Scoring = Literal["at-once", "background"]
THREADS = 4  # for rewards in this process


class RewardSource(NamedTuple):
    """What gives the rewards: a scorer, and environments if responses have several turns."""

    scorer: Scorer
    environments: Environments | None = None


class Rewards(ExitStack):
    """Those of built-in tasks run in this process; those of an import path in `reward_workers` processes, so that
    nothing that they do can end or block the run. `close` ends scorers before the processes that score."""

    def __init__(self, settings: ModelSettings, resources: Resources, scoring: Scoring | None = None) -> None:
        super().__init__()
        built_in = is_built_in(settings.task) and BUILT_IN_TOOLS.keys() >= set(settings.tools)
        self._settings = settings
        self._resources = resources
        self._scoring = scoring or ("at-once" if built_in else "background")
        self._pool: WorkerPool | None = None
        self._hosts: list[WorkerHosts] = []  # one for each source, the first for the first one
        self._served: ServedEnvironments | None = None
        task, workers, limit_seconds = resources.task, settings.reward_workers, settings.score_limit_seconds
        if isinstance(task, ServedTask):
            eos_token_ids, workers = resources.eos_token_ids, max(workers, 1)
            served = task.serve(
                resources.tokenizer, eos_token_ids=eos_token_ids, workers=workers, limit_seconds=limit_seconds
            )
            self._served = self.enter_context(closing(served))
            return
        try:
            if isinstance(task, EnvironmentTask):
                count = 2 if self._scoring == "background" and workers else 0  # for training and for evaluation
                hosts = (WorkerHosts(task, workers=workers, limit_seconds=limit_seconds) for _ in range(count))
                self._hosts = [self.enter_context(closing(host)) for host in hosts]
            elif not built_in and workers:
                pool = reward_workers(task, workers=workers, limit_seconds=limit_seconds)
                self._pool = self.enter_context(closing(pool))
                self._pool.start()
        except ValueError as error:
            raise cannot_be_sent(settings, error) from None
        self._unused_hosts = iter(self._hosts)

    def require_ready(self) -> None:
        """Wait for the first worker: a module that cannot be imported there is an error before the run."""
        first = self._pool or self._served or next(iter(self._hosts), None)
        try:
            if first is not None:
                first.wait_until_ready()
        except WorkerError as error:
            fix = "A task is imported by each worker process: its module must not need what this process alone has."
            raise ConfigurationError("task", self._settings.task, str(error), fix) from None

    def source(self) -> RewardSource:
        """A new one: evaluation and training do not share what is pending."""
        task = self._resources.task
        if isinstance(task, ServedTask):
            assert self._served is not None
            return RewardSource(*self._served.source())
        if not isinstance(task, EnvironmentTask):
            return RewardSource(self._scorer(task))
        tools = tuple(getattr(task.environment(), "tools", ()))
        environments = TaskEnvironments(
            self._resources.tokenizer, self._host(task), tools, eos_token_ids=self._resources.eos_token_ids
        )
        return RewardSource(environments.ends, environments)

    def _host(self, task: EnvironmentTask) -> Host:
        if (unused := next(self._unused_hosts, None)) is not None:
            return unused
        host = LocalHost(task.environment, limit_seconds=self._settings.score_limit_seconds)
        return self.enter_context(closing(host))

    def _scorer(self, task: Task) -> Scorer:
        score = reward_function(task, self._resources.tokenizer, pool=self._pool)
        if self._scoring == "at-once":
            return DirectScorer(score)
        if self._pool is not None:  # it has a time limit of its own
            scorer = BackgroundScorer(score, threads=self._settings.reward_workers, limit_seconds=None)
        else:
            scorer = BackgroundScorer(score, threads=THREADS, limit_seconds=self._settings.score_limit_seconds)
        return self.enter_context(closing(scorer))


RECENT_REWARDS = 256  # recent rewards to draw from


class RewardShuffler:
    """A control experiment: every rollout gets the reward of another one, so there is nothing to learn.

    `recent`: rewards in the order in which they were trained on, for checkpoints."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.recent: list[float] = []

    def shuffle(self, rollouts: Iterable[Rollout]) -> None:
        """Each gets a reward that was seen recently, its own included."""
        for rollout in rollouts:
            self.recent = [*self.recent[-RECENT_REWARDS:], rollout.reward or 0.0]
            rollout.reward = self.recent[derive_seed(self._seed, rollout.id, rollout.attempt) % len(self.recent)]
