"""Measures how fast this engine is on this machine, to calibrate the simulator to your hardware.

Each cell of the profile runs `running + 1` requests with contexts of equal length. The engine may prefill them over
many steps, so the first may decode long before the last. So the last two requests serve as the clock. When the last one
finishes after a few tokens, all others are decoding; the one before it finishes `steps` tokens later, and no other
request finishes in between. That interval gives the step time; the time before it, minus its decode steps, is the
prefill. The remaining requests are aborted. This works with any engine, even if it delivers tokens in large chunks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count, islice
from pathlib import Path
from statistics import median
from typing import Any

from sortedrl.core.atomic_write import write_atomically
from sortedrl.core.engine import Engine, Failed, Finished, Request
from sortedrl.core.rollout import Prompt
from sortedrl.engines.forced_lengths import ForcedLengths
from sortedrl.engines.step_time import Point, StepTime, fit_levels
from sortedrl.studies.bench import random_prompts

_LEAD_TOKENS = 8  # until the batch is in steady state
_SMALLEST_PREFILL_STEP = 512  # tokens that every engine can prefill in one step
SHORT_CONTEXT = 32


@dataclass(frozen=True)
class Cell:
    running: int
    context: int
    cached_tokens: float  # total of all running requests, in the middle of the interval
    step_seconds: float
    prefill_seconds_per_token: float


@dataclass(frozen=True)
class Profile:
    """The measurements, as written to the file that `--step-time` reads."""

    engine: str
    model: str
    slots: int
    cells: tuple[Cell, ...]
    prefill_seconds_per_token: float
    prefill_tokens_per_step: int | None
    kv_tokens: int | None
    weight_update_seconds: float | None
    machine: str

    def step_time(self) -> StepTime:
        points = [Point(cell.running, cell.cached_tokens, cell.step_seconds) for cell in self.cells]
        fitted = fit_levels(
            points, per_prefill_token=self.prefill_seconds_per_token, source=f"profile of {self.machine}"
        )
        return replace(fitted, prefill_tokens_per_step=self.prefill_tokens_per_step)

    def fit_error(self) -> float:
        """The largest relative error of the fitted step time over the measured cells."""
        fitted = self.step_time()
        return max(
            abs((fitted.at(cell.running) + fitted.per_cached_token * cell.cached_tokens) / cell.step_seconds - 1)
            for cell in self.cells
        )

    def write(self, path: Path) -> None:
        write_atomically(path, json.dumps(asdict(self), indent=1) + "\n")


def cells_for(slots: int, longest_context: int, cached_tokens_at_most: float, steps: int = 48) -> list[tuple[int, int]]:
    """(running, context) pairs to measure: few to all slots, short to long contexts, as far as they fit in memory."""
    levels = sorted({1, max(1, slots // 8), max(1, slots // 4), max(1, slots // 2), max(1, slots - 1)})
    contexts = [SHORT_CONTEXT, *(c for c in (longest_context // 4, longest_context // 2) if c > 2 * SHORT_CONTEXT)]
    return [
        (r, c)
        for c in contexts
        for r in levels
        if r < slots and (r + 1) * (c + 128) <= cached_tokens_at_most and c + _room_for(r, c, steps) <= longest_context
    ]


def _room_for(running: int, context: int, steps: int) -> int:
    """Upper bound on the tokens that a request of the cell may generate."""
    return 2 * _LEAD_TOKENS + max(128, steps) + running + (running + 1) * context // _SMALLEST_PREFILL_STEP


def measure(
    engine: Engine,
    cells: Sequence[tuple[int, int]],
    vocabulary: int,
    *,
    steps: int,
    repeats: int,
    on_cell: Callable[[Cell], None] = lambda cell: None,
) -> list[Cell]:
    found = []
    fresh = count(engine.slots)  # places not used by the warm-up or another cell: no prefix cache hits
    for running, context in cells:
        runs = []
        for _ in range(repeats):
            prompts = random_prompts(islice(fresh, running + 1), context, vocabulary)  # before timing starts
            runs.append(_measured(engine, prompts, context, steps))
        step = median(run.step_seconds for run in runs)
        prefill = median(run.prefill_seconds_per_token for run in runs)
        found.append(Cell(running, context, runs[0].cached_tokens, step, prefill))
        on_cell(found[-1])
    return found


def _measured(engine: Engine, prompts: Sequence[Prompt], context: int, steps: int) -> Cell:
    """The step time with all but one of the prompts, between the ends of the last two submitted."""
    running = len(prompts) - 1
    first_to_end, second = running, running - 1
    prefill_tokens = (running + 1) * context
    # No other request may finish before the second: those prefilled first are ahead by at most this many steps.
    ahead = running + prefill_tokens // _SMALLEST_PREFILL_STEP
    lengths = {first_to_end: _LEAD_TOKENS, second: _LEAD_TOKENS + steps}
    longest = _LEAD_TOKENS + steps + ahead
    forced = ForcedLengths(engine, lambda request: lengths.get(request.id, longest))
    began = engine.now()
    forced.submit([Request(i, prompt, (), longest, i) for i, prompt in enumerate(prompts)])
    ended: dict[int, float] = {}
    while not ended.keys() >= {first_to_end, second}:
        for change in forced.poll():
            if isinstance(change, Finished):
                ended[change.id] = change.at
            elif isinstance(change, Failed):
                raise RuntimeError(f"the engine refused a context of {context} tokens: {change.reason}")
    forced.abort([id for id in range(running + 1) if id not in ended])
    step = (ended[second] - ended[first_to_end]) / steps
    prefill = max(0.0, (ended[first_to_end] - began - _LEAD_TOKENS * step) / prefill_tokens)
    return Cell(running, context, running * (context + _LEAD_TOKENS + steps / 2), step, prefill)


def prefill_of(cells: Sequence[Cell]) -> float:
    """From the cells with the most prefill tokens: in the others, fixed costs dominate."""
    heaviest = sorted(cells, key=lambda cell: -cell.running * cell.context)[:3]
    return median(cell.prefill_seconds_per_token for cell in heaviest)


def read(path: Path) -> Profile:
    try:
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found = Profile(**(fields | {"cells": tuple(Cell(**cell) for cell in fields["cells"])}))
        times_are_right = (
            all(0 < cell.step_seconds < math.inf for cell in found.cells)
            and 0 <= found.prefill_seconds_per_token < math.inf
            and 0 <= (found.weight_update_seconds or 0.0) < math.inf
        )
        if not (found.kv_tokens is None or found.kv_tokens > 0):
            raise TypeError(f"kv_tokens = {found.kv_tokens}")
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a profile ({error}): create one with sortedrl profile") from None
    if not times_are_right:
        raise ValueError(
            f"{path} contains an impossible time, such as a step of 0 s: create it again with sortedrl profile"
        )
    return found
