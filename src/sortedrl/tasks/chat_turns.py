"""Turns of a chat as token ids: what a template puts between the end of a response and the start of the next.

The tokens of a response are never decoded and encoded again. An observation is encoded alone, with all that the
template puts around it, and appended. This is right only if the template preserves the prefix: with more messages,
its text starts with the same text. Templates that drop or rewrite earlier turns are refused before the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sortedrl.core.user_values import reason_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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

    def _rendered(self, messages: Sequence[Mapping[str, Any]]) -> str:
        try:
            render: Callable[..., Any] = self._tokenizer.apply_chat_template
            return str(render(list(messages), tokenize=False, add_generation_prompt=True))
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
