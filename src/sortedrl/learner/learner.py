"""The learner: one update from a batch of scored rollouts.

    rollouts -> rewards -> advantages -> micro-batches -> gradients -> optimizer -> weights()

Invariants:
- the old policy is the sampling policy, token by token; it is never replaced by recomputed log-probabilities;
- neither padding nor the split into micro-batches changes the gradient;
- a `step` that fails before its optimizer step has no effect and can be repeated;
- `state_dict` holds everything that the next update depends on, except the initial model and the settings.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sortedrl.core.rollout import Rollout
from sortedrl.learner.advantages import (
    CohortStatistics,
    Moments,
    explained_variance,
    generalised_advantages,
    group_indices,
    normalized,
    reward_advantages,
    rewards_with_truncation,
    zero_variance,
)
from sortedrl.learner.batching import (
    UpdateBatch,
    balanced_parts,
    micro_batches,
    padded_tokens,
    sorted_micro_batches,
    update_batch,
)
from sortedrl.learner.gradient_cosine import GradientCosine
from sortedrl.learner.losses import (
    effective_sample_fraction,
    kl_k3,
    policy_loss,
    token_weights,
    within_second_moment,
)
from sortedrl.learner.models import (
    TokenScorer,
    ValueModel,
    checkpoint_layers,
    compile_layers,
    response_logprobs,
    scattered,
    with_adapters,
)
from sortedrl.learner.optimizer import AdamW
from sortedrl.learner.settings import LearnerSettings, require


@dataclass(slots=True)
class _Tally:
    """Data from an update's micro-batches for its metrics. Entries are per trained token or sums."""

    gap: list[Tensor] = field(default_factory=list)  # new - behavior log-probability before any step
    staleness: list[Tensor] = field(default_factory=list)
    entropy: list[Tensor] = field(default_factory=list)
    clipped: list[Tensor] = field(default_factory=list)
    weight: list[Tensor] = field(default_factory=list)
    policy_loss: list[Tensor] = field(default_factory=list)
    kl_reference: list[Tensor] = field(default_factory=list)
    critic_loss: list[Tensor] = field(default_factory=list)
    rollout_log_weight: list[Tensor] = field(default_factory=list)  # of the current step: new / behavior, untruncated
    ess_rollouts: list[float] = field(default_factory=list)  # one per step
    learning_rates: list[float] = field(default_factory=list)
    gradient_cosines: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    critic_grad_norms: list[float] = field(default_factory=list)
    micro_batches: int = 0
    skipped_steps: int = 0


class Learner:
    """Owns the model and its optimizer. The model is cast, adapted and trained in place.

    With a KL term, the reference is the model as passed in. So to resume, build the learner from the initial model and
    then call `load_state_dict`.
    """

    def __init__(self, model: PreTrainedModel, settings: LearnerSettings) -> None:
        self.settings = settings
        nn.Module.to(model, torch.bfloat16 if settings.bf16 else torch.float32).train(False)
        self.model = model
        self.critic = ValueModel(model).eval() if settings.algorithm == "ppo" else None
        self.updates = 0
        self._normalizer_tokens = settings.normalizer_tokens
        self._statistics = CohortStatistics()
        self._device: torch.device = model.device
        self._policy_scorer = TokenScorer(model, settings.temperature)
        self._reference_scorer = self._frozen_scorer()
        self._adapted: Any = None
        if settings.lora_rank:
            self._adapted = with_adapters(model, settings.lora_rank).eval()
            if self.critic is not None:
                with_adapters(self.critic.trunk, settings.lora_rank).eval()
        for module in (model, self.critic.trunk if self.critic is not None else None):
            if module is not None and settings.gradient_checkpointing:
                checkpoint_layers(module, settings.recompute_above_tokens)
            if module is not None and settings.compile_layers:
                compile_layers(module)
        self._optimizer = AdamW(list(_trainable(model).values()), settings.weight_decay)
        self._critic_optimizer = (
            AdamW(list(_trainable(self.critic).values()), settings.weight_decay) if self.critic is not None else None
        )
        self._gradient_cosine = GradientCosine(self._optimizer.parameters) if settings.gradient_cosine else None

    def _frozen_scorer(self) -> TokenScorer | None:
        """The reference of the KL term. LoRA needs no copy: the reference is the model without its adapters."""
        if not self.settings.kl_coefficient:
            return None
        if self.settings.lora_rank:
            return self._policy_scorer
        return TokenScorer(copy.deepcopy(self.model).requires_grad_(False), self.settings.temperature)

    def set_initial_rewards(self, rewards: Sequence[float]) -> None:
        """Rewards of the initial policy, such as those of an evaluation before the first update.

        They give the scale of rewards before the first batch, which holds the shortest rollouts. For a cohort without
        a predecessor, `previous_cohorts` uses their mean and standard deviation. A critic starts at their mean, and its
        advantages are divided by their standard deviation.
        """
        require(self.updates == 0, "initial rewards", len(rewards), f"{self.updates} updates were already made")
        initial = Moments.of(torch.tensor([reward for reward in rewards if math.isfinite(reward)]))
        if self.critic is not None:
            nn.init.constant_(self.critic.head.bias, initial.mean)
            initial = replace(initial, mean=0.0)
        self._statistics = replace(self._statistics, initial=initial)

    def step(self, rollouts: Sequence[Rollout], version: int, harvest_index: int = 0) -> dict[str, float]:
        """One update. `version` is that of the latest published weights; returns metrics by name.

        `harvest_index` is the update's position within its cohort: the quality of a critic may depend on length.
        """
        require(len(rollouts) > 0, "rollouts", len(rollouts), "an update needs at least one rollout")
        whole = update_batch(rollouts, version)
        rewards_b, truncated_b = self._rewards(rollouts, whole)
        group_b = group_indices([rollout.group for rollout in rollouts])
        cohort_b = torch.tensor([rollout.cohort for rollout in rollouts])
        flat_b = zero_variance(rewards_b, group_b)

        trains_b = whole.mask_br.any(1)
        if self.settings.truncated_rollouts == "masked":
            trains_b &= ~truncated_b
        if self.settings.drop_zero_variance_groups:
            trains_b &= ~flat_b
        rows = [row for row, trains in enumerate(trains_b.tolist()) if trains]
        batch = whole.select(rows)
        metrics = {
            "rollouts": float(len(whole)),
            "rollouts_trained": float(len(batch)),
            "tokens_trained": float(batch.mask_br.sum()),
            "reward_mean": rewards_b.mean().item(),
            "reward_std": rewards_b.std(correction=0).item(),
            "length_mean": whole.response_lengths_b.float().mean().item(),
            "truncated_fraction": truncated_b.float().mean().item(),
            "groups": float(group_b.max() + 1),
            "zero_variance_groups": float(len(set(group_b[flat_b].tolist()))),
        }
        if self.critic is None:
            advantages_b, statistics = reward_advantages(
                rewards_b,
                group_b,
                cohort_b,
                self.settings.algorithm,
                self.settings.resolved_advantage_baseline,
                self._statistics,
            )
            batch = replace(batch, advantages_br=advantages_b[rows][:, None] * batch.mask_br)
        elif len(batch):
            batch, statistics, quality = self._critic_advantages(batch, rewards_b[rows], cohort_b[rows])
            metrics["explained_variance"] = quality
            metrics[f"explained_variance/harvest_{harvest_index}"] = quality
        else:
            statistics = self._statistics
        if len(batch):
            load_order = sorted(range(len(batch)), key=lambda row: rollouts[rows[row]].id)
            metrics |= self._padding(batch, load_order)
            metrics |= self._train(batch)
        self._statistics = statistics
        return metrics

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's weights under their Hugging Face names, with LoRA merged in and tied weights under both names.

        Unmerged weights are the learner's own tensors: use them before the next step.
        """
        adapted = {name: module for name, module in self.model.named_modules() if hasattr(module, "get_delta_weight")}
        for name, tensor in self.model.state_dict().items():
            if ".lora_" in name:
                continue
            owner, _, leaf = name.rpartition(".")
            owner = owner.removesuffix(".base_layer")
            if owner in adapted and leaf == "weight":
                layer = adapted[owner]
                delta = layer.get_delta_weight(layer.active_adapters[0]).detach()
                tensor = (tensor.float() + delta.float()).to(tensor.dtype)
            yield f"{owner}.{leaf}", tensor

    def save_adapter(self, folder: Path, base_model: str) -> None:
        """The LoRA adapter in peft format, to be loaded on top of `base_model`."""
        config = self._adapted.peft_config[self._adapted.active_adapter]
        config.base_model_name_or_path = base_model
        self._adapted.save_pretrained(folder, save_embedding_layers=False)  # "auto" may ask the hub

    def logprobs_of(self, context: Sequence[int], response: Sequence[int]) -> list[float]:
        """The log-probability of each response token under the current policy, at temperature 1."""
        return response_logprobs(self.model, context, response)

    def state_dict(self) -> dict[str, Any]:
        """Plain containers with the learner's own tensors: save them before the next step."""
        state: dict[str, Any] = {
            "updates": self.updates,
            "normalizer_tokens": self._normalizer_tokens,
            "statistics": self._statistics.state_dict(),
            "policy": {name: weight.detach() for name, weight in _trainable(self.model).items()},
            "optimizer": self._optimizer.state_dict(),
        }
        if self.critic is not None and self._critic_optimizer is not None:
            state["critic"] = {name: weight.detach() for name, weight in _trainable(self.critic).items()}
            state["critic_optimizer"] = self._critic_optimizer.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, in a learner built from the same initial model with the same settings."""
        _copy_into(_trainable(self.model), state["policy"], "policy")
        self._optimizer.load_state_dict(state["optimizer"])
        if self.critic is not None and self._critic_optimizer is not None:
            _copy_into(_trainable(self.critic), state["critic"], "critic")
            self._critic_optimizer.load_state_dict(state["critic_optimizer"])
        self._statistics = CohortStatistics.from_state_dict(state["statistics"])
        # A run goes on with the constant that its optimizer has seen. Older versions saved None at update 0.
        self._normalizer_tokens = state["normalizer_tokens"] or self.settings.normalizer_tokens
        self.updates = int(state["updates"])

    def _rewards(self, rollouts: Sequence[Rollout], batch: UpdateBatch) -> tuple[Tensor, Tensor]:
        truncated_b = torch.tensor([rollout.truncated for rollout in rollouts])
        rewards_b = rewards_with_truncation(
            torch.tensor([float(rollout.reward or 0.0) for rollout in rollouts]),
            batch.mask_br.sum(1),  # max_response_tokens counts what the policy sampled
            truncated_b,
            self.settings.truncated_rollouts,
            self.settings.max_response_tokens,
            self.settings.soft_penalty_tokens,
        )
        return rewards_b, truncated_b

    def _critic_advantages(
        self, batch: UpdateBatch, rewards_b: Tensor, cohort_b: Tensor
    ) -> tuple[UpdateBatch, CohortStatistics, float]:
        """Values under the current critic, GAE over them, and the explained variance of the returns."""
        assert self.critic is not None
        mask_br = batch.mask_br
        values_br = torch.zeros_like(batch.behavior_br)
        with torch.no_grad():
            for rows in self._plan(batch, range(len(batch))):
                part = batch.select(rows, self._device)
                values_br[rows, : part.mask_br.shape[1]] = self.critic(part).cpu()
        last_b = mask_br.shape[1] - 1 - mask_br.flip(1).int().argmax(1)
        rewards_br = torch.zeros_like(values_br).scatter_(1, last_b[:, None], rewards_b[:, None])
        advantages_br, returns_br = generalised_advantages(
            rewards_br, values_br, mask_br, self.settings.gamma, self.settings.gae_lambda
        )
        quality = explained_variance(values_br[mask_br], returns_br[mask_br])
        normalized_n, statistics = normalized(
            advantages_br[mask_br],
            cohort_b[:, None].expand_as(mask_br)[mask_br],
            self.settings.resolved_advantage_baseline,
            self._statistics,
        )
        advantages_br = scattered(normalized_n, mask_br)
        return replace(batch, advantages_br=advantages_br, returns_br=returns_br), statistics, quality

    def _plan(self, batch: UpdateBatch, rows: Sequence[int]) -> list[list[int]]:
        return sorted_micro_batches(rows, batch.lengths_b.tolist(), self.settings.tokens_per_micro_batch)

    def _padding(self, batch: UpdateBatch, load_order: Sequence[int]) -> dict[str, float]:
        """`padding_fraction`: the fraction of computed tokens that are padding. `padding_saved`: the fraction of tokens
        saved compared with micro-batches of the same limit in the order in which the prompts were loaded."""
        lengths = batch.lengths_b.tolist()
        computed = padded_tokens(self._plan(batch, range(len(batch))), lengths)
        unsorted = padded_tokens(micro_batches(load_order, lengths, self.settings.tokens_per_micro_batch), lengths)
        return {"padding_fraction": 1.0 - sum(lengths) / computed, "padding_saved": 1.0 - computed / unsorted}

    def _train(self, batch: UpdateBatch) -> dict[str, float]:
        if self.settings.off_policy_correction == "decoupled" and self.settings.steps_per_update > 1:
            batch = replace(batch, proximal_br=self._proximal(batch))
        metrics: dict[str, float] = {}
        if self.settings.off_policy_correction == "m2po":
            batch, metrics["m2po_dropped_fraction"] = self._within_second_moment(batch)
        parts = balanced_parts(batch.lengths_b.tolist(), self.settings.steps_per_update)
        tally = _Tally()
        warm = min(1.0, (self.updates + 1) / max(1, self.settings.warmup_updates))
        for index, rows in enumerate(parts):
            part = batch.select(rows)
            normalizer_tokens = self._normalizer_tokens / self.settings.steps_per_update
            weights_br = token_weights(part.mask_br, self.settings.aggregation, normalizer_tokens)
            part = replace(part, weights_br=weights_br)
            self._forget_gradients()  # of an update that failed halfway
            for group in self._plan(part, range(len(part))):
                self._accumulate(part.select(group, self._device), first_step=index == 0, tally=tally)
            self._apply(warm, tally)
        self.updates += 1
        return metrics | _summary(tally, batch)

    def _forget_gradients(self) -> None:
        self._optimizer.forget_gradients()
        if self._critic_optimizer is not None:
            self._critic_optimizer.forget_gradients()

    @torch.no_grad()
    def _proximal(self, batch: UpdateBatch) -> Tensor:
        """Log-probabilities under the weights before the update. A single step needs no extra pass: it computes them
        anyway."""
        proximal_br = torch.zeros_like(batch.behavior_br)
        for rows in self._plan(batch, range(len(batch))):
            part = batch.select(rows, self._device)
            proximal_br[rows, : part.mask_br.shape[1]] = self._policy_scorer(part)[0].cpu()
        return proximal_br

    def _within_second_moment(self, batch: UpdateBatch) -> tuple[UpdateBatch, float]:
        """The batch without the policy gradient of the tokens that M2PO drops, and their fraction.

        The limit is one of the whole update, so this needs a pass before the first gradient.
        """
        log_ratio_n = (self._proximal(batch) - batch.behavior_br)[batch.mask_br]
        kept_n = within_second_moment(log_ratio_n, self.settings.second_moment_limit)
        kept_br = scattered(kept_n.to(batch.advantages_br.dtype), batch.mask_br)
        return replace(batch, advantages_br=batch.advantages_br * kept_br), 1.0 - kept_n.float().mean().item()

    def _accumulate(self, batch: UpdateBatch, first_step: bool, tally: _Tally) -> None:
        """Add the gradient of a micro-batch to those of the policy and the critic."""
        settings, mask_br = self.settings, batch.mask_br
        new_br, entropy_br = self._policy_scorer(batch, entropy_gradient=settings.entropy_coefficient > 0)
        policy = policy_loss(
            new_br,
            batch.behavior_br,
            batch.proximal_br if settings.steps_per_update > 1 else new_br.detach(),
            batch.advantages_br,
            mask_br,
            off_policy_correction=settings.off_policy_correction,
            level=settings.ratio_level,
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            cap=settings.importance_cap,
        )
        loss_br = policy.loss_bt
        if settings.entropy_coefficient:
            loss_br = loss_br - settings.entropy_coefficient * entropy_br
        if self._reference_scorer is not None:
            kl_br = kl_k3(new_br, self._reference_logprobs(batch)) * mask_br
            loss_br = loss_br + settings.kl_coefficient * kl_br
            tally.kl_reference.append(kl_br[mask_br].detach())
        (loss_br * batch.weights_br).sum().backward()  # type: ignore[no-untyped-call]

        if self.critic is not None:
            critic_loss = 0.5 * ((self.critic(batch) - batch.returns_br).square() * batch.weights_br).sum()
            critic_loss.backward()
            tally.critic_loss.append(critic_loss.detach())
        gap_br = (new_br.detach() - batch.behavior_br) * mask_br
        tally.rollout_log_weight.append(gap_br.sum(1, dtype=torch.float64))
        if first_step:
            tally.gap.append(gap_br[mask_br])
            tally.staleness.append(batch.staleness_br[mask_br])
        tally.entropy.append(entropy_br[mask_br].detach())
        tally.clipped.append(policy.clipped_bt[mask_br])
        tally.weight.append(policy.weight_bt[mask_br])
        tally.policy_loss.append((policy.loss_bt.detach() * batch.weights_br).sum())
        tally.micro_batches += 1

    @torch.no_grad()
    def _reference_logprobs(self, batch: UpdateBatch) -> Tensor:
        assert self._reference_scorer is not None
        with self._adapted.disable_adapter() if self._adapted is not None else contextlib.nullcontext():
            return self._reference_scorer(batch)[0]

    def _apply(self, warm: float, tally: _Tally) -> None:
        """An optimizer step with the accumulated, clipped gradients; skipped if they are not finite."""
        ess = effective_sample_fraction(torch.cat(tally.rollout_log_weight))
        tally.ess_rollouts.append(ess)
        tally.rollout_log_weight.clear()
        scale = math.sqrt(ess) if self.settings.scale_learning_rate_by_ess else 1.0
        tally.learning_rates.append(scale * warm * self.settings.learning_rate)
        if self._gradient_cosine is not None:
            tally.gradient_cosines += self._gradient_cosine.with_previous()
        norm = self._step_of(self._optimizer, tally.learning_rates[-1])
        tally.grad_norms.append(norm)
        tally.skipped_steps += not math.isfinite(norm)
        if self._critic_optimizer is not None:
            critic_norm = self._step_of(self._critic_optimizer, warm * self.settings.critic_learning_rate)
            tally.critic_grad_norms.append(critic_norm)

    def _step_of(self, optimizer: AdamW, learning_rate: float) -> float:
        norm = optimizer.grad_norm()
        if math.isfinite(norm):
            optimizer.step(learning_rate, min(1.0, self.settings.max_grad_norm / max(norm, 1e-12)))
        optimizer.forget_gradients()
        return norm


def _trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: weight for name, weight in module.named_parameters() if weight.requires_grad}


@torch.no_grad()
def _copy_into(own: Mapping[str, Tensor], saved: Mapping[str, Tensor], what: str) -> None:
    differing = sorted(own.keys() ^ saved.keys())
    require(
        not differing,
        f"{what} state",
        f"{len(saved)} tensors",
        f"this model has {len(own)}, and {len(differing)} names differ, first {differing[:1]}: resume with "
        "the model and the lora_rank that the state was saved with",
    )
    for name, tensor in own.items():
        require(
            tensor.shape == saved[name].shape,
            f"{what} state of {name}",
            tuple(saved[name].shape),
            f"this model has {tuple(tensor.shape)}: resume with the model that the state was saved with",
        )
        tensor.copy_(saved[name])


def _summary(tally: _Tally, batch: UpdateBatch) -> dict[str, float]:
    advantages_n = batch.advantages_br[batch.mask_br]
    metrics = {
        "policy_loss": torch.stack(tally.policy_loss).sum().item(),
        "advantage_mean": advantages_n.mean().item(),
        "advantage_std": advantages_n.std(correction=0).item(),
        "entropy": torch.cat(tally.entropy).mean().item(),
        "clipped_fraction": torch.cat(tally.clipped).float().mean().item(),
        "importance_weight_mean": torch.cat(tally.weight).mean().item(),
        "ess_token_fraction": effective_sample_fraction(torch.cat(tally.gap)),
        "ess_rollout_fraction": tally.ess_rollouts[0],
        "learning_rate": min(tally.learning_rates),
        "grad_norm": max(tally.grad_norms),
        "skipped_steps": float(tally.skipped_steps),
        "micro_batches": float(tally.micro_batches),
        "staleness_mean": batch.staleness_br[batch.mask_br].float().mean().item(),
        "staleness_max": float(batch.staleness_br[batch.mask_br].max()),
    }
    if tally.gradient_cosines:
        metrics["gradient_cosine"] = fmean(tally.gradient_cosines)
    if tally.kl_reference:
        metrics["kl_reference"] = torch.cat(tally.kl_reference).mean().item()
    if tally.critic_loss:
        metrics["critic_loss"] = torch.stack(tally.critic_loss).sum().item()
        metrics["critic_grad_norm"] = max(tally.critic_grad_norms)
    return metrics | mismatch(torch.cat(tally.gap), torch.cat(tally.staleness))


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
