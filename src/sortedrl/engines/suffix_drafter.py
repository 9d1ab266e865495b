"""A drafter without a model: other responses to the same prompt, and the response itself, often say how it goes on.

    speculative_config = {"method": "custom_class", "num_speculative_tokens": 3,
                          "model": "sortedrl.engines.suffix_drafter.SuffixDrafter"}

It looks for the longest end of the context that occurs elsewhere, and drafts what followed there. If equally long, the
first of: the response itself, running responses to its prompt, and what the engine has delivered before (finished
members of the group, aborted attempts, earlier epochs). `VllmEngine` tells it about prompts and delivered responses.
vLLM gives it rows of tokens without request ids, so it knows a row's prompt by its first tokens. A wrong guess costs a
draft, nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from sortedrl.engines.speculative import Drafter

LONGEST_MATCH = 16
SHORTEST_MATCH = 3  # of fewer tokens too few drafts are accepted
RESPONSES_PER_PROMPT = 16
MOST_TOKENS = 50_000_000  # of all responses: 200 MB
NOTHING = np.zeros(0, np.int32)
BETWEEN = -1  # no token: between two responses in one text


class SuffixDrafter(Drafter):
    """`by_source` counts drafted and accepted tokens."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self.by_source: Counter[str] = Counter()
        self._lengths: Counter[int] = Counter()  # of known prompts
        self._known: dict[bytes, _Delivered] = {}  # by prompt, the one used last at the end
        self._tokens = 0
        self._rows: list[_Row] = []  # as of the last step that drafted

    # What the engine says

    def expect(self, prompt: Sequence[int]) -> None:
        """A request with this prompt is coming."""
        key = np.asarray(prompt, np.int32).tobytes()
        if key not in self._known:
            self._lengths[len(prompt)] += 1
        self._known[key] = self._known.pop(key) if key in self._known else _Delivered()  # now the one used last

    def learn(self, prompt: Sequence[int], response: Sequence[int], source: str) -> None:
        delivered = self._known.get(np.asarray(prompt, np.int32).tobytes())
        if delivered is None or not response:
            return
        self._tokens += delivered.add(np.asarray([*prompt[-LONGEST_MATCH:], *response], np.int32), source)
        while self._tokens > MOST_TOKENS and len(self._known) > 1:
            oldest = next(iter(self._known))
            self._tokens -= self._known.pop(oldest).tokens
            self._lengths[len(oldest) // NOTHING.itemsize] -= 1

    # What vLLM asks

    def drafts(self, sampled: Sequence[Sequence[int]], contexts: Sequence[np.ndarray]) -> list[list[int]]:
        before, self._rows = self._rows, []
        for place, context in enumerate(contexts):
            old = before[place] if place < len(before) else None
            goes_on = old is not None and old.goes_on_in(context)
            if old is not None and goes_on and old.source:
                self.by_source[f"{old.source} accepted"] += max(0, len(sampled[place]) - 1)
            self._rows.append(_Row(context, old.prompt if old is not None and goes_on else self._prompt_of(context)))
        return [self._drafted(row) if tokens else [] for row, tokens in zip(self._rows, sampled, strict=True)]

    def _prompt_of(self, context: np.ndarray) -> bytes | None:
        starts = (
            context[:length].tobytes() for length, prompts in self._lengths.items() if prompts and length < len(context)
        )
        return next((start for start in starts if start in self._known), None)

    def _drafted(self, row: _Row) -> list[int]:
        end, best, found = row.context[-LONGEST_MATCH:], SHORTEST_MATCH - 1, NOTHING
        for text, source in self._texts(row):
            length, follows = longest_match(text, end)
            if length > best:
                best, found, row.source = length, text[follows : follows + self.tokens], source
        draft = found[: np.argmax(found == BETWEEN) if BETWEEN in found else None].tolist()
        if draft:
            self.by_source[f"{row.source} drafted"] += len(draft)
        return list(draft)

    def _texts(self, row: _Row) -> list[tuple[np.ndarray, str]]:
        texts = [(row.context, "itself")]
        if row.prompt is None:
            return texts
        start = max(0, len(row.prompt) // NOTHING.itemsize - LONGEST_MATCH)
        running = [other.context[start:] for other in self._rows if other is not row and other.prompt == row.prompt]
        delivered = self._known.get(row.prompt) or _Delivered()
        return [*texts, *((text, "running") for text in running), *delivered.texts()]


def longest_match(text: np.ndarray, end: np.ndarray) -> tuple[int, int]:
    """The longest end of `end` that occurs in `text` with a token after it: its length, and the place of that token.

    Of several, the last one.
    """
    places = np.flatnonzero(text[:-1] == end[-1])
    length = 0
    while len(places):
        length, last = length + 1, int(places[-1])
        if length == len(end):
            break
        places = places[places >= length]
        places = places[text[places - length] == end[-1 - length]]
    return (length, last + 1) if length else (0, 0)


class _Row:
    """A running request as of one step: its tokens, and its prompt if it is known."""

    def __init__(self, context: np.ndarray, prompt: bytes | None) -> None:
        self.context, self.prompt, self.source = context, prompt, ""
        self._length, self._end = len(context), context[-4:].copy()  # vLLM overwrites the row with another request's

    def goes_on_in(self, context: np.ndarray) -> bool:
        """Whether it is the same request, by its length and last tokens."""
        same = context[max(0, self._length - 4) : self._length]
        return len(context) >= self._length and np.array_equal(same, self._end)


class _Delivered:
    """Responses to one prompt, the newest last, each behind the end of the prompt. Those of one source are one text."""

    def __init__(self) -> None:
        self._responses: list[tuple[np.ndarray, str]] = []
        self._texts: list[tuple[np.ndarray, str]] | None = None

    @property
    def tokens(self) -> int:
        return sum(len(response) for response, _ in self._responses)

    def add(self, response: np.ndarray, source: str) -> int:
        """How many tokens more it has now."""
        before = self.tokens
        self._responses = [*self._responses, (response, source)][-RESPONSES_PER_PROMPT:]
        self._texts = None
        return self.tokens - before

    def texts(self) -> list[tuple[np.ndarray, str]]:
        if self._texts is None:
            by_source: dict[str, list[np.ndarray]] = {}
            for response, source in self._responses:
                by_source.setdefault(source, []).extend((response, np.full(1, BETWEEN, np.int32)))
            self._texts = [(np.concatenate(parts), source) for source, parts in by_source.items()]
        return self._texts
