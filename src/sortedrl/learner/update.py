"""The coming update: the part whose gradient was added up already, what its rollouts train with, and its metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import torch
from torch import Tensor, nn

from sortedrl.core.batch import Batch
from sortedrl.core.rollout import Rollout
from sortedrl.learner.advantages import CohortStatistics
from sortedrl.learner.batching import UpdateBatch, micro_batches, padded_tokens
from sortedrl.learner.losses import effective_sample_fraction, kl_k3

CONTEXT_AGES = (0, 1, 2, 4, 8)  # first age of each bin of `mismatch_by_age`; the last one is open

# Advantages differ by less if the same values were summed in another order.
ROUNDING = 1e-5


@dataclass(slots=True)
class Tally:
    """Data from an update's micro-batches. Lists have one tensor per micro-batch: its trained tokens, or a sum."""

    gap: list[Tensor] = field(default_factory=list)  # new - behavior log-probability before any step
    staleness: list[Tensor] = field(default_factory=list)
    context_age: list[Tensor] = field(default_factory=list)  # staleness of the oldest token of the same rollout
    entropy: list[Tensor] = field(default_factory=list)
    clipped: list[Tensor] = field(default_factory=list)
    weight: list[Tensor] = field(default_factory=list)
    kl_reference: list[Tensor] = field(default_factory=list)
    summed_policy_loss: list[Tensor] = field(default_factory=list)  # since the last optimizer step, like the next
    summed_critic_loss: list[Tensor] = field(default_factory=list)
    rollout_log_weight: list[Tensor] = field(default_factory=list)  # since the last step: new / behavior, untruncated
    policy_losses: list[float] = field(default_factory=list)  # one per optimizer step, like the next
    critic_losses: list[float] = field(default_factory=list)
    ess_rollouts: list[float] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    gradient_cosines: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    critic_grad_norms: list[float] = field(default_factory=list)
    micro_batches: int = 0
    computed_tokens: int = 0  # including padding
    skipped_steps: int = 0  # the gradient of the policy or the critic was not finite

    def close_step(self, normalizer: float, ess_rollouts: float, learning_rate: float) -> None:
        """The micro-batches since the last call belong to one optimizer step, with this normalizer."""
        self.ess_rollouts.append(ess_rollouts)
        self.learning_rates.append(learning_rate)
        self.rollout_log_weight.clear()
        self.policy_losses.append(torch.stack(self.summed_policy_loss).sum().item() / normalizer)
        self.summed_policy_loss.clear()
        if self.summed_critic_loss:
            self.critic_losses.append(torch.stack(self.summed_critic_loss).sum().item() / normalizer)
            self.summed_critic_loss.clear()


@dataclass(frozen=True, slots=True)
class Assessment:
    """What rollouts train with, as if they were the whole update: their advantages, which of them have a gradient, and
    the statistics after the update."""

    advantages_br: Tensor
    trains_b: Tensor
    statistics: CohortStatistics
    metrics: dict[str, float]


@dataclass(slots=True)
class UpdateSoFar:
    """Rows of all tensors are in the order of `rollouts`: shortest first, as in a batch of the controller. So the order
    in which rollouts arrive does not change a sum over them."""

    version: int
    rollouts: tuple[Rollout, ...]
    batch: UpdateBatch  # its advantages are those that the gradient was computed with
    trains_b: Tensor
    tally: Tally = field(default_factory=Tally)
    streamed: int = 0  # rollouts, before the batch was complete

    @staticmethod
    def of(version: int, rollouts: Sequence[Rollout], batch: UpdateBatch) -> UpdateSoFar:
        nothing = UpdateSoFar(version, (), batch.select([]), torch.zeros(0, dtype=torch.bool))
        return nothing.with_more(rollouts, batch)

    def with_more(self, rollouts: Sequence[Rollout], batch: UpdateBatch) -> UpdateSoFar:
        """With rollouts whose gradient is still to be computed; row i of `batch` is rollout i."""
        together = (*self.rollouts, *rollouts)
        order = sorted(range(len(together)), key=lambda row: (len(together[row]), together[row].id))
        return replace(
            self,
            rollouts=tuple(together[row] for row in order),
            batch=self.batch.joined(batch).select(order),
            trains_b=torch.cat((self.trains_b, torch.zeros(len(rollouts), dtype=torch.bool)))[order],
        )

    def is_part_of(self, batch: Batch) -> bool:
        return batch.version == self.version and set(self.rollouts) <= set(batch)

    def rows_of(self, rollouts: Sequence[Rollout]) -> list[int]:
        wanted = set(rollouts)
        return [row for row, rollout in enumerate(self.rollouts) if rollout in wanted]

    def train_with(self, found: Assessment, rows: Sequence[int]) -> list[int]:
        """The gradient of these rows is computed next, with what was found. Returns those that have one."""
        advantages_br, trains_b = self.batch.advantages_br.clone(), self.trains_b.clone()
        advantages_br[rows], trains_b[rows] = found.advantages_br[rows], found.trains_b[rows]
        self.batch, self.trains_b = replace(self.batch, advantages_br=advantages_br), trains_b
        return [row for row in rows if found.trains_b[row]]

    def agrees_with(self, found: Assessment) -> bool:
        """Whether the gradient so far is that of the whole update: no rollout that came later has changed what an
        earlier one trains with."""
        if not torch.equal(self.trains_b, found.trains_b):
            return False
        used_br, right_br = (b[found.trains_b] for b in (self.batch.advantages_br, found.advantages_br))
        return torch.allclose(used_br, right_br, rtol=ROUNDING, atol=ROUNDING)


# Metrics


def summary(tally: Tally, batch: UpdateBatch) -> dict[str, float]:
    """`batch`: the rollouts that were trained on."""
    advantages_n = batch.advantages_br[batch.mask_br]
    metrics = {
        "policy_loss": fmean(tally.policy_losses),
        "advantage_mean": advantages_n.mean().item(),
        "advantage_std": advantages_n.std(correction=0).item(),
        "entropy": torch.cat(tally.entropy).mean().item(),
        "clipped_fraction": torch.cat(tally.clipped).float().mean().item(),
        "importance_weight_mean": torch.cat(tally.weight).mean().item(),
        "ess_token_fraction": effective_sample_fraction(torch.cat(tally.gap)),
        "ess_rollout_fraction": tally.ess_rollouts[0],
        "learning_rate": min(tally.learning_rates),
        "grad_norm": _largest(tally.grad_norms),
        "skipped_steps": float(tally.skipped_steps),
        "micro_batches": float(tally.micro_batches),
        "staleness_mean": batch.staleness_br[batch.mask_br].float().mean().item(),
        "staleness_max": float(batch.staleness_br[batch.mask_br].max()),
    }
    if tally.gradient_cosines:
        metrics["gradient_cosine"] = fmean(tally.gradient_cosines)
    if tally.kl_reference:
        metrics["kl_reference"] = torch.cat(tally.kl_reference).mean().item()
    if tally.critic_grad_norms:
        metrics["critic_loss"] = fmean(tally.critic_losses)
        metrics["critic_grad_norm"] = _largest(tally.critic_grad_norms)
    gap_n, staleness_n = torch.cat(tally.gap), torch.cat(tally.staleness)
    return metrics | mismatch(gap_n, staleness_n) | mismatch_by_age(gap_n, staleness_n, torch.cat(tally.context_age))


def _largest(norms: list[float]) -> float:
    """NaN if one of them is: `max` would hide it behind a number."""
    return math.nan if any(map(math.isnan, norms)) else max(norms)


def padding(lengths: Sequence[int], ids: Sequence[int], computed: int, token_budget: int) -> dict[str, float]:
    """`padding_fraction`: the fraction of `computed` tokens that are padding. `padding_saved`: the fraction of tokens
    saved compared with micro-batches of the same limit in load order, which is that of the rollouts' ids."""
    load_order = sorted(range(len(ids)), key=lambda row: ids[row])
    unsorted = padded_tokens(micro_batches(load_order, lengths, token_budget), lengths)
    return {"padding_fraction": 1.0 - sum(lengths) / computed, "padding_saved": 1.0 - computed / unsorted}


def mismatch(gap_n: Tensor, staleness_n: Tensor) -> dict[str, float]:
    """How far the learner's log-probabilities are from those of the sampling policy.

    `gap_n` is learner - engine. Tokens of the learner's own version differ only because engine and learner compute
    differently: `mismatch_*`; a growing KL means that the engine has the wrong weights. For stale tokens the policy has
    changed as well: `stale_*`. Metrics without tokens are left out.
    """
    fresh_n, stale_n = gap_n[staleness_n == 0], gap_n[staleness_n > 0]
    metrics = {"mismatch_tokens": float(len(fresh_n)), "stale_fraction": len(stale_n) / max(1, len(gap_n))}
    if len(fresh_n):
        metrics |= {
            "mismatch_kl": kl_k3(torch.zeros_like(fresh_n), fresh_n).mean().item(),
            "mismatch_mean_abs": fresh_n.abs().mean().item(),
            "mismatch_max_abs": fresh_n.abs().max().item(),
        }
    if len(stale_n):
        ratio_n = stale_n.exp()
        metrics |= {
            "stale_kl": kl_k3(torch.zeros_like(stale_n), stale_n).mean().item(),
            "stale_ratio_mean": ratio_n.mean().item(),
            "stale_ratio_max": ratio_n.max().item(),
            "stale_ratio_min": ratio_n.min().item(),
        }
    return metrics


def mismatch_by_age(gap_n: Tensor, staleness_n: Tensor, context_age_n: Tensor) -> dict[str, float]:
    """The mismatch of tokens of the learner's own version, by the age of the rollout that they continue.

    A token sampled with the current weights in a rollout that started a versions ago follows tokens of age a. With an
    engine that recomputes the KV cache after a weight update, the mismatch is rounding at every age. One that reuses it
    computes this token from stale KV, and the mismatch grows with age. Empty if no rollout has stale tokens; bins
    without tokens are left out.
    """
    if not bool((context_age_n > 0).any()):
        return {}
    metrics = {}
    for first, after in zip(CONTEXT_AGES, (*CONTEXT_AGES[1:], math.inf), strict=True):
        gap_k = gap_n[(staleness_n == 0) & (context_age_n >= first) & (context_age_n < after)]
        if len(gap_k):
            metrics[f"mismatch_kl_age_{first}"] = kl_k3(torch.zeros_like(gap_k), gap_k).mean().item()
            metrics[f"mismatch_mean_abs_age_{first}"] = gap_k.abs().mean().item()
    return metrics


class GradientCosine:
    """The cosine between each gradient and the one before it. Keeps a copy of the last gradient."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._previous = [torch.zeros_like(parameter) for parameter in parameters]
        self._previous_norm = 0.0

    @torch.no_grad()
    def with_previous(self) -> list[float]:
        """The cosine, or none: for the first gradient, and for one that is zero or not finite, which is skipped."""
        gradient = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self._parameters]
        norm = math.sqrt(_product(gradient, gradient))
        if not (math.isfinite(norm) and norm > 0):
            return []
        found = [_product(self._previous, gradient) / (self._previous_norm * norm)] if self._previous_norm else []
        for kept, new in zip(self._previous, gradient, strict=True):
            kept.copy_(new)
        self._previous_norm = norm
        return found


def _product(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """The inner product over all parameters, in fp32."""
    parts = [torch.dot(a.flatten().float(), b.flatten().float()) for a, b in zip(first, second, strict=True)]
    return float(torch.stack(parts).sum())
