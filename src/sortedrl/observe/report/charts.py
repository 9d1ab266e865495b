"""The report's charts as plain data for plotly, from the runs that runs.py has read.

Colors are consistent across the page: each outcome, each part of slot-time and each series has its own.
Fonts, grid and background are set in page/charts.js, so that they follow light and dark mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from sortedrl.core.wording import counted
from sortedrl.log.lines import is_number
from sortedrl.observe.report.curves import Curve, Dot, curve, line, rounded, thinned
from sortedrl.observe.report.folds import UpdatePoint
from sortedrl.observe.report.runs import Run
from sortedrl.observe.report.series import Series
from sortedrl.observe.run_state import ROUNDING_NATS
from sortedrl.observe.timeline import Slice

# Bottom to top in every stack: work, then empty slots while the engine could run, then the other phases.
WORK = {
    "trained": "#2b7fb8",
    "stepped": "#5aa5a0",
    "kept": "#86bde0",
    "lookahead": "#8470c9",
    "dropped": "#c8413b",
    "preempted": "#9c6b3f",
    "failed": "#93205c",
    "running": "#7d9db1",
}
BUBBLE = {
    "drain": "#eba23a",
    "held_back": "#f2cc74",
    "environment": "#d6b25e",
    "refill": "#d9772b",
    "queued": "#c4573a",
    "kv_limited": "#b98a1f",
}
REST = {
    "learner": "#7d8794",
    "weights": "#98a1ac",
    "scores": "#b0b7bf",
    "evaluation": "#8b9a8f",
    "checkpoint": "#a7b3aa",
    "start": "#c3c8cd",
    "end": "#d2d6da",
}
PART_COLORS = WORK | BUBBLE | REST
SMALLEST_IN_LEGEND = 0.0005  # fraction of slot-time: less is invisible
UNITS = ((1.0, "s"), (60.0, "min"), (3600.0, "h"))


@dataclass(frozen=True, slots=True)
class Chart:
    """`views`: the same chart by x axis; the first is shown initially."""

    id: str
    title: str
    views: dict[str, dict[str, Any]]  # each with plotly's data and layout
    height: int = 300


@dataclass(frozen=True, slots=True)
class TimeUnit:
    seconds: float
    name: str

    def of(self, seconds: float) -> float:
        return rounded(seconds / self.seconds)


@dataclass(frozen=True, slots=True)
class Axis:
    """The x axis of a curve."""

    name: str
    title: str
    of: Callable[[Any], float] = field(repr=False)


def time_unit(longest_seconds: float) -> TimeUnit:
    fitting = [unit for unit in UNITS if longest_seconds >= 10 * unit[0]] or [UNITS[0]]
    return TimeUnit(*fitting[-1])


# Slot-time


def slot_time_fractions(runs: Sequence[Run], names: Sequence[str]) -> Chart:
    """Where all slot-time went, one bar per run."""
    shares = [slot_time_parts(run) for run in runs]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": part_name(part),
            "y": list(names),
            "x": [rounded(100 * share.get(part, 0.0)) for share in shares],
            "marker": {"color": color},
            "hovertemplate": "%{x:.1f} %",
        }
        for part, color in _ordered({part for share in shares for part, value in share.items() if value > 0})
    ]
    layout = {
        "barmode": "stack",
        "bargap": 0.35,
        "xaxis": {"title": {"text": "slot-time, wall-clock (%)"}, "range": [0, 100]},
        "yaxis": {"autorange": "reversed", "automargin": True, "ticksuffix": "  "},
        "hovermode": "y unified",
        "showlegend": False,
    }
    return Chart("shares", "Where all slot-time went", _view(data, layout), height=84 + 38 * len(runs))


def slot_time_parts(run: Run) -> dict[str, float]:
    """Fractions of wall-clock slot-time: work by outcome, the parts of the bubble, other phases. They add up to 1."""
    work = {part: math.fsum(run.occupancy.parts.get(part, ())) for part in WORK}
    busy = (1 - run.run_metrics.idle) / (math.fsum(work.values()) or 1.0)
    work = {part: slots * busy for part, slots in work.items()}
    return {part: share for part, share in (work | run.run_metrics.idle_parts).items() if share > 0}


def occupancy(run: Run, place: int, title: str, unit: TimeUnit, until: float) -> Chart:
    """Number of slots in each part over time, stacked."""
    edges = [unit.of(edge) for edge in run.occupancy.edges]
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": part_name(part),
            "x": edges,
            "y": [rounded(value) for value in (*values, *values[-1:])],
            "stackgroup": "slots",
            "line": {"width": 0, "shape": "hv", "color": color},
            "fillcolor": color,
            "hovertemplate": "%{y:.1f}",
        }
        for part, color in _ordered(run.occupancy.parts)
        for values in [run.occupancy.parts[part]]
    ]
    layout = {
        "xaxis": {"title": {"text": f"time ({unit.name})"}, "range": [0, unit.of(until)]},
        "yaxis": {"title": {"text": "slots"}, "range": [0, max(run.slot_counts)]},
        "hovermode": "x unified",
        "showlegend": False,
    }
    return Chart(f"occupancy-{place}", title, _view(data, layout), height=230)


def bubble_per_harvest(series: Sequence[Series]) -> Chart:
    data: list[dict[str, Any]] = []
    for one in series:
        curves: list[Curve] = [
            [Dot(i, i, 100 * value) for i, value in enumerate(run.run_metrics.bubble_per_harvest, start=1)]
            for run in one.measured
        ]
        data += curve(one, thinned(curves))
    layout = {
        "xaxis": {"title": {"text": "harvest"}},
        "yaxis": {"title": {"text": "bubble (%)"}, "rangemode": "tozero"},
    }
    return Chart("bubble", "Bubble per harvest", _view(data, layout))


# Lengths, staleness


def lengths(run: Run, place: int, title: str, top: float) -> Chart:
    """Response lengths per update: the median and the middle 50 % and 90 %."""
    x = [point.updates for point in run.points]
    p5, p25, p50, p75, p95 = ([rounded(p.length_quantiles[i]) for p in run.points] for i in range(5))
    band = {"type": "scatter", "mode": "lines", "x": x, "line": {"width": 0}}
    outer, inner = {"fillcolor": "rgba(43,127,184,0.18)"}, {"fillcolor": "rgba(43,127,184,0.35)"}
    data = [
        band | {"name": "5 %", "y": p5},
        band | {"name": "95 %", "y": p95, "fill": "tonexty"} | outer,
        band | {"name": "25 %", "y": p25},
        band | {"name": "75 %", "y": p75, "fill": "tonexty"} | inner,
        {
            "type": "scatter",
            "mode": "lines",
            "name": "median",
            "x": x,
            "y": p50,
            "line": {"color": "#2b7fb8", "width": 2},
        },
    ]
    layout = {
        "xaxis": {"title": {"text": "update"}},
        "yaxis": {"title": {"text": "length (tokens)"}, "range": [0, top]},
        "hovermode": "x unified",
        "showlegend": False,
    }
    return Chart(f"lengths-{place}", title, _view(data, layout), height=250)


def staleness_of_updates(series: Sequence[Series]) -> Chart:
    data: list[dict[str, Any]] = []
    for one in series:
        data += curve(one, [[Dot(p.updates, p.updates, p.staleness) for p in run.points] for run in one.runs])
    layout = {
        "xaxis": {"title": {"text": "update"}},
        "yaxis": {"title": {"text": "mean staleness (versions)"}, "rangemode": "tozero"},
        "showlegend": False,
    }
    return Chart("staleness-updates", "Staleness per update", _view(data, layout), height=270)


def histogram(
    id: str, title: str, x_title: str, y_title: str, series: Sequence[Series], of: Callable[[Run], dict[int, int]]
) -> Chart:
    data = []
    keys = sorted({key for one in series for run in one.runs for key in of(run)})
    for one in series:
        rows = [[_percent(of(run).get(key, 0), sum(of(run).values())) for key in keys] for run in one.measured]
        columns = list(zip(*rows, strict=True))
        means = [fmean(column) for column in columns]
        bars: dict[str, Any] = {
            "type": "bar",
            "name": one.label,
            "x": keys,
            "y": [rounded(mean) for mean in means],
            "marker": {"color": one.color},
            "hovertemplate": "%{y:.1f} %",
        }
        if len(one.measured) > 1:
            bars["error_y"] = {
                "type": "data",
                "symmetric": False,
                "array": [rounded(max(c) - m) or None for c, m in zip(columns, means, strict=True)],
                "arrayminus": [rounded(m - min(c)) or None for c, m in zip(columns, means, strict=True)],
                "thickness": 1,
                "width": 2,
            }
        data.append(bars)
    layout = {
        "barmode": "group",
        "xaxis": {"title": {"text": x_title}, "dtick": max(1, math.ceil(len(keys) / 12))},
        "yaxis": {"title": {"text": y_title}, "rangemode": "tozero"},
        "hovermode": "x unified",
        "showlegend": False,
    }
    return Chart(id, title, _view(data, layout), height=270)


# Learning


def learning(id: str, title: str, y_title: str, series: Sequence[Series], unit: TimeUnit, *, held_out: bool) -> Chart:
    """Reward per update, or the held-out score, over trained rollouts, wall-clock time and updates."""
    axes = (
        Axis("rollouts", "rollouts trained on", lambda at: at.rollouts),
        Axis("wall-clock", f"wall-clock ({unit.name})", lambda at: unit.of(at.seconds)),
        Axis("updates", "update", lambda at: at.updates),
    )
    views = {}
    for axis in axes:
        data: list[dict[str, Any]] = []
        for one in series:
            if held_out:
                data += _held_out_curve(one, axis)
            else:
                data += curve(one, [[Dot(p.updates, axis.of(p), p.reward) for p in run.points] for run in one.runs])
        views[axis.name] = {
            "data": data,
            "layout": {
                "xaxis": {"title": {"text": axis.title}, "rangemode": "tozero"},
                "yaxis": {"title": {"text": y_title}},
            },
        }
    return Chart(id, title, views, height=320)


def _held_out_curve(one: Series, axis: Axis) -> list[dict[str, Any]]:
    """Several seeds: mean, min and max. One run: its score with the 95 % confidence interval of the evaluation."""
    if len(one.runs) > 1:
        curves = [[Dot(h.mark.updates, axis.of(h.mark), h.score["value"]) for h in run.held_out] for run in one.runs]
        return curve(one, curves, marks=True)
    found = one.runs[0].held_out
    if not found:
        return []
    values = [h.score["value"] for h in found]
    return [
        line(one, [axis.of(h.mark) for h in found], values, marks=True)
        | {
            "error_y": {
                "type": "data",
                "symmetric": False,
                "array": [rounded(h.score["high"] - h.score["value"]) for h in found],
                "arrayminus": [rounded(h.score["value"] - h.score["low"]) for h in found],
                "thickness": 1,
                "width": 3,
            }
        }
    ]


@dataclass(frozen=True, slots=True)
class LearnerPanel:
    key: str
    title: str
    y_title: str
    percent: bool = False
    from_zero: bool = False
    least: float = 0.0  # the panel is left out if no value is above it


SCORING_PANEL = LearnerPanel("scoring_backlog", "Scoring backlog", "responses without a score", from_zero=True)
LEARNER_PANELS = (
    LearnerPanel("stale_ratio_mean", "Importance ratio, mean", "ratio, stale tokens"),
    LearnerPanel("stale_ratio_max", "Importance ratio, max", "ratio, stale tokens"),
    LearnerPanel("importance_weight_mean", "Importance weight, mean", "weight in the loss"),
    LearnerPanel("ess_rollout_fraction", "Effective sample size", "rollouts (%)", percent=True, from_zero=True),
    LearnerPanel("clipped_fraction", "Clip fraction", "tokens clipped (%)", percent=True, from_zero=True),
    LearnerPanel(
        "mismatch_kl", "Engine/learner mismatch", "KL, fresh tokens (nats)", from_zero=True, least=ROUNDING_NATS
    ),
    LearnerPanel("stale_kl", "KL of stale tokens", "KL, stale tokens (nats)", from_zero=True),
    LearnerPanel("entropy", "Entropy", "nats per token", from_zero=True),
    LearnerPanel("grad_norm", "Gradient norm", "norm", from_zero=True),
)
LOGARITHMIC_FROM = 100.0  # ratio of the largest to the smallest value from which a panel gets a logarithmic axis


def learner_panels(series: Sequence[Series]) -> list[Chart]:
    return [chart for panel in LEARNER_PANELS for chart in panel_charts(panel, series)]


def panel_charts(panel: LearnerPanel, series: Sequence[Series]) -> Iterable[Chart]:
    """The chart of a metric from metrics.jsonl; none if it is flat by nature, as the mismatch on a CPU."""
    factor = 100 if panel.percent else 1
    data: list[dict[str, Any]] = []
    for one in series:
        curves = [
            [
                Dot(line["update"], line["update"], factor * line[panel.key])
                for line in run.learner
                if is_number(line.get(panel.key))
            ]
            for run in one.runs
        ]
        data += curve(one, thinned(curves))
    values = [value for trace in data for value in trace["y"]]
    if any(abs(value) > panel.least for value in values):
        yaxis: dict[str, Any] = {"title": {"text": panel.y_title}}
        if min(values) > 0 and max(values) > LOGARITHMIC_FROM * min(values):
            yaxis |= {"type": "log", "tickformat": "~g"}
        elif panel.from_zero:
            yaxis |= {"rangemode": "tozero"}
        layout = {"xaxis": {"title": {"text": "update"}}, "yaxis": yaxis, "showlegend": False}
        yield Chart(f"learner-{panel.key.replace('_', '-')}", panel.title, _view(data, layout), height=240)


# The slot timeline, drawn by page/timeline.js


def timelines(run: Run, label: str, unit: TimeUnit) -> list[dict[str, Any]]:
    """Every bar of the run. For a large run: every bar of its first updates, then the whole run as a grid."""
    source = run.timeline
    if not source.grid:
        return [_timeline(run, label, unit, source.slices, (), run.ended)]
    updates = sum(at <= source.until for at in source.updates)
    return [
        _timeline(run, f"{label}: first {counted(updates, 'update')}, in full", unit, source.slices, (), source.until),
        _timeline(run, f"{label}: whole run, aggregated", unit, (), source.grid, run.ended),
    ]


def _timeline(
    run: Run, label: str, unit: TimeUnit, pieces: Sequence[Slice], grid: Sequence[str], until: float
) -> dict[str, Any]:
    """Times are in millionths of the range shown; `outcomes` and `grid` hold the first letter of each outcome."""
    seconds = until - run.began or 1.0

    def tick(at: float) -> int:
        return round((min(at, until) - run.began) / seconds * 1e6)

    return {
        "label": label,
        "slots": max(run.slot_counts),
        "duration": unit.of(seconds),
        "unit": unit.name,
        "updates": [tick(at) for at in run.timeline.updates if at <= until],
        "slot": [piece.slot for piece in pieces],
        "start": [tick(piece.start) for piece in pieces],
        "end": [tick(piece.end) for piece in pieces],
        "outcomes": "".join(piece.outcome[0] for piece in pieces),
        "rollout": [piece.rollout for piece in pieces],
        "made": [piece.made for piece in pieces],
        "version": [piece.version for piece in pieces],
        "grid": list(grid),
    }


# Helpers


def part_name(part: str) -> str:
    return {"kv_limited": "KV-limited"}.get(part, part.replace("_", " "))


def _ordered(parts: Iterable[str]) -> list[tuple[str, str]]:
    """Parts with their colors, in stacking order; unknown phases last."""
    known = list(PART_COLORS)
    present = sorted(parts, key=lambda part: (known.index(part) if part in PART_COLORS else len(known), part))
    return [(part, PART_COLORS.get(part, "#bcc1c7")) for part in present]


def legend(runs: Sequence[Run]) -> list[tuple[str, str, str]]:
    """Kind, name and color of every part that appears in these runs."""
    kinds = dict.fromkeys(WORK, "work") | dict.fromkeys(BUBBLE, "bubble")
    present = {part for run in runs for part, share in slot_time_parts(run).items() if share >= SMALLEST_IN_LEGEND}
    return [(kinds.get(part, "rest"), part_name(part), color) for part, color in _ordered(present)]


def _view(data: list[dict[str, Any]], layout: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {"": {"data": data, "layout": layout}}


def _percent(part: float, whole: float) -> float:
    return 100 * part / whole if whole else 0.0


def highest_length(runs: Sequence[Run]) -> float:
    points: list[UpdatePoint] = [point for run in runs for point in run.points]
    return 1.05 * max((point.length_quantiles[-1] for point in points), default=1.0)
