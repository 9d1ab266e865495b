"""verl's dataset as the prompts of the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from sortedrl.core.rollout import Prompt


class PromptTokens(Sequence[int]):
    """A prompt's tokens as the scheduler needs them: their number. Counted when first asked for."""

    def __init__(self, count: Callable[[], int]) -> None:
        self._count = cache(count)

    def __len__(self) -> int:
        return self._count()

    def __getitem__(self, place: Any) -> Any:
        return range(len(self))[place]


class DatasetPrompts(Sequence[Prompt]):
    """verl's dataset, read as prompts; a prompt's id is its row."""

    def __init__(self, dataset: Any, tokenizer: Any, template_arguments: dict[str, Any]) -> None:
        self._dataset, self._tokenizer, self._template_arguments = dataset, tokenizer, template_arguments

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return Prompt(str(index), PromptTokens(partial(self._tokens_in, index)))

    def _tokens_in(self, index: int) -> int:
        messages = list(self._dataset[index]["raw_prompt"])
        text = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, **self._template_arguments
        )
        return len(self._tokenizer(text, add_special_tokens=False)["input_ids"])
