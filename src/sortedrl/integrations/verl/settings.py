"""From verl's configuration to a schedule: what verl knows already is read, a handful of keys is added.

The keys stand under `trainer.v1.sortedrl`, where verl keeps the settings of a trainer mode.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sortedrl.core.schedule import ConfigurationError, Schedule
from sortedrl.core.strategies.base import Strategy
from sortedrl.core.strategies.registry import strategy_named

PREFIX = "trainer.v1.sortedrl"
SCHEDULE_KEYS = (
    "mode",
    "prompts_per_cohort",
    "oversubscribe",
    "max_staleness",
    "max_wait_updates",
    "max_retries",
    "score_wait_seconds",
)
OWN_KEYS = ("slots", "folder")
COHORT_UPDATES = 4  # the paper's n: a cohort is this many updates unless set
COMPARES_NO_SIBLINGS = ("gae", "reinforce_plus_plus")


@dataclass(frozen=True)
class Settings:
    schedule: Schedule
    strategy: Strategy
    slots: int | None  # None: what all servers together run at once
    folder: Path  # for the event log
    minibatches: int  # optimizer steps of one update and PPO epoch


def settings_of(config: Any) -> Settings:
    """Read and check verl's configuration (an OmegaConf tree). Raises ConfigurationError."""
    given = dict(config.trainer.v1.get("sortedrl") or {})
    _refuse_unknown(given)
    schedule = schedule_of(config, given)
    strategy = strategy_named(schedule.mode)
    strategy.check(schedule)
    _refuse_unsupported(config, strategy)
    slots = given.get("slots")
    if slots is not None and int(slots) < 1:
        raise ConfigurationError(f"{PREFIX}.slots", slots, "must be at least 1", "Leave it out to use all.")
    return Settings(
        schedule=schedule,
        strategy=strategy,
        slots=None if slots is None else int(slots),
        folder=Path(given.get("folder") or config.trainer.default_local_dir),
        minibatches=_minibatches(config),
    )


def schedule_of(config: Any, given: Mapping[str, Any]) -> Schedule:
    rollout, data = config.actor_rollout_ref.rollout, config.data
    siblings = int(rollout.n)
    values: dict[str, Any] = {
        "rollouts_per_update": int(data.train_batch_size) * siblings,
        "rollouts_per_prompt": siblings,
        "whole_groups": siblings > 1 and str(config.algorithm.adv_estimator) not in COMPARES_NO_SIBLINGS,
        "prompts_per_cohort": COHORT_UPDATES * int(data.train_batch_size),
        "max_response_tokens": int(rollout.response_length),
        "max_prompt_tokens": int(rollout.prompt_length),
        "seed": int(data.get("seed") or 0),
    }
    values |= {key: given[key] for key in SCHEDULE_KEYS if key in given}
    try:
        return Schedule(**values)
    except ConfigurationError as error:
        raise ConfigurationError(f"{PREFIX}.{error.key}", error.value, error.why, error.fix) from None


def _refuse_unknown(given: Mapping[str, Any]) -> None:
    known = (*SCHEDULE_KEYS, *OWN_KEYS)
    for key, value in given.items():
        if key not in known:
            raise ConfigurationError(f"{PREFIX}.{key}", value, "no such key", f"Keys: {', '.join(known)}.")


def _refuse_unsupported(config: Any, strategy: Strategy) -> None:
    """What verl offers and the scheduler cannot honor, by name. Never silently ignored."""
    rollout, reward_model = config.actor_rollout_ref.rollout, config.reward.reward_model
    if strategy.keeps_tokens and rollout.multi_turn.enable:
        raise ConfigurationError(
            "actor_rollout_ref.rollout.multi_turn.enable", True,
            f"mode {strategy.name} resumes stopped responses, and an agent loop cannot be resumed between two turns",
            f"Set {PREFIX}.mode=on-policy+planned, which starts it again.",
        )  # fmt: skip
    if strategy.keeps_tokens and not rollout.calculate_log_probs:
        raise ConfigurationError(
            "actor_rollout_ref.rollout.calculate_log_probs", False,
            f"mode {strategy.name} trains on tokens of older weights, whose log-probabilities the correction needs",
            "Set it to True.",
        )  # fmt: skip
    if strategy.keeps_tokens:
        _require_correction(config, strategy)
    if reward_model.enable and not reward_model.enable_resource_pool:
        raise ConfigurationError(
            "reward.reward_model.enable_resource_pool", False,
            "a reward model on the training GPUs scores after the batch is taken, and here a batch is made of scored "
            "rollouts",
            "Set it to True, or use a reward function.",
        )  # fmt: skip
    if not config.actor_rollout_ref.actor.use_dynamic_bsz:
        raise ConfigurationError(
            "actor_rollout_ref.actor.use_dynamic_bsz", False,
            "updates differ in size, and verl splits only whole multiples into micro-batches of a fixed size",
            "Set it to True, with actor_rollout_ref.actor.ppo_max_token_len_per_gpu.",
        )  # fmt: skip
    filter_groups = config.algorithm.get("filter_groups")
    if filter_groups is not None and filter_groups.get("enable", False):
        raise ConfigurationError(
            "algorithm.filter_groups.enable", True, "filtered prompts would have to be replaced by new ones, and here "
            "every loaded rollout is trained on", "Set it to False.",
        )  # fmt: skip
    sampler = config.data.get("sampler")
    if sampler is not None and sampler.get("class_path"):
        raise ConfigurationError(
            "data.sampler.class_path", sampler.get("class_path"), "the scheduler draws the prompts",
            "Leave it out; data.shuffle and data.seed are honored.",
        )  # fmt: skip
    custom = config.trainer.v1.sampler.get("custom_sampler")
    if custom is not None and custom.get("path"):
        raise ConfigurationError(
            "trainer.v1.sampler.custom_sampler.path", custom.get("path"), "the scheduler composes the batches",
            f"Leave it out; choose a schedule with {PREFIX}.mode.",
        )  # fmt: skip
    if str(config.algorithm.adv_estimator) == "remax":
        raise ConfigurationError(
            "algorithm.adv_estimator", "remax", "its greedy baseline is a second rollout, unknown to the scheduler",
            "Use grpo, rloo, reinforce_plus_plus or gae.",
        )  # fmt: skip


def _require_correction(config: Any, strategy: Strategy) -> None:
    """Stale tokens must not be trained on with ratio 1: refuse settings under which verl corrects nothing.

    With bypass_mode, PPO's ratio is against the policy that sampled. Without it (and with its REINFORCE loss) the
    importance weights of rollout_is alone tell stale tokens from fresh ones; verl makes them only with a threshold.
    """
    correction = config.algorithm.get("rollout_correction") or {}
    if correction.get("bypass_mode") and correction.get("loss_type", "ppo_clip") == "ppo_clip":
        return
    for key, value in (("rollout_is", "token"), ("rollout_is_threshold", "2.0")):
        name = f"algorithm.rollout_correction.{key}"
        if correction.get(key) is None:
            raise ConfigurationError(
                name, None,
                f"mode {strategy.name} trains on tokens of older weights, and without it verl takes them as on-policy",
                f"Add {name}={value} to the command line.",
            )  # fmt: skip


def _minibatches(config: Any) -> int:
    return math.ceil(int(config.data.train_batch_size) / int(config.actor_rollout_ref.actor.ppo_mini_batch_size))
