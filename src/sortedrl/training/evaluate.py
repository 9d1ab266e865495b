"""Held-out scores: of an engine during training, and of a model for `sortedrl eval`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from sortedrl.core.engine import Engine, Request, Sampling
from sortedrl.core.generate import Response, generate
from sortedrl.core.rejections import RejectionWatch
from sortedrl.core.rollout import Prompt, Rollout
from sortedrl.core.scoring import Scorer
from sortedrl.core.seeds import derive_seed
from sortedrl.engines.registry import SERVERS
from sortedrl.learner.models import response_logprobs
from sortedrl.tasks.evaluation import Evaluation, mean_at_k, pass_at_k
from sortedrl.training.build import dtype_of, set_threads
from sortedrl.training.engine import checked_engine, engine_of
from sortedrl.training.resources import Log, eos_token_ids, read_resources
from sortedrl.training.rewards import EvaluationScores, Rewards, unscored_notice
from sortedrl.training.settings import EvalSettings

EVALUATION_WORTH = 64  # `sortedrl eval` stops if a reward function fails on this many responses and scores none


def evaluate(
    engine: Engine,
    prompts: Sequence[Prompt],
    scorer: Scorer,
    *,
    samples: int,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    watch: RejectionWatch | None = None,
) -> Evaluation:
    """Samples every problem, with the same noise at every call: two evaluations can be paired.

    A response without a score counts as wrong, one that the engine could not generate too. `watch` counts responses
    without a score, and raises if they are too many.
    """
    rollouts = {
        i * samples + j: Rollout(i * samples + j, prompt, j, 0, derive_seed(seed, i, j), 0)
        for i, prompt in enumerate(prompts)
        for j in range(samples)
    }
    scores = EvaluationScores(scorer, watch or RejectionWatch(EVALUATION_WORTH))
    ended = 0

    def score(response: Response) -> None:
        nonlocal ended
        ended += 1
        on_progress(ended, len(rollouts))
        if response.failure is None:
            rollout = rollouts[response.request.id]
            for segment in response.segments:
                rollout.append(segment)
            scores.submit(rollout)

    requests = [Request(r.id, r.prompt, (), max_new_tokens, r.seed, sampling) for r in rollouts.values()]
    generate(engine, requests, on_end=score)
    found = scores.all()
    correct = tuple(
        tuple(i * samples + j in found and found[i * samples + j].correct for j in range(samples))
        for i in range(len(prompts))
    )
    rewards = tuple(found[id].value for id in sorted(found))
    return Evaluation(tuple(prompt.id for prompt in prompts), correct, rewards)


def evaluate_model(
    settings: EvalSettings, log: Log, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, Any]:
    """The command `sortedrl eval`."""
    resources = read_resources(settings, log)
    set_threads(settings, resources.model)
    rewards = Rewards(settings, resources)
    held_out = resources.held_out[: settings.eval_problems]
    with closing(rewards):
        engine = engine_of(
            settings,
            resources.model,
            resources.tokenizer,
            eos_token_ids(resources.model, resources.tokenizer),
            dtype=str(dtype_of(settings)).removeprefix("torch."),
        )
        if settings.engine in SERVERS:  # a server may hold other weights
            engine = checked_engine(engine, settings, held_out, partial(response_logprobs, resources.model))
            engine.update_weights(resources.model.state_dict(), 0)
        rewards.require_ready()
        watch = RejectionWatch(EVALUATION_WORTH, log=log)
        began = time.perf_counter()
        found = evaluate(
            engine,
            held_out,
            rewards.scorer(),
            samples=settings.eval_samples,
            max_new_tokens=settings.max_response_tokens,
            sampling=Sampling(temperature=settings.temperature),
            seed=settings.eval_seed,
            on_progress=on_progress,
            watch=watch,
        )
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
        "seconds": time.perf_counter() - began,
    }
