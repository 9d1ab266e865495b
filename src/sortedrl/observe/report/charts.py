"""The report's charts as plain data for plotly, from the runs that runs.py has read.

Colors are consistent across the page: each outcome, each part of slot-time and each series has its own.
Fonts, grid and background are set in page/charts.js, so that they follow light and dark mode.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from sortedrl.core.wording import counted
from sortedrl.observe.report.runs import ReportedRun, Series

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
UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}
FEW_POINTS = 30  # up to this many, a curve shows each point as a dot
Trace = dict[str, Any]
MIN_TO_MAX: Mapping[str, Callable[[Sequence[float]], float]] = {"min": min, "max": max}


@dataclass(frozen=True, slots=True)
class Chart:
    """`views`: the same chart by x axis; the first is shown initially."""

    id: str
    title: str
    views: dict[str, dict[str, Any]]  # each with plotly's data and layout
    height: int = 300


def time_unit(longest_seconds: float) -> str:
    return [unit for unit, seconds in UNITS.items() if unit == "s" or longest_seconds >= 10 * seconds][-1]


# Slot-time


def slot_time_fractions(runs: Sequence[ReportedRun], names: Sequence[str]) -> Chart:
    """Where all slot-time went, one bar per run."""
    data = [
        {
            "type": "bar", "orientation": "h", "name": part_name(part), "y": list(names),
            "x": [rounded(100 * run.slot_time.get(part, 0.0)) for run in runs],
            "marker": {"color": color}, "hovertemplate": "%{x:.1f}%",
        }
        for part, color in ordered({part for run in runs for part in run.slot_time})
    ]  # fmt: skip
    bars = layout("slot-time, wall-clock (%)", "", barmode="stack", bargap=0.35, showlegend=True, hovermode="y unified")
    bars["xaxis"]["range"] = [0, 100]
    bars["yaxis"] |= {"autorange": "reversed", "ticksuffix": "  "}
    return Chart("shares", "Where all slot-time went", _view(data, bars), height=130 + 38 * len(runs))


def part_name(part: str) -> str:
    return {"kv_limited": "KV-limited"}.get(part, part.replace("_", " "))


def ordered(parts: Iterable[str]) -> list[tuple[str, str]]:
    """Parts with their colors, in stacking order; unknown phases last."""
    known = list(PART_COLORS)
    present = sorted(parts, key=lambda part: (known.index(part) if part in PART_COLORS else len(known), part))
    return [(part, PART_COLORS.get(part, "#bcc1c7")) for part in present]


def timeline(run: ReportedRun, place: int, label: str, unit: str) -> Chart:
    """Which rollout was in which slot: a bar per slice. A vertical line is an update."""
    slots, until = max(run.slot_counts), run.slices_until

    def time(at: float) -> float:
        return (min(at, until) - run.began) / UNITS[unit]

    data: list[Trace] = []
    for outcome, color in WORK.items():
        if stays := [stay for stay in run.slices if stay.outcome == outcome]:
            about = [f"rollout {s.rollout}, {s.made:,} tokens, version {s.version}, {outcome}" for s in stays]
            bars = {"type": "bar", "orientation": "h", "name": outcome, "marker": {"color": color}, "width": 0.9}
            bars |= {"base": [rounded(time(s.start)) for s in stays], "y": [s.slot for s in stays]}
            bars |= {"x": [rounded(time(s.end) - time(s.start)) for s in stays], "hovertext": about}
            data.append(bars | {"hoverinfo": "text"})
    updates = [rounded(point.seconds / UNITS[unit]) for point in run.points if run.began + point.seconds <= until]
    marks: Trace = {"type": "scatter", "mode": "lines", "name": "updates", "line": {"color": "#5b6670", "width": 1}}
    marks |= {"x": [x for at in updates for x in (at, at, None)], "y": [-0.5, slots - 0.5, None] * len(updates)}
    axes = layout(f"time ({unit})", "slot", barmode="overlay", hovermode="closest")
    axes["yaxis"] |= {"range": [slots - 0.5, -0.5], "fixedrange": True, "zeroline": False, "showgrid": False}
    axes["xaxis"] |= {"range": [0, rounded(time(until))], "showgrid": False}
    title = label if until == run.ended else f"{label}: first {counted(len(updates), 'update')}"
    return Chart(f"slots-{place}", title, _view([*data, marks | {"hoverinfo": "skip"}], axes), height=420)


# Per update


def lengths(run: ReportedRun, place: int, title: str) -> Chart:
    """Response lengths per update: the median and the middle 50% and 90%."""
    x = [point.updates for point in run.points]
    p5, p25, p50, p75, p95 = ([rounded(p.length_quantiles[i]) for p in run.points] for i in range(5))
    band = {"type": "scatter", "mode": "lines", "x": x, "line": {"width": 0}}
    data = [
        band | {"name": "5%", "y": p5},
        band | {"name": "95%", "y": p95, "fill": "tonexty", "fillcolor": "rgba(43,127,184,0.18)"},
        band | {"name": "25%", "y": p25},
        band | {"name": "75%", "y": p75, "fill": "tonexty", "fillcolor": "rgba(43,127,184,0.35)"},
        band | {"name": "median", "y": p50, "line": {"color": "#2b7fb8", "width": 2}},
    ]
    axes = layout("update", "length (tokens)")
    axes["yaxis"]["rangemode"] = "tozero"
    return Chart(f"lengths-{place}", title, _view(data, axes), height=250)


# By chart: title, title of the y axis, and the values of a run at points with `updates`, `rollouts` and `seconds`.
CURVES: dict[str, tuple[str, str, Callable[[ReportedRun], list[tuple[Any, float]]]]] = {
    "staleness": (
        "Staleness per update", "mean staleness (versions)", lambda run: [(p, p.staleness) for p in run.points]
    ),
    "reward": ("Reward per update", "mean reward", lambda run: [(p, p.reward) for p in run.points]),
    "held-out": (
        "Held-out score", "fraction of problems solved", lambda run: [(h, h.score["value"]) for h in run.held_out]
    ),
}  # fmt: skip


def curves(kind: str, series: Sequence[Series], unit: str) -> list[Chart]:
    """The chart of one kind, with one curve per series; none if there is nothing to draw, as without rewards."""
    title, y_title, values = CURVES[kind]
    of_series = [(one, [values(run) for run in one.runs]) for one in series]
    if not any(y or kind == "held-out" for _, of_runs in of_series for of_run in of_runs for _, y in of_run):
        return []
    axes: dict[str, tuple[str, Callable[[Any], float]]] = {
        "rollouts": ("rollouts trained on", lambda point: point.rollouts),
        "wall-clock": (f"wall-clock ({unit})", lambda point: rounded(point.seconds / UNITS[unit])),
        "updates": ("update", lambda point: point.updates),
    }
    views = {}
    for name in ("updates",) if kind == "staleness" else axes:
        x_title, x = axes[name]
        data: list[Trace] = []
        for one, of_runs in of_series:
            dots = [[Dot(point.updates, x(point), y) for point, y in of_run] for of_run in of_runs]
            drawn = mean_curve(one.label, one.color, dots)
            if drawn and kind == "held-out" and len(one.runs) == 1:
                drawn[0]["error_y"] = _error_bars([held_out.score for held_out in one.runs[0].held_out])
            data += drawn
        view = layout(x_title, y_title, hovermode="x", showlegend=True)
        view["xaxis"]["rangemode"] = "tozero"
        view["yaxis"]["rangemode"] = "tozero" if kind == "staleness" else "normal"
        views[name] = {"data": data, "layout": view}
    return [Chart(kind, title, views)]


def _error_bars(scores: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The 95% confidence interval of each evaluation."""
    up, down = ([rounded(abs(score[end] - score["value"])) for score in scores] for end in ("high", "low"))
    return {"type": "data", "symmetric": False, "thickness": 1, "width": 3, "array": up, "arrayminus": down}


class Dot(NamedTuple):
    """A point of a curve. `place` is its update: curves of several runs are averaged place by place."""

    place: int
    x: float
    y: float


def mean_curve(
    label: str,
    color: str,
    curves: Iterable[Sequence[Dot]],
    edges: Mapping[str, Callable[[Sequence[float]], float]] = MIN_TO_MAX,
) -> list[Trace]:
    """One run: a line. Several: the mean within a band between two edges, at the places that all of them have."""
    by_place = [{dot.place: dot for dot in dots} for dots in curves if dots]
    if not by_place:
        return []
    shared = sorted(set(by_place[0]).intersection(*by_place[1:]))
    columns = [[dots[place] for dots in by_place] for place in shared]
    x = [rounded(fmean(dot.x for dot in column)) for column in columns]
    heights = [[dot.y for dot in column] for column in columns]
    line = {
        "type": "scatter", "mode": "lines+markers" if len(x) <= FEW_POINTS else "lines", "name": label,
        "legendgroup": label, "x": x, "y": [rounded(fmean(ys)) for ys in heights],
        "line": {"color": color, "width": 2}, "marker": {"size": 5},
    }  # fmt: skip
    if len(by_place) == 1:
        return [line]
    band = [
        line | {"name": f"{label}, {name}", "y": [rounded(edge(ys)) for ys in heights], "mode": "lines"}
        | {"line": {"width": 0}, "showlegend": False, "hoverinfo": "skip"}
        for name, edge in edges.items()
    ]  # fmt: skip
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    band[1] |= {"fill": "tonexty", "fillcolor": f"rgba({red},{green},{blue},0.2)"}
    return [*band, line]


def layout(x: str, y: str, **more: Any) -> dict[str, Any]:
    axes = {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}}
    return axes | {"hovermode": "x unified", "showlegend": False} | more


def _view(data: list[Trace], axes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {"": {"data": data, "layout": axes}}


def rounded(value: float) -> float:
    """To seven digits: more would be invisible and double the size of the page."""
    return float(f"{value:.7g}")
