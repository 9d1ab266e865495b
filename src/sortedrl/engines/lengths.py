"""Response lengths for the simulated engine: drawn from a distribution, or replayed from the user's file.

A length depends only on the prompt and the request's seed, as with a real model: a resumed request keeps its length,
and a regenerated one with another seed draws a new one.

Beside them: which groups have equal rewards, and a wrapper that forces lengths on any engine.
"""

import csv
import io
import json
import math
import reprlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from statistics import NormalDist
from typing import TypeVar

from sortedrl.core.engine import Change, Engine, ForwardingEngine, Request, RequestFinished
from sortedrl.core.engine_checks import checked_changes
from sortedrl.core.rollout import Prompt, Rollout
from sortedrl.core.seeds import derive_seed, mixing
from sortedrl.engines.step_time import delimiter_of

LengthOf = Callable[[Prompt, int], int]  # prompt, seed -> tokens
Drawn = TypeVar("Drawn")
MOST_TOKENS = 10_000_000  # anything longer is an error in the file
MOST_CSV_FIELD = 1 << 30  # characters: a file may have the responses in a column beside their lengths
CSV_ENDINGS = (".csv", ".tsv")
LENGTH_NAMES = ("length", "response_length", "completion_length", "completion_tokens", "output_tokens")
PROMPT_NAMES = ("prompt", "prompt_id")
REWARD_NAMES = ("reward", "score")
BINARY_KINDS = {  # first bytes -> what it is, and how to get a file that can be read
    b"\x93NUMPY": 'a NumPy file: write it with numpy.savetxt("lengths.txt", lengths, fmt="%d")',
    b"PAR1": "a Parquet file: examples/lengths_from_logs.py counts the tokens of TRL's completions; from one with a "
    'column `length`, write pandas.read_parquet(file).to_csv("lengths.csv")',
}
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
    """Lengths by prompt; the seed picks one of a prompt's lengths. `rewards`: those of the same responses, if known.
    `run_limit`: where the run that they are from cut its responses; 0: unknown."""

    by_prompt: tuple[tuple[int, ...], ...]
    rewards: tuple[tuple[float, ...], ...] | None = None
    run_limit: int = 0

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
    """A JSONL or CSV file: one number per line, or rows with a length, and optionally a prompt and a reward.

    Without prompts, every response draws from all lengths: the file does not show how the lengths of one prompt's
    responses are correlated.
    """
    by_prompt: dict[object, list[int]] = {}
    rewards: dict[object, list[float]] = {}
    text = _text(path)
    rows = _csv_rows(path, text) if _is_csv(path, text) else _json_rows(path, text)
    for place, prompt, length, reward in (found for at, row in rows for found in _lengths_in(row, at, path)):
        if isinstance(length, bool) or not isinstance(length, int | float) or not 1 <= length <= MOST_TOKENS:
            why = f"length {reprlib.repr(length)} is not a number of tokens (1 to {MOST_TOKENS:,})"
            raise ValueError(f"{path}, {place}: {why}")
        if length != round(length):  # a column of a trainer's log, such as completion_length of TRL before 0.16
            why = f"length {length} is not a whole number of tokens: give the length of each response, not means"
            raise ValueError(f"{path}, {place}: {why}")
        by_prompt.setdefault(prompt, []).append(round(length))
        if isinstance(reward, int | float) and math.isfinite(reward):
            rewards.setdefault(prompt, []).append(float(reward))
    if not by_prompt:
        raise ValueError(f"{path}: no lengths in this file")
    if None in by_prompt and len(by_prompt) > 1:
        raise ValueError(f"{path}: some lengths have a `prompt` and some do not: give it for all or none")
    is_rewarded = all(len(rewards.get(prompt, ())) == len(lengths) for prompt, lengths in by_prompt.items())
    of_prompts = tuple(tuple(rewards[prompt]) for prompt in by_prompt) if is_rewarded else None
    return ReplayedLengths(tuple(map(tuple, by_prompt.values())), of_prompts)


def _text(path: Path) -> str:
    data = path.read_bytes()
    for start, kind in BINARY_KINDS.items():
        if data.startswith(start):
            raise ValueError(f"{path}: {kind}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not text in UTF-8 (byte {error.start + 1:,})") from None


def _is_csv(path: Path, text: str) -> bool:
    """By the ending of its name, or because its first line names a column of lengths."""
    if path.name.lower().endswith(CSV_ENDINGS):
        return True
    first = text.partition("\n")[0]
    names = {name.strip().lower() for name in first.split(delimiter_of(first))}
    return _first_of(LENGTH_NAMES, names) is not None


def _json_rows(path: Path, text: str) -> Iterator[tuple[str, object]]:
    """Place in the file, and the value there. The file may also be one JSON list."""
    if text.startswith("["):
        with suppress(ValueError, RecursionError):
            yield from [(f"entry {number}", entry) for number, entry in enumerate(json.loads(text), start=1)]
            return
    for number, line in enumerate(io.StringIO(text, newline=None), start=1):
        if line.strip():
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:  # or thousands of digits, or deeply nested lists
                why = str(error)
                if isinstance(error, json.JSONDecodeError):
                    why = f"not JSON ({error.msg.removesuffix(' at')} at column {error.colno})"
                raise ValueError(f"{path}, line {number}: {why}") from None
            yield f"line {number}", value


def _csv_rows(path: Path, text: str) -> Iterator[tuple[str, object]]:
    """The first line names the columns, unless the file is one column of numbers."""
    csv.field_size_limit(MOST_CSV_FIELD)
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter_of(text.partition("\n")[0]))
    header = next(rows, [])
    names = [name.strip().lower() for name in header]
    if len(names) == 1 and isinstance(_number(names[0]), float):
        yield "line 1", _number(names[0])
        names = ["length"]
    length, reward = _first_of(LENGTH_NAMES, names), _first_of(REWARD_NAMES, names)
    if names and length is None:
        raise ValueError(f"{path}, line 1: no column `length` in {header}")
    for row in rows:
        if any(cell.strip() for cell in row):
            cells = {name: row[i] if i < len(row) else "" for i, name in enumerate(names)}
            numbers = {name: _number(cells[name]) for name in (length or "", reward or "") if name in cells}
            yield f"line {rows.line_num}", cells | numbers


def _number(cell: str) -> float | str:
    """The number in a cell of a CSV file, or its text if it is none."""
    try:
        return float(cell)
    except ValueError:
        return cell


def _first_of(names: tuple[str, ...], found: Collection[object]) -> str | None:
    return next((name for name in names if name in found), None)


def _lengths_in(value: object, place: str, path: Path) -> Iterator[tuple[str, object, object, object]]:
    """Place, prompt (None if it has none), length, and reward (None if unknown) of each response of a row."""
    if not isinstance(value, dict):
        yield place, None, value, None
        return
    length, prompt = _first_of(LENGTH_NAMES, value), _first_of(PROMPT_NAMES, value)
    reward = value.get(_first_of(REWARD_NAMES, value))
    if prompt is None and length is not None:
        yield place, None, value[length], reward
        return
    lengths = value.get("lengths", [value.get(length)])
    if lengths == [None] or not isinstance(lengths, list) or not lengths:
        raise ValueError(f"{path}, {place}: no `length` or `lengths` in {sorted(value)}")
    rewards: object = value.get("rewards")
    if not isinstance(rewards, list) or len(rewards) != len(lengths):
        rewards = [reward] * len(lengths)
    for one, its_reward in zip(lengths, rewards, strict=True):
        yield place, place if prompt is None else str(value[prompt]), one, its_reward


def cached(draw: Callable[[Prompt, int], Drawn]) -> Callable[[Prompt, int], Drawn]:
    """The same lengths or episodes with a cache: every resume and turn asks again. What has a cache stays as it is."""
    return draw if hasattr(draw, "cache_info") else lru_cache(maxsize=1 << 14)(draw)


@lru_cache(maxsize=4)
def with_shared_cache(lengths: LengthOf) -> LengthOf:
    """`cached`, with one cache for equal lengths: all schedules that are compared draw the same ones."""
    return cached(lengths)


def length_of_request(lengths: LengthOf) -> Callable[[Request], int]:
    draw = cached(lengths)
    return lambda request: draw(request.prompt, request.seed)


def number_of(prompt: Prompt) -> int:
    """The payload of a simulated prompt is its index in the dataset."""
    return int(prompt.payload)


def normal(bits: int) -> float:
    return _NORMAL.inv_cdf(((bits >> 10) + 0.5) / (1 << 53))


# Groups of equal rewards, which dynamic sampling filters

EqualGroups = Callable[[Rollout], bool]  # whether the rewards of its group are equal


@dataclass(frozen=True)
class DrawnEqual:
    """Each visit of a prompt with the same probability, independent of its lengths."""

    fraction: float

    def __call__(self, rollout: Rollout) -> bool:
        return derive_seed(rollout.group, 11) % 1_000_000 < self.fraction * 1_000_000


@dataclass(frozen=True)
class RecordedEqual:
    """The prompts whose recorded rewards are equal, with the lengths that these have."""

    by_prompt: tuple[bool, ...]

    def __call__(self, rollout: Rollout) -> bool:
        return self.by_prompt[number_of(rollout.prompt) % len(self.by_prompt)]


def simulated_reward(equal: EqualGroups | None) -> Callable[[Rollout], float]:
    """1 in groups of equal rewards; in others, 0 and 1 in turn."""
    if equal is None:
        return lambda rollout: 0.0
    return lambda rollout: 1.0 if equal(rollout) else float(rollout.index_in_group % 2)


# Lengths on a real engine


class ForcedLengths(ForwardingEngine):
    """Wraps `inner`, to compare schedules on equal work: `length_of` the whole response, including the prefix.

    The model computes every token; only the end of each response is decided here. So time, memory and preemptions are
    real.
    """

    def __init__(self, inner: Engine, length_of: Callable[[Request], int]) -> None:
        super().__init__(inner)
        self._length_of = length_of
        self._truncated: dict[int, bool] = {}  # by request id: ends at max_new_tokens before its forced length

    def submit(self, requests: Sequence[Request]) -> None:
        self.inner.submit([self._forced(request) for request in requests])

    def poll(self, until: float | None = None) -> list[Change]:
        return [self._told(change) for change in checked_changes(self, "poll", self.inner.poll(until))]

    def abort(self, ids: Sequence[int]) -> list[Change]:
        changes = [self._told(change) for change in checked_changes(self, "abort", self.inner.abort(ids))]
        for id in ids:
            self._truncated.pop(id, None)
        return changes

    def _forced(self, request: Request) -> Request:
        # A prefix that already has the forced length gets one more token: engines cannot generate none.
        left = max(1, self._length_of(request) - request.prefix_length)
        self._truncated[request.id] = left >= request.max_new_tokens
        sampling = replace(request.sampling, ignore_eos=True)
        return request._replace(max_new_tokens=min(left, request.max_new_tokens), sampling=sampling)

    def _told(self, change: Change) -> Change:
        if isinstance(change, RequestFinished):
            return change._replace(truncated=self._truncated.pop(change.id))
        return change
