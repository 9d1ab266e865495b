"""Held-out scores: of an engine during training, and of a model for `sortedrl eval`."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sortedrl.core.engine import Engine, Request, Sampling
from sortedrl.core.rejections import RejectionWatch
from sortedrl.core.rollout import Prompt, Rollout
from sortedrl.core.schedule import Schedule
from sortedrl.core.scoring import Scorer
from sortedrl.core.seeds import derive_seed
from sortedrl.core.turns import Answer, Environments, fault_of, limit_of_cut, limit_reached
from sortedrl.engines.generate import Response, generate
from sortedrl.engines.registry import SERVERS
from sortedrl.learner.models import response_logprobs
from sortedrl.observe.console import Log
from sortedrl.settings.schedule import schedule_from
from sortedrl.tasks.evaluation import Evaluation, mean_at_k, mean_parts, pass_at_k
from sortedrl.tasks.task import Reward
from sortedrl.training.build import set_threads
from sortedrl.training.engine import checked_engine, engine_of
from sortedrl.training.resources import read_resources
from sortedrl.training.rewards import Rewards, RewardSource
from sortedrl.training.settings import EvalSettings, ModelSettings

SECONDS_BETWEEN_LOOKS = 0.25  # an interrupt must not wait for a score
EVALUATED = "a response of the evaluation"
EVALUATION_WORTH = 64  # `sortedrl eval` stops if a reward function fails on this many responses and scores none


def evaluate(
    engine: Engine,
    prompts: Sequence[Prompt],
    rewards: RewardSource,
    settings: ModelSettings,
    watch: RejectionWatch,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Samples every problem, with the same noise at every call: two evaluations can be paired.

    A response without a score counts as wrong, one that the engine could not generate too. `watch` counts both, and
    raises if they are too many.
    """
    samples, seed = settings.eval_samples, settings.eval_seed
    rollouts = {
        i * samples + j: Rollout(i * samples + j, prompt, j, 0, derive_seed(seed, i, j), 0)
        for i, prompt in enumerate(prompts)
        for j in range(samples)
    }
    sampling = Sampling(temperature=settings.temperature)
    limits = schedule_from(settings, max_prompt_tokens=None, max_context_tokens=settings.longest_context())
    found = _Run(engine, rollouts, *rewards, limits, sampling, watch, on_progress).scores()
    correct = tuple(
        tuple(i * samples + j in found and found[i * samples + j].correct for j in range(samples))
        for i in range(len(prompts))
    )
    ordered = [found[id] for id in sorted(found)]
    ids = tuple(prompt.id for prompt in prompts)
    return Evaluation(ids, correct, tuple(one.value for one in ordered), mean_parts(one.parts for one in ordered))


@dataclass(slots=True)
class _Run:
    """Generates one turn of all rollouts at a time. Their environments answer meanwhile; the next turn starts when all
    have answered."""

    engine: Engine
    rollouts: Mapping[int, Rollout]
    scorer: Scorer
    environments: Environments | None
    limits: Schedule
    sampling: Sampling
    watch: RejectionWatch
    on_progress: Callable[[int, int], None]
    ended: int = 0
    found: dict[int, Reward] = field(default_factory=dict)

    def scores(self) -> dict[int, Reward]:
        """By rollout id, those without a score left out."""
        waiting = list(self.rollouts.values())
        while waiting:
            waiting = self._next_turn(waiting)
        while self.scorer.pending:
            self.scorer.wait(SECONDS_BETWEEN_LOOKS)
            self._collect()
        return self.found

    def _next_turn(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Returns those that continue."""
        requests = [
            Request(r.id, r.prompt, tuple(r.segments), self.limits.room_for(r), r.seed, self.sampling) for r in rollouts
        ]
        generate(self.engine, requests, on_end=self._end_turn)
        continued: list[Rollout] = []
        while self.environments is not None and self.environments.pending:
            self.environments.wait(SECONDS_BETWEEN_LOOKS)
            continued += [self.rollouts[one.rollout_id] for one in self.environments.collect() if self._goes_on(one)]
        return sorted(continued, key=lambda rollout: rollout.id)

    def _end_turn(self, response: Response) -> None:
        rollout = self.rollouts[response.request.id]
        for segment in response.segments:
            rollout.append(segment)
        if response.failure is not None:
            self._end_without_score(rollout, f"the engine did not generate it: {response.failure}")
        elif self.environments is not None and not response.truncated:
            self.environments.submit(rollout, rollout.observations)
        else:
            self._end_to_score(rollout, limit_of_cut(self.limits, rollout) if response.truncated else "")

    def _goes_on(self, answer: Answer) -> bool:
        rollout = self.rollouts[answer.rollout_id]
        if (fault := answer.error or fault_of(answer)) is not None:
            self._end_without_score(rollout, fault)
        elif answer.observation is None and answer.reward is not None:
            self._count_end()
            self._add(rollout.id, answer.reward, answer.detail)
        elif answer.observation is None:
            self._end_to_score(rollout, "")
        elif limit := limit_reached(self.limits, rollout, len(answer.observation)):
            self._end_to_score(rollout, limit)
        else:
            rollout.observe(answer.observation)
            return True
        return False

    def _end_without_score(self, rollout: Rollout, reason: str) -> None:
        """Its environment is canceled: the next evaluation has rollouts with the same ids."""
        if self.environments is not None:
            self.environments.cancel(rollout.id)
        self._count_end()
        self.watch.count_rejected(reason, EVALUATED)

    def _end_to_score(self, rollout: Rollout, limit: str) -> None:
        rollout.truncated, rollout.ended_by = bool(limit), limit
        self._count_end()
        self.scorer.submit(rollout)
        self._collect()

    def _collect(self) -> None:
        for scored in self.scorer.collect():
            if scored.reward is None:
                self.watch.count_rejected(scored.error or "no reward", EVALUATED)
            else:
                self._add(scored.rollout_id, scored.reward, scored.detail)

    def _add(self, rollout_id: int, reward: float, detail: Any) -> None:
        self.watch.count_scored()
        self.found[rollout_id] = Reward(reward, **detail)

    def _count_end(self) -> None:
        self.ended += 1
        self.on_progress(self.ended, len(self.rollouts))


def unscored_notice(watch: RejectionWatch) -> str | None:
    """One line about responses without a score."""
    if not watch.rejected:
        return None
    responses = watch.rejected + watch.scored
    return (
        f"{watch.rejected} of {responses} responses of the evaluation got no score and count as wrong; "
        f"{watch.most_frequent()}"
    )


def evaluate_model(
    settings: EvalSettings, log: Log, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, Any]:
    """The command `sortedrl eval`."""
    resources = read_resources(settings, log)
    set_threads(settings, resources.model)
    held_out = resources.held_out[: settings.eval_problems]
    with Rewards(settings, resources) as rewards, closing(engine_of(settings, resources, resources.model)) as engine:
        source = rewards.source()
        if settings.engine in SERVERS:  # a server may hold other weights
            engine = checked_engine(engine, settings, held_out, partial(response_logprobs, resources.model))
            engine.update_weights(resources.model.state_dict(), 0)
        rewards.require_ready()
        watch = RejectionWatch(EVALUATION_WORTH, log=log)
        began = time.perf_counter()
        found = evaluate(engine, held_out, source, settings, watch, on_progress)
    watch.require_some_scored()
    if notice := unscored_notice(watch):
        log(notice)
    return {
        "model": settings.model,
        "task": settings.task,
        "problems": len(found.problem_ids),
        "samples": settings.eval_samples,
        "unscored": watch.rejected,
        "mean_at_k": mean_at_k(found.correct)._asdict(),
        "pass_at_k": pass_at_k(found.correct, settings.eval_samples)._asdict(),
        "parts": dict(found.parts),
        "seconds": time.perf_counter() - began,
    }
