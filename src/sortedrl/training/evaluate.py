"""Held-out scores: of an engine during training, and of a model for `sortedrl eval`."""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from operator import attrgetter
from typing import Any

from sortedrl.core.controller import Controller
from sortedrl.core.engine import Engine, Sampling
from sortedrl.core.events import Event, EventLog, Rejected, Scored
from sortedrl.core.prompts import Prompts
from sortedrl.core.rejections import RejectionWatch
from sortedrl.core.rollout import Prompt
from sortedrl.core.schedule import Schedule
from sortedrl.engines.registry import SERVERS
from sortedrl.learner.models import response_logprobs
from sortedrl.observe.console import Log
from sortedrl.tasks.evaluation import Evaluation, mean_at_k, mean_parts, pass_at_k
from sortedrl.tasks.task import Reward
from sortedrl.training.build import set_threads
from sortedrl.training.engine import checked_engine, engine_of
from sortedrl.training.resources import read_resources
from sortedrl.training.rewards import Rewards, RewardSource
from sortedrl.training.settings import EvalSettings, ModelSettings, limits_of

EVALUATED = "a response of the evaluation"
EVALUATION_WORTH = 64  # `sortedrl eval` stops if a reward function fails on this many responses and scores none
FIRST_ID = 1 << 40  # far above those of a run: by id, a pool remembers which member has the KV cache of a rollout


def evaluate(
    engine: Engine,
    prompts: Sequence[Prompt],
    rewards: RewardSource,
    settings: ModelSettings,
    watch: RejectionWatch,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    version: int = 0,
) -> Evaluation:
    """Samples every problem, with the same noise at every call: two evaluations can be paired.

    It is one update of a baseline, with the engine's weights of this `version`. A response without a score counts as
    wrong, one that the engine could not generate too. `watch` counts both, and raises if they are too many.
    """
    samples, ended = settings.eval_samples, 0
    count = samples * len(prompts)
    sizes = {"rollouts_per_update": count, "prompts_per_cohort": None, "rollouts_per_prompt": samples}

    def see(event: Event) -> None:
        nonlocal ended
        if isinstance(event, Scored):
            watch.count_scored()
        elif isinstance(event, Rejected):
            watch.count_rejected(event.reason, EVALUATED)
        else:
            return
        ended += 1
        on_progress(ended, count)

    controller = Controller(
        engine,
        Prompts(prompts, shuffle=False),
        rewards.scorer,
        Schedule(mode="baseline", seed=settings.eval_seed, **sizes | limits_of(settings)),
        environments=rewards.environments,
        sampling=Sampling(temperature=settings.temperature),
        log=EventLog(see),
    )
    controller.restore(controller.state() | {"version": version, "next_id": FIRST_ID})
    scored = sorted((rollout for batch in controller for rollout in batch), key=attrgetter("id"))
    found = {rollout.id - FIRST_ID: Reward(rollout.reward or 0.0, **rollout.detail) for rollout in scored}
    correct = [id in found and found[id].correct for id in range(count)]
    return Evaluation(
        tuple(prompt.id for prompt in prompts),
        tuple(tuple(correct[first : first + samples]) for first in range(0, count, samples)),
        tuple(one.value for one in found.values()),
        mean_parts(one.parts for one in found.values()),
    )


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
