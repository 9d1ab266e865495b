"""The file that `sortedrl profile` writes and `--step-time` reads: measured step times of an engine."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from sortedrl.engines.step_time import Point, StepTime, fit_levels
from sortedrl.log.atomic_write import write_atomically

NOTICED = 1.05  # a step that took this many times as long as one of more work was disturbed
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Cell:
    running: int
    context: int
    cached_tokens: float  # total of all running requests, in the middle of the interval
    step_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    prefill_seconds_per_token: float


@dataclass(frozen=True)
class Profile:
    """The measurements, as written to the file that `--step-time` reads."""

    engine: str
    model: str
    slots: int
    cells: tuple[Cell, ...]
    prefill_seconds_per_token: Seconds
    prefill_tokens_per_step: int | None
    kv_tokens: Annotated[int, Field(gt=0)] | None
    weight_update_seconds: Seconds | None
    machine: str
    prefill_step_seconds: Seconds = 0.0  # of a return; measured if it was asked for, or with SGLang
    prefill_step_tokens: Annotated[int, Field(ge=0)] = 128  # with requests of so many new tokens
    draft_tokens: int = 0  # drafted per request and step, if the engine has drafts; `cells` are without them
    draft_cells: tuple[Cell, ...] = ()  # the same measured with drafts, per step

    def drafted_step_time(self) -> StepTime:
        """A step with drafts reads each context at least once: it costs no less per cached token than one without."""
        fitted, least = self._fitted(self.draft_cells), self._fitted(self.cells).per_cached_token
        if fitted.per_cached_token >= least:
            return fitted
        cells = undisturbed(self.draft_cells)
        steps = tuple(
            (running, fmean(c.step_seconds - least * c.cached_tokens for c in cells if c.running == running))
            for running, _ in fitted.steps
        )
        return replace(fitted, steps=steps, per_cached_token=least)

    def _fitted(self, cells: Sequence[Cell]) -> StepTime:
        points = [Point(cell.running, cell.cached_tokens, cell.step_seconds) for cell in undisturbed(cells)]
        source = f"profile of {self.machine}"
        return fit_levels(points, per_prefill_token=self.prefill_seconds_per_token, source=source)

    def step_time(self) -> StepTime:
        fitted = self._fitted(self.cells)
        per_step, per_token = self._prefill_costs(fitted)
        return replace(
            fitted,
            prefill_tokens_per_step=self.prefill_tokens_per_step,
            per_prefill_step=per_step,
            per_prefill_token=per_token,
        )

    def _prefill_costs(self, decode: StepTime) -> tuple[float, float]:
        """Seconds that a step with a prefill takes longer than its decode: in any case, and per prefilled token.

        They are a line through two measurements: a step with few tokens, for one request that returns, and the mean
        step of a cell, filled with tokens. In the latter, the requests that are prefilled first decode already.
        """
        few, at_once = self.prefill_step_tokens, self.prefill_tokens_per_step
        if at_once is None or not self.prefill_step_seconds:
            return self.prefill_step_seconds, self.prefill_seconds_per_token
        seconds_of_few = self.prefill_step_seconds + few * self.prefill_seconds_per_token
        slopes = []
        for cell in heaviest(self.cells):
            decoding = cell.running / 2 if (cell.running + 1) * cell.context > at_once else 0
            tokens = min(at_once - decoding, (cell.running + 1) * cell.context)
            decode_seconds = decode.at(round(decoding)) + decode.per_cached_token * decoding * cell.context
            seconds_of_many = tokens * cell.prefill_seconds_per_token - decode_seconds
            if tokens > few:
                slopes.append(max(0.0, (seconds_of_many - seconds_of_few) / (tokens - few)))
        per_token = median(slopes) if slopes else self.prefill_seconds_per_token
        return max(0.0, seconds_of_few - few * per_token), per_token

    def fit_error(self) -> float:
        """The largest relative error of the fitted step time over the undisturbed cells."""
        fitted = self.step_time()
        return max(
            abs((fitted.at(cell.running) + fitted.per_cached_token * cell.cached_tokens) / cell.step_seconds - 1)
            for cell in undisturbed(self.cells)
        )

    def disturbed(self) -> list[Cell]:
        """Those that count with a much shorter step than was measured."""
        both = zip(
            (*self.cells, *self.draft_cells), (*undisturbed(self.cells), *undisturbed(self.draft_cells)), strict=True
        )
        return [cell for cell, used in both if cell.step_seconds > NOTICED * used.step_seconds]

    def write(self, path: Path) -> None:
        write_atomically(path, json.dumps(asdict(self), indent=1) + "\n")


def undisturbed(cells: Sequence[Cell]) -> list[Cell]:
    """A step does not get faster with more requests and more cached tokens. A cell that took longer than such a larger
    one was disturbed, perhaps by another process, and counts with the larger one's step."""

    def least(cell: Cell) -> float:
        return min(
            other.step_seconds
            for other in cells
            if other.running >= cell.running and other.cached_tokens >= cell.cached_tokens
        )

    return [replace(cell, step_seconds=least(cell)) for cell in cells]


def heaviest(cells: Sequence[Cell]) -> list[Cell]:
    """The three with the most prefill tokens: in the others, fixed costs dominate."""
    return sorted(cells, key=lambda cell: -cell.running * cell.context)[:3]


def read(path: Path) -> Profile:
    try:
        return TypeAdapter(Profile).validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise ValueError(f"{path} is not a profile ({why}): create one with sortedrl profile") from None
