"""Dynamic sampling in verl: the metric by which groups are filtered (`algorithm.filter_groups`).

The reward itself is the scheduler's filter `equal_rewards`. Any other metric comes from the reward function's
`reward_extra_info`: the agent loop worker reads it there, and it reaches the filter as the rollout's `detail`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.group_filter import Keeps, are_equal
from sortedrl.core.rollout import Rollout
from sortedrl.core.user_values import as_reward

FILTER = "algorithm.filter_groups"
REWARD_NAMES = (None, "reward", "score", "seq_reward", "seq_final_reward")


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
