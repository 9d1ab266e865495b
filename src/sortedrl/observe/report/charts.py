"""The report's charts as plain data for plotly, from the runs that runs.py has read.

Colors are consistent across the page: each outcome, each part of slot-time and each series has its own.
Fonts, grid and background are set in page/charts.js, so that they follow light and dark mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from sortedrl.core.wording import counted
from sortedrl.observe.report.runs import ReportedRun
from sortedrl.observe.report.series import Series

# Bottom to top in every stack: work, then empty slots while the engine could run, then the other phases.
WORK = {
    "trained": "#2b7fb8", "filtered": "#c9a227", "stepped": "#5aa5a0", "kept": "#86bde0", "lookahead": "#8470c9",
    "dropped": "#c8413b", "preempted": "#9c6b3f", "failed": "#93205c", "running": "#7d9db1",
}  # fmt: skip
BUBBLE = {
    "drain": "#eba23a", "held_back": "#f2cc74", "environment": "#d6b25e", "refill": "#d9772b", "queued": "#c4573a",
    "kv_limited": "#b98a1f",
}  # fmt: skip
REST = {
    "learner": "#7d8794", "weights": "#98a1ac", "scores": "#b0b7bf", "evaluation": "#8b9a8f", "checkpoint": "#a7b3aa",
    "start": "#c3c8cd", "end": "#d2d6da",
}  # fmt: skip
PART_COLORS = WORK | BUBBLE | REST
KINDS = {"Work": WORK, "Bubble": BUBBLE, "Remaining wall-clock time": REST}
SMALLEST_IN_LEGEND = 0.0005  # fraction of slot-time: less is invisible
UNITS = ((1.0, "s"), (60.0, "min"), (3600.0, "h"))
FEW_POINTS = 30  # up to this many, a curve shows each point as a dot
Trace = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Chart:
    """`views`: the same chart by x axis; the first is shown initially."""

    id: str
    title: str
    views: dict[str, dict[str, Any]]  # each with plotly's data and layout
    height: int = 300


class TimeUnit(NamedTuple):
    seconds: float
    name: str

    def of(self, seconds: float) -> float:
        return rounded(seconds / self.seconds)


def time_unit(longest_seconds: float) -> TimeUnit:
    fitting = [unit for unit in UNITS if longest_seconds >= 10 * unit[0]] or [UNITS[0]]
    return TimeUnit(*fitting[-1])


# Slot-time


def slot_time_fractions(runs: Sequence[ReportedRun], names: Sequence[str]) -> Chart:
    """Where all slot-time went, one bar per run."""
    data = [
        {
            "type": "bar", "orientation": "h", "name": part_name(part), "y": list(names),
            "x": [rounded(100 * run.slot_time.get(part, 0.0)) for run in runs],
            "marker": {"color": color}, "hovertemplate": "%{x:.1f} %",
        }
        for part, color in ordered({part for run in runs for part in run.slot_time})
    ]  # fmt: skip
    layout = _layout("slot-time, wall-clock (%)", "", barmode="stack", bargap=0.35, hovermode="y unified")
    layout["xaxis"]["range"] = [0, 100]
    layout["yaxis"] |= {"autorange": "reversed", "ticksuffix": "  "}
    return Chart("shares", "Where all slot-time went", _view(data, layout), height=84 + 38 * len(runs))


def part_name(part: str) -> str:
    return {"kv_limited": "KV-limited"}.get(part, part.replace("_", " "))


def ordered(parts: Iterable[str]) -> list[tuple[str, str]]:
    """Parts with their colors, in stacking order; unknown phases last."""
    known = list(PART_COLORS)
    present = sorted(parts, key=lambda part: (known.index(part) if part in PART_COLORS else len(known), part))
    return [(part, PART_COLORS.get(part, "#bcc1c7")) for part in present]


def legend(runs: Sequence[ReportedRun]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Name and color of every part that appears in these runs, by kind."""
    present = {part for run in runs for part, share in run.slot_time.items() if share >= SMALLEST_IN_LEGEND}
    kinds = {part: kind for kind, parts in KINDS.items() for part in parts}
    found: dict[str, list[tuple[str, str]]] = {}
    for part, color in ordered(present):
        found.setdefault(kinds.get(part, "Remaining wall-clock time"), []).append((part_name(part), color))
    return list(found.items())


def timeline(run: ReportedRun, label: str, unit: TimeUnit) -> dict[str, Any]:
    """Which rollout was in which slot, for page/timeline.js. Times are in millionths of the range shown; each of
    `outcomes` is a place in `WORK`."""
    until, pieces = run.slices_until, run.slices
    seconds = until - run.began or 1.0
    places = {outcome: place for place, outcome in enumerate(WORK)}

    def tick(at: float) -> int:
        return round((min(at, until) - run.began) / seconds * 1e6)

    updates = [tick(at) for at in run.update_times if at <= until]
    return {
        "label": label if until == run.ended else f"{label}: first {counted(len(updates), 'update')}",
        "slots": max(run.slot_counts), "duration": unit.of(seconds), "unit": unit.name, "updates": updates,
        "slot": [piece.slot for piece in pieces],
        "start": [tick(piece.start) for piece in pieces],
        "end": [tick(piece.end) for piece in pieces],
        "outcomes": [places[piece.outcome] for piece in pieces],
        "rollout": [piece.rollout for piece in pieces],
        "made": [piece.made for piece in pieces],
        "version": [piece.version for piece in pieces],
    }  # fmt: skip


# Per update


def lengths(run: ReportedRun, place: int, title: str, top: float) -> Chart:
    """Response lengths per update: the median and the middle 50 % and 90 %."""
    x = [point.updates for point in run.points]
    p5, p25, p50, p75, p95 = ([rounded(p.length_quantiles[i]) for p in run.points] for i in range(5))
    band = {"type": "scatter", "mode": "lines", "x": x, "line": {"width": 0}}
    data = [
        band | {"name": "5 %", "y": p5},
        band | {"name": "95 %", "y": p95, "fill": "tonexty", "fillcolor": "rgba(43,127,184,0.18)"},
        band | {"name": "25 %", "y": p25},
        band | {"name": "75 %", "y": p75, "fill": "tonexty", "fillcolor": "rgba(43,127,184,0.35)"},
        band | {"name": "median", "y": p50, "line": {"color": "#2b7fb8", "width": 2}},
    ]
    layout = _layout("update", "length (tokens)")
    layout["yaxis"]["range"] = [0, top]
    return Chart(f"lengths-{place}", title, _view(data, layout), height=250)


def highest_length(runs: Sequence[ReportedRun]) -> float:
    return 1.05 * max((point.length_quantiles[-1] for run in runs for point in run.points), default=1.0)


def staleness(series: Sequence[Series]) -> Chart:
    layout = _layout("update", "mean staleness (versions)", hovermode="x")
    layout["yaxis"]["rangemode"] = "tozero"
    data = []
    for one in series:
        data += curve(one, [[Dot(p.updates, p.updates, p.staleness) for p in run.points] for run in one.runs])
    return Chart("staleness", "Staleness per update", _view(data, layout), height=270)


def learning(series: Sequence[Series], unit: TimeUnit) -> list[Chart]:
    """Reward per update and held-out score, over trained rollouts, wall-clock time and updates."""
    charts = []
    if any(point.reward for one in series for run in one.runs for point in run.points):
        charts.append(_over_axes("reward", "Reward per update", "mean reward", series, unit, _reward_curve))
    scored = [one for one in series if any(run.held_out for run in one.runs)]
    if scored:
        title = "fraction of problems solved"
        charts.append(_over_axes("held-out", "Held-out score", title, scored, unit, _held_out_curve))
    return charts


Axis = Callable[[Any], float]  # the place on it of an update or an evaluation


def _over_axes(
    id: str, title: str, y: str, series: Sequence[Series], unit: TimeUnit, of: Callable[[Series, Axis], list[Trace]]
) -> Chart:
    axes: dict[str, tuple[str, Axis]] = {
        "rollouts": ("rollouts trained on", lambda at: at.rollouts),
        "wall-clock": (f"wall-clock ({unit.name})", lambda at: unit.of(at.seconds)),
        "updates": ("update", lambda at: at.updates),
    }
    views = {}
    for name, (x, axis) in axes.items():
        layout = _layout(x, y, hovermode="x", showlegend=True)
        layout["xaxis"]["rangemode"] = "tozero"
        views[name] = {"data": [trace for one in series for trace in of(one, axis)], "layout": layout}
    return Chart(id, title, views, height=320)


def _reward_curve(one: Series, axis: Axis) -> list[Trace]:
    return curve(one, [[Dot(p.updates, axis(p), p.reward) for p in run.points] for run in one.runs])


def _held_out_curve(one: Series, axis: Axis) -> list[Trace]:
    """Several seeds: mean, min and max. One run: its score with the 95 % confidence interval of the evaluation."""
    curves = [[Dot(h.mark.updates, axis(h.mark), h.score["value"]) for h in run.held_out] for run in one.runs]
    found = curve(one, curves, marks=True)
    if len(one.runs) == 1 and found:
        scores = [h.score for h in one.runs[0].held_out]
        found[0]["error_y"] = {
            "type": "data", "symmetric": False, "thickness": 1, "width": 3,
            "array": [rounded(score["high"] - score["value"]) for score in scores],
            "arrayminus": [rounded(score["value"] - score["low"]) for score in scores],
        }  # fmt: skip
    return found


# Curves


class Dot(NamedTuple):
    """A point of a curve. `place` is its update: curves of several runs are averaged place by place."""

    place: int
    x: float
    y: float


def curve(one: Series, curves: Iterable[Sequence[Dot]], *, marks: bool = False) -> list[Trace]:
    """One run: a line. Several: the mean with a min-to-max band, at the places that all of them have."""
    by_place = [{dot.place: dot for dot in dots} for dots in curves if dots]
    if not by_place:
        return []
    shared = sorted(set(by_place[0]).intersection(*by_place[1:]))
    columns = [[dots[place] for dots in by_place] for place in shared]
    x = [rounded(fmean(dot.x for dot in column)) for column in columns]
    low, mean, high = ([rounded(pick(dot.y for dot in column)) for column in columns] for pick in (min, fmean, max))
    line = line_through(one.label, one.color, x, mean, size=7 if marks else 5)
    line["mode"] = "lines+markers" if marks or len(x) <= FEW_POINTS else "lines"
    if len(by_place) == 1:
        return [line]
    return [*band(line, "min", low, "max", high), line | {"name": f"{one.label}, mean of {len(by_place)}"}]


def line_through(name: str, color: str, x: Sequence[float], y: Sequence[float], size: int = 5) -> Trace:
    return {
        "type": "scatter", "mode": "lines+markers", "name": name, "legendgroup": name, "x": x, "y": y,
        "line": {"color": color, "width": 2}, "marker": {"size": size},
    }  # fmt: skip


def band(line: Trace, low_name: str, low: Sequence[float], high_name: str, high: Sequence[float]) -> list[Trace]:
    """The edges of a translucent band around a line."""
    name, color = line["name"], line["line"]["color"]
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    edge = line | {"mode": "lines", "line": {"width": 0}, "showlegend": False, "hoverinfo": "skip"}
    filled = {"fill": "tonexty", "fillcolor": f"rgba({red},{green},{blue},0.2)"}
    return [
        edge | {"name": f"{name}, {low_name}", "y": low},
        edge | {"name": f"{name}, {high_name}", "y": high} | filled,
    ]


def _layout(x: str, y: str, **more: Any) -> dict[str, Any]:
    axes = {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}}
    return axes | {"hovermode": "x unified", "showlegend": False} | more


def _view(data: list[Trace], layout: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {"": {"data": data, "layout": layout}}


def rounded(value: float) -> float:
    """To seven digits: more would be invisible and double the size of the page."""
    return float(f"{value:.7g}")
