"""verl's dataset as the prompts of the scheduler, and as the rows that agent loops get."""

from collections.abc import Sequence
from typing import Any

import numpy
from verl.utils import tensordict_utils
from verl.utils.dataset.rl_dataset import collate_fn

from sortedrl.core.engine import Request
from sortedrl.core.rollout import Prompt
from sortedrl.integrations.verl.agent import TICKET
from sortedrl.integrations.verl.visit import Ticket


class DatasetPrompts(Sequence[Prompt]):
    """verl's dataset, read as prompts; a prompt's id is its row. Of its tokens, the scheduler needs the number."""

    def __init__(self, dataset: Any, tokenizer: Any, template_arguments: dict[str, Any]) -> None:
        self._dataset, self._tokenizer, self._template_arguments = dataset, tokenizer, template_arguments

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return Prompt(str(index), range(self._tokens_in(index)))

    def _tokens_in(self, index: int) -> int:
        messages = list(self._dataset[index]["raw_prompt"])
        text = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, **self._template_arguments
        )
        return len(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def rows_with_tickets(rows: list[Any], requests: Sequence[tuple[Request, Ticket]], group_size: int) -> Any:
    """The requests' rows of the dataset, each with its ticket, as verl sends them to agent loop workers."""
    fields = collate_fn(rows)
    fields["uid"] = numpy.array([str(request.id // group_size) for request, _ in requests], dtype=object)
    fields[TICKET] = numpy.empty(len(requests), dtype=object)
    fields[TICKET][:] = [ticket for _, ticket in requests]
    return tensordict_utils.get_tensordict(fields)
