"""The workload of end_to_end.py: shapes of models, modes, and what the simulator predicts for them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedConfig
from update_rows import UpdateRows, summary

from sortedrl.core.group_filter import EQUAL_REWARDS
from sortedrl.core.schedule import Schedule
from sortedrl.engines.lengths import DrawnEqual, LognormalLengths
from sortedrl.engines.step_time import StepTime
from sortedrl.studies import bench, profile
from sortedrl.studies import workload as simulated
from sortedrl.studies.workload import Workload, with_mode

GIB = 2**30
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Shape:
    """A model's shape with the sizes of its workload. `profile` and `learner_tokens_per_second` predict it."""

    folder: str
    kv_gib: float
    slots: int = 128
    rollouts_per_update: int = 128
    rollouts_per_prompt: int = 8
    prompts_per_cohort: int = 64
    prompt_tokens: int = 128
    median_length: float = 636.85
    max_response_tokens: int = 4096
    filtered: float = 0.0  # fraction of the groups, by dynamic sampling
    tokens_per_micro_batch: int = 8192
    kept_tokens: int = 0  # micro-batches up to this size keep their activations
    prefill_tokens_per_step: int = 2048  # as in the profile
    profile: Path | None = None
    learner_tokens_per_second: float | None = None


SHAPES = {
    # The learner's speed is that of Qwen2-7B's shape (benchmarks/LOG.md, section 7), scaled by the weights that a token
    # is multiplied with: 7.07 and 7.50 billion.
    "8b": Shape(
        "llama-3.1-8b",
        kv_gib=20.0,
        profile=HERE / "measured" / "h200-8b" / "profile_second.json",
        learner_tokens_per_second=7552 * 7.07 / 7.50,
    ),
    "1.5b": Shape(
        "qwen2.5-1.5b",
        kv_gib=10.0,
        kept_tokens=8192,
        profile=HERE / "measured" / "h200-1.5b" / "profile_second.json",
        learner_tokens_per_second=19_506,
    ),
    "tiny": Shape(
        "tiny",
        kv_gib=0.05,
        slots=16,
        rollouts_per_update=16,
        rollouts_per_prompt=4,
        prompts_per_cohort=8,
        prompt_tokens=16,
        median_length=60,
        max_response_tokens=400,
        tokens_per_micro_batch=2048,
    ),
}


@dataclass(frozen=True)
class Mode:
    """`updates`: of this mode, including the first, if not as many as of all. The prompts are the same either way."""

    name: str
    case: bench.Case
    reuse_kv_cache: bool
    stream: bool
    sleep: bool
    offload: bool
    updates: int | None = None

    @classmethod
    def parsed(cls, text: str) -> Mode:
        case, *words = text.split(":")
        options = [word for word in words if not word.isdecimal()]
        numbers = [int(word) for word in words if word.isdecimal()]
        unknown = set(options) - {"reuse", "stream", "sleep", "offload"}
        if unknown:
            named = ", ".join(sorted(unknown))
            raise SystemExit(
                f"--modes {text}: no such option: {named}. Use :reuse, :stream, :sleep, :offload or :UPDATES."
            )
        if {"sleep", "offload"} & set(options) and len(options) > 1:
            raise SystemExit(f"--modes {text}: a sleeping engine has no KV cache to reuse and no work to share.")
        if len(numbers) > 1 or 0 in numbers:
            raise SystemExit(f"--modes {text}: give one number of updates, at least 1.")
        flags = (option in options for option in ("reuse", "stream", "sleep", "offload"))
        return cls(":".join([case, *options]), bench.case_of(case, Workload(), Schedule()), *flags, *numbers)


def schedule_of(shape: Shape, mode: Mode, seed: int) -> Schedule:
    base = Schedule(
        rollouts_per_update=shape.rollouts_per_update,
        prompts_per_cohort=shape.prompts_per_cohort,
        rollouts_per_prompt=shape.rollouts_per_prompt,
        whole_groups=True,
        max_response_tokens=shape.max_response_tokens,
        filter_groups=EQUAL_REWARDS if shape.filtered else None,
        max_filtered_fraction=1.0,
        seed=seed,
    )
    chosen = mode.case.schedule
    return replace(with_mode(base, chosen.mode), oversubscribe=chosen.oversubscribe)


def workload_of(shape: Shape, mode: Mode, updates: int, seed: int) -> Workload:
    """One cohort more than the updates use: modes without a drain start it early. With a filter, two more: whole
    cohorts join, and a round may yield few groups."""
    per_cohort = shape.prompts_per_cohort * shape.rollouts_per_prompt / shape.rollouts_per_update
    cohorts = math.ceil(updates / per_cohort / (1 - shape.filtered)) + (3 if shape.filtered else 1)
    return Workload(
        lengths=LognormalLengths(mu=math.log(shape.median_length), limit=shape.max_response_tokens, seed=seed),
        slots=shape.slots,
        prompts=shape.prompts_per_cohort * cohorts,
        prompt_tokens=shape.prompt_tokens,
        expectation=mode.case.workload.expectation,
        reuse_kv_cache=mode.reuse_kv_cache,
        stream=mode.stream,
        share_gpu=mode.stream,
        equal_groups=DrawnEqual(shape.filtered) if shape.filtered else None,
    )


def predicted(
    workload: Workload,
    schedule: Schedule,
    known: profile.Profile,
    learner_tokens_per_second: float,
    updates: int,
    step_time: StepTime | None = None,  # with drafts; default: that of the profile
) -> dict[str, float]:
    """The simulator's answer for the same lengths, updates and modes."""
    per_token = 1 / learner_tokens_per_second
    prompts = schedule.rollouts_needed * workload.prompt_tokens
    timed = replace(
        workload,
        step_time=step_time or known.step_time(),
        kv_tokens=known.kv_tokens,
        weight_update_seconds=known.weight_update_seconds or 0.0,
        learner_seconds_per_token=per_token,
        learner_seconds_per_update=per_token * prompts,
    )
    prefill = 0.0 if workload.reuse_kv_cache else known.prefill_seconds_per_token
    rows = UpdateRows(prefill)
    simulated.run(timed, schedule, rows, max_updates=updates)
    return summary(rows.rows)


def kv_bytes_per_token(config: PreTrainedConfig) -> int:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * head * 2)


def memory_arithmetic(config: PreTrainedConfig, weights: int, shape: Shape) -> dict[str, float]:
    """GiB by part, before anything is allocated. Activations: one hidden state per layer and the layer in work, or all
    of the largest micro-batch that keeps them."""
    layers, hidden, inner = config.num_hidden_layers, config.hidden_size, config.intermediate_size
    tokens = max(shape.tokens_per_micro_batch, shape.max_response_tokens + shape.prompt_tokens)
    parts = {
        "learner_at_rest": 10 * weights / GIB,  # bf16 weight and first moment, fp32 second moment, 16 bits of remainder
        "gradients": 2 * weights / GIB,
        "activations": 2.0  # chunks of logits
        + max(
            tokens * (2 * layers * hidden + 24 * hidden + 16 * inner),
            shape.kept_tokens * layers * (38 * hidden + 8 * inner),
        )
        / GIB,
        "engine_weights": 2 * weights / GIB,
        "kv_cache": shape.kv_gib,
        "graphs_and_context": 5.0,
    }
    return {**parts, "sum": sum(parts.values())}
