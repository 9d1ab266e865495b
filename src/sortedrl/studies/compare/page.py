"""The page of a study: the answer, the contrasts, the learning curves with bands, all outcomes, and failed runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from sortedrl.core.wording import counted
from sortedrl.observe.report.charts import Chart, Dot, layout, mean_curve, rounded
from sortedrl.observe.report.runs import colors_of
from sortedrl.observe.report.self_contained import render
from sortedrl.studies.compare import text
from sortedrl.studies.compare.comparison import Comparison
from sortedrl.studies.compare.outcomes import OUTCOMES
from sortedrl.studies.compare.paired import CONFIDENCE, t_quantile

FOLDER = Path(__file__).parent / "page"
AXES = {  # of the learning curves: a field of `Point`, and its title
    "rollouts": ("rollouts", "rollouts trained on"),
    "seconds": ("seconds", "seconds, without evaluations"),
    "updates": ("update", "update"),
}


def page(comparison: Comparison, version: str) -> str:
    study = comparison.study
    modes = [str(study.settings_of(arm).get("mode")) for arm in study.arms]
    colors = dict(zip(study.arms, colors_of(modes), strict=True))
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


def learning_chart(comparison: Comparison, colors: dict[str, str]) -> Chart:
    """Mean score per arm; the band is the 95 % interval of the mean over seeds."""
    at = comparison.study.threshold
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": at, "y1": at}
    line |= {"line": {"color": "#888888", "width": 1, "dash": "dot"}}
    views = {}
    for name, (axis, title) in AXES.items():
        axes = layout(title, "held-out score", hovermode="x", showlegend=True, shapes=[] if at is None else [line])
        axes["xaxis"]["rangemode"] = "tozero"
        data = []
        for arm, color in colors.items():
            curves = [[Dot(p.update, getattr(p, axis), p.score) for p in run.curve] for run in comparison.of_arm(arm)]
            data += mean_curve(arm, color, curves, T_INTERVAL)
        views[name] = {"data": data, "layout": axes}
    return Chart("learning", "Held-out score", views, height=380)


def _edge(side: int, values: Sequence[float]) -> float:
    """Of the t interval of the mean."""
    t = t_quantile((1 + CONFIDENCE) / 2, len(values) - 1)
    return fmean(values) + side * t * stdev(values) / math.sqrt(len(values))


T_INTERVAL = {"low": partial(_edge, -1), "high": partial(_edge, 1)}


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
        axes = layout(f"{outcome}: difference, 95 % t interval", "", hovermode="closest")
        axes["xaxis"]["rangemode"] = "tozero"
        axes["yaxis"] |= {"autorange": "reversed", "ticksuffix": "  "}
        view = {"data": [marks], "layout": axes}
        charts.append(Chart(f"difference-{outcome}", outcome, {"": view}, height=110 + 34 * len(found)))
    return charts
