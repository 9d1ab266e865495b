"""From rewards to advantages.

Invariant: a rollout's advantage must not depend on the update that its length put it into. SortedRL's batches are
sorted by length, and long responses belong to hard prompts, which have lower rewards. So a baseline computed from the
batch itself is lower for longer responses, and rewards length as such. `previous_cohorts` avoids this with one constant
for all rollouts of a cohort, short and long; `group` by comparing responses to the same prompt. `batch` (the paper's)
and `cohort_so_far` exist for comparison. The same applies to the first cohort: its reference must not come from its
first batch, which is the shortest.

Suffixes: `_b` one entry per rollout, `_n` one per value (a rollout, or a token of any rollout), `_bt` rollouts x
response tokens, padded on the right.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sortedrl.core.batch import Batch
from sortedrl.learner.settings import AdvantageBaseline, Algorithm

# Previous cohorts are pooled, latest first, until they hold this many values: the standard error of the mean is then
# 0.05 standard deviations. With cohorts of the usual size, the latest one is enough, which is closest to the policy.
POOLED_VALUES = 512
# Below this standard deviation, rewards were practically equal so far and are not scaled.
SMALLEST_DEVIATION = 1e-4
# Past statistics can be outdated: the first success after cohorts of failure is thousands of standard deviations away.
# Advantages are clipped to this many.
MOST_DEVIATIONS = 10.0


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, mean and summed squared deviation of some values; adding two pools their values."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @staticmethod
    def of(values_n: Tensor) -> Moments:
        if not len(values_n):
            return Moments()
        values_n = values_n.double()
        mean = values_n.mean()
        return Moments(len(values_n), mean.item(), (values_n - mean).square().sum().item())

    def __add__(self, other: Moments) -> Moments:
        count = self.count + other.count
        if not count:
            return self
        gap = other.mean - self.mean
        return Moments(
            count=count,
            mean=self.mean + gap * other.count / count,
            squares=self.squares + other.squares + gap * gap * self.count * other.count / count,
        )

    @property
    def std(self) -> float:
        """Sample standard deviation, or 1 if it is too small to divide by."""
        if self.count < 2:
            return 1.0
        std = float((self.squares / (self.count - 1)) ** 0.5)
        return std if std > SMALLEST_DEVIATION else 1.0


@dataclass(frozen=True, slots=True)
class CohortStatistics:
    """Statistics of rewards (with a critic: of token advantages) per cohort.

    `seen` holds the moments of each cohort's values so far. `references` holds the moments that `previous_cohorts`
    normalizes a cohort with. They are fixed when the cohort's first rollouts arrive and never change: a constant over
    the whole cohort treats short and long rollouts alike. `complete`: all rollouts of cohorts below this number have
    arrived. Of a cohort that is still arriving mostly the short rollouts are known, so it is in no reference. `initial`
    is the reference of cohorts that start before any is complete. It is known before the first update; without values
    it means mean 0 and standard deviation 1.
    """

    seen: Mapping[int, Moments] = field(default_factory=dict)
    references: Mapping[int, Moments] = field(default_factory=dict)
    initial: Moments = Moments()
    complete: int = 0

    def before(self) -> Moments:
        """The latest complete cohorts with a total of `POOLED_VALUES`, or all there are."""
        pooled = Moments()
        for earlier in sorted((cohort for cohort in self.seen if cohort < self.complete), reverse=True):
            pooled += self.seen[earlier]
            if pooled.count >= POOLED_VALUES:
                break
        return pooled

    def with_references(self, cohorts: Sequence[int]) -> CohortStatistics:
        """References for the batch's cohorts that have none yet; empty for those without a predecessor."""
        latest = self.before()
        new = dict.fromkeys(set(cohorts) - self.references.keys(), latest if latest.count > 1 else Moments())
        return replace(self, references={**self.references, **new})

    def reference(self, cohort: int) -> Moments:
        found = self.references[cohort]
        return found if found.count else self.initial

    def without_predecessor(self, cohort_n: Tensor) -> Tensor:
        """Whether each value's cohort has the initial reference."""
        first = [cohort for cohort in set(cohort_n.tolist()) if not self.references[cohort].count]
        return torch.isin(cohort_n, torch.tensor(first, dtype=cohort_n.dtype))

    def with_seen(self, values_n: Tensor, cohort_n: Tensor) -> CohortStatistics:
        new = {
            cohort: self.seen.get(cohort, Moments()) + Moments.of(values_n[cohort_n == cohort])
            for cohort in set(cohort_n.tolist())
        }
        return replace(self, seen={**self.seen, **new})

    def after(self, batch: Batch, *, of_rewards: bool) -> CohortStatistics:
        """The statistics after the batch. If they are of rewards, those of filtered rollouts are part of them."""
        seen = self
        if of_rewards and batch.filtered_rewards:
            cohorts, rewards = zip(*batch.filtered_rewards, strict=True)
            seen = self.with_seen(torch.tensor(rewards, dtype=torch.float64), torch.tensor(cohorts))
        return replace(seen, complete=batch.complete_cohorts)

    def state_dict(self) -> dict[str, Any]:
        moments = {"seen": self.seen, "references": self.references, "initial": {0: self.initial}}
        plain = {name: {key: (m.count, m.mean, m.squares) for key, m in of.items()} for name, of in moments.items()}
        return {**plain, "complete": self.complete}

    @staticmethod
    def from_state_dict(state: Mapping[str, Any]) -> CohortStatistics:
        seen, references, initial = (
            {int(key): Moments(*values) for key, values in state[name].items()}
            for name in ("seen", "references", "initial")
        )
        complete = state.get("complete", max(seen, default=0))  # sortedrl 0.2 did not save it
        return CohortStatistics(seen, references, initial[0], complete)


def normalized(
    values_n: Tensor, cohort_n: Tensor, advantage_baseline: AdvantageBaseline, statistics: CohortStatistics
) -> tuple[Tensor, CohortStatistics]:
    """The values, centered and scaled, and the updated statistics.

    - `previous_cohorts`: by the reference of the value's cohort, a constant over that cohort.
    - `cohort_so_far`: by all values of the cohort up to and including these.
    - `batch`: by these values alone.
    """
    cohorts = sorted(set(cohort_n.tolist()))
    after = statistics.with_references(cohorts).with_seen(values_n, cohort_n)
    if advantage_baseline == "batch":
        batch = Moments.of(values_n)
        return (values_n - batch.mean) / batch.std, after
    out_n = torch.empty_like(values_n)
    for cohort in cohorts:
        members_n = cohort_n == cohort
        against = after.reference(cohort) if advantage_baseline == "previous_cohorts" else after.seen[cohort]
        out_n[members_n] = (values_n[members_n] - against.mean) / against.std
    if advantage_baseline == "previous_cohorts":
        out_n = out_n.clamp(-MOST_DEVIATIONS, MOST_DEVIATIONS)
    return out_n, after


def group_indices(keys: Sequence[Hashable]) -> Tensor:
    """The index of each rollout's group, `group_b`, from keys that the rollouts of a group share."""
    index: dict[Hashable, int] = {}
    return torch.tensor([index.setdefault(key, len(index)) for key in keys], dtype=torch.long)


def _group_sums(values_b: Tensor, group_b: Tensor) -> Tensor:
    """The sum over each rollout's group."""
    sums = torch.zeros(int(group_b.max()) + 1, dtype=values_b.dtype).index_add_(0, group_b, values_b)
    return sums[group_b]


def centered_on_group(rewards_b: Tensor, group_b: Tensor) -> Tensor:
    """Reward minus the mean of the group; 0 for a rollout that is alone in its group."""
    return rewards_b - _group_sums(rewards_b, group_b) / _group_sums(torch.ones_like(rewards_b), group_b)


def grpo_advantages(rewards_b: Tensor, group_b: Tensor) -> Tensor:
    """Deviation from the group's mean, in sample standard deviations of the group."""
    centered_b = centered_on_group(rewards_b, group_b)
    degrees_b = (_group_sums(torch.ones_like(rewards_b), group_b) - 1).clamp(min=1)
    return centered_b / ((_group_sums(centered_b.square(), group_b) / degrees_b).sqrt() + SMALLEST_DEVIATION)


def rloo_advantages(rewards_b: Tensor, group_b: Tensor) -> Tensor:
    """Reward minus the mean of the others in the group; 0 for a rollout that is alone in its group."""
    size_b = _group_sums(torch.ones_like(rewards_b), group_b)
    return centered_on_group(rewards_b, group_b) * size_b / (size_b - 1).clamp(min=1)


def zero_variance(rewards_b: Tensor, group_b: Tensor) -> Tensor:
    """True if a rollout's group has several members, all with the same reward."""
    size_b = _group_sums(torch.ones_like(rewards_b), group_b)
    spread_b = _group_sums(centered_on_group(rewards_b, group_b).abs(), group_b)
    return (size_b > 1) & (spread_b < 1e-6 * size_b)


def has_groups(group_b: Tensor) -> bool:
    """Whether any two rollouts are of one group."""
    return bool((group_b.bincount() > 1).any())


def require_groups(group_b: Tensor, algorithm: Algorithm) -> None:
    """Raise a ValueError if no two rollouts of the first update are of one group: there is nothing to compare."""
    if not has_groups(group_b):
        raise ValueError(
            f"{algorithm} compares the rollouts of a group, but each of the {len(group_b)} in this update is alone: "
            "set rollouts_per_prompt to 2 or more, or use reinforce++ with advantage_baseline = previous_cohorts"
        )


def reward_advantages(
    rewards_b: Tensor,
    group_b: Tensor,
    cohort_b: Tensor,
    algorithm: Algorithm,
    advantage_baseline: AdvantageBaseline,
    statistics: CohortStatistics,
) -> tuple[Tensor, CohortStatistics]:
    """One advantage per rollout for the algorithms without a critic, and the updated statistics.

    Reinforce++ with `group` subtracts the group's mean and divides by the standard deviation of such differences in
    the previous cohorts, one scale for all groups. A cohort without a predecessor has no such statistics: there a
    rollout is compared with the members of its group in the batch, like GRPO. So it is with `previous_cohorts` if
    there are no initial rewards either. A rollout that is alone in its group gets 0 then, because being alone depends
    on length. With one rollout per prompt, all are alone and keep the initial reference.
    """
    if algorithm == "grpo":
        return grpo_advantages(rewards_b, group_b), statistics
    if algorithm == "rloo":
        return rloo_advantages(rewards_b, group_b), statistics
    if advantage_baseline in ("batch", "cohort_so_far"):
        return normalized(rewards_b, cohort_b, advantage_baseline, statistics)
    compared_b = centered_on_group(rewards_b, group_b) if advantage_baseline == "group" else rewards_b
    advantages_b, after = normalized(compared_b, cohort_b, "previous_cohorts", statistics)
    has_reference = advantage_baseline == "previous_cohorts" and statistics.initial.count > 1
    if has_reference or not has_groups(group_b):
        return advantages_b, after
    by_group_b = after.without_predecessor(cohort_b)
    return torch.where(by_group_b, grpo_advantages(rewards_b, group_b), advantages_b), after


def generalized_advantages(
    rewards_bt: Tensor, values_bt: Tensor, mask_bt: Tensor, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """GAE: advantages and returns per token, 0 outside the mask.

    `values_bt` is the value of the state before each token. Only tokens sampled by the policy count as time steps.
    The value after the last one is 0, also for a truncated rollout: its reward is final.
    """
    advantages_bt = torch.zeros_like(values_bt)
    next_value_b = torch.zeros_like(values_bt[:, 0])
    next_advantage_b = torch.zeros_like(next_value_b)
    for t in reversed(range(values_bt.shape[1])):
        surprise_b = rewards_bt[:, t] + gamma * next_value_b - values_bt[:, t]
        advantage_b = surprise_b + gamma * gae_lambda * next_advantage_b
        sampled_b = mask_bt[:, t]
        next_advantage_b = torch.where(sampled_b, advantage_b, next_advantage_b)
        next_value_b = torch.where(sampled_b, values_bt[:, t], next_value_b)
        advantages_bt[:, t] = advantage_b * sampled_b
    return advantages_bt, (advantages_bt + values_bt) * mask_bt


def explained_variance(values_n: Tensor, returns_n: Tensor) -> float:
    """1: the critic predicts every return; 0: no better than their mean. 0 if returns do not vary."""
    spread = returns_n.var(correction=0)
    if spread < 1e-12:
        return 0.0
    return float(1.0 - (returns_n - values_n).var(correction=0) / spread)
