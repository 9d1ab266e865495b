"""The metrics of several runs as those of one: over seeds, or over controllers that train together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import fields, replace
from statistics import fmean
from typing import Any

from sortedrl.observe.run_metrics import RunMetrics

MAXIMA = ("slots", "staleness_max", "longest_wait_updates")
OF_EACH_CONTROLLER = ("updates", "harvests", *MAXIMA[1:])  # whole numbers that do not add up
RATES = ("goodput", "kept", "rollouts_per_update_mean", "trained_rollouts_per_hour", "trained_tokens_per_hour")


def merged(runs: Sequence[RunMetrics], add: Collection[str] = ()) -> dict[str, Any]:
    """Sums of histograms and of the metrics in `add`, maxima of maxima, else means. Unknown values do not count."""
    result: dict[str, Any] = {}
    for field in fields(RunMetrics):
        name, values = field.name, [getattr(run_metrics, field.name) for run_metrics in runs]
        first, known = values[0], [value for value in values if value is not None]
        if isinstance(first, dict):
            result[name] = _merged_counts(values, add=name in add or name.endswith("histogram"))
        elif name == "bubble_per_harvest":
            result[name] = first if len(runs) == 1 else [fmean(column) for column in zip(*values, strict=False)]
        elif isinstance(first, bool | str):
            result[name] = first
        elif name in add:
            result[name] = sum(known)
        else:
            result[name] = max(values) if name in MAXIMA else fmean(known) if known else None
    return result


def of_controllers(runs: Sequence[RunMetrics]) -> RunMetrics:
    """Counts, and rates of tokens and rollouts, add up; fractions are means, since all have as many slots. The run ends
    with the last controller."""
    if len(runs) == 1:
        return runs[0]
    longest = max(run.wall_seconds for run in runs)
    hourly = [name for name in RATES if name.endswith("hour")]
    runs = [replace(run, **{name: getattr(run, name) * run.wall_seconds / longest for name in hourly}) for run in runs]
    counts = [field.name for field in fields(RunMetrics) if field.type == "int"]
    add = {*counts, *RATES, "rejected_reasons", "filtered_reasons"} - {*OF_EACH_CONTROLLER}
    return RunMetrics(**merged(runs, add) | {"wall_seconds": longest})


def _merged_counts(values: Sequence[dict[Any, float]], *, add: bool) -> dict[Any, float]:
    total: Counter[Any] = Counter()
    for value in values:
        total.update(value)
    return {key: number if add else number / len(values) for key, number in sorted(total.items())}
