"""The report's tables: formatted metrics, configurations side by side."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any, NamedTuple

from sortedrl.observe.report.charts import part_name
from sortedrl.observe.report.runs import ReportedRun
from sortedrl.observe.report.series import Series
from sortedrl.observe.run_metrics import RunMetrics

MOST_REASONS = 20  # of rejections
Rows = list[tuple[str, list[str]]]  # each with its name


class Column(NamedTuple):
    """A metric of the headline. `form` is its format, of 100 x the value if it ends with %."""

    field: str
    name: str
    unit: str
    meaning: str
    form: str

    def text(self, *values: float) -> str:
        """One value, or a range."""
        of_percent = self.form.endswith("%")
        numbers = [format(100 * v, self.form[:-1]) if of_percent else format(v, self.form) for v in values]
        return (" to " if "+" in self.form else "–").join(numbers) + " %" * of_percent


HEADLINE = (
    Column("bubble", "bubble", "", "empty slot-time while the engine may run", ".1f%"),
    Column("idle", "idle", "", "empty slot-time over wall-clock", ".1f%"),
    Column("goodput", "goodput", "tokens/s", "tokens trained on per second of harvest time", ",.0f"),
    Column("waste", "waste", "", "fraction of generated tokens that were discarded", ".1f%"),
    Column("filtered_fraction", "filtered", "", "of the complete rollouts: their group teaches nothing", ".1f%"),
    Column("staleness_mean", "staleness", "mean", "of trained tokens, in versions", ".2f"),
    Column("staleness_max", "", "max", "maximum staleness of a trained token", ",.0f"),
    Column("sortedness", "sortedness", "", "log-length variance within updates that sorting removed", "z.2f"),
    Column("length_bias", "length bias", "", "mean trained length relative to uncut responses, minus 1", "+z.1f%"),
    Column("mean_reward", "reward", "mean", "over all trained rollouts", "+.2f"),
    Column("updates", "updates", "", "made", ",.0f"),
    Column("wall_seconds", "wall-clock", "s", "from the first event to the last", ",.1f"),
)


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def headline(series: Sequence[Series]) -> dict[str, Any]:
    """One row per series. Rewards and what was filtered are left out if there are none."""
    metrics = [run.run_metrics for one in series for run in one.runs]
    unused = {name for name in ("mean_reward", "filtered_fraction") if not any(getattr(m, name) for m in metrics)}
    columns = [column for column in HEADLINE if column.field not in unused]
    rows = [
        {"label": one.label, "color": one.color, "sub": _runs_and_seeds(one), "cells": [_cell(one, c) for c in columns]}
        for one in series
    ]
    return {"columns": columns, "rows": rows}


def _cell(one: Series, column: Column) -> tuple[str, str]:
    """The mean over the runs (the maximum if it is one), and their range."""
    values = [value for run in one.measured if (value := getattr(run.run_metrics, column.field)) is not None]
    if not values:
        return "unknown", ""
    shown = max(values) if column.field == "staleness_max" else fmean(values)
    return column.text(shown), column.text(min(values), max(values)) if len(set(values)) > 1 else ""


def _runs_and_seeds(one: Series) -> str:
    """Runs of one seed may differ, on a GPU for example, but they are not independent."""
    runs, seeds = len(one.measured), list(dict.fromkeys(str(run.seed) for run in one.measured))
    if runs == 1:
        return ""
    return f"{runs} runs of one seed ({seeds[0]})" if len(seeds) == 1 else f"{runs} runs, seeds {', '.join(seeds)}"


def rejections(runs: Sequence[ReportedRun]) -> Rows:
    """How often each reason occurred in each run, most frequent first."""
    of_runs = [run.run_metrics.rejected_reasons for run in runs]
    total: Counter[str] = Counter()
    for reasons in of_runs:
        total.update(reasons)
    return [(why, [f"{r.get(why, 0):,}" for r in of_runs]) for why, _ in total.most_common(MOST_REASONS)]


def all_metrics(runs: Sequence[ReportedRun]) -> Rows:
    columns = [dict(_flattened(run.run_metrics)) for run in runs]
    keys = dict.fromkeys(key for column in columns for key in column)
    return [(key, [_number(column.get(key)) for column in columns]) for key in keys]


def _flattened(run_metrics: RunMetrics) -> Iterable[tuple[str, Any]]:
    for name, value in asdict(run_metrics).items():
        if name == "rejected_reasons":  # has a table of its own
            continue
        if isinstance(value, dict):
            yield from ((f"{name}, {part_name(str(key))}", item) for key, item in value.items())
        elif not isinstance(value, tuple):
            yield name, value


def _number(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}" if isinstance(value, float) else str(value)


# Settings


def differing_keys(runs: Sequence[ReportedRun]) -> list[str]:
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    return [key for key in keys if len({shown(run.settings.get(key)) for run in runs}) > 1]


def differences(runs: Sequence[ReportedRun]) -> Rows:
    keys = [key for key in differing_keys(runs) if key not in ("out", "resume")]
    return [(key, [shown(run.settings.get(key)) for run in runs]) for key in keys]


def changes(run: ReportedRun) -> Rows:
    """The setting; after how many updates, and its value before and after."""
    return [(one.setting, [f"{one.updates:,}", shown(one.old), shown(one.new)]) for one in run.changes]


def shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
