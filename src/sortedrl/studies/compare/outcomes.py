"""The results of one finished run: its learning curve and outcomes, read from its run folder.

Seconds are without the time of evaluations, which belongs to the study and not to the method. Everything that depends
on the threshold is computed from the learning curve, so it can be computed again for another threshold.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

OUTCOMES = {
    "final_score": "held-out score after the last update",
    "curve_area": "mean held-out score over all trained rollouts",
    "samples_to_threshold": "trained rollouts until the held-out score reaches the threshold",
    "seconds_to_threshold": "seconds until the held-out score reaches the threshold, without evaluations",
    "seconds": "duration of the run in seconds, without evaluations",
    "response_length": "mean length of trained responses, in tokens",
    "final_response_length": "mean length of trained responses over the last quarter's cohorts, in tokens",
    "staleness": "mean staleness of trained tokens, in versions",
    "rollouts_per_second": "trained rollouts per second, without evaluations",
    "bubble": "empty fraction of slot-time while generating",
    "goodput": "tokens trained on per second of generation",
    "waste": "fraction of generated tokens that are discarded",
    "length_bias": "mean trained length against that of uncut responses",
}
FROM_THE_SUMMARY = {  # outcome: name in RunMetrics
    "staleness": "staleness_mean",
    "bubble": "bubble",
    "goodput": "goodput",
    "waste": "waste",
    "length_bias": "length_bias",
}
NEEDS_THRESHOLD = {"samples_to_threshold": "rollouts", "seconds_to_threshold": "seconds"}  # with its axis of the curve
NEEDS_ONE_DEVICE = ("seconds_to_threshold", "seconds", "rollouts_per_second", "goodput")  # to compare two runs
NEEDS_EVALUATIONS = {"curve_area", *NEEDS_THRESHOLD}
LAST_PART = 4  # `final_response_length` is over the last quarter, in whole cohorts
ALWAYS_KEPT = ("length", "correct")  # per update, in every line of results


class Point(NamedTuple):
    """One evaluation."""

    update: int
    rollouts: int  # trained on until then
    seconds: float  # without evaluations
    score: float


class Reached(NamedTuple):
    """Where a run reached the threshold. A censored run did not: `at` is where it ended."""

    at: float
    censored: bool


class IncompleteRun(ValueError):
    """A run folder with a summary that lacks other results; the text names them."""


# From a run folder


def read_run(folder: Path, metrics: Sequence[str]) -> dict[str, Any]:
    """The raw results of a finished run: curve, series per update, and its summary's numbers."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        metrics_of_run = {name: summary["metrics"][key] for name, key in FROM_THE_SUMMARY.items()}
        wall_seconds = summary["seconds"]
        updates = [line for line in lines if "rollouts" in line]
        curve = list(learning_curve(lines))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise IncompleteRun(f"results of {folder} cannot be read: {error!r}") from None
    if not curve or not updates:
        raise IncompleteRun(f"{folder / 'metrics.jsonl'} has no {'updates' if curve else 'held-out score'}")
    return {
        "curve": {name: [getattr(point, name) for point in curve] for name in Point._fields},
        "series": {name: _series(updates, name) for name in (*ALWAYS_KEPT, *metrics)},
        "rollouts_per_update": [line["rollouts"] for line in updates],
        "metrics": metrics_of_run,
        "wall_seconds": wall_seconds,
    }


def learning_curve(lines: Sequence[Mapping[str, Any]]) -> Iterator[Point]:
    """From the lines of metrics.jsonl. An evaluation lasts from the line before it to its own."""
    rollouts, evaluating, before = 0, 0.0, 0.0
    for line in lines:
        if "held_out" in line:
            evaluating += line["seconds"] - before
            seconds = round(line["seconds"] - evaluating, 3)
            yield Point(line["update"], rollouts, seconds, line["held_out"]["value"])
        else:
            rollouts += line.get("rollouts", 0)
        before = line["seconds"]


def _series(updates: Sequence[Mapping[str, Any]], name: str) -> list[float | None]:
    """One value per update, to five digits; None if an update has none, or one that is not finite, which JSON lacks."""
    values: list[Any] = [line.get(name) for line in updates]
    is_known = [type(value) in (int, float) and math.isfinite(value) for value in values]
    return [float(f"{value:.5g}") if known else None for value, known in zip(values, is_known, strict=True)]


# Outcomes


def outcomes_of(
    raw: Mapping[str, Any], threshold: float | None, metrics: Sequence[str], cohort_rollouts: int
) -> dict[str, float | None]:
    """All outcomes of a run. `censored`: the threshold was not reached; None: it has no such value."""
    curve = curve_of(raw)
    lengths, rollouts = raw["series"]["length"], raw["rollouts_per_update"]
    last = last_cohorts(rollouts, cohort_rollouts)
    found: dict[str, float | None] = {
        "final_score": curve[-1].score,
        "curve_area": curve_area(curve),
        "seconds": curve[-1].seconds,
        "response_length": _weighted_mean(lengths, rollouts),
        "final_response_length": _weighted_mean(lengths[last], rollouts[last]),
        "rollouts_per_second": curve[-1].rollouts / curve[-1].seconds if curve[-1].seconds > 0 else None,
        **{name: raw["metrics"].get(name) for name in FROM_THE_SUMMARY},  # an older version may have fewer
    }
    if threshold is not None:
        found |= {name: reached(curve, threshold, axis).at for name, axis in NEEDS_THRESHOLD.items()}
    return found | {name: _mean_of_known(raw["series"].get(name, [])) for name in metrics}


def last_cohorts(rollouts: Sequence[int], cohort_rollouts: int) -> slice:
    """The updates of the last quarter, from the start of a cohort to the end of one.

    Batches within a cohort may be sorted by length: half a cohort has another mean length than the whole. A run without
    a complete cohort there has all updates of its last quarter.
    """
    quarter = len(rollouts) - -(-len(rollouts) // LAST_PART)
    cohorts = [0, *(int(trained // cohort_rollouts) for trained in accumulate(rollouts))]  # complete ones, per update
    ends = [0, *(place for place in range(1, len(cohorts)) if cohorts[place] > cohorts[place - 1])]
    start, end = max(place for place in ends if place <= quarter), ends[-1]
    return slice(start, end) if end > start else slice(quarter, len(rollouts))


def curve_of(raw: Mapping[str, Any]) -> list[Point]:
    return [Point(*values) for values in zip(*(raw["curve"][name] for name in Point._fields), strict=True)]


def curve_area(curve: Sequence[Point]) -> float:
    """The mean score over the trained rollouts: the area under the curve by trapezoids, over its width."""
    width = curve[-1].rollouts - curve[0].rollouts
    if width == 0:
        return curve[-1].score
    return sum((a.score + b.score) / 2 * (b.rollouts - a.rollouts) for a, b in pairwise(curve)) / width


def reached(curve: Sequence[Point], threshold: float, axis: str) -> Reached:
    """Where the score first reaches the threshold, interpolated from the evaluation before."""
    place: Callable[[Point], float] = lambda point: float(getattr(point, axis))  # noqa: E731
    if curve[0].score >= threshold:
        return Reached(place(curve[0]), censored=False)
    for below, above in pairwise(curve):
        if above.score >= threshold:
            share = (threshold - below.score) / (above.score - below.score)
            return Reached(place(below) + share * (place(above) - place(below)), censored=False)
    return Reached(place(curve[-1]), censored=True)


def _weighted_mean(values: Sequence[float | None], weights: Sequence[int]) -> float | None:
    known = [(value, weight) for value, weight in zip(values, weights, strict=True) if value is not None]
    total = sum(weight for _, weight in known)
    return math.fsum(value * weight for value, weight in known) / total if total else None


def _mean_of_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return fmean(known) if known else None
