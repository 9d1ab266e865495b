"""The sentences and tables of the report that depend on the runs. All other words are in page/report.html.j2."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any, NamedTuple

from sortedrl.core.wording import counted
from sortedrl.observe import wall_clock
from sortedrl.observe.metrics import BUBBLE_PARTS
from sortedrl.observe.report.charts import part_name
from sortedrl.observe.report.runs import INCIDENTAL, ReportedRun, Series
from sortedrl.observe.run_metrics import RunMetrics

MOST_REASONS = 20  # of rejections
WORKLOAD = ("task", "task_options", "data", "model")  # the settings of one workload, which schedules share
Rows = list[tuple[str, list[str]]]  # each with its name


class Column(NamedTuple):
    """A metric of the headline. `form` is its format, of 100x the value if it ends with %."""

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
    return f"{100 * value:.1f}%"


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
    seeds = dict.fromkeys(str(run.seed) for run in one.measured)
    return f"{len(one.measured)} runs, seeds {', '.join(seeds)}" if len(one.measured) > 1 else ""


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


# Sentences


def conclusion(series: Sequence[Series], runs: Sequence[ReportedRun]) -> list[str]:
    """One sentence, then lines that limit or complete it."""
    measured = [one for one in series if one.has_updates]
    asides = []
    if not measured:
        sentence = f"No update was made in {', '.join(run.name for run in runs)}: there is nothing to measure yet."
    elif len(measured) == 1:
        sentence = _conclusion_of_one(measured[0])
    elif tasks := _different_tasks(measured):
        sentence = f"These runs have different tasks ({tasks}) and are not compared: the metrics of each are below."
    else:
        sentence = _conclusion_of_several(measured)
        apart = [key for key in differing_keys(runs) if key not in ("mode", *INCIDENTAL)]
        if apart:
            asides.append(f"The runs differ in more than the mode: {', '.join(apart)}. Compare them with care.")
    for title, of in (("Held-out score", _score), ("Bottleneck", _bottleneck), ("Rejected", _rejected)):
        found = [f"{one.label} {words}" if len(series) > 1 else words for one in series for words in of(one)]
        if found:
            asides.append(f"{title}: {'; '.join(found)}.")
    return [sentence, *asides]


def _conclusion_of_one(one: Series) -> str:
    bubble = one.mean("bubble")
    parts = {part: fmean(run.run_metrics.bubble_parts[part] for run in one.measured) for part in BUBBLE_PARTS}
    most = max(parts, key=lambda part: parts[part])
    mostly = f", mostly {part_name(most)}" if bubble >= 0.005 and parts[most] > bubble / 2 else ""
    return (
        f"{one.label} left {percent(bubble)} of slot-time empty while the engine could run{mostly}, and trained on "
        f"{one.mean('goodput'):,.0f} tokens per second{_cost(one)}."
    )


def _different_tasks(series: Sequence[Series]) -> str:
    """The settings that choose model and problems, as far as they differ; empty if the runs can be compared."""
    firsts = [one.runs[0].settings for one in series]
    values = {key: list(dict.fromkeys(shown(settings.get(key)) for settings in firsts)) for key in WORKLOAD}
    return "; ".join(f"{key}: {', '.join(found)}" for key, found in values.items() if len(found) > 1)


def _conclusion_of_several(series: Sequence[Series]) -> str:
    reference = next((one for one in series if one.label == "baseline"), series[0])
    best = max(series, key=lambda one: one.mean("goodput"))
    before, after = reference.mean("goodput"), best.mean("goodput")
    if best is reference:
        second = max((one for one in series if one is not reference), key=lambda one: one.mean("goodput"))
        return (
            f"No other run is faster than {reference.label}: it trained on {before:,.0f} tokens per second with "
            f"{percent(reference.mean('bubble'))} of slot-time empty; {second.label} trained on "
            f"{second.mean('goodput'):,.0f} with {percent(second.mean('bubble'))}."
        )
    gain = f"{after / before:.2f}x the tokens per second of {reference.label}" if before else "most tokens per second"
    return (
        f"{best.label} trained on {gain} ({after:,.0f} vs. {before:,.0f}): it left {percent(best.mean('bubble'))} of "
        f"slot-time empty instead of {percent(reference.mean('bubble'))}{_cost(best)}."
    )


def _cost(one: Series) -> str:
    waste, greatest = one.mean("waste"), max(run.run_metrics.staleness_max for run in one.runs)
    tokens = f"discarding {percent(waste)} of generated tokens" if waste >= 0.0005 else "discarding no tokens"
    age = f"tokens were {one.mean('staleness_mean'):.2f} versions old on average, {greatest} at most"
    return f", {tokens}; {age if greatest else 'every token was on-policy'}"


def _score(one: Series) -> Iterable[str]:
    runs = [run for run in one.runs if len(run.held_out) > 1]
    if runs:
        before = fmean(run.held_out[0].score["value"] for run in runs)
        after = [run.held_out[-1].score["value"] for run in runs]
        spread = f" ({min(after):.3f}–{max(after):.3f} over {len(after)} runs)" if len(after) > 1 else ""
        yield f"{before:.3f} → {fmean(after):.3f}{spread}"


def _bottleneck(one: Series) -> Iterable[str]:
    parts = {part: fmean(run.run_metrics.wall_parts[part] for run in one.measured) for part in wall_clock.PARTS}
    if any(parts.values()):
        most = wall_clock.bottleneck(parts)
        yield f"{wall_clock.part_name(most)}, {parts[most]:.0%} of wall-clock time"


def _rejected(one: Series) -> Iterable[str]:
    if reasons := rejections(one.runs):
        yield f"{counted(sum(run.run_metrics.rejected for run in one.runs), 'rollout')}, most often: {reasons[0][0]}"


def subtitle(runs: Sequence[ReportedRun]) -> str:
    trained = sum(run.run_metrics.trained for run in runs)
    what = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    counts = sorted({run.slot_counts for run in runs})
    slots = " / ".join(", then ".join(f"{count:,}" for count in of_a_run) for of_a_run in counts)
    of_slots = "1 slot" if counts == [(1,)] else f"{slots} slots"
    return f"{what} · {of_slots} · {counted(trained, 'rollout')} trained on"
