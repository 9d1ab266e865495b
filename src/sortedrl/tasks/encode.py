"""Problems as prompts: the model's own chat template around the question, then tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from sortedrl.core.rollout import Prompt
from sortedrl.tasks.task import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TooLong(NamedTuple):
    """A problem that was left out, and how many tokens its prompt has."""

    problem: Problem
    length: int


@dataclass(frozen=True, slots=True)
class Encoded:
    """`prompts` in the order of their problems; `rejected` are those that were too long, longest first."""

    prompts: tuple[Prompt, ...]
    rejected: tuple[TooLong, ...]
    max_prompt_tokens: int

    def rejection_notice(self) -> str | None:
        """One line that says how many were left out and shows the longest; None if none was."""
        if not self.rejected:
            return None
        longest = self.rejected[0]
        return (
            f"{len(self.rejected)} of {len(self.rejected) + len(self.prompts)} prompts have more than "
            f"{self.max_prompt_tokens} tokens and are left out; the longest, {longest.problem.id}, has "
            f"{longest.length}: {longest.problem.question[:60]!r}..."
        )


def encode(problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int) -> Encoded:
    """One prompt for each problem that fits, with the problem as its payload."""
    require_eos(tokenizer)
    _require_unique_ids(problems)
    prompts: list[Prompt] = []
    rejected: list[TooLong] = []
    for problem in problems:
        tokens = prompt_tokens(problem, tokenizer)
        if len(tokens) > max_prompt_tokens:
            rejected.append(TooLong(problem, len(tokens)))
        else:
            prompts.append(Prompt(problem.id, tokens, problem))
    rejected.sort(key=lambda one: -one.length)
    encoded = Encoded(tuple(prompts), tuple(rejected), max_prompt_tokens)
    if rejected and not prompts:
        raise ValueError(
            f"no prompt is left: {encoded.rejection_notice()} The shortest has {rejected[-1].length} tokens; "
            f"set max_prompt_tokens to at least that"
        )
    return encoded


def prompt_tokens(problem: Problem, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens of `prompt_text`, with the tokens that the tokenizer itself begins a text with."""
    templated = bool(tokenizer.chat_template)
    # A template writes its special tokens itself; adding them again would double the first one.
    tokens = list(tokenizer(prompt_text(problem, tokenizer), add_special_tokens=not templated)["input_ids"])
    if not templated and tokens and tokens[-1] == tokenizer.eos_token_id:
        tokens.pop()  # some tokenizers end every text, and the response is still to come
    return tokens


def prompt_text(problem: Problem, tokenizer: PreTrainedTokenizerBase) -> str:
    """The chat template's text up to where the response begins; without a template the texts in a row."""
    if not tokenizer.chat_template:
        return "\n\n".join(filter(None, (problem.system, problem.question))) + "\n"
    user = {"role": "user", "content": problem.question}
    if not problem.system:
        return _render([user], tokenizer)
    from jinja2 import TemplateError

    try:
        return _render([{"role": "system", "content": problem.system}, user], tokenizer)
    except TemplateError:  # the templates of some models refuse a system message
        return _render([{"role": "user", "content": f"{problem.system}\n\n{problem.question}"}], tokenizer)


def require_eos(tokenizer: PreTrainedTokenizerBase) -> None:
    """A tokenizer without an end token cannot be trained with: say so before anything runs."""
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path!r} has no EOS token, so that no response could end by "
            'itself and each would run to its token max_new_tokens: set "eos_token" in its tokenizer_config.json'
        )


def _render(messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def _require_unique_ids(problems: Sequence[Problem]) -> None:
    seen: set[str] = set()
    for problem in problems:
        if problem.id in seen:
            raise ValueError(f"two problems have the id {problem.id!r}: ids tell prompts apart")
        seen.add(problem.id)
