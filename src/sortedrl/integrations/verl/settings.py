"""From verl's configuration to a schedule: existing settings of verl are reused, and a few keys are added.

The keys are under `trainer.v1.sortedrl`, where verl has the settings of a trainer mode.
"""

import logging
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from sortedrl.core.configuration import ConfigurationError, checked_fraction, checked_int
from sortedrl.core.group_filter import EQUAL_REWARDS, Keeps, are_equal
from sortedrl.core.rollout import Rollout
from sortedrl.core.schedule import Schedule
from sortedrl.core.strategies.base import Strategy
from sortedrl.core.strategies.registry import strategy_named
from sortedrl.core.user_values import as_reward
from sortedrl.settings.slots import default_slots, too_many_slots

PREFIX = "trainer.v1.sortedrl"
FILTER = "algorithm.filter_groups"
REWARD_NAMES = (None, "reward", "score", "seq_reward", "seq_final_reward")
_log = logging.getLogger(__name__)
SCHEDULE_KEYS = (
    "mode",
    "prompts_per_cohort",
    "oversubscribe",
    "max_staleness",
    "overlap",
    "max_wait_updates",
    "max_environment_seconds",
    "max_retries",
    "score_wait_seconds",
    "max_filtered_fraction",
)
OWN_KEYS = ("slots", "folder", "max_rejected_fraction")
COHORT_UPDATES = 4  # the paper's n: a cohort is this many updates unless set
ESTIMATORS_WITHOUT_GROUPS = ("gae", "reinforce_plus_plus")
# Settings of verl that the scheduler does not support: the values that are fine, why others are not, what to do.
FIXED: dict[str, tuple[Container[object], str, str]] = {
    "actor_rollout_ref.actor.use_dynamic_bsz": (
        (True,),
        "updates vary in size, but verl can split only whole multiples into micro-batches of a fixed size",
        "Set it to True, with actor_rollout_ref.actor.ppo_max_token_len_per_gpu.",
    ),
    "data.sampler.class_path": (
        (None, ""), "the scheduler selects the prompts", "Leave it out; data.shuffle and data.seed are honored.",
    ),
    "trainer.v1.sampler.max_off_policy_threshold": (
        (8, None), "the schedule bounds staleness itself", f"Leave it out; set {PREFIX}.max_staleness.",
    ),
    "trainer.v1.sampler.max_off_policy_strategy": (("drop", None), "no stale rollout is dropped", "Leave it out."),
    "trainer.v1.sampler.sync_refill_failed_groups": (
        (False, None), "a failed rollout is regenerated", f"Leave it out; set {PREFIX}.max_retries.",
    ),
    "trainer.v1.sampler.custom_sampler.path": (
        (None, ""), "the scheduler composes the batches", f"Leave it out; choose a schedule with {PREFIX}.mode.",
    ),
}  # fmt: skip
FIXED_WITH_OWN_GPUS: dict[str, tuple[Container[object], str, str]] = {
    "actor_rollout_ref.rollout.nnodes": (
        range(1, 2**31), "the servers have GPUs of their own (actor_rollout_ref.hybrid_engine=False)",
        "Set it to the number of nodes for the servers.",
    ),
}  # fmt: skip
FIXED_WITH_FILTER: dict[str, tuple[Container[object], str, str]] = {
    "actor_rollout_ref.rollout.n": (
        range(2, 2**31), "algorithm.filter_groups compares the rollouts of a group", "Set it to 2 or more.",
    ),
    f"{FILTER}.max_num_gen_batches": (
        range(-(2**31), 1), "V1 trainers do not count batches", f"Set it to 0; set {PREFIX}.max_filtered_fraction.",
    ),
    f"{FILTER}.max_inflight_gen_batches": (
        (1, None), "the scheduler decides how many groups to start", f"Leave it out; set {PREFIX}.prompts_per_cohort.",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    schedule: Schedule
    slots: int | None  # None: those of an update, or of all servers (vLLM max_num_seqs) if these have fewer
    folder: Path  # for the event log
    minibatches: int  # optimizer steps per update and PPO epoch
    max_rejected_fraction: float  # of recent rollouts: the run stops if more are rejected
    checks_weights: bool  # by the learner's log-probabilities, if verl computes those of the whole distribution
    filter_metric: str | None  # by which groups are filtered, if it is not the reward


def settings_of(config: Any) -> Settings:
    """Read and check verl's configuration (an OmegaConf tree). Raises ConfigurationError."""
    given = dict(config.trainer.v1.get("sortedrl") or {})
    for key in given.keys() - {*SCHEDULE_KEYS, *OWN_KEYS}:
        known = ", ".join((*SCHEDULE_KEYS, *OWN_KEYS))
        raise ConfigurationError(f"{PREFIX}.{key}", given[key], "no such key", f"Keys: {known}.")
    schedule = schedule_of(config, given)
    strategy = strategy_named(schedule.mode)
    strategy.check(schedule)
    if is_filtered(config):
        strategy.check_filter()
    for key, why, fix in _refused(config, schedule, strategy):
        raise ConfigurationError(key, OmegaConf.select(config, key), why, fix)
    slots, fraction = given.get("slots"), given.get("max_rejected_fraction")
    return Settings(
        schedule=schedule,
        slots=None if slots is None else checked_int(f"{PREFIX}.slots", slots, 1),
        folder=Path(given.get("folder") or config.trainer.default_local_dir),
        minibatches=_minibatches(config, config.actor_rollout_ref.actor),
        max_rejected_fraction=checked_fraction(
            f"{PREFIX}.max_rejected_fraction", 0.5 if fraction is None else fraction
        ),
        checks_weights=_has_comparable_logprobs(config),
        filter_metric=metric_of(config),
    )


def has_own_gpus(config: Any) -> bool:
    """Whether the servers have GPUs of their own, instead of sharing the learner's."""
    return not config.actor_rollout_ref.get("hybrid_engine", True)


def slots_of(settings: Settings, of_servers: int) -> int:
    """As set, with a warning if they are far more than an update needs; by default as many as it needs."""
    needed = settings.schedule.rollouts_needed
    if settings.slots is None:
        return default_slots(needed, of_servers)
    if notice := too_many_slots(settings.slots, needed):
        _log.warning("%s.slots: %s", PREFIX, notice)
    return settings.slots


def schedule_of(config: Any, given: Mapping[str, Any]) -> Schedule:
    rollout, data = config.actor_rollout_ref.rollout, config.data
    group_size = int(rollout.n)
    needs_groups = is_filtered(config) or str(config.algorithm.adv_estimator) not in ESTIMATORS_WITHOUT_GROUPS
    values: dict[str, Any] = {
        "rollouts_per_update": int(data.train_batch_size) * group_size,
        "rollouts_per_prompt": group_size,
        "whole_groups": group_size > 1 and needs_groups,
        "filter_groups": EQUAL_REWARDS if is_filtered(config) and metric_of(config) is None else None,
        "prompts_per_cohort": COHORT_UPDATES * int(data.train_batch_size),
        "max_response_tokens": int(rollout.response_length),
        "max_prompt_tokens": int(rollout.prompt_length),
        "seed": int(data.get("seed") or 0),
    }
    values |= {key: given[key] for key in SCHEDULE_KEYS if key in given}
    try:
        schedule = Schedule(**values)
        if has_own_gpus(config):
            schedule = _with_overlap(schedule, given)
        schedule.check_cohort()
        return schedule
    except ConfigurationError as error:
        raise ConfigurationError(f"{PREFIX}.{error.key}", error.value, error.why, error.fix) from None


def _with_overlap(schedule: Schedule, given: Mapping[str, Any]) -> Schedule:
    """The defaults for servers with GPUs of their own: overlap, if the mode keeps tokens.

    If the learner is slower than the servers, finished rollouts would pile up until the bound makes updates larger,
    and the learner slower still. So no more are started than the next updates can train on within the bound.
    """
    if "overlap" not in given:
        schedule = replace(schedule, overlap=strategy_named(schedule.mode).keeps_tokens)
    if schedule.overlap and schedule.oversubscribe is None and schedule.max_staleness is not None:
        schedule = replace(schedule, oversubscribe=float(schedule.max_staleness + 1))
    return schedule


def _refused(config: Any, schedule: Schedule, strategy: Strategy) -> Iterator[tuple[str, str, str]]:
    """Settings that the scheduler does not support: their names, why, what to do. None is silently ignored."""
    if schedule.overlap and not has_own_gpus(config):
        why = "servers and learner share GPUs, so one of them waits for the other"
        fix = "Leave it out, or give the servers GPUs of their own with actor_rollout_ref.hybrid_engine=False."
        yield f"{PREFIX}.overlap", why, fix
    if schedule.overlap and schedule.max_staleness is None:
        why = "the servers generate while the learner steps (overlap), and nothing else bounds how old a token may be"
        yield f"{PREFIX}.max_staleness", why, f"Set it, for example to 4, or set {PREFIX}.overlap=False."
    if not strategy.on_policy:
        yield from _without_correction(config, strategy)
    fixed = FIXED
    if is_filtered(config):
        fixed = fixed | FIXED_WITH_FILTER
    if has_own_gpus(config):
        fixed = fixed | FIXED_WITH_OWN_GPUS
        yield from _without_weight_transfer(config.actor_rollout_ref)
    for key, (fine, why, fix) in fixed.items():
        if OmegaConf.select(config, key) not in fine:
            yield key, why, fix
    reward_model = config.reward.reward_model
    if reward_model.enable and not reward_model.enable_resource_pool:
        why = "a reward model on the training GPUs scores after the batch is formed, but a batch has scored rollouts"
        yield "reward.reward_model.enable_resource_pool", why, "Set it to True, or use a reward function."
    if config.algorithm.adv_estimator == "remax":
        why = "its greedy baseline needs a second rollout, which is unsupported"
        yield "algorithm.adv_estimator", why, "Use grpo, rloo, reinforce_plus_plus or gae."
    yield from _fixed_sizes(config)


def _without_weight_transfer(actor: Any) -> Iterator[tuple[str, str, str]]:
    """To servers with GPUs of their own, of which verl's checkpoint engines are the only way."""
    if actor.rollout.checkpoint_engine.backend == "naive":
        why = "it passes weights within a GPU, but the servers have their own (actor_rollout_ref.hybrid_engine=False)"
        fix = "Set it to nccl, or another of verl's checkpoint engines."
        yield "actor_rollout_ref.rollout.checkpoint_engine.backend", why, fix
    model, lora = actor.model, actor.model.get("lora") or {}
    has_adapter = model.get("lora_rank") or lora.get("rank") or model.get("lora_adapter_path")
    if has_adapter and not lora.get("merge"):
        why = "verl's checkpoint engines send the base weights alone, so the adapter would never reach the servers"
        fix = "Set it to True, or share the GPUs (actor_rollout_ref.hybrid_engine=True)."
        yield "actor_rollout_ref.model.lora.merge", why, fix


def _fixed_sizes(config: Any) -> Iterator[tuple[str, str, str]]:
    """Of the critic and the reference policy, if they are in use. By default they are the actor's."""
    actor, critic = config.actor_rollout_ref.actor, config.critic
    is_gae = config.algorithm.adv_estimator == "gae"
    has_critic = is_gae if critic.get("enable") is None else bool(critic.enable)
    if has_critic and _minibatches(config, critic) != _minibatches(config, actor):
        why = (
            "actor and critic make the same number of optimizer steps per update, and the actor's mini-batches have "
            f"{actor.ppo_mini_batch_size} prompts"
        )
        yield "critic.ppo_mini_batch_size", why, "Leave it out."
    has_reference = config.algorithm.get("use_kl_in_reward") or actor.get("use_kl_loss")
    in_use = {"critic.use_dynamic_bsz": has_critic, "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": has_reference}
    for key, is_used in in_use.items():
        if is_used and not OmegaConf.select(config, key):
            yield key, "updates vary in size, which micro-batches of a fixed size cannot split", "Leave it out."


def _without_correction(config: Any, strategy: Strategy) -> Iterator[tuple[str, str, str]]:
    """Settings under which stale tokens would be trained on with ratio 1.

    With bypass_mode, PPO's ratio is against the sampling policy. Without it (and with the REINFORCE loss), only the
    importance weights of rollout_is correct for staleness; verl computes them only with a threshold.
    """
    if not config.actor_rollout_ref.rollout.calculate_log_probs:
        why = f"mode {strategy.name} trains on stale tokens, and the correction needs their log-probabilities"
        yield "actor_rollout_ref.rollout.calculate_log_probs", why, "Set it to True."
    correction = config.algorithm.get("rollout_correction") or {}
    if correction.get("bypass_mode") and correction.get("loss_type", "ppo_clip") == "ppo_clip":
        return
    for key, value in (("rollout_is", "token"), ("rollout_is_threshold", "2.0")):
        if correction.get(key) is None:
            name = f"algorithm.rollout_correction.{key}"
            why = f"mode {strategy.name} trains on stale tokens, and without it verl treats them as on-policy"
            yield name, why, f"Add {name}={value} to the command line."


def _has_comparable_logprobs(config: Any) -> bool:
    """Not with bypass_mode, which takes the servers', nor if these are of a distribution that top_p or top_k cut."""
    rollout = config.actor_rollout_ref.rollout
    bypasses = (config.algorithm.get("rollout_correction") or {}).get("bypass_mode")
    cut = float(rollout.get("top_p") or 1) < 1 or int(rollout.get("top_k") or -1) > 0
    return bool(rollout.calculate_log_probs and not bypasses and not cut)


def _minibatches(config: Any, trained: Any) -> int:
    """Per update. `trained`: the settings of the actor or the critic."""
    return math.ceil(int(config.data.train_batch_size) / int(trained.ppo_mini_batch_size))


# Dynamic sampling. The reward itself is the scheduler's filter `equal_rewards`. Any other metric comes from the reward
# function's `reward_extra_info`: the agent loop worker reads it there, and it reaches the filter as `Rollout.detail`.


def is_filtered(config: Any) -> bool:
    return bool(OmegaConf.select(config, f"{FILTER}.enable"))


def metric_of(config: Any) -> str | None:
    """The metric, if groups are filtered by another one than the reward."""
    metric = OmegaConf.select(config, f"{FILTER}.metric")
    return None if not is_filtered(config) or metric in REWARD_NAMES else str(metric)


def value_of(metric: str, extra_info: Mapping[str, Any]) -> float:
    """Raises a ConfigurationError if the reward function did not return the metric."""
    if metric not in extra_info:
        found = ", ".join(map(str, extra_info)) or "nothing but the reward"
        why = f"the reward function did not return it; it returned {found}"
        raise ConfigurationError(f"{FILTER}.metric", metric, why, "Return it in the reward's dict, or set reward.")
    return as_reward(extra_info[metric], f"the metric {metric!r}")


def keeps_unequal(metric: str) -> Keeps:
    """The filter by a metric. A rollout without it was scored before the filter was set: its group is kept."""

    def keeps(rollouts: Sequence[Rollout]) -> bool:
        values = [rollout.detail for rollout in rollouts]
        return None in values or not are_equal(values)

    keeps.__qualname__ = f"equal {metric}"  # the reason in the log
    return keeps
