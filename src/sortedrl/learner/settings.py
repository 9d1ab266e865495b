"""The learner's settings, and those of them that `sortedrl train` offers. Errors have a reason and a fix.

This file does not need PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, Field

from sortedrl.core.schedule import ConfigurationError, Schedule

Algorithm = Literal["reinforce++", "grpo", "rloo", "ppo"]
AdvantageBaseline = Literal["group", "previous_cohorts", "cohort_so_far", "batch"]
TruncatedRollouts = Literal["keep", "masked", "zero", "soft_penalty"]
OffPolicyCorrection = Literal["ppo_clip", "tis", "mask", "decoupled", "m2po"]
RatioLevel = Literal["token", "sequence"]
Aggregation = Literal["constant", "token_mean", "sequence_mean"]

_DEFAULTS = Schedule()

DEFAULT_ADVANTAGE_BASELINE: Mapping[str, AdvantageBaseline] = {
    "reinforce++": "previous_cohorts",
    "grpo": "group",
    "rloo": "group",
    "ppo": "previous_cohorts",
}


def off_policy_correction_for(mode: str) -> OffPolicyCorrection:
    """The default off-policy correction for a schedule's mode.

    On-policy modes have no stale tokens, and tis corrects the mismatch of engine and learner; every other mode has
    stale tokens.
    """
    return "tis" if mode.startswith("on-policy") else "decoupled"


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    """Defaults are for full training of a model with a few billion parameters."""

    algorithm: Algorithm = "reinforce++"
    # The baseline of rewards; None: group for GRPO and RLOO, otherwise previous_cohorts. With PPO, the critic is the
    # baseline, and this selects the statistics that scale its advantages.
    advantage_baseline: AdvantageBaseline | None = None
    off_policy_correction: OffPolicyCorrection = "decoupled"
    ratio_level: RatioLevel = "token"
    clip_low: float = 0.2
    clip_high: float = 0.28
    # tis and decoupled truncate importance weights here; mask drops tokens above it or below its inverse.
    importance_cap: float = 2.0
    # m2po drops tokens until the mean squared log-ratio of the rest is at most this, which is the paper's value.
    second_moment_limit: float = 0.04
    aggregation: Aggregation = "constant"
    # The constant of `constant`: rollouts_per_update x max_response_tokens of the schedule. It is known before the
    # first update, whose rollouts are the shortest. It scales the loss, which affects gradient clipping but not AdamW.
    normalizer_tokens: float = _DEFAULTS.rollouts_per_update * _DEFAULTS.max_response_tokens
    kl_coefficient: float = 0.0
    entropy_coefficient: float = 0.0
    drop_zero_variance_groups: bool = False
    # Truncated rollouts. `keep`: they train with their score, as the token limit is part of the problem. `masked`: no
    # gradient, but they count in the statistics. `zero`: their reward is 0. `soft_penalty`: subtracts up to 1 from any
    # reward over the last soft_penalty_tokens before max_response_tokens.
    truncated_rollouts: TruncatedRollouts = "keep"
    max_response_tokens: int | None = None
    soft_penalty_tokens: int | None = None
    temperature: float = 1.0  # of the engine's sampling
    top_p: float = 1.0
    learning_rate: float = 1e-6
    # The policy's learning rate times the root of the effective sample fraction of the update's rollouts, as in VCPO.
    scale_learning_rate_by_ess: bool = False
    warmup_updates: int = 10
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    steps_per_update: int = 1  # optimizer steps per update
    tokens_per_micro_batch: int = 16_384  # including padding
    gradient_cosine: bool = False  # report the cosine of successive gradients; keeps a copy of the gradient
    gradient_checkpointing: bool = False
    # With gradient_checkpointing: micro-batches of at most this many tokens keep their activations, which saves a
    # quarter of the computation. Memory per token and layer in bf16: about 24 x hidden size + 8 x intermediate size.
    recompute_above_tokens: int = 0
    compile_layers: bool = False  # fuse elementwise operations with torch.compile; a minute in the first update
    bf16: bool = False
    lora_rank: int = 0  # 0: train all weights
    critic_learning_rate: float = 1e-5
    gamma: float = 1.0
    gae_lambda: float = 1.0  # the lambda of GAE

    @property
    def resolved_advantage_baseline(self) -> AdvantageBaseline:
        return self.advantage_baseline or DEFAULT_ADVANTAGE_BASELINE[self.algorithm]

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = self.resolved_advantage_baseline if name == "advantage_baseline" else getattr(self, name)
            options = get_args(choices)
            require(value in options, name, repr(value), f"choose one of {', '.join(options)}")
        for name, (lowest, highest, why) in _RANGES.items():
            value = getattr(self, name)
            require(value is None or lowest <= value <= highest, name, value, why)
        limit, zone = self.max_response_tokens, self.soft_penalty_tokens
        require(
            self.truncated_rollouts != "soft_penalty" or (zone or math.inf) <= (limit or 0),
            "soft_penalty_tokens",
            zone,
            f"soft_penalty needs at most max_response_tokens = {limit}: set both, for example to 1024 and 8192",
        )
        wants_whole_groups = self.resolved_advantage_baseline == "group"
        require(
            wants_whole_groups or self.algorithm not in ("grpo", "rloo"),
            "advantage_baseline",
            self.advantage_baseline,
            f"{self.algorithm} uses the group baseline: leave advantage_baseline out, or use algorithm = reinforce++",
        )
        require(
            not wants_whole_groups or self.algorithm != "ppo",
            "advantage_baseline",
            self.advantage_baseline,
            "with ppo the critic is the baseline: leave advantage_baseline out, or use algorithm = reinforce++",
        )


_CHOICES: Mapping[str, Any] = {
    "algorithm": Algorithm,
    "advantage_baseline": AdvantageBaseline,
    "off_policy_correction": OffPolicyCorrection,
    "ratio_level": RatioLevel,
    "aggregation": Aggregation,
    "truncated_rollouts": TruncatedRollouts,
}
_ABOVE_0 = 1e-30
_RANGES: Mapping[str, tuple[float, float, str]] = {
    "clip_low": (_ABOVE_0, 1, "ratios are clipped at 1 - clip_low: use 0.2"),
    "clip_high": (_ABOVE_0, math.inf, "ratios are clipped at 1 + clip_high: use 0.28"),
    "importance_cap": (1, math.inf, "a cap below 1 also truncates on-policy tokens: use 2.0"),
    "second_moment_limit": (0, math.inf, "it limits a mean of squares: use 0.04"),
    "normalizer_tokens": (1, math.inf, "the loss is divided by it: use rollouts_per_update x max_response_tokens"),
    "kl_coefficient": (0, math.inf, "it must be 0 or more"),
    "entropy_coefficient": (0, math.inf, "it must be 0 or more"),
    "max_response_tokens": (1, math.inf, "it must be 1 or more"),
    "soft_penalty_tokens": (1, math.inf, "it must be 1 or more"),
    "temperature": (_ABOVE_0, math.inf, "log-probabilities depend on it: use the engine's temperature"),
    "top_p": (
        1,
        1,
        "below 1, the engine's log-probabilities are normalized over the top-p tokens and the learner's over all, so "
        "every ratio is biased: sample with top_p = 1.0",
    ),
    "learning_rate": (_ABOVE_0, math.inf, "it must be above 0"),
    "warmup_updates": (0, math.inf, "it must be 0 or more"),
    "weight_decay": (0, math.inf, "it must be 0 or more"),
    "max_grad_norm": (_ABOVE_0, math.inf, "it must be above 0: use inf for no clipping"),
    "steps_per_update": (1, math.inf, "it must be 1 or more"),
    "tokens_per_micro_batch": (1, math.inf, "it must be 1 or more"),
    "recompute_above_tokens": (0, math.inf, "it must be 0 (recompute always) or more"),
    "lora_rank": (0, math.inf, "it must be 0 (train all weights) or more"),
    "critic_learning_rate": (_ABOVE_0, math.inf, "it must be above 0"),
    "gamma": (0, 1, "it must be between 0 and 1"),
    "gae_lambda": (0, 1, "it must be between 0 and 1"),
}


class LearnerFlags(BaseModel):
    """The learner's settings of `sortedrl train`, with defaults for the built-in model."""

    algorithm: Annotated[Algorithm, Field(description="how advantages are computed")] = "grpo"
    advantage_baseline: Annotated[
        AdvantageBaseline | None,
        Field(description="what is subtracted from a reward; default: the algorithm's own"),
    ] = None
    off_policy_correction: Annotated[
        OffPolicyCorrection | None,
        Field(description="how stale tokens are corrected; default: decoupled, or tis in on-policy modes"),
    ] = None
    learning_rate: Annotated[float, Field(gt=0, description="learning rate after warm-up")] = 3e-4
    scale_learning_rate_by_ess: Annotated[
        bool, Field(description="multiply it by the root of the rollouts' effective sample fraction, as in VCPO")
    ] = False
    warmup_updates: Annotated[int, Field(ge=0, description="updates of linear learning rate warm-up")] = 2
    clip_low: Annotated[float, Field(gt=0, lt=1, description="lower clip range of the ratio; see docs/learner.md")] = (
        0.2
    )
    clip_high: Annotated[float, Field(gt=0, description="upper clip range of the ratio")] = 0.28
    kl_coefficient: Annotated[float, Field(ge=0, description="weight of the KL penalty")] = 0.0
    entropy_coefficient: Annotated[float, Field(ge=0, description="weight of the entropy bonus")] = 0.0
    steps_per_update: Annotated[int, Field(ge=1, description="optimizer steps per update")] = 1
    tokens_per_micro_batch: Annotated[int, Field(ge=1, description="tokens per forward and backward pass")] = 16_384
    gradient_cosine: Annotated[bool, Field(description="report the cosine of successive gradients")] = False
    gradient_checkpointing: Annotated[bool, Field(description="less GPU memory, slower updates")] = False
    recompute_above_tokens: Annotated[
        int, Field(ge=0, description="gradient_checkpointing for micro-batches of more tokens only")
    ] = 0
    compile_layers: Annotated[bool, Field(description="faster learner on a GPU, slower first update")] = False
    lora_rank: Annotated[int, Field(ge=0, description="rank of LoRA adapters; 0: train all weights")] = 0

    def wants_whole_groups(self) -> bool:
        return (self.advantage_baseline or DEFAULT_ADVANTAGE_BASELINE[self.algorithm]) == "group"


def learner_settings_from(flags: LearnerFlags, mode: str, **derived: Any) -> LearnerSettings:
    """The learner's settings for a schedule's mode. `derived` fields have no flag."""
    given: dict[str, Any] = {name: getattr(flags, name) for name in LearnerFlags.model_fields}
    given["off_policy_correction"] = flags.off_policy_correction or off_policy_correction_for(mode)
    try:
        return LearnerSettings(**given, **derived)
    except ValueError as error:
        raise ConfigurationError("algorithm", flags.algorithm, str(error), "See docs/learner.md.") from None


def needs_whole_update(settings: LearnerSettings) -> bool:
    """Whether no gradient can be computed before all rollouts of the update are known, not even with their advantages:
    each of several optimizer steps needs a mix of all rollouts, and M2PO drops tokens by a limit on the whole."""
    return settings.steps_per_update > 1 or settings.off_policy_correction == "m2po"


def require_streamable(settings: LearnerSettings) -> None:
    """Raise a ValueError that names the setting because of which nothing can be streamed."""
    baseline = settings.resolved_advantage_baseline
    require(
        baseline not in ("batch", "cohort_so_far"),
        "advantage_baseline",
        baseline,
        "an advantage depends on the other rollouts of its update, so no gradient can be streamed before the update is "
        "complete: use group or previous_cohorts, or leave stream out",
    )
    name = "steps_per_update" if settings.steps_per_update > 1 else "off_policy_correction"
    require(
        not needs_whole_update(settings),
        name,
        getattr(settings, name),
        "it needs all rollouts of the update, so no gradient can be streamed before the update is complete: use one "
        "step per update and ppo_clip, tis, mask or decoupled, or leave stream out",
    )


def require(holds: bool, name: str, value: object, why: str) -> None:
    if not holds:
        raise ValueError(f"{name} = {value}: {why}")
