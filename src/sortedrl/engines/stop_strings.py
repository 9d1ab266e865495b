"""Stop strings: finds the token that completes one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sortedrl.core.engine import Request

_VERBATIM = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}  # decode every character


@dataclass(frozen=True)
class StopStrings:
    """Detects the token that completes one of the strings; `tokenizer` is a Hugging Face tokenizer."""

    tokenizer: Any
    strings: tuple[str, ...]

    def completed_by_last(self, turn: Sequence[int], made: Sequence[int]) -> bool:
        """Whether the last token of `made`, which follows `turn`, completes a string.

        `turn` has the earlier tokens of the same turn only: a string in another turn, or in an answer of the
        environment, ends nothing.
        """
        if made[-1] not in self._endings:
            return False
        # A token holds at least one byte of text, so no match starts earlier than this.
        window = max(len(string.encode()) for string in self.strings)
        newest = [*turn[-window:], *made[-window:]]
        text = self.tokenizer.decode(newest[-window:], **_VERBATIM)
        return any(string in text for string in self.strings)

    @cached_property
    def _endings(self) -> frozenset[int]:
        """Tokens that contain the last character of a string; all tokens if they may split or hide it."""
        last_characters = {string[-1] for string in self.strings}
        entries = range(len(self.tokenizer))
        if any(not character.isascii() or character.isspace() for character in last_characters):
            return frozenset(entries)
        texts = self.tokenizer.batch_decode([[entry] for entry in entries], **_VERBATIM)
        return frozenset(e for e, text in zip(entries, texts, strict=True) if last_characters & set(text))


class StopWatches:
    """The detectors of requests with stop strings; requests with the same strings share one."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._watches: dict[tuple[str, ...], StopStrings] = {}

    def of(self, request: Request) -> StopStrings | None:
        """None if it has none. Raises a ValueError if they cannot be used."""
        strings = request.sampling.stop_strings
        if not strings or request.sampling.ignore_eos:
            return None
        if self._tokenizer is None:
            raise ValueError(f"stop_strings = {strings} are text, but the engine has no tokenizer: pass tokenizer=...")
        if strings not in self._watches:
            self._watches[strings] = StopStrings(self._tokenizer, strings)
        return self._watches[strings]
