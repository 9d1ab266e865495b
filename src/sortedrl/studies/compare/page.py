"""The page of a study: the answer, the contrasts, the learning curves with bands, all outcomes, and failed runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from sortedrl.core.wording import counted
from sortedrl.observe.report.charts import Chart, Trace, band, line_through, rounded
from sortedrl.observe.report.self_contained import render
from sortedrl.observe.report.series import MODE_COLORS, OTHER_COLORS
from sortedrl.studies.compare import text
from sortedrl.studies.compare.comparison import Comparison
from sortedrl.studies.compare.outcomes import OUTCOMES, Point
from sortedrl.studies.compare.paired import CONFIDENCE, t_quantile

FOLDER = Path(__file__).parent / "page"
AXES = {  # of the learning curves: a field of `Point`, and its title
    "rollouts": ("rollouts", "rollouts trained on"),
    "seconds": ("seconds", "seconds, without evaluations"),
    "updates": ("update", "update"),
}


def page(comparison: Comparison, version: str) -> str:
    study = comparison.study
    colors = arm_colors(comparison)
    charts = [learning_chart(comparison, colors), *difference_charts(comparison)]
    sizes = counted(len(study.arms), "arm"), counted(len(study.seeds), "seed")
    devices = sorted({run.device for run in comparison.finished})
    versions = sorted({f"torch {run.versions['torch']}" for run in comparison.finished if "torch" in run.versions})
    content = {
        "subtitle": ", ".join((f"study {study.name}", *sizes, *([*devices, *versions] or ["no finished run"]))),
        "comparison": comparison,
        "colors": colors,
        "charts": charts,
        "meanings": {name: outcome.meaning for name, outcome in OUTCOMES.items()},
        "text": text,
    }
    return render("compare.html.j2", content, charts, version, folder=FOLDER)


def arm_colors(comparison: Comparison) -> dict[str, str]:
    """The color of the mode, if one arm alone has it."""
    modes = {arm: comparison.study.settings_of(arm).get("mode") for arm in comparison.study.arms}
    spare = iter(OTHER_COLORS * (1 + len(modes) // len(OTHER_COLORS)))
    alone = {arm for arm, mode in modes.items() if mode in MODE_COLORS and list(modes.values()).count(mode) == 1}
    return {arm: MODE_COLORS[str(mode)] if arm in alone else next(spare) for arm, mode in modes.items()}


def learning_chart(comparison: Comparison, colors: dict[str, str]) -> Chart:
    """Mean score per arm; the band is the 95 % interval of the mean over seeds."""
    arms, at = comparison.study.arms, comparison.study.threshold
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": at, "y1": at}
    line |= {"line": {"color": "#888888", "width": 1, "dash": "dot"}}
    views = {}
    for name, (axis, title) in AXES.items():
        layout: dict[str, Any] = {"xaxis": {"title": {"text": title}, "rangemode": "tozero"}}
        layout |= {"yaxis": {"title": {"text": "held-out score"}}} | ({} if at is None else {"shapes": [line]})
        bands = (arm_curve(arm, colors[arm], [run.curve for run in comparison.of_arm(arm)], axis) for arm in arms)
        views[name] = {"data": list(chain.from_iterable(bands)), "layout": layout}
    return Chart("learning", "Held-out score", views, height=380)


def arm_curve(arm: str, color: str, curves: Sequence[Sequence[Point]], axis: str) -> list[Trace]:
    """The mean over curves, as far as all of them go, with the t interval of the mean if there are several."""
    columns = list(zip(*curves, strict=False))
    if not columns:
        return []
    x = [rounded(fmean(getattr(point, axis) for point in column)) for column in columns]
    means = [fmean(point.score for point in column) for column in columns]
    line = line_through(arm, color, x, [rounded(mean) for mean in means])
    if len(curves) < 2:
        return [line]
    t = t_quantile((1 + CONFIDENCE) / 2, len(curves) - 1) / math.sqrt(len(curves))
    halves = [t * stdev(point.score for point in column) for column in columns]
    low, high = ([rounded(mean + side * half) for mean, half in zip(means, halves, strict=True)] for side in (-1, 1))
    return [*band(line, "low", low, "high", high), line]


def difference_charts(comparison: Comparison) -> list[Chart]:
    """One chart per outcome that a contrast names: differences of several pairs with their t intervals. The same
    difference in all pairs has none."""
    charts = []
    for outcome in dict.fromkeys(compared.outcome for compared in comparison.contrasts):
        found = [
            (compared.name, compared.difference)
            for compared in comparison.contrasts
            if compared.outcome == outcome and compared.difference and compared.difference.pairs > 1
        ]
        if not found:
            continue
        halves = [rounded(one.t_interval.high - one.mean) if one.t_interval else None for _, one in found]
        marks: dict[str, Any] = {"type": "scatter", "mode": "markers", "orientation": "h", "name": outcome}
        marks |= {"y": [name for name, _ in found], "x": [rounded(one.mean) for _, one in found]}
        marks |= {"error_x": {"type": "data", "array": halves, "thickness": 1.5, "width": 5}}
        marks |= {"marker": {"size": 9, "color": "#2b7fb8"}}
        axes: dict[str, Any] = {
            "xaxis": {"title": {"text": f"{outcome}: difference, 95 % t interval"}, "rangemode": "tozero"},
            "yaxis": {"autorange": "reversed", "automargin": True, "ticksuffix": "  "},
        }
        view = {"data": [marks], "layout": axes | {"hovermode": "closest", "showlegend": False}}
        charts.append(Chart(f"difference-{outcome}", outcome, {"": view}, height=110 + 34 * len(found)))
    return charts
