"""Splits the log-ratio of stale tokens into engine mismatch and staleness, in runs with partial rollouts.

    python benchmarks/studies/mismatch_and_staleness.py                     # the embedded engine: a minute on one core
    python benchmarks/studies/mismatch_and_staleness.py --rounded-weights   # the engine's weights rounded to bfloat16

A token of version v in an update of version n has the log-ratio learner(n) - engine(v): what `decoupled` and `tis`
weight it by. With the learner's weights of version v at hand, which only a measurement keeps, it has two parts:

    mismatch = learner(v) - engine(v)        staleness = learner(n) - learner(v)

One line per age of tokens: means of |mismatch|, |staleness| and |log-ratio| in nats. Then the fraction of stale tokens
whose weight is truncated, and of those that staleness alone would not truncate.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from math import log
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from sortedrl import Controller, Prompts, Schedule
from sortedrl.core.rollout import Rollout
from sortedrl.engines.embedded.engine import EmbeddedEngine
from sortedrl.learner.learner import Learner
from sortedrl.learner.settings import LearnerSettings
from sortedrl.models import BUILT_IN_MODEL
from sortedrl.tasks.encode import encode
from sortedrl.tasks.registry import task_by_name
from sortedrl.tasks.scoring import DirectScorer, reward_function

SLOTS, ROLLOUTS_PER_UPDATE, GROUP, TOKEN_LIMIT = 32, 16, 4, 320
SCHEDULE = {"rollouts_per_update": ROLLOUTS_PER_UPDATE, "prompts_per_cohort": 16, "rollouts_per_prompt": GROUP}
LEARNER = LearnerSettings(
    algorithm="grpo",
    learning_rate=3e-4,
    bf16=False,
    warmup_updates=0,
    normalizer_tokens=float(ROLLOUTS_PER_UPDATE * TOKEN_LIMIT),
)
AGES = {"0": range(1), "1": range(1, 2), "2 to 3": range(2, 4), "4 and more": range(4, 1 << 30)}


class Token(NamedTuple):
    age: int
    mismatch: float
    staleness: float


@torch.no_grad()
def logprobs(model: PreTrainedModel, rollout: Rollout) -> Tensor:
    """Of the response's tokens, straight from the logits."""
    prompt = list(rollout.prompt.tokens)
    logits = model(input_ids=torch.tensor([[*prompt, *rollout.tokens]])).logits[0].float()
    return logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(rollout.tokens)[:, None])[:, 0]


def split(rollout: Rollout, models: Mapping[int, PreTrainedModel], version: int) -> Iterator[Token]:
    """Both parts of each token's log-ratio. `models` has the learner's model of every version."""
    under = {v: logprobs(models[v], rollout).tolist() for v in {*rollout.versions, version}}
    for place, (sampled, behavior) in enumerate(zip(rollout.versions, rollout.logprobs, strict=True)):
        then, now = under[sampled][place], under[version][place]
        yield Token(version - sampled, then - behavior, now - then)


def engine_weights(learner: Learner, *, rounded: bool) -> Iterator[tuple[str, Tensor]]:
    """The learner's weights; rounded to bfloat16, they make an engine that disagrees with the learner."""
    return ((name, weight.bfloat16().float() if rounded else weight) for name, weight in learner.weights())


def tokens_of_a_run(updates: int, seed: int, *, rounded_weights: bool) -> list[Token]:
    """All trained tokens of a run of the built-in model, in the order of training."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(BUILT_IN_MODEL)
    model = AutoModelForCausalLM.from_pretrained(BUILT_IN_MODEL, dtype=torch.float32).train(False)
    engine = EmbeddedEngine(
        copy.deepcopy(model),
        slots=SLOTS,
        eos_token_ids={int(tokenizer.eos_token_id)},
        max_length=256 + TOKEN_LIMIT,
        tokenizer=tokenizer,
    )
    task = task_by_name("knights_and_knaves:mixed", count=600)
    prompts = Prompts(encode(task.train(), tokenizer, 256).prompts, seed=seed)
    schedule = Schedule(whole_groups=True, max_response_tokens=TOKEN_LIMIT, seed=seed, **SCHEDULE)
    learner = Learner(model, LEARNER)
    engine.update_weights(engine_weights(learner, rounded=rounded_weights), 0)
    controller = Controller(engine, prompts, DirectScorer(reward_function(task, tokenizer)), schedule)
    models, found = {0: copy.deepcopy(model)}, []
    for version, batch in zip(range(updates), controller, strict=False):
        found += [token for rollout in batch for token in split(rollout, models, version)]
        learner.step(batch)
        models[version + 1] = copy.deepcopy(learner.model)
        controller.publish(engine_weights(learner, rounded=rounded_weights))
    return found


def table(tokens: list[Token]) -> list[dict[str, float | str]]:
    lines: list[dict[str, float | str]] = []
    for name, ages in AGES.items():
        of_age = [token for token in tokens if token.age in ages]
        if of_age:
            lines.append(
                {
                    "age": name,
                    "tokens": len(of_age),
                    "mismatch": fmean(abs(token.mismatch) for token in of_age),
                    "staleness": fmean(abs(token.staleness) for token in of_age),
                    "log_ratio": fmean(abs(token.mismatch + token.staleness) for token in of_age),
                }
            )
    return lines


def truncation(tokens: list[Token]) -> dict[str, float]:
    """Fractions of stale tokens whose weight is truncated, and of those that staleness alone would not truncate."""
    limit, counts = log(LEARNER.importance_cap), defaultdict[str, int](int)
    for token in (token for token in tokens if token.age):
        counts["stale"] += 1
        is_truncated = token.mismatch + token.staleness > limit
        counts["truncated"] += is_truncated
        counts["by_mismatch"] += is_truncated and token.staleness <= limit
    stale = max(1, counts["stale"])
    return {name: counts[name] / stale for name in ("truncated", "by_mismatch")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounded-weights", action="store_true")
    parser.add_argument("--updates", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tokens = tokens_of_a_run(arguments.updates, arguments.seed, rounded_weights=arguments.rounded_weights)
    print(json.dumps({"settings": vars(arguments), "by_age": table(tokens), "of_stale": truncation(tokens)}, indent=2))


if __name__ == "__main__":
    main()
