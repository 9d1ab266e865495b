"""How fast is this engine on this machine: what the simulator needs to speak about your own hardware.

One cell of the profile: `running + 1` requests with contexts of equal length start together; one of them ends after a
few tokens, and from then until all others end `running` requests decode side by side. That interval gives the step
time; what came before it, less its own steps, is the prefill. Works with any engine, however coarsely it delivers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from sortedrl.core.engine import Engine, Failed, Finished, Request
from sortedrl.engines.forced_lengths import ForcedLengths
from sortedrl.engines.step_time import Point, StepTime, fit_levels
from sortedrl.studies.bench import RandomPrompts

_LEAD_TOKENS = 8  # until the batch runs evenly
SHORT_CONTEXT = 32


@dataclass(frozen=True)
class Cell:
    running: int
    context: int
    cached_tokens: float  # of all running requests together, in the middle of the interval
    step_seconds: float
    prefill_seconds_per_token: float


@dataclass(frozen=True)
class Profile:
    """What was measured, as it is written to a file and read by `--step-time`."""

    engine: str
    model: str
    slots: int
    cells: tuple[Cell, ...]
    prefill_seconds_per_token: float
    kv_tokens: int | None
    load_seconds: float | None
    machine: str

    def step_time(self) -> StepTime:
        points = [Point(cell.running, cell.cached_tokens, cell.step_seconds) for cell in self.cells]
        return fit_levels(points, per_prefill_token=self.prefill_seconds_per_token, source=f"profile of {self.machine}")

    def fit_error(self) -> float:
        """The largest relative error of the fitted step time over the measured cells."""
        fitted = self.step_time()
        return max(
            abs((fitted.at(cell.running) + fitted.per_cached_token * cell.cached_tokens) / cell.step_seconds - 1)
            for cell in self.cells
        )

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def cells_for(slots: int, longest_context: int, cached_tokens_at_most: float) -> list[tuple[int, int]]:
    """(running, context) to measure: few to all slots, short to long contexts, as far as they fit in memory."""
    levels = sorted({1, max(1, slots // 8), max(1, slots // 4), max(1, slots // 2), max(1, slots - 1)})
    contexts = [SHORT_CONTEXT, *(c for c in (longest_context // 4, longest_context // 2) if c > 2 * SHORT_CONTEXT)]
    return [(r, c) for c in contexts for r in levels if r < slots and (r + 1) * (c + 128) <= cached_tokens_at_most]


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
    for number, (running, context) in enumerate(cells):
        runs = [
            _measured(engine, running, context, vocabulary, steps, seed=number * repeats + i) for i in range(repeats)
        ]
        step = median(run.step_seconds for run in runs)
        prefill = median(run.prefill_seconds_per_token for run in runs)
        found.append(Cell(running, context, runs[0].cached_tokens, step, prefill))
        on_cell(found[-1])
    return found


def _measured(engine: Engine, running: int, context: int, vocabulary: int, steps: int, seed: int) -> Cell:
    lead, whole = _LEAD_TOKENS, _LEAD_TOKENS + steps
    forced = ForcedLengths(engine, lambda request: lead if request.id == running else whole)
    first = seed * (running + 1)  # other prompts in every cell: none finds its keys in a cache
    prompts = RandomPrompts(first + running + 1, context, vocabulary)
    began = engine.now()
    forced.submit([Request(i, prompts[first + i], (), whole, i) for i in range(running + 1)])
    ended: dict[int, float] = {}
    while len(ended) <= running:
        for change in forced.poll():
            if isinstance(change, Finished):
                ended[change.id] = change.at
            elif isinstance(change, Failed):
                raise RuntimeError(f"the engine refused a context of {context} tokens: {change.reason}")
    at_lead = ended.pop(running)
    step = (max(ended.values()) - at_lead) / steps
    prefill = max(0.0, (at_lead - began - lead * step) / ((running + 1) * context))
    return Cell(running, context, running * (context + lead + steps / 2), step, prefill)


def prefill_of(cells: Sequence[Cell]) -> float:
    """From the cells with the most to prefill: in the others a fixed cost hides it."""
    heaviest = sorted(cells, key=lambda cell: -cell.running * cell.context)[:3]
    return median(cell.prefill_seconds_per_token for cell in heaviest)


def read(path: Path) -> Profile:
    try:
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return Profile(**(fields | {"cells": tuple(Cell(**cell) for cell in fields["cells"])}))
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a profile ({error}): make one with sortedrl profile") from None
