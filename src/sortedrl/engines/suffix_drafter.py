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
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sortedrl.engines.speculative import Drafter

LONGEST_MATCH = 8
SHORTEST_MATCH = 3  # of fewer tokens too few drafts are accepted
TOKEN_BITS = 63 // SHORTEST_MATCH
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
        lengths = (length for length, prompts in self._lengths.items() if prompts and length < len(context))
        return next((start for length in lengths if (start := context[:length].tobytes()) in self._known), None)

    def _drafted(self, row: _Row) -> list[int]:
        end, best, found = row.context[-LONGEST_MATCH:], 0, NOTHING
        for text, places, source in self._matches(row, end):
            length, follows = longest_match(text, end, places)
            if length > best:
                best, found, row.source = length, text[follows : follows + self.tokens], source
        draft = found[: np.argmax(found == BETWEEN) if BETWEEN in found else None].tolist()
        if draft:
            self.by_source[f"{row.source} drafted"] += len(draft)
        return list(draft)

    def _matches(self, row: _Row, end: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, str]]:
        """Texts in which the last tokens occur: the places of the last one, and the source."""
        if len(end) < SHORTEST_MATCH:
            return
        yield row.context, places_in(row.context, end), "itself"
        if row.prompt is None:
            return
        start = max(0, len(row.prompt) // NOTHING.itemsize - LONGEST_MATCH)
        for other in self._rows:
            if other is not row and other.prompt == row.prompt:
                yield other.context[start:], places_in(other.context[start:], end), "running"
        if (delivered := self._known.get(row.prompt)) is not None:
            for text, source in delivered.texts():
                yield text.tokens, text.places(end), source


def places_in(text: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Where the last `SHORTEST_MATCH` tokens of `end` occur in `text` with a token after them: places of the last."""
    ends = len(text) - SHORTEST_MATCH
    if ends < 1:
        return NOTHING
    same = [text[back : back + ends] == end[back - SHORTEST_MATCH] for back in range(SHORTEST_MATCH)]
    return np.flatnonzero(np.logical_and.reduce(same)) + SHORTEST_MATCH - 1


def longest_match(text: np.ndarray, end: np.ndarray, places: np.ndarray) -> tuple[int, int]:
    """The longest end of `end` that occurs in `text`, at one of `places`, the last one of several: its length, and the
    place after it."""
    if not len(places):
        return 0, 0
    length, last = SHORTEST_MATCH, int(places[-1])
    while length < len(end):
        places = places[places >= length]
        places = places[text[places - length] == end[-1 - length]]
        if not len(places):
            break
        length, last = length + 1, int(places[-1])
    return length, last + 1


class _Text:
    """A text that does not change, with an index by `SHORTEST_MATCH` tokens: it may be long."""

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens = tokens
        keys = _keys(tokens[:-1])
        self._order = np.argsort(keys, kind="stable")
        self._sorted = keys[self._order]

    def places(self, end: np.ndarray) -> np.ndarray:
        key = _keys(end[-SHORTEST_MATCH:])[0]
        first, after = np.searchsorted(self._sorted, [key, key + 1])
        return self._order[first:after] + SHORTEST_MATCH - 1


def _keys(tokens: np.ndarray) -> np.ndarray:
    """A number for each run of `SHORTEST_MATCH` tokens."""
    count = max(0, len(tokens) - SHORTEST_MATCH + 1)
    keys = np.zeros(count, np.int64)
    for back in range(SHORTEST_MATCH):
        keys = (keys << TOKEN_BITS) + (tokens[back : back + count] + 1)  # BETWEEN is 0
    return keys


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
        self._texts: list[tuple[_Text, str]] | None = None

    @property
    def tokens(self) -> int:
        return sum(len(response) for response, _ in self._responses)

    def add(self, response: np.ndarray, source: str) -> int:
        """How many tokens more it has now."""
        before = self.tokens
        self._responses = [*self._responses, (response, source)][-RESPONSES_PER_PROMPT:]
        self._texts = None
        return self.tokens - before

    def texts(self) -> list[tuple[_Text, str]]:
        if self._texts is None:
            by_source: dict[str, list[np.ndarray]] = {}
            for response, source in self._responses:
                by_source.setdefault(source, []).extend((response, np.full(1, BETWEEN, np.int32)))
            self._texts = [(_Text(np.concatenate(parts)), source) for source, parts in by_source.items()]
        return self._texts
