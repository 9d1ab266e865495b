"""Converts an update to TRL's rows: consecutive groups of equal size, split into micro-batches.

TRL computes advantages over `rows.view(-1, num_generations)`, and every process must have the same number of rows. A
batch of the scheduler may have a group with a rejected member, or more or fewer groups than usual. Padding rows are
copies of real ones without effect: no reward, and a mask of zeros.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sortedrl.core.rollout import Rollout

# Metrics that `_compute_loss` appends per micro-batch, as means over its tokens. The second ones are means over its
# responses if the ratio of the loss is per response.
MEANS_OVER_TOKENS = ("entropy", "kl")
MEANS_OF_RATIOS = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "cispo_clip_ratio")


class Row(NamedTuple):
    rollout: Rollout
    trains: bool  # False: padding


def prompt_of(row: Mapping[str, Any]) -> Any:
    """Text or messages. An environment may make all of it."""
    return row.get("prompt", [{"role": "user", "content": ""}])


def rows_in_groups(rollouts: Iterable[Rollout], group_size: int) -> list[Row]:
    """The rollouts by group, in the order of each group's shortest member, each group padded to `group_size` rows."""
    groups: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group, []).append(rollout)
    rows: list[Row] = []
    for members in groups.values():
        rows += [Row(member, True) for member in members]
        rows += [Row(members[0], False)] * (group_size - len(members))
    return rows


def filled_up(rows: Sequence[Row], count: int) -> list[Row]:
    """Pad to `count` rows with copies of the first, which is the shortest."""
    return [*rows, *[Row(rows[0].rollout, False)] * (count - len(rows))]


def rows_needed(rows: int, group_size: int, micro_batches: int) -> int:
    """The next larger number of rows that makes whole groups and equal micro-batches."""
    unit = math.lcm(group_size, micro_batches)
    return -(-rows // unit) * unit


def rows_by_rank(rows: Sequence[Row], ranks: int, group_size: int, micro_batches: int) -> list[list[Row]]:
    """Whole groups for each rank, of about the same lengths, padded to the same number of rows."""
    parts: list[list[Row]] = [[] for _ in range(ranks)]
    for place in range(0, len(rows), group_size):
        turn, rank = divmod(place // group_size, ranks)
        parts[ranks - 1 - rank if turn % 2 else rank] += rows[place : place + group_size]
    count = rows_needed(max(map(len, parts)), group_size, micro_batches)
    return [filled_up(part or [Row(rows[0].rollout, False)], count) for part in parts]


def token_staleness(rollouts: Sequence[Rollout], version: int, width: int) -> Tensor:
    """[rows, width]: the staleness of each token in versions, 0 in the padding."""
    staleness = torch.zeros(len(rollouts), width, dtype=torch.long)
    for row, rollout in enumerate(rollouts):
        staleness[row, : len(rollout)] = version - torch.tensor(rollout.versions)
    return staleness


def first_turn(rollout: Rollout) -> tuple[list[int], list[float]]:
    """Tokens and log-probabilities up to the first tool result."""
    length = rollout.mask.index(0) if 0 in rollout.mask else len(rollout)
    return rollout.tokens[:length], rollout.logprobs[:length]


def loss_mask(scored: dict[str, Tensor]) -> Tensor:
    """1 for the tokens that are trained on: neither padding nor tool results."""
    mask = scored["completion_mask"]
    return mask * scored["tool_mask"] if "tool_mask" in scored else mask


def micro_batches(
    scored: dict[str, Tensor], count: int, *, optimizer_steps: int = 1, trim: bool
) -> list[dict[str, Tensor]]:
    """Equal micro-batches in the order of the optimizer steps, each without columns that are all padding.

    Rows are distributed by length over the optimizer steps, so that every step sees the same mix of lengths. Within a
    step, micro-batches are formed by length, shortest first. Prompts are padded on the left, everything else on the
    right. Tensors without rows go into every part.
    """
    order = torch.argsort(scored["completion_mask"].sum(dim=1), stable=True)
    parts = [
        {name: value if value.ndim == 0 else value[rows] for name, value in scored.items()}
        for step in range(optimizer_steps)
        for rows in order[step::optimizer_steps].chunk(count // optimizer_steps)
    ]
    return [_trimmed(part) for part in parts] if trim else parts


def token_weights(tokens: Tensor, optimizer_steps: int) -> Tensor:
    """What the mean of each micro-batch counts in the mean over its optimizer step: its share of the tokens, 1 for the
    average micro-batch. `tokens`: of each micro-batch, in all processes."""
    per_step = tokens.view(optimizer_steps, -1).float()
    return (per_step / per_step.mean(dim=1, keepdim=True).clamp(min=1.0)).flatten()


def weight_means(metrics: Mapping[str, list[float]], weight: float, *, has_ratio_per_sequence: bool) -> None:
    """TRL logs the mean over micro-batches. Cut by length, those of long responses have most of the tokens: the last
    value of each mean counts by its tokens here."""
    for name in MEANS_OVER_TOKENS if has_ratio_per_sequence else MEANS_OVER_TOKENS + MEANS_OF_RATIOS:
        if name in metrics:
            metrics[name][-1] *= weight


def _trimmed(part: dict[str, Tensor]) -> dict[str, Tensor]:
    width = part["completion_mask"].shape[1]
    response = max(1, int(part["completion_mask"].sum(dim=1).max()))
    prompt = int(part["prompt_mask"].sum(dim=1).max())

    def trimmed(name: str, value: Tensor) -> Tensor:
        if name in ("prompt_ids", "prompt_mask"):
            return value[:, value.shape[1] - prompt :]
        return value[:, :response] if value.ndim == 2 and value.shape[1] == width else value

    return {name: trimmed(name, value) for name, value in part.items()}
