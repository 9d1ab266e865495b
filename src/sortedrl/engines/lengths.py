"""Response lengths for the simulated engine: drawn from a distribution, or replayed from the user's file.

A length depends only on the prompt and the request's seed, as with a real model: a resumed request keeps its length,
and a regenerated one with another seed draws a new one.
"""

from __future__ import annotations

import csv
import json
import math
import reprlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from statistics import NormalDist

from sortedrl.core.engine import Request
from sortedrl.core.rollout import Prompt
from sortedrl.core.seeds import derive_seed, mixing

LengthOf = Callable[[Prompt, int], int]  # prompt, seed -> tokens
MOST_TOKENS = 10_000_000  # anything longer is an error in the file
MOST_CSV_FIELD = 1 << 30  # characters: a file may have the responses in a column beside their lengths
CSV_DELIMITERS = ",;\t"  # spreadsheets write semicolons where the comma is the decimal mark
CSV_ENDINGS = (".csv", ".tsv")
LENGTH_NAMES = ("length", "response_length", "completion_length", "completion_tokens", "output_tokens")
PROMPT_NAMES = ("prompt", "prompt_id")
_NORMAL = NormalDist()


@dataclass(frozen=True)
class LognormalLengths:
    """log length = mu + prompt's own effect (sd `between`, the same in every epoch) + noise (sd `within`).

    Responses are truncated at `limit`, so the distribution has mass there.
    """

    mu: float = math.log(2100) - 0.5
    between: float = 0.8
    within: float = 0.6
    shortest: int = 16
    limit: int = 8192
    seed: int = 0

    @cached_property
    def _seed_state(self) -> int:
        return mixing(0, self.seed)

    def __call__(self, prompt: Prompt, seed: int) -> int:
        state = mixing(self._seed_state, number_of(prompt))
        effect = self.between * normal(mixing(state, 1) >> 1)
        noise = self.within * normal(mixing(mixing(state, 2), seed) >> 1)
        return min(self.limit, max(self.shortest, round(math.exp(self.mu + effect + noise))))


@dataclass(frozen=True)
class ReplayedLengths:
    """Lengths by prompt; the seed picks one of a prompt's lengths."""

    by_prompt: tuple[tuple[int, ...], ...]

    def __call__(self, prompt: Prompt, seed: int) -> int:
        lengths = self.by_prompt[number_of(prompt) % len(self.by_prompt)]
        return lengths[derive_seed(seed) % len(lengths)]

    @property
    def count(self) -> int:
        return sum(map(len, self.by_prompt))

    @property
    def longest(self) -> int:
        return max(map(max, self.by_prompt))

    def longer_than(self, limit: int) -> int:
        """How many responses would be truncated at `limit` tokens."""
        return sum(length > limit for lengths in self.by_prompt for length in lengths)


def read_lengths(path: Path) -> ReplayedLengths:
    """A JSONL or CSV file: one number per line, or rows with a length and optionally a prompt.

    Without prompts, every response draws from all lengths: the file does not show how the lengths of one prompt's
    responses are correlated.
    """
    by_prompt: dict[object, list[int]] = {}
    for line_number, prompt, length in _csv_rows(path) if path.suffix.lower() in CSV_ENDINGS else _json_rows(path):
        if isinstance(length, bool) or not isinstance(length, int | float) or not 1 <= length <= MOST_TOKENS:
            why = f"length {reprlib.repr(length)} is not a number of tokens (1 to {MOST_TOKENS:,})"
            raise ValueError(f"{path}, line {line_number}: {why}")
        if length != round(length):  # a column of a trainer's log, such as completion_length of TRL before 0.16
            why = f"length {length} is not a whole number of tokens: give the length of each response, not means"
            raise ValueError(f"{path}, line {line_number}: {why}")
        by_prompt.setdefault(prompt, []).append(round(length))
    if not by_prompt:
        raise ValueError(f"{path}: no lengths in this file")
    if None in by_prompt and len(by_prompt) > 1:
        raise ValueError(f"{path}: some lengths have a `prompt` and some do not: give it for all or none")
    return ReplayedLengths(tuple(map(tuple, by_prompt.values())))


def _json_rows(path: Path) -> Iterator[tuple[int, object, object]]:
    """Line number, prompt (None if it has none) and length."""
    for line_number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), start=1):
        if line.strip():
            for prompt, length in _parsed(line, line_number, path):
                yield line_number, prompt, length


def _csv_rows(path: Path) -> Iterator[tuple[int, object, object]]:
    """The first line names the columns, unless the file is one column of numbers."""
    csv.field_size_limit(MOST_CSV_FIELD)
    with path.open(encoding="utf-8-sig", newline="") as file:
        first = file.readline()
        file.seek(0)
        rows = csv.reader(file, delimiter=max(CSV_DELIMITERS, key=first.count))
        header = next(rows, [])
        names = [name.strip().lower() for name in header]
        if len(names) == 1 and isinstance(_number(names[0]), float):
            yield 1, None, _number(names[0])
            names = ["length"]
        length, prompt = _first_of(LENGTH_NAMES, names), _first_of(PROMPT_NAMES, names)
        if names and length is None:
            raise ValueError(f"{path}, line 1: no column `length` in {header}")
        for row in rows:
            if any(cell.strip() for cell in row):
                cells = dict(zip(names, row, strict=False))
                yield rows.line_num, None if prompt is None else cells.get(prompt), _number(cells.get(length or "", ""))


def _number(cell: str) -> float | str:
    """The number in a cell of a CSV file, or its text if it is none."""
    try:
        return float(cell)
    except ValueError:
        return cell


def _first_of(names: tuple[str, ...], found: Collection[str]) -> str | None:
    return next((name for name in names if name in found), None)


def _parsed(line: str, line_number: int, path: Path) -> Iterator[tuple[object, object]]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}, line {line_number}: not JSON ({error.msg.removesuffix(' at')} at column {error.colno})"
        ) from None
    except (ValueError, RecursionError) as error:  # a number with thousands of digits, or deeply nested lists
        raise ValueError(f"{path}, line {line_number}: {error}") from None
    if not isinstance(value, dict):
        yield None, value
        return
    length, prompt = _first_of(LENGTH_NAMES, value), _first_of(PROMPT_NAMES, value)
    if prompt is None and length is not None:
        yield None, value[length]
        return
    lengths = value.get("lengths", [value.get(length)])
    if lengths == [None] or not isinstance(lengths, list) or not lengths:
        raise ValueError(f"{path}, line {line_number}: no `length` or `lengths` in {sorted(value)}")
    for one in lengths:
        yield f"line {line_number}" if prompt is None else str(value[prompt]), one


def remembered(lengths: LengthOf) -> LengthOf:
    """The same lengths with a cache: a resumed rollout asks again. Lengths that have a cache stay as they are."""
    return lengths if hasattr(lengths, "cache_info") else lru_cache(maxsize=1 << 14)(lengths)


@lru_cache(maxsize=4)
def with_shared_cache(lengths: LengthOf) -> LengthOf:
    """`remembered`, with one cache for equal lengths: all schedules that are compared draw the same ones."""
    return remembered(lengths)


def length_of_request(lengths: LengthOf) -> Callable[[Request], int]:
    drawn = remembered(lengths)
    return lambda request: drawn(request.prompt, request.seed)


def number_of(prompt: Prompt) -> int:
    """The payload of a simulated prompt is its index in the dataset."""
    return int(prompt.payload)


def normal(bits: int) -> float:
    return _NORMAL.inv_cdf(((bits >> 10) + 0.5) / (1 << 53))
