"""The rows of a TRL dataset as prompts of the scheduler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, overload

from datasets import Dataset

from sortedrl.core.rollout import Prompt
from sortedrl.integrations.trl.tools import ToolBox, different_observation
from sortedrl.tasks.problem_digests import digests

if TYPE_CHECKING:
    from trl.trainer.grpo_config import GRPOConfig

    from sortedrl.integrations.trl.trainer import SortedGRPOTrainer


class DatasetPrompts(Sequence[Prompt]):
    """Rows `rank`, `rank + processes`, ... of the dataset as prompts, tokenized lazily.

    With environments, a prompt ends with what `reset` returns for its row. One instance per environment is used for
    all prompts, as in TRL.
    """

    def __init__(self, trainer: SortedGRPOTrainer) -> None:
        self._trainer = trainer
        processes = trainer.accelerator
        self._rows = range(processes.process_index, len(trainer.train_dataset), processes.num_processes)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, place: int) -> Prompt: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Prompt]: ...
    def __getitem__(self, place: int | slice) -> Prompt | Sequence[Prompt]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        row, trainer = self._rows[place], self._trainer
        messages = trainer.example(row).get("prompt", [{"role": "user", "content": ""}])
        if trainer.tool_use is not None and trainer.environment_factories is not None:
            messages = _with_observation(messages, self._observation(row, trainer.tool_use.box))
        tokens, *_ = trainer._tokenize_prompts([messages])
        return Prompt(str(row), tuple(tokens[0]), row)

    @property
    def ids(self) -> list[str]:
        return list(map(str, self._rows))

    @cached_property
    def row_digests(self) -> str:
        """Digests of the columns in use."""
        return digests(columns_in_use(row, self._trainer.args) for row in self._stored_rows())

    def _stored_rows(self) -> Iterator[dict[str, Any]]:
        """Without the dataset's transform: it may add something on reading, such as today's date."""
        dataset = self._trainer.train_dataset
        if not isinstance(dataset, Dataset):
            yield from (dict(dataset[row]) for row in self._rows)
            return
        for columns in dataset.with_format(None).select(self._rows).iter(batch_size=1000):  # far faster than by row
            yield from (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))

    def _observation(self, row: int, box: ToolBox) -> Any:
        example = self._trainer.example(row)
        name = box.name_of(example)
        self._trainer._batch_environments = [name]  # TRL's own: the prompt shows the tools of this environment
        instance = self._trainer._environment_pool[name][0]
        observation = box.reset(instance, example)
        if box.observations.setdefault(row, observation) != observation:
            raise different_observation(instance, row)
        return observation


def columns_in_use(row: dict[str, Any], args: GRPOConfig) -> dict[str, Any]:
    """Those that TRL passes on to reward functions and environments."""
    return {key: row[key] for key in row if key == "prompt" or not args.remove_unused_columns}


def _with_observation(messages: list[dict[str, Any]], observation: Any) -> list[dict[str, Any]]:
    """As TRL does it: added to the last message."""
    if observation is None:
        return messages
    content = messages[-1]["content"]
    if isinstance(observation, list) and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if isinstance(observation, str) and isinstance(content, list):
        observation = [{"type": "text", "text": observation}]
    return [*messages[:-1], {**messages[-1], "content": content + observation}]
