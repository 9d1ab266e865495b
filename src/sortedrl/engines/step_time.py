"""The duration of a decode step: the model used by the simulated engine, its presets, and how to fit it.

    seconds = step(running) + per_cached_token x (sum of contexts)
    prefill = per_prefill_step for each step that prefills + per_prefill_token x tokens

`step` is given at a few batch sizes and interpolated between them. No request decodes during a prefill, unless there
are both a `per_prefill_step` and `prefill_tokens_per_step`: then `per_prefill_token` is what a token adds to a step in
which other requests decode (simulated_chunked_prefill.py).

With drafts a step of the engine yields `acceptance` tokens per request on average, but a simulated step yields one. So
a simulated step takes 1 / acceptance of the engine's. That treats all requests alike; over a response of hundreds of
steps the difference averages out.
"""

from __future__ import annotations

import csv
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

from sortedrl.core.wording import counted

When = Literal["none", "tail", "always"]  # to draft
_CSV_DELIMITERS = ",;\t"  # spreadsheets write semicolons where the comma is the decimal mark


class Point(NamedTuple):
    """One measurement: a decode step of `running` requests whose contexts add up to `cached_tokens`."""

    running: float
    cached_tokens: float
    seconds: float


@dataclass(frozen=True)
class StepTime:
    steps: tuple[tuple[float, float], ...]  # (running, seconds), at least two, ascending
    per_cached_token: float = 0.0
    per_prefill_token: float = 0.0
    source: str = ""
    prefill_tokens_per_step: int | None = None  # maximum per step; other requests wait in the queue
    per_prefill_step: float = 0.0  # what a decode step costs more if it also prefills, even a few tokens
    measured_to: float | None = None  # the largest batch that was measured; None: it holds for all
    _memo: dict[int, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        runnings = [running for running, _ in self.steps]
        if len(runnings) < 2 or sorted(set(runnings)) != runnings:
            raise ValueError(f"steps must have two or more ascending batch sizes, got {runnings}")
        if min(self.per_cached_token, self.per_prefill_token, self.per_prefill_step, *(t for _, t in self.steps)) < 0:
            raise ValueError("step times must not be negative")

    def at(self, running: int) -> float:
        """Seconds per step of `running` requests with empty contexts; linear beyond the last point."""
        if running not in self._memo:
            place = min(max(bisect_right(self.steps, (running, float("inf"))), 1), len(self.steps) - 1)
            (r0, t0), (r1, t1) = self.steps[place - 1], self.steps[place]
            self._memo[running] = max(0.0, t0 + (t1 - t0) * (running - r0) / (r1 - r0))
        return self._memo[running]

    def per_cached(self, running: int) -> float:
        """Seconds per step and cached token, while so many requests run."""
        return self.per_cached_token

    def prefill(self, tokens: int) -> float:
        """Seconds to prefill so many tokens, beyond the decode step that they share."""
        return self.per_prefill_step + tokens * self.per_prefill_token if tokens else 0.0

    @property
    def has_chunked_prefill(self) -> bool:
        """Whether the cost of a step with a prefill has been measured apart from that of the tokens."""
        return self.prefill_tokens_per_step is not None and self.per_prefill_step > 0

    def scaled(self, *, per_prefill_token: float) -> StepTime:
        return replace(self, per_prefill_token=per_prefill_token)


def linear(
    fixed: float, per_request: float, per_cached_token: float = 0.0, per_prefill_token: float = 0.0, source: str = ""
) -> StepTime:
    return StepTime(((0, fixed), (128, fixed + 128 * per_request)), per_cached_token, per_prefill_token, source)


PRESETS: dict[str, StepTime] = {
    "memory-bound": linear(1.0, 1 / 128, source="t = 1 + r/128, prefill free"),
    "compute-bound": linear(0.164, 1 / 128, source="t = 0.164 + r/128, prefill free"),
    # How close it is: docs/my_lengths.md
    "h200-8b": StepTime(
        ((1, 0.0050), (16, 0.0051), (32, 0.0054), (64, 0.0056), (128, 0.0068)),
        3e-8,
        2.7e-5,
        source="mean of two profiles, vLLM 0.25.1, LLaMA-3.1-8B shape, one H200",
        prefill_tokens_per_step=2048,
        measured_to=128,
    ),
    "a100-8b": StepTime(
        ((1, 0.0097), (32, 0.0109), (64, 0.0112), (128, 0.0132), (256, 0.0195), (512, 0.0347)),
        8e-8,
        4e-5,
        source="Vidur's tables, Llama-3-8B on A100; 0.08 us per cached token; prefill estimated",
        measured_to=512,
    ),
    "h100-7b": StepTime(
        ((1, 0.0056), (32, 0.0058), (64, 0.0059), (128, 0.0064), (256, 0.0092), (512, 0.0120)),
        5e-8,
        2e-5,
        source="Vidur's tables, Llama-2-7B on H100; cached tokens and prefill estimated",
        measured_to=512,
    ),
}


def fit(points: Sequence[Point], source: str = "") -> StepTime:
    """Least squares of the relative error of t = a + b running + c cached, with coefficients >= 0."""
    if len(points) < 3:
        raise ValueError(f"{counted(len(points), 'measured point')}, but a fit needs at least 3")
    rows = [(1 / p.seconds, p.running / p.seconds, p.cached_tokens / p.seconds) for p in points]
    columns = [0, 1, 2]
    while True:
        solution = _least_squares([[row[c] for c in columns] for row in rows], [1.0] * len(rows))
        if min(solution) >= 0 or len(columns) == 1:
            break
        del columns[solution.index(min(solution))]
    coefficient = dict(zip(columns, solution, strict=True))
    a, b, c = (max(0.0, coefficient.get(column, 0.0)) for column in (0, 1, 2))
    fitted = linear(a, b, c, source=source or f"fit to {len(points)} points")
    return replace(fitted, measured_to=max(point.running for point in points))


def fit_levels(points: Sequence[Point], *, per_prefill_token: float = 0.0, source: str = "") -> StepTime:
    """Least squares of the relative error of t = step(running) + c cached, with one step time per batch size.

    On a GPU, batches are padded to captured sizes, so the step time is a staircase that a line would miss.
    """
    levels = sorted({point.running for point in points})
    if len(levels) < 2 or len(points) <= len(levels):
        few = f"{len(points)} points at {len(levels)} batch sizes"
        raise ValueError(f"{few}, but a fit needs two sizes and two contexts")
    rows = [[*((p.running == level) / p.seconds for level in levels), p.cached_tokens / p.seconds] for p in points]
    *steps, per_cached_token = _least_squares(rows, [1.0] * len(rows))
    steps = [max(0.0, step) for step in steps]
    by_level = tuple(zip(levels, steps, strict=True))
    return StepTime(by_level, max(0.0, per_cached_token), per_prefill_token, source, measured_to=levels[-1])


def delimiter_of(first_line: str) -> str:
    """Of a CSV file."""
    return max(_CSV_DELIMITERS, key=first_line.count)


def read_points(path: Path) -> list[Point]:
    """A CSV file with the columns running, cached_tokens, seconds. Upper case, semicolons and tabs are fine."""
    points = []
    with path.open(newline="", encoding="utf-8-sig") as file:
        first = file.readline()
        file.seek(0)
        reader = csv.DictReader(file, delimiter=delimiter_of(first))
        columns = list(reader.fieldnames or ())
        reader.fieldnames = [name.strip().lower() for name in columns]
        missing = set(Point._fields) - set(reader.fieldnames)
        if missing:
            found = ", ".join(columns) or "none"
            raise ValueError(f"{path}: no column {', '.join(sorted(missing))}; columns: {found}")
        for row in reader:
            try:
                point = Point(*(float(row[name]) for name in Point._fields))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {reader.line_num}: {error}") from None
            positive = point.running > 0 and point.cached_tokens >= 0 and point.seconds > 0
            if not (positive and all(map(math.isfinite, point))):
                values = ", ".join(f"{name} = {value:g}" for name, value in point._asdict().items())
                raise ValueError(f"{path}, line {reader.line_num}: {values} is not a valid measurement")
            points.append(point)
    return points


def _least_squares(rows: list[list[float]], target: list[float]) -> list[float]:
    """Solves the normal equations by Gaussian elimination, columns scaled to unit size."""
    size = len(rows[0])
    scale = [max(abs(row[i]) for row in rows) or 1.0 for i in range(size)]
    scaled = [[value / scale[i] for i, value in enumerate(row)] for row in rows]
    matrix = [
        [sum(row[i] * row[j] for row in scaled) for j in range(size)]
        + [sum(row[i] * t for row, t in zip(scaled, target, strict=True))]
        for i in range(size)
    ]
    for i in range(size):
        pivot = max(range(i, size), key=lambda k: abs(matrix[k][i]))
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        if abs(matrix[i][i]) < 1e-12:
            parts = "the cost of batch size, contexts and a fixed part"
            raise ValueError(f"the measured points do not vary enough to separate {parts}")
        for k in range(size):
            if k != i:
                factor = matrix[k][i] / matrix[i][i]
                matrix[k] = [a - factor * b for a, b in zip(matrix[k], matrix[i], strict=True)]
    return [matrix[i][size] / matrix[i][i] / scale[i] for i in range(size)]


# Drafts


@dataclass(frozen=True, kw_only=True)
class DraftedStepTime(StepTime):
    """The step time of an engine that drafts while at most `most_running` requests run."""

    drafted: StepTime  # of steps with drafts
    acceptance: float  # tokens per request and step with drafts, the policy's own included
    most_running: int

    def at(self, running: int) -> float:
        if running > self.most_running:
            return super().at(running)
        return self.drafted.at(running) / self.acceptance

    def per_cached(self, running: int) -> float:
        if running > self.most_running:
            return self.per_cached_token
        return self.drafted.per_cached_token / self.acceptance


def checking_drafts(step_time: StepTime, draft_tokens: int) -> StepTime:
    """The model where nothing was measured: a step that checks drafts takes as long as one of `draft_tokens` + 1 times
    as many requests, and reads each context once."""
    at_once = draft_tokens + 1
    steps = tuple((running / at_once, seconds) for running, seconds in step_time.steps)
    return replace(step_time, steps=steps, source=f"{step_time.source}, {at_once} tokens per request")


def with_drafts(
    plain: StepTime, drafted: StepTime, acceptance: float, when: When, slots: int, context: float = 0.0
) -> StepTime:
    """`plain`: the steps without drafts of the same engine; `context`: as in `pays_up_to`."""
    if when == "none":
        return plain
    most = slots if when == "always" else pays_up_to(plain, drafted, acceptance, slots, context)
    fields = {name: getattr(plain, name) for name, known in StepTime.__dataclass_fields__.items() if known.init}
    return DraftedStepTime(**fields, drafted=drafted, acceptance=acceptance, most_running=most)


def pays_up_to(plain: StepTime, drafted: StepTime, acceptance: float, slots: int, context: float = 0.0) -> int:
    """The most running requests, of `context` tokens each, with which drafts still make responses faster; 0: never."""

    def pays(running: int) -> bool:
        cached = running * context
        without = plain.at(running) + plain.per_cached(running) * cached
        return drafted.at(running) + drafted.per_cached(running) * cached < acceptance * without

    return next((running for running in range(slots, 0, -1) if pays(running)), 0)
