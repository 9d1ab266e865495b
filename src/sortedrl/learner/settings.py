"""The learner's settings, and those of them that `sortedrl train` offers. Errors have a reason and a fix.

This file does not need PyTorch.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, ValidationError, ValidationInfo, model_validator

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.schedule import Schedule
from sortedrl.core.strategies.registry import strategy_named
from sortedrl.settings.base import SettingsGroup, first_error

Algorithm = Literal["reinforce++", "grpo", "rloo", "ppo"]
AdvantageBaseline = Literal["group", "previous_cohorts", "cohort_so_far", "batch"]
TruncatedRollouts = Literal["keep", "masked", "zero"]
OffPolicyCorrection = Literal["ppo_clip", "cispo", "mask", "decoupled"]
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

    Stale tokens are clipped against the policy that sampled them. Truncated weights let a token that has already moved
    move on, and at high learning rates such runs collapsed (docs/evidence.md). Without stale tokens only the mismatch
    of engine and learner is to be corrected; several steps are clipped around the policy before the update.
    """
    return "decoupled" if strategy_named(mode).on_policy else "ppo_clip"


def _between(lowest: float, highest: float, why: str, fix: str) -> AfterValidator:
    """Refuses a number outside of these bounds, by the name of its setting."""

    def check(value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and not lowest <= value <= highest:
            raise ConfigurationError(info.field_name or "", value, why, fix)
        return value

    return AfterValidator(check)


_ABOVE_0 = 1e-30
_Positive = _between(_ABOVE_0, math.inf, "it must be above 0", "Use a positive number.")
_NotNegative = _between(0, math.inf, "it must not be negative", "Use 0 or more.")
_AtLeast1 = _between(1, math.inf, "it must be at least 1", "Use 1 or more.")
_Fraction = _between(0, 1, "it must be between 0 and 1", "Use 1.0.")

AlgorithmSetting = Annotated[Algorithm, Field(description="how advantages are computed")]
LearningRate = Annotated[float, Field(description="learning rate after warm-up"), _Positive]
WarmupUpdates = Annotated[int, Field(description="updates of linear learning rate warm-up"), _NotNegative]


class LearnerFlags(SettingsGroup):
    """The learner's settings that `sortedrl train` offers, which may set other defaults with the types above.

    These defaults are for full training of a model with a few billion parameters.
    """

    help_group: ClassVar[str] = "learner"

    algorithm: AlgorithmSetting = "reinforce++"
    # None: group for GRPO and RLOO, otherwise previous_cohorts. With PPO, the critic is the baseline, and this selects
    # the statistics that scale its advantages.
    advantage_baseline: AdvantageBaseline | None = None
    """what is subtracted from a reward; default: the algorithm's own"""
    off_policy_correction: OffPolicyCorrection | None = None
    """how stale tokens are corrected; default: ppo_clip, or decoupled in modes without stale tokens"""
    learning_rate: LearningRate = 1e-6
    scale_learning_rate_by_ess: bool = False
    """multiply it by the root of the rollouts' effective sample fraction, as in VCPO"""
    warmup_updates: WarmupUpdates = 10
    ratio_level: RatioLevel = "token"
    """sequence: one ratio per response, the geometric mean of its tokens'"""
    clip_low: Annotated[float, _between(_ABOVE_0, 1, "ratios are clipped at 1 - clip_low", "Use 0.2.")] = 0.2
    """lower clip range of the ratio; see docs/trainer.md"""
    clip_high: Annotated[float, _between(_ABOVE_0, math.inf, "ratios are clipped at 1 + clip_high", "Use 0.28.")] = 0.28
    """upper clip range of the ratio"""
    # cispo and decoupled truncate importance weights here; mask drops tokens above it or below its inverse.
    importance_cap: Annotated[
        float, _between(1, math.inf, "a cap below 1 also truncates on-policy tokens", "Use 2.0.")
    ] = 2.0
    """largest importance weight of cispo, decoupled and mask"""
    aggregation: Aggregation = "constant"
    """what the sum over tokens is divided by; see docs/trainer.md"""
    # `keep`: they train with their score, as the token limit is part of the problem. `masked`: no gradient, but they
    # count in the statistics. `zero`: their reward is 0.
    truncated_rollouts: TruncatedRollouts = "keep"
    """how responses that a token limit cut are trained on; those of tasks with an environment keep the score of its
    finish"""
    kl_coefficient: Annotated[float, _NotNegative] = 0.0
    """weight of the KL penalty"""
    entropy_coefficient: Annotated[float, _NotNegative] = 0.0
    """weight of the entropy bonus"""
    steps_per_update: Annotated[int, _AtLeast1] = 1
    """optimizer steps per update"""
    weight_decay: Annotated[float, _NotNegative] = 0.0
    """AdamW's, of matrices"""
    max_grad_norm: Annotated[
        float, _between(_ABOVE_0, math.inf, "it must be above 0", "Use 1.0, or 1e9 for no clipping.")
    ] = 1.0
    """larger gradients are scaled down to this norm"""
    critic_learning_rate: Annotated[float, _Positive] = 1e-5
    """of ppo's critic"""
    gamma: Annotated[float, _Fraction] = 1.0
    """ppo: discount per token"""
    gae_lambda: Annotated[float, _Fraction] = 1.0
    """ppo: lambda of generalized advantage estimation"""
    tokens_per_micro_batch: Annotated[int, _AtLeast1] = 16_384
    """tokens per forward and backward pass, including padding"""
    # It keeps a copy of the gradient.
    gradient_cosine: bool = False
    """report the cosine of successive gradients"""
    gradient_checkpointing: bool = False
    """less GPU memory, slower updates"""
    # Smaller micro-batches keep their activations, which saves a quarter of the computation. Memory per token and layer
    # in bf16: about 24 x hidden size + 8 x intermediate size.
    recompute_above_tokens: Annotated[int, _NotNegative] = 0
    """gradient_checkpointing for micro-batches of more tokens only"""
    # torch.compile fuses elementwise operations; it takes about 20 s in the first update.
    compile_layers: bool = False
    """faster learner on a GPU, slower first update"""
    lora_rank: Annotated[int, _NotNegative] = 0
    """rank of LoRA adapters; 0: train all weights"""

    @property
    def resolved_advantage_baseline(self) -> AdvantageBaseline:
        return self.advantage_baseline or DEFAULT_ADVANTAGE_BASELINE[self.algorithm]

    def wants_whole_groups(self) -> bool:
        return self.resolved_advantage_baseline == "group"


class LearnerSettings(LearnerFlags):
    """All settings of the learner: also those that follow from the schedule and the engine's sampling."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    off_policy_correction: OffPolicyCorrection = "ppo_clip"  # a learner has no mode to choose it by
    # The constant of `constant`: rollouts_per_update x max_response_tokens of the schedule. It is known before the
    # first update, whose rollouts are the shortest. It scales the loss, which affects gradient clipping but not AdamW.
    normalizer_tokens: Annotated[
        float, _between(1, math.inf, "the loss is divided by it", "Use rollouts_per_update x max_response_tokens.")
    ] = _DEFAULTS.rollouts_per_update * _DEFAULTS.max_response_tokens
    # Of the engine's sampling.
    temperature: Annotated[
        float, _between(_ABOVE_0, math.inf, "log-probabilities depend on it", "Use the engine's temperature.")
    ] = 1.0
    top_p: Annotated[
        float,
        _between(
            1,
            1,
            "below 1, the engine's log-probabilities are normalized over the top-p tokens and the learner's over all, "
            "so every ratio is biased",
            "Sample with top_p = 1.0.",
        ),
    ] = 1.0
    bf16: bool = False

    if not TYPE_CHECKING:  # type checkers see the fields

        def __init__(self, **given: Any) -> None:
            try:
                super().__init__(**given)
            except ValidationError as error:
                raise first_error(error, lambda key: "See docs/trainer.md.") from None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.recompute_above_tokens and not self.gradient_checkpointing:
            why = "without gradient_checkpointing nothing is recomputed"
            fix = "Set gradient_checkpointing = true too, or leave it out."
            raise ConfigurationError("recompute_above_tokens", self.recompute_above_tokens, why, fix)
        baseline, fix = self.advantage_baseline, "Leave it out, or use algorithm = reinforce++."
        if self.algorithm in ("grpo", "rloo") and not self.wants_whole_groups():
            why = f"{self.algorithm} uses the group baseline"
            raise ConfigurationError("advantage_baseline", baseline, why, fix)
        if self.algorithm == "ppo" and self.wants_whole_groups():
            raise ConfigurationError("advantage_baseline", baseline, "with ppo the critic is the baseline", fix)
        return self


def learner_settings_from(flags: LearnerFlags, mode: str, **derived: Any) -> LearnerSettings:
    """The learner's settings for a schedule's mode. `derived` fields have no flag."""
    given: dict[str, Any] = {name: getattr(flags, name) for name in LearnerFlags.model_fields}
    given["off_policy_correction"] = flags.off_policy_correction or off_policy_correction_for(mode)
    return LearnerSettings(**given, **derived)


def require_streamable(settings: LearnerSettings) -> None:
    """Raise a ValueError that names the setting because of which nothing can be streamed."""
    baseline, steps = settings.resolved_advantage_baseline, settings.steps_per_update
    why = "so no gradient can be streamed before the update is complete: use"
    unless = f"an advantage depends on the other rollouts of its update, {why} group or previous_cohorts, or no stream"
    require(baseline not in ("batch", "cohort_so_far"), "advantage_baseline", baseline, unless)
    unless = f"each step needs a mix of all rollouts, {why} one step per update, or no stream"
    require(steps == 1, "steps_per_update", steps, unless)


def require(holds: bool, name: str, value: object, why: str) -> None:
    if not holds:
        raise ValueError(f"{name} = {value}: {why}")
