"""Converts problems to prompts, and observations to what follows a response: applies the chat template and tokenizes.

The tokens of a response are never decoded and encoded again. An observation is encoded alone, with all that the
template puts around it, and appended. This is right only if the template preserves the prefix: with more messages,
its text starts with the same text. Templates that drop or rewrite earlier turns are refused before the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from sortedrl.core.rollout import Prompt
from sortedrl.core.user_values import reason_of, require_unique_ids
from sortedrl.tasks.environment import Prompt as EnvironmentPrompt
from sortedrl.tasks.environment import as_messages
from sortedrl.tasks.task import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Encoded:
    """`prompts` in the order of their problems; `rejected` were too long, longest first."""

    prompts: tuple[Prompt, ...]
    rejected: tuple[Prompt, ...]
    max_prompt_tokens: int
    kind: str = "prompts"

    def rejection_notice(self) -> str | None:
        """One line with the number of rejected prompts and the longest; None if there are none."""
        if not self.rejected:
            return None
        longest = self.rejected[0]
        return (
            f"{len(self.rejected)} of {len(self.rejected) + len(self.prompts)} {self.kind} have more than "
            f"{self.max_prompt_tokens} tokens and are left out; the longest, {longest.id}, has "
            f"{len(longest.tokens)}: {longest.payload.question[:60]!r}..."
        )


def encode(
    problems: Sequence[Problem],
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    tokens_of: Callable[[Problem], Sequence[int]] | None = None,
    kind: str = "prompts",
) -> Encoded:
    """One prompt per problem that fits, with the problem as its payload.

    With `tokens_of`, these are the prompt's tokens. `kind` names the prompts in messages.
    """
    require_unique_ids("problems", [problem.id for problem in problems])
    tokens_of = tokens_of or partial(prompt_tokens, tokenizer=tokenizer)
    prompts = [Prompt(problem.id, list(tokens_of(problem)), problem) for problem in problems]
    fitting = [prompt for prompt in prompts if len(prompt.tokens) <= max_prompt_tokens]
    rejected = [prompt for prompt in prompts if len(prompt.tokens) > max_prompt_tokens]
    rejected.sort(key=lambda prompt: -len(prompt.tokens))
    encoded = Encoded(tuple(fitting), tuple(rejected), max_prompt_tokens, kind)
    if rejected and not fitting:
        raise ValueError(
            f"no {kind} left: {encoded.rejection_notice()} The shortest has {len(rejected[-1].tokens)} tokens; "
            f"set max_prompt_tokens to at least that"
        )
    return encoded


def prompt_tokens(problem: Problem, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Any] = ()) -> list[int]:
    """The tokens of `prompt_text`, including the tokens that the tokenizer adds at the start of a text."""
    return _encoded(prompt_text(problem, tokenizer, tools), tokenizer)


def environment_prompt(
    prompt: EnvironmentPrompt, problem: Problem, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Any] = ()
) -> list[int]:
    """The tokens with which an episode starts: `prompt` is what `reset` of its environment returned, `tools` are the
    environment's. Raises TypeError for a prompt of the wrong type."""
    if prompt is None:
        return prompt_tokens(problem, tokenizer, tools)
    if isinstance(prompt, str):
        return prompt_tokens(Problem(problem.id, prompt, None), tokenizer, tools)
    tokens = [token for token in prompt if isinstance(token, int)]
    if tokens and len(tokens) == len(prompt):
        return tokens
    messages = as_messages(prompt, f"the result of reset for {problem.id}")
    if not tokenizer.chat_template:
        return _encoded("\n\n".join(str(message["content"]) for message in messages) + "\n", tokenizer)
    return _encoded(_render(messages, tokenizer, tools), tokenizer)


def _encoded(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    templated = bool(tokenizer.chat_template)
    # A template already contains its special tokens; adding them again would double the first one.
    tokens = list(tokenizer(text, add_special_tokens=not templated)["input_ids"])
    if not templated and tokens and tokens[-1] == tokenizer.eos_token_id:
        tokens.pop()  # some tokenizers end every text with EOS, but the response is still to come
    return tokens


def prompt_text(problem: Problem, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Any] = ()) -> str:
    """The chat template's text up to the start of the response; without a template, the texts joined."""
    if not tokenizer.chat_template:
        _require_no_tools(tools, tokenizer)
        return "\n\n".join(filter(None, (problem.system, problem.question))) + "\n"
    user = {"role": "user", "content": problem.question}
    if not problem.system:
        return _render([user], tokenizer, tools)
    from jinja2 import TemplateError

    try:
        return _render([{"role": "system", "content": problem.system}, user], tokenizer, tools)
    except TemplateError:  # the templates of some models refuse a system message
        return _render([{"role": "user", "content": f"{problem.system}\n\n{problem.question}"}], tokenizer, tools)


def _render(messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, tools: Sequence[Any] = ()) -> str:
    """With `tools`, transformers derives their schemas; a template that ignores them is refused."""
    text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    if not tools:
        return text
    with_tools = str(
        tokenizer.apply_chat_template(messages, tools=list(tools), tokenize=False, add_generation_prompt=True)
    )
    if with_tools == text:
        _require_no_tools(tools, tokenizer)
    return with_tools


def _require_no_tools(tools: Sequence[Any], tokenizer: PreTrainedTokenizerBase) -> None:
    if tools:
        names = ", ".join(tool.__name__ for tool in tools)
        raise ValueError(
            f"the chat template of {tokenizer.name_or_path!r} does not show tools, so the model would not see "
            f"{names}: use a model whose template does, or describe them in the prompt"
        )


# Turns of a chat

_QUESTION = {"role": "user", "content": "question"}
_RESPONSE = "<think>\nthought\n</think>\n\nresponse-4711"  # reasoning: what templates most often drop
_MARK = "response-4711"


class TemplateRefused(ValueError):
    """The chat template does not preserve the prefix, or the messages of this environment cannot be encoded."""


class ChatTurns:
    """Encodes observations for one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._checked: set[tuple[str, ...]] = set()

    def observation(self, messages: Sequence[Mapping[str, Any]], response: Sequence[int]) -> list[int]:
        """The tokens from the end of a response to the start of the next one.

        If the response ends with the token that the template puts there, the observation starts after it. Raises
        TemplateRefused."""
        if not self._tokenizer.chat_template:
            text = "\n" + "\n".join(str(message["content"]) for message in messages) + "\n"
            return self._encoded(text)
        self.require_prefix_preserving(messages)
        after = self._after_response(messages)
        end = self._tokenizer.convert_ids_to_tokens(int(response[-1])) if response else None
        return self._encoded(after.removeprefix(end) if isinstance(end, str) else after)

    def require_prefix_preserving(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Raises TemplateRefused if earlier turns do not stay as they are when messages of these roles follow."""
        roles = tuple(str(message["role"]) for message in messages)
        if roles in self._checked or not self._tokenizer.chat_template:
            return
        response = {"role": "assistant", "content": _RESPONSE}
        turns = [_QUESTION]
        expected = self._rendered(turns)
        for _ in range(2):
            turns = [*turns, response, *({"role": role, "content": "observation"} for role in roles)]
            text = self._rendered(turns)
            if not text.startswith(expected + _RESPONSE):
                raise TemplateRefused(
                    f"the chat template of {self._tokenizer.name_or_path!r} does not preserve the prefix: it changes "
                    f"a response when a message of role {roles[-1]!r} follows. The policy would be trained on "
                    "tokens that it did not see. Use a template that keeps earlier turns as they are, or messages of "
                    "another role"
                )
            expected = text
        self._checked.add(roles)

    def _after_response(self, messages: Sequence[Mapping[str, Any]]) -> str:
        text = self._rendered([_QUESTION, {"role": "assistant", "content": _MARK}, *map(dict, messages)])
        return text[text.index(_MARK) + len(_MARK) :]

    def _rendered(self, messages: Sequence[dict[str, Any]]) -> str:
        try:
            return _render(list(messages), self._tokenizer)
        except Exception as error:  # a TypeError, too: most templates add texts, and a content may be anything
            raise TemplateRefused(
                f"the chat template of {self._tokenizer.name_or_path!r} refuses these messages: {reason_of(error)}"
            ) from None

    def _encoded(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # a lone surrogate, as in file names that are not UTF-8
            raise TemplateRefused(f"the text of these messages is not valid Unicode: {error}") from None
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
