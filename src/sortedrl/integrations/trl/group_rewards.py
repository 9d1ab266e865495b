"""Dynamic sampling in TRL: the rewards of a group as soon as it is complete.

TRL computes the rewards of an update after it is composed, but a filter needs them before. So TRL's own code scores
each complete group, on a copy of the trainer that has only the group's rows and gathers nothing: ranks complete their
groups at different times. Reward functions see every rollout once. Its rewards, and what they log about it, stay with
it as `detail` until TRL asks for those of the update.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.utils import gather
from torch import Tensor
from trl.trainer import grpo_trainer

from sortedrl.core.group_filter import GroupFilter
from sortedrl.core.rollout import Rollout
from sortedrl.core.schedule import Schedule
from sortedrl.integrations.trl.rows import Row, prompt_of, rows_in_groups

Score = Callable[[Sequence[Rollout]], None]  # sets `reward` and `detail` of the members of a group


class ScoredGroups(GroupFilter):
    """Has a group scored before it decides on it. Until then, the reward of a finished rollout is a placeholder.

    As in TRL's advantages, a rollout for which every reward function returned None does not count in its group.
    """

    def __init__(self, chosen: GroupFilter, schedule: Schedule, score: Score) -> None:
        super().__init__(chosen.name, chosen.keeps, schedule)
        self._score = score

    def decide(self, group: Sequence[Rollout]) -> str:
        self._score(group)
        with_reward = [rollout for rollout in group if any(r is not None for r in rollout.detail["rewards"])]
        return super().decide(with_reward or group)


def score_group(trainer: Any, group: Sequence[Rollout]) -> None:
    """Set `reward` and `detail` of the members with the trainer's reward functions. No rank waits for another one."""
    rows = rows_in_groups(group, trainer.num_generations)
    inputs = [trainer.example(row.rollout.prompt.payload) for row in rows]
    prompts = [prompt_of(example) for example in inputs]
    if trainer.tool_use is not None:
        prompts = trainer.tool_use.prompts(rows, prompts)
    alone = _alone(trainer, rows)
    if alone.tool_use is not None:
        alone.tool_use = alone.tool_use.of_group(group)
        alone.environments = alone.tool_use.instances(rows)
    _, completion_ids, _, completions, *_ = alone._generate(prompts)
    with _gathering_nothing():
        rewards = grpo_trainer.GRPOTrainer._calculate_rewards(alone, inputs, prompts, completions, completion_ids)
    if alone.tool_use is not None:
        alone.tool_use.release()
    logged = _by_row(alone._pending_extra_logs, len(rows))
    totals = total_rewards(rewards, trainer.reward_weights).tolist()
    for row, total, values, extra in zip(rows, totals, rewards.tolist(), logged, strict=True):
        if row.trains:
            row.rollout.reward = total
            row.rollout.detail = {"rewards": [None if math.isnan(value) else value for value in values], "extra": extra}


def total_rewards(rewards: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum for each row, finite: a log is JSON. TRL itself takes what it was given."""
    total = (rewards * weights.to(rewards.device)).nansum(dim=1)
    return total.nan_to_num(0.0, posinf=0.0, neginf=0.0)


def rewards_of_update(trainer: Any, rows: Sequence[Row]) -> Tensor:
    """What TRL's `_calculate_rewards` returns: one line per row of all ranks. The trainer gets what the reward
    functions logged about the rows, in their order."""
    details = [row.rollout.detail for row in rows]
    for column in {*trainer._logs["extra"], *(column for detail in details for column in detail["extra"])}:
        trainer._pending_extra_logs[column] = [detail["extra"].get(column) for detail in details]
    values = [[math.nan if value is None else value for value in detail["rewards"]] for detail in details]
    gathered: Tensor = gather(torch.tensor(values, device=trainer.accelerator.device))
    return gathered


def _alone(trainer: Any, rows: list[Row]) -> Any:
    """A copy of the trainer for these rows alone. Of what TRL notes in it, the trainer gets `log_metric` only."""
    alone = copy.copy(trainer)
    alone.accelerator = copy.copy(trainer.accelerator)
    alone.accelerator.gather = lambda tensor: tensor
    alone.model = SimpleNamespace(training=True)  # the engine may decode with the module, in evaluation mode
    alone.state = copy.copy(trainer.state)
    alone._metrics = {"train": defaultdict(list)}
    alone._pending_extra_logs = defaultdict(list)
    alone._fired = set()  # these are not TRL's calls
    alone._rows = rows
    return alone


@contextmanager
def _gathering_nothing() -> Iterator[None]:
    module: Any = grpo_trainer
    module.gather, before = (lambda tensor: tensor), module.gather
    try:
        yield
    finally:
        module.gather = before


def _by_row(columns: dict[str, list[Any]], rows: int) -> list[dict[str, Any]]:
    for column, values in columns.items():
        if len(values) != rows:
            raise ValueError(f"log_extra({column!r}) got {len(values)} values for {rows} completions: log one for each")
    return [{column: values[row] for column, values in columns.items()} for row in range(rows)]
