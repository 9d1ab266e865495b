"""Curves of a report: a line per run, or the mean of several runs with a band, averaged at the same places."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from statistics import fmean
from typing import Any, NamedTuple

from sortedrl.observe.report.series import Series

FEW_POINTS = 30  # up to this many, a curve shows each point as a dot


class Dot(NamedTuple):
    """A point of a curve. `place` is its update or harvest: curves of several runs are averaged place by place."""

    place: int
    x: float
    y: float


Curve = list[Dot]


def curve(one: Series, curves: Sequence[Curve], *, marks: bool = False) -> list[dict[str, Any]]:
    """One run: a line. Several: the mean with a min-to-max band, at the places that all of them have."""
    curves = [curve for curve in curves if curve]
    if not curves:
        return []
    if len(curves) == 1:
        return [line(one, [dot.x for dot in curves[0]], [dot.y for dot in curves[0]], marks=marks)]
    by_place = [{dot.place: dot for dot in curve} for curve in curves]
    shared = sorted(set(by_place[0]).intersection(*by_place[1:]))
    columns = [[dots[place] for dots in by_place] for place in shared]
    x = [fmean(dot.x for dot in column) for column in columns]
    low, high = ([pick(dot.y for dot in column) for column in columns] for pick in (min, max))
    edge = {
        "type": "scatter",
        "mode": "lines",
        "x": [rounded(at) for at in x],
        "line": {"width": 0},
        "legendgroup": one.label,
        "showlegend": False,
        "hoverinfo": "skip",
    }
    return [
        edge | {"name": f"{one.label}, min", "y": [rounded(y) for y in low]},
        edge
        | {"name": f"{one.label}, max", "y": [rounded(y) for y in high]}
        | {"fill": "tonexty", "fillcolor": translucent(one.color)},
        line(one, x, [fmean(dot.y for dot in column) for column in columns], marks=marks)
        | {"name": f"{one.label}, mean of {len(curves)}"},
    ]


def line(one: Series, x: Sequence[float], y: Sequence[float], *, marks: bool) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers" if marks or len(x) <= FEW_POINTS else "lines",
        "name": one.label,
        "legendgroup": one.label,
        "x": [rounded(value) for value in x],
        "y": [rounded(value) for value in y],
        "line": {"color": one.color, "width": 2},
        "marker": {"size": 7 if marks else 5},
    }


def thinned(curves: Sequence[Curve], most: int = 600) -> list[Curve]:
    """Averaged over neighbors, the same places in each curve, until there are few enough points."""
    every = max(1, math.ceil(max((dot.place for curve in curves for dot in curve), default=0) / most))
    return [
        [
            Dot(bin_ * every, dots[-1].x, fmean(dot.y for dot in dots))
            for bin_, group in groupby(curve, key=lambda dot: math.ceil(dot.place / every))
            for dots in [list(group)]
        ]
        for curve in curves
    ]


def translucent(color: str) -> str:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.2)"


def rounded(value: float) -> float:
    """To seven digits: more would be invisible and double the size of the page."""
    return float(f"{value:.7g}")
