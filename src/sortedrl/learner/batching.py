"""Rollouts as padded tensors, and micro-batches with little padding.

Suffixes: `_b` one entry per rollout, `_bt` prompt and response tokens padded on the right, `_br` response tokens padded
on the right. A causal model never looks to the right, so padding there needs no attention mask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from sortedrl.core.rollout import Rollout

# Fixed cost of a micro-batch, in tokens: reading the weights, kernel launches.
OVERHEAD_TOKENS = 256
# Launching the kernels of a decoder layer, forward and backward, takes a CPU core about a millisecond. A GPU computes
# 2e11 floating-point operations in this time, and a token needs 6 per weight.
LAUNCH_OPERATIONS_PER_LAYER = 2e11
OPERATIONS_PER_WEIGHT = 6


@dataclass(frozen=True, slots=True)
class UpdateBatch:
    """The rollouts of an update, or some of them. Fields with a default are computed by the learner."""

    tokens_bt: Tensor
    prompt_lengths_b: Tensor
    response_lengths_b: Tensor
    behavior_br: Tensor  # log-probabilities under the sampling policy
    staleness_br: Tensor  # versions between sampling and this update
    mask_br: Tensor  # bool: the policy sampled the token
    proximal_br: Tensor
    advantages_br: Tensor
    returns_br: Tensor
    gae_br: Tensor  # with a critic: advantages before they are scaled
    weights_br: Tensor  # weight of each token in the loss

    def __len__(self) -> int:
        return len(self.tokens_bt)

    @property
    def lengths_b(self) -> Tensor:
        return self.prompt_lengths_b + self.response_lengths_b

    def select(
        self, rows: Sequence[int] | Tensor, device: torch.device | None = None, width_multiple: int = 1
    ) -> UpdateBatch:
        """These rollouts, padded to the longest of them, and `tokens_bt` to the next multiple of `width_multiple`."""
        rows_b = torch.as_tensor(rows, dtype=torch.long)
        longest = int(self.lengths_b[rows_b].max()) if len(rows_b) else 0
        width = {
            "bt": math.ceil(longest / width_multiple) * width_multiple,
            "br": int(self.response_lengths_b[rows_b].max()) if len(rows_b) else 0,
        }

        def picked(name: str) -> Tensor:
            tensor: Tensor = getattr(self, name)[rows_b]
            suffix = name.rsplit("_", 1)[1]
            if suffix in width:
                tensor = nn.functional.pad(tensor, (0, width[suffix] - tensor.shape[1]))  # negative: cut
            return tensor if device is None else tensor.to(device)

        return UpdateBatch(**{field.name: picked(field.name) for field in fields(self)})

    def joined(self, more: UpdateBatch) -> UpdateBatch:
        """These rollouts, then `more`, padded to the longest of both."""

        def both(name: str) -> Tensor:
            first, second = getattr(self, name), getattr(more, name)
            if first.ndim == 1:
                return torch.cat((first, second))
            width = max(first.shape[1], second.shape[1])
            return torch.cat([nn.functional.pad(tensor, (0, width - tensor.shape[1])) for tensor in (first, second)])

        return UpdateBatch(**{field.name: both(field.name) for field in fields(self)})

    def trained_positions(self) -> tuple[Tensor, Tensor]:
        """Row and position in `tokens_bt` of each token in the mask, in row-major order."""
        row_n, response_n = self.mask_br.nonzero(as_tuple=True)
        return row_n, self.prompt_lengths_b[row_n] + response_n


def update_batch(rollouts: Sequence[Rollout], version: int) -> UpdateBatch:
    """The rollouts as tensors, in order; raises ValueError for an invalid rollout.

    `version` is the learner's: a token's staleness is `version` minus its own version.
    """
    for rollout in rollouts:
        _check(rollout)
    prompts = [len(rollout.prompt.tokens) for rollout in rollouts]
    responses = [len(rollout) for rollout in rollouts]
    width_t = max(prompt + response for prompt, response in zip(prompts, responses, strict=True))
    width_r = max(responses)

    def padded(rows: Sequence[Sequence[float]], width: int, dtype: torch.dtype) -> Tensor:
        out = torch.zeros(len(rows), width, dtype=dtype)
        for index, row in enumerate(rows):
            out[index, : len(row)] = torch.tensor(row, dtype=dtype)
        return out

    staleness = [[version - token_version for token_version in rollout.versions] for rollout in rollouts]
    empty_br = torch.zeros(len(rollouts), width_r)
    return UpdateBatch(
        tokens_bt=padded([[*r.prompt.tokens, *r.tokens] for r in rollouts], width_t, torch.long),
        prompt_lengths_b=torch.tensor(prompts),
        response_lengths_b=torch.tensor(responses),
        behavior_br=padded([rollout.logprobs for rollout in rollouts], width_r, torch.float32),
        staleness_br=padded(staleness, width_r, torch.int32),
        mask_br=padded([rollout.mask for rollout in rollouts], width_r, torch.bool),
        proximal_br=empty_br,
        advantages_br=empty_br,
        returns_br=empty_br,
        gae_br=empty_br,
        weights_br=empty_br,
    )


def _check(rollout: Rollout) -> None:
    """Of what is in no report of an engine: those are checked when they come (core/engine_checks.py)."""
    name = f"rollout {rollout.id} of prompt {rollout.prompt.id!r}"
    if rollout.reward is None or not math.isfinite(rollout.reward):
        raise ValueError(f"{name} has reward {rollout.reward}: score it with a finite number before training")
    if not len(rollout.prompt.tokens) or not len(rollout):
        raise ValueError(
            f"{name} has {len(rollout.prompt.tokens)} prompt and {len(rollout)} response tokens: both need "
            "at least 1; reject it before training"
        )


def micro_batches(order: Sequence[int], lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Splits `order` into consecutive parts whose padded size (rows x longest) stays within the limit.

    A rollout that is longer than the limit gets its own micro-batch, since it cannot be split.
    """
    groups: list[list[int]] = []
    longest = 0
    for row in order:
        longest = max(longest, lengths[row])
        if not groups or (len(groups[-1]) + 1) * longest > token_budget:
            groups.append([])
            longest = lengths[row]
        groups[-1].append(row)
    return groups


def overhead_tokens(device_type: str, layers: int, weights: int) -> int:
    """The fixed cost of a micro-batch, in tokens. On a GPU, a small model spends its time on kernel launches."""
    if device_type == "cpu":
        return OVERHEAD_TOKENS
    return max(OVERHEAD_TOKENS, round(layers * LAUNCH_OPERATIONS_PER_LAYER / (OPERATIONS_PER_WEIGHT * weights)))


def sorted_micro_batches(
    rows: Sequence[int], lengths: Sequence[int], token_budget: int, overhead: int = OVERHEAD_TOKENS
) -> list[list[int]]:
    """Micro-batches of rollouts of similar length, longest first, so that running out of memory shows immediately.

    Of all ways to split the sorted rollouts within the limit, the one with the least padding and overhead, which is the
    fixed cost of a micro-batch in tokens.
    """
    order = sorted(rows, key=lambda row: -lengths[row])
    cost = [0.0] + [math.inf] * len(order)  # of the best split of the first k rollouts
    begin = [0] * (len(order) + 1)  # where the last micro-batch of that split starts
    for start, row in enumerate(order):
        most_rows = max(1, token_budget // lengths[row])
        for end in range(start + 1, min(start + most_rows, len(order)) + 1):
            candidate = cost[start] + overhead + (end - start) * lengths[row]
            if candidate < cost[end]:
                cost[end], begin[end] = candidate, start
    groups: list[list[int]] = []
    end = len(order)
    while end:
        groups.append(order[begin[end] : end])
        end = begin[end]
    return groups[::-1]


def padded_tokens(groups: Sequence[Sequence[int]], lengths: Sequence[int]) -> int:
    """Tokens that the model computes, including padding."""
    return sum(len(group) * max(lengths[row] for row in group) for group in groups)


def balanced_parts(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """The rows distributed by length, so that every optimizer step of an update sees the same mix of lengths."""
    order = sorted(range(len(lengths)), key=lambda row: lengths[row])
    return [part for start in range(parts) if (part := order[start::parts])]
