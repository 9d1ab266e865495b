"""Losses per token, pure functions of tensors.

There are three policies. *Behavior*: the policy that sampled a token, possibly several versions ago. *Proximal*: the
learner's weights before the update. *New*: the weights being trained. The clipped ratio is new / old;
`off_policy_correction` selects which policy is "old" and how the rest is corrected:

    ppo_clip    old = behavior: PPO-clip on the stored log-probabilities (as in the paper)
    mask        like ppo_clip, but tokens with a ratio above the cap or below its inverse do not train
    decoupled   old = proximal, weighted by min(proximal / behavior, cap): TIS, as in verl, slime and TRL
    cispo       a policy gradient weighted by min(new / behavior, cap): the weight follows each step, nothing is clipped

With one optimizer step per update, the proximal policy equals the new one, and decoupled and cispo have the same
gradient; they differ when an update takes several steps.

Suffixes: `_bt` rollouts x response tokens padded on the right, `_n` tokens selected from those, `_h` hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sortedrl.learner.settings import Aggregation, OffPolicyCorrection, RatioLevel

# exp(20) is beyond any meaningful ratio and still far from overflow.
LARGEST_LOG_RATIO = 20.0
# Maximum number of fp32 logits at a time (0.5 GiB): 880 tokens at a vocabulary of 152,000.
LOGITS_PER_CHUNK = 1 << 27


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Per token, all [rollouts, tokens]: the loss, the weight of the off-policy correction, and whether clipping took
    the token's gradient away."""

    loss_bt: Tensor
    weight_bt: Tensor
    clipped_bt: Tensor


def ratio(log_ratio_bt: Tensor, mask_bt: Tensor, level: RatioLevel) -> Tensor:
    """Token level: each token's own ratio. Sequence level: the geometric mean over the rollout's trained tokens."""
    if level == "sequence":
        tokens_b1 = mask_bt.sum(1, keepdim=True).clamp(min=1)
        log_ratio_bt = ((log_ratio_bt * mask_bt).sum(1, keepdim=True) / tokens_b1).expand_as(log_ratio_bt)
    return log_ratio_bt.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def policy_loss(
    new_bt: Tensor,
    behavior_bt: Tensor,
    proximal_bt: Tensor,
    advantages_bt: Tensor,
    mask_bt: Tensor,
    *,
    off_policy_correction: OffPolicyCorrection,
    level: RatioLevel,
    clip_low: float,
    clip_high: float,
    cap: float,
) -> PolicyLoss:
    """The clipped surrogate with off-policy correction, from log-probabilities. Only `new_bt` has a gradient.

    `proximal_bt` is used only by `decoupled`. Clipping is asymmetric, from 1 - clip_low to 1 + clip_high, and applies
    only where it lowers the objective.
    """
    if off_policy_correction == "decoupled":
        old_bt = proximal_bt
    elif off_policy_correction == "cispo":
        old_bt = new_bt.detach()
    else:
        old_bt = behavior_bt
    ratio_bt = ratio(new_bt - old_bt, mask_bt, level)
    if off_policy_correction == "ppo_clip":
        weight_bt = torch.ones_like(behavior_bt)
    elif off_policy_correction == "mask":
        weight_bt = ((ratio_bt <= cap) & (ratio_bt >= 1.0 / cap)).to(behavior_bt.dtype)
    else:
        weight_bt = ratio(old_bt - behavior_bt, mask_bt, level).clamp(max=cap)
    free_bt = ratio_bt * advantages_bt
    clipped_bt = ratio_bt.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_bt
    return PolicyLoss(
        loss_bt=-weight_bt * torch.minimum(free_bt, clipped_bt) * mask_bt,
        weight_bt=weight_bt.detach(),
        clipped_bt=(clipped_bt < free_bt).detach() & mask_bt,
    )


def effective_sample_fraction(log_weight_n: Tensor) -> float:
    """The effective sample size of importance weights as a fraction of their number: (sum w)^2 / sum w^2 / n.

    1: all weights are equal. 1 / n: one sample outweighs all others. Computed from log weights, so that no weight is
    too large or too small; a common factor cancels.
    """
    log_weight_n = log_weight_n.double()
    log_size = 2 * log_weight_n.logsumexp(0) - (2 * log_weight_n).logsumexp(0)
    return log_size.exp().item() / len(log_weight_n)


def kl_k3(new: Tensor, other: Tensor) -> Tensor:
    """A per-token estimate of KL(new || other) from tokens of `new`: never negative, low variance."""
    gap = (other - new).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return gap.expm1() - gap  # exp(gap) - 1 would round to fewer digits than a small gap has


def token_weights(mask_bt: Tensor, aggregation: Aggregation) -> Tensor:
    """The weight of each token in the summed loss, before the sum is divided by `loss_normalizer`; 0 outside the mask.

    A rollout's weights depend on that rollout alone. So its gradient can be computed before the rest of the update is
    known, and micro-batches add up to the same gradient.
    """
    if aggregation == "sequence_mean":
        return mask_bt / mask_bt.sum(1, keepdim=True).clamp(min=1)
    return mask_bt.float()


def loss_normalizer(mask_bt: Tensor, aggregation: Aggregation, normalizer_tokens: float) -> float:
    """What the summed loss of an optimizer step is divided by; `mask_bt` has all rollouts of the step.

    `constant`: normalizer_tokens, the same in every update, so that tokens in batches of short and long rollouts have
    equal weight. `token_mean`: the number of tokens. `sequence_mean`: the number of rollouts, since each rollout counts
    with its mean.
    """
    if aggregation == "constant":
        return normalizer_tokens
    if aggregation == "token_mean":
        return max(1.0, float(mask_bt.sum()))
    return max(1.0, float(mask_bt.any(1).sum()))


def token_scores(
    logits_cv: Tensor, targets_c: Tensor, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of its distribution, in fp32, at this temperature."""
    logits_cv = logits_cv.float()
    if temperature != 1.0:
        logits_cv = logits_cv / temperature
    log_total_c = logits_cv.logsumexp(-1)
    chosen_c = logits_cv.gather(-1, targets_c[:, None]).squeeze(-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        probabilities_cv = (logits_cv - log_total_c[:, None]).exp()
        entropy_c = log_total_c - (probabilities_cv * logits_cv).sum(-1)
    return chosen_c - log_total_c, entropy_c


def selected_logprobs(
    hidden_nh: Tensor,
    targets_n: Tensor,
    head: Callable[[Tensor], Tensor],
    temperature: float,
    entropy_gradient: bool,
    logits_per_chunk: int = LOGITS_PER_CHUNK,
    scores: Callable[[Tensor, Tensor, float, bool], tuple[Tensor, Tensor]] = token_scores,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of its distribution, both `_n` in fp32, at this temperature.

    `head` maps hidden states to logits. Only one chunk of logits exists at a time: the backward pass recomputes each
    chunk. The entropy has no gradient unless requested. `scores` is `token_scores` or the same, compiled.
    """

    def score(hidden_ch: Tensor, targets_c: Tensor) -> tuple[Tensor, Tensor]:
        return scores(head(hidden_ch), targets_c, temperature, entropy_gradient)

    with torch.no_grad():
        vocabulary = head(hidden_nh[:1]).shape[-1]
    chunk = max(1, logits_per_chunk // vocabulary)
    if len(targets_n) <= chunk:
        return score(hidden_nh, targets_n)
    parts = [
        checkpoint(score, hidden_ch, targets_c, use_reentrant=False, preserve_rng_state=False)
        for hidden_ch, targets_c in zip(torch.split(hidden_nh, chunk), torch.split(targets_n, chunk), strict=True)
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
