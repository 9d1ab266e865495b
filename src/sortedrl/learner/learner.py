"""The learner: one update from a batch of scored rollouts.

    rollouts -> rewards -> advantages -> micro-batches -> gradients -> optimizer -> weights()

    learner.step(batch)       # of the controller

Rollouts that are certain to be in the coming update can be passed to `accumulate` earlier, in any parts: the controller
does this with `Controller(..., stream_to=learner.accumulate)`.

Invariants:
- the old policy is the sampling policy, token by token; it is never replaced by recomputed log-probabilities;
- neither padding, the split into micro-batches nor streaming changes the gradient;
- an update has the gradient of exactly the rollouts that it is made of: what was accumulated for another batch, or with
  advantages that later rollouts changed, is dropped and computed again;
- a `step` that fails before its optimizer step has no effect and can be repeated;
- `state_dict` holds everything that the next update depends on, except the initial model and the settings. The gradient
  so far is not part of it.
"""

import contextlib
import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sortedrl.core.batch import Batch
from sortedrl.core.rollout import Rollout
from sortedrl.learner.advantages import (
    CohortStatistics,
    Moments,
    explained_variance,
    generalized_advantages,
    group_indices,
    normalized,
    require_groups,
    reward_advantages,
    zero_variance,
)
from sortedrl.learner.batching import UpdateBatch, balanced_parts, overhead_tokens, sorted_micro_batches, update_batch
from sortedrl.learner.losses import effective_sample_fraction, kl_k3, loss_normalizer, policy_loss, token_weights
from sortedrl.learner.models import (
    COMPILED_WIDTH_MULTIPLE,
    TokenScorer,
    ValueModel,
    avoid_plans_per_shape,
    cast_weights,
    checkpoint_layers,
    checksum,
    compile_layers,
    copy_into,
    require_same_model,
    response_logprobs,
    scattered,
    trainable,
    with_adapters,
)
from sortedrl.learner.optimizer import AdamW
from sortedrl.learner.settings import LearnerSettings, require, require_streamable
from sortedrl.learner.update import Assessment, GradientCosine, Tally, UpdateSoFar, padding, summary
from sortedrl.models.merged_weights import merged_weights

_OPTIMIZERS = {"policy": "optimizer", "critic": "critic_optimizer"}  # their names in a state
_STREAMED_IN_VAIN = (
    "the gradient of streamed rollouts was computed again: later rollouts of the update changed what they train with. "
    "Streaming gains nothing then: set whole_groups, use one rollout per prompt, or leave stream_to out"
)


class Learner:
    """Owns the model and its optimizer. The model is cast, adapted and trained in place.

    With a KL term, the reference is the model as passed in. So to resume, build the learner from the initial model and
    then call `load_state_dict`.
    """

    def __init__(self, model: PreTrainedModel, settings: LearnerSettings) -> None:
        self.settings = settings
        cast_weights(model, torch.bfloat16 if settings.bf16 else torch.float32)
        model.train(False)
        self.model = model
        self.critic = ValueModel(model).eval() if settings.algorithm == "ppo" else None
        self.updates = 0
        self._normalizer_tokens = settings.normalizer_tokens
        self._statistics = CohortStatistics()
        self._so_far: UpdateSoFar | None = None
        self._is_streamed_to = False
        self._device: torch.device = model.device
        avoid_plans_per_shape(self._device)
        layers: int = model.config.get_text_config().num_hidden_layers
        self._overhead_tokens = overhead_tokens(self._device.type, layers, model.num_parameters())
        # Entered around each micro-batch of a gradient. shared_gpu.py limits the SMs there.
        self.micro_batch_scope: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        self._policy_scorer = TokenScorer(model, settings.temperature, compiled=settings.compile_layers)
        self._reference_scorer = self._frozen_scorer()
        self._adapted: Any = None
        if settings.lora_rank:
            self._adapted = with_adapters(model, settings.lora_rank).eval()
            if self.critic is not None:
                with_adapters(self.critic.trunk, settings.lora_rank).eval()
        for trained in [model] if self.critic is None else [model, self.critic.trunk]:
            if settings.gradient_checkpointing:
                checkpoint_layers(trained, settings.recompute_above_tokens)
            if settings.compile_layers:
                compile_layers(trained)
        self._trained: dict[str, tuple[nn.Module, AdamW]] = {"policy": (model, self._optimizer_of(model))}
        if self.critic is not None:
            self._trained["critic"] = (self.critic, self._optimizer_of(self.critic))
        self._optimizer = self._trained["policy"][1]
        self._gradient_cosine = GradientCosine(self._optimizer.parameters) if settings.gradient_cosine else None

    def _optimizer_of(self, trained: nn.Module) -> AdamW:
        weights = list(trainable(trained).values())
        return AdamW(weights, self.settings.weight_decay, compiled=self.settings.compile_layers)

    def _frozen_scorer(self) -> TokenScorer | None:
        """The reference of the KL term. LoRA needs no copy: the reference is the model without its adapters."""
        if not self.settings.kl_coefficient:
            return None
        if self.settings.lora_rank:
            return self._policy_scorer
        frozen = copy.deepcopy(self.model).requires_grad_(False)
        return TokenScorer(frozen, self.settings.temperature, compiled=self.settings.compile_layers)

    def set_initial_rewards(self, rewards: Sequence[float]) -> None:
        """Rewards of the initial policy, such as those of an evaluation before the first update.

        They give the scale of rewards before the first batch, which holds the shortest rollouts. For a cohort without
        a predecessor, `previous_cohorts` uses their mean and standard deviation. A critic starts at their mean, and its
        advantages are divided by their standard deviation.
        """
        require(self.updates == 0, "initial rewards", len(rewards), f"{self.updates} updates were already made")
        finite = [reward for reward in rewards if math.isfinite(reward)]
        initial = Moments.of(torch.tensor(finite, dtype=torch.float64))
        if self.critic is not None:
            nn.init.constant_(self.critic.head.bias, initial.mean)
            initial = replace(initial, mean=0.0)
        self._statistics = replace(self._statistics, initial=initial)

    def step(self, batch: Batch) -> dict[str, float]:
        """One update; returns metrics by name. Only rollouts that were not accumulated yet need a gradient."""
        require(len(batch) > 0, "rollouts", len(batch), "an update needs at least one rollout")
        try:
            if self._so_far is not None and not self._so_far.is_part_of(batch):
                self._drop_gradient()
            so_far = self._add(batch.rollouts, batch.version)
            found = self._assess(so_far)
            if self.settings.steps_per_update == 1 and not so_far.agrees_with(found):
                if so_far.streamed:  # shown once
                    warnings.warn(_STREAMED_IN_VAIN, RuntimeWarning, stacklevel=2)
                self._drop_gradient()
                so_far = self._add(batch.rollouts, batch.version)
            return self._update(so_far, found, batch)
        finally:
            self._drop_gradient()

    def accumulate(self, rollouts: Sequence[Rollout], version: int) -> None:
        """Add the gradient of rollouts that are certain to be in the coming update, whole groups at a time.

        An error drops the gradient so far. The weights do not change before `step`.
        """
        require_streamable(self.settings)
        self._is_streamed_to = True
        if self._so_far is not None and self._so_far.version != version:
            self._drop_gradient()
        self._add(rollouts, version).streamed += len(rollouts)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's weights under their Hugging Face names, with LoRA merged in and tied weights under both names.

        Unmerged weights are the learner's own tensors: use them before the next step.
        """
        return merged_weights(self.model)

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
            "initial_model": self._initial_model,
            "normalizer_tokens": self._normalizer_tokens,
            "statistics": self._statistics.state_dict(),
        }
        for part, (module, optimizer) in self._trained.items():
            state[part] = {name: weight.detach() for name, weight in trainable(module).items()}
            state[_OPTIMIZERS[part]] = optimizer.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, in a learner built from the same initial model with the same settings."""
        require_same_model(str(self.model.name_or_path), self._initial_model, state["initial_model"])
        self._drop_gradient()
        for part, (module, optimizer) in self._trained.items():
            copy_into(trainable(module), state[part], part)
            optimizer.load_state_dict(state[_OPTIMIZERS[part]])
        self._statistics = CohortStatistics.from_state_dict(state["statistics"])
        self._normalizer_tokens = state["normalizer_tokens"]  # the constant that the optimizer has seen
        self.updates = int(state["updates"])

    @cached_property
    def _initial_model(self) -> dict[str, str]:
        """With a checksum of the weights that no state holds: the base model of LoRA, the reference of the KL term."""
        models = [self.model] if self._reference_scorer is None else [self.model, self._reference_scorer.model]
        frozen = (weight for model in models for weight in model.parameters() if not weight.requires_grad)
        return {"dtype": "bfloat16" if self.settings.bf16 else "float32", "frozen": checksum(frozen)}

    def _drop_gradient(self) -> None:
        """Forget the rollouts that were accumulated and their gradient."""
        self._so_far = None
        for _, optimizer in self._trained.values():
            optimizer.forget_gradients()

    def _add(self, rollouts: Sequence[Rollout], version: int) -> UpdateSoFar:
        """The update so far with these rollouts and, unless that needs the whole update, with their gradient."""
        known = set(self._so_far.rollouts) if self._so_far is not None else set()
        new = [rollout for rollout in rollouts if rollout not in known]
        if self._so_far is not None and not new:
            return self._so_far
        try:
            batch = self._with_critic(new, update_batch(new, version))
            so_far = self._so_far.with_more(new, batch) if self._so_far else UpdateSoFar.of(version, new, batch)
            self._so_far = so_far
            if self.settings.steps_per_update == 1:
                rows = so_far.train_with(self._assess(so_far), so_far.rows_of(new))
                self._add_gradient(so_far.batch.select(rows), so_far.tally)
            return so_far
        except BaseException:
            self._drop_gradient()
            raise

    def _assess(self, so_far: UpdateSoFar) -> Assessment:
        rollouts, batch = so_far.rollouts, so_far.batch
        rewards_b, truncated_b = self._rewards(rollouts)
        group_b = group_indices([rollout.group for rollout in rollouts])
        cohort_b = torch.tensor([rollout.cohort for rollout in rollouts])
        flat_b = zero_variance(rewards_b, group_b)
        trains_b = self._may_train(batch, truncated_b)
        baseline = self.settings.resolved_advantage_baseline
        if self.critic is None:
            advantages_b, statistics = reward_advantages(
                rewards_b, group_b, cohort_b, self.settings.algorithm, baseline, self._statistics
            )
            advantages_br = advantages_b.float()[:, None] * batch.mask_br
        else:
            mask_br = batch.mask_br & trains_b[:, None]
            cohort_n = cohort_b[:, None].expand_as(mask_br)[mask_br]
            gae_n, statistics = normalized(batch.gae_br[mask_br], cohort_n, baseline, self._statistics)
            advantages_br = scattered(gae_n, mask_br)
        metrics = {
            "rollouts": float(len(batch)),
            "rollouts_trained": float(trains_b.sum()),
            "tokens_trained": float(batch.mask_br[trains_b].sum()),
            "reward_mean": rewards_b.mean().item(),
            "reward_std": rewards_b.std(correction=0).item(),
            "length_mean": batch.response_lengths_b.float().mean().item(),
            "truncated_fraction": sum(rollout.truncated for rollout in rollouts) / len(rollouts),
            "groups": float(group_b.max() + 1),
            "zero_variance_groups": float(len(set(group_b[flat_b].tolist()))),
        }
        return Assessment(advantages_br, trains_b, statistics, metrics)

    def _rewards(self, rollouts: Sequence[Rollout]) -> tuple[Tensor, Tensor]:
        """And which ones `truncated_rollouts` is about: not those that an environment scored after a limit.

        In float64: the mean of equal rewards must be that reward, or their group would have advantages.
        """
        truncated_b = torch.tensor([rollout.truncated and not rollout.has_environment for rollout in rollouts])
        rewards_b = torch.tensor([float(rollout.reward or 0.0) for rollout in rollouts], dtype=torch.float64)
        if self.settings.truncated_rollouts == "zero":
            rewards_b[truncated_b] = 0.0
        return rewards_b, truncated_b

    def _may_train(self, batch: UpdateBatch, truncated_b: Tensor) -> Tensor:
        """Which rollouts have a gradient, as far as it depends on the rollout alone."""
        has_tokens_b = batch.mask_br.any(1)
        return has_tokens_b & ~truncated_b if self.settings.truncated_rollouts == "masked" else has_tokens_b

    def _with_critic(self, rollouts: Sequence[Rollout], batch: UpdateBatch) -> UpdateBatch:
        """The batch with GAE over the values of the current critic, if there is one."""
        if self.critic is None:
            return batch
        rewards_b, truncated_b = self._rewards(rollouts)
        mask_br = batch.mask_br & self._may_train(batch, truncated_b)[:, None]
        values_br = self._per_token(batch, mask_br.any(1).nonzero()[:, 0].tolist(), self.critic)
        last_b = mask_br.shape[1] - 1 - mask_br.flip(1).int().argmax(1)
        rewards_br = torch.zeros_like(values_br).scatter_(1, last_b[:, None], rewards_b.float()[:, None])
        gae_br, returns_br = generalized_advantages(
            rewards_br, values_br, mask_br, self.settings.gamma, self.settings.gae_lambda
        )
        return replace(batch, gae_br=gae_br, returns_br=returns_br)

    def _plan(self, batch: UpdateBatch, rows: Sequence[int]) -> list[list[int]]:
        budget = self.settings.tokens_per_micro_batch
        return sorted_micro_batches(rows, batch.lengths_b.tolist(), budget, self._overhead_tokens)

    def _micro_batch(self, batch: UpdateBatch, rows: Sequence[int]) -> UpdateBatch:
        multiple = COMPILED_WIDTH_MULTIPLE if self.settings.compile_layers else 1
        return batch.select(rows, self._device, multiple)

    def _update(self, so_far: UpdateSoFar, found: Assessment, handed_out: Batch) -> dict[str, float]:
        """Optimizer steps, statistics and metrics of an update that is complete."""
        settings = self.settings
        if settings.resolved_advantage_baseline == "group" and not self.updates:  # later ones may have lost members
            require_groups(group_indices([rollout.group for rollout in so_far.rollouts]), settings.algorithm)
        rows = found.trains_b.nonzero()[:, 0].tolist()
        metrics = dict(found.metrics)
        if rows:
            batch = replace(so_far.batch, advantages_br=found.advantages_br).select(rows)
            tally = so_far.tally
            warm = min(1.0, (self.updates + 1) / max(1, settings.warmup_updates))
            if settings.steps_per_update > 1:
                self._step_by_step(batch, warm, tally)
            else:
                self._optimizer_step(batch, warm, tally)
            self.updates += 1
            metrics |= summary(tally, batch)
            ids = [so_far.rollouts[row].id for row in rows]
            metrics |= padding(batch.lengths_b.tolist(), ids, tally.computed_tokens, settings.tokens_per_micro_batch)
            if self._is_streamed_to:
                metrics["streamed_fraction"] = so_far.streamed / len(so_far.rollouts)
            if self.critic is not None:
                returns_n, gae_n = batch.returns_br[batch.mask_br], batch.gae_br[batch.mask_br]
                metrics["explained_variance"] = explained_variance(returns_n - gae_n, returns_n)
        of_rewards = self.critic is None and settings.resolved_advantage_baseline != "group"
        self._statistics = found.statistics.after(handed_out, of_rewards=of_rewards)
        return metrics

    def _step_by_step(self, batch: UpdateBatch, warm: float, tally: Tally) -> None:
        """Several optimizer steps: each of them needs a mix of all rollouts."""
        if self.settings.off_policy_correction == "decoupled":
            # A single step needs no extra pass: it computes the log-probabilities before the update anyway.
            proximal_br = self._per_token(batch, range(len(batch)), lambda part: self._policy_scorer(part)[0])
            batch = replace(batch, proximal_br=proximal_br)
        for index, rows in enumerate(balanced_parts(batch.lengths_b.tolist(), self.settings.steps_per_update)):
            part = batch.select(rows)
            self._add_gradient(part, tally, first_step=index == 0)
            self._optimizer_step(part, warm, tally)

    def _add_gradient(self, batch: UpdateBatch, tally: Tally, *, first_step: bool = True) -> None:
        """Add the gradient of these rollouts, which is not normalized yet."""
        batch = replace(batch, weights_br=token_weights(batch.mask_br, self.settings.aggregation))
        for rows in self._plan(batch, range(len(batch))):
            with self.micro_batch_scope():
                part = self._micro_batch(batch, rows)
                tally.micro_batches += 1
                tally.computed_tokens += part.tokens_bt.numel()
                self._add_micro_batch(part, tally, first_step=first_step)

    @torch.no_grad()
    def _per_token(self, batch: UpdateBatch, rows: Sequence[int], score: Callable[[UpdateBatch], Tensor]) -> Tensor:
        """What `score` gives for each trained token of these rows, by micro-batches; 0 elsewhere."""
        found_br = torch.zeros_like(batch.behavior_br)
        for part_rows in self._plan(batch, rows):
            with self.micro_batch_scope():
                part = self._micro_batch(batch, part_rows)
                found_br[part_rows, : part.mask_br.shape[1]] = score(part).cpu()
        return found_br

    def _add_micro_batch(self, batch: UpdateBatch, tally: Tally, *, first_step: bool) -> None:
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
            tally.summed_critic_loss.append(critic_loss.detach())
        gap_br = (new_br.detach() - batch.behavior_br) * mask_br
        tally.rollout_log_weight.append(gap_br.sum(1, dtype=torch.float64))
        if first_step:
            tally.gap.append(gap_br[mask_br])
            tally.staleness.append(batch.staleness_br[mask_br])
            tally.context_age.append(batch.staleness_br.amax(1, keepdim=True).expand_as(mask_br)[mask_br])
        tally.entropy.append(entropy_br[mask_br].detach())
        tally.clipped.append(policy.clipped_bt[mask_br])
        tally.weight.append(policy.weight_bt[mask_br])
        tally.summed_policy_loss.append((policy.loss_bt.detach() * batch.weights_br).sum())

    @torch.no_grad()
    def _reference_logprobs(self, batch: UpdateBatch) -> Tensor:
        assert self._reference_scorer is not None
        with self._adapted.disable_adapter() if self._adapted is not None else contextlib.nullcontext():
            return self._reference_scorer(batch)[0]

    def _optimizer_step(self, batch: UpdateBatch, warm: float, tally: Tally) -> None:
        """A step with the gradient of `batch`, which was accumulated: normalized, then clipped; skipped if it is not
        finite."""
        tokens = self._normalizer_tokens / self.settings.steps_per_update
        normalizer = loss_normalizer(batch.mask_br, self.settings.aggregation, tokens)
        ess = effective_sample_fraction(torch.cat(tally.rollout_log_weight))
        scale = math.sqrt(ess) if self.settings.scale_learning_rate_by_ess else 1.0
        learning_rate = scale * warm * self.settings.learning_rate
        tally.close_step(normalizer, ess, learning_rate)
        if self._gradient_cosine is not None:
            tally.gradient_cosines += self._gradient_cosine.with_previous()
        rates = {"policy": learning_rate, "critic": warm * self.settings.critic_learning_rate}
        norms = [self._step_of(optimizer, rates[part], normalizer) for part, (_, optimizer) in self._trained.items()]
        tally.grad_norms.append(norms[0])
        tally.critic_grad_norms += norms[1:]
        tally.skipped_steps += not all(map(math.isfinite, norms))

    def _step_of(self, optimizer: AdamW, learning_rate: float, normalizer: float) -> float:
        norm = optimizer.grad_norm() / normalizer
        if math.isfinite(norm):
            optimizer.step(learning_rate, min(1.0, self.settings.max_grad_norm / max(norm, 1e-12)) / normalizer)
        optimizer.forget_gradients()
        return norm
