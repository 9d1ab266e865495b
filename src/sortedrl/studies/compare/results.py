"""results.jsonl: one line per run that ended, appended as it ends, and the outcomes of a run. The file is what a study
leaves.

A finished run has its learning curve and series per update; a failed one has its error. A run that was tried again has
several lines: the last one counts. A line with a plan says what the study was to compare from there on.
Seconds are without the time of evaluations, which belongs to the study and not to the method. Everything that depends
on the threshold is computed from the learning curve, so it can be computed again for another threshold.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from sortedrl.core.configuration import ConfigurationError
from sortedrl.log.atomic_write import write_atomically
from sortedrl.settings.base import plain_reason

Line = dict[str, Any]
Key = tuple[str, int]  # arm, seed
RESULT = ("settings", "curve", "series", "metrics", "versions")  # tables in the line of a finished run
LIMITS = ("max_prompt_tokens", "max_response_tokens", "max_context_tokens")  # longer prompts are left out
PROBLEM_SETTINGS = ("task", "task_options", "data", "tools", "model", "eval_problems", *LIMITS)


class Outcome(NamedTuple):
    meaning: str
    digits: str  # how a value is printed
    metric: str = ""  # its name in the summary of a run
    axis: str = ""  # of the learning curve, if it is where the score reaches the threshold
    needs_one_device: bool = False  # to compare two runs


OUTCOMES = {
    "final_score": Outcome("held-out score after the last update", ".3f"),
    "curve_area": Outcome("mean held-out score over all trained rollouts", ".3f"),
    "samples_to_threshold": Outcome("trained rollouts until the held-out score reaches the threshold", ",.0f",
                                    axis="rollouts"),
    "seconds_to_threshold": Outcome("seconds until the held-out score reaches the threshold, without evaluations",
                                    ",.1f", axis="seconds", needs_one_device=True),
    "seconds": Outcome("duration of the run in seconds, without evaluations", ",.1f", needs_one_device=True),
    "response_length": Outcome("mean length of trained responses, in tokens", ",.1f"),
    "final_response_length": Outcome("mean length of trained responses over the last quarter's cohorts, in tokens",
                                     ",.1f"),
    "staleness": Outcome("mean staleness of trained tokens, in versions", ".2f", "staleness_mean"),
    "rollouts_per_second": Outcome("trained rollouts per second, without evaluations", ",.1f", needs_one_device=True),
    "bubble": Outcome("empty fraction of slot-time while generating", ".3f", "bubble"),
    "goodput": Outcome("tokens trained on per second of generation", ",.0f", "goodput", needs_one_device=True),
    "waste": Outcome("fraction of generated tokens that are discarded", ".3f", "waste"),
    "length_bias": Outcome("mean trained length against that of uncut responses", ".3f", "length_bias"),
}  # fmt: skip
FROM_THE_SUMMARY = {name: outcome.metric for name, outcome in OUTCOMES.items() if outcome.metric}
NEEDS_THRESHOLD = {name: outcome.axis for name, outcome in OUTCOMES.items() if outcome.axis}
NEEDS_ONE_DEVICE = tuple(name for name, outcome in OUTCOMES.items() if outcome.needs_one_device)
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


# From a run folder


def read_run(folder: Path, metrics: Sequence[str]) -> dict[str, Any]:
    """The raw results of a finished run: curve, series per update, numbers of its summary, digest of its problems.
    Raises `ValueError` with the folder's name if some are missing or damaged."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        metrics_of_run = {name: summary["metrics"][key] for name, key in FROM_THE_SUMMARY.items()}
        wall_seconds = summary["seconds"]
        updates = [line for line in lines if "rollouts" in line]
        curve = list(learning_curve(lines))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"results of {folder} cannot be read: {error!r}") from None
    if not curve or not updates:
        raise ValueError(f"{folder / 'metrics.jsonl'} has no {'updates' if curve else 'held-out score'}")
    return {
        "curve": {name: [getattr(point, name) for point in curve] for name in Point._fields},
        "series": {name: [_stored(line.get(name)) for line in updates] for name in (*ALWAYS_KEPT, *metrics)},
        "rollouts_per_update": [line["rollouts"] for line in updates],
        "metrics": metrics_of_run,
        "wall_seconds": wall_seconds,
        "problems": problems_in(folder),
    }


def problems_in(folder: Path) -> str | None:
    """A digest of the problems of a run, from its newest checkpoint; None if it cannot be read."""
    newest = max(folder.glob("checkpoints/update-*/state.json"), key=lambda path: path.parent.name, default=None)
    try:
        problems = json.loads(newest.read_text(encoding="utf-8"))["notes"]["problems"] if newest else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return None if problems is None else digest_of(problems)


def digest_of(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


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


def _stored(value: Any) -> float | None:
    """To five digits; None for what is no number or not finite, which JSON lacks."""
    return float(f"{value:.5g}") if type(value) in (int, float) and math.isfinite(value) else None


# Outcomes


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """One finished run: its outcomes by name, for the threshold of the study."""

    arm: str
    seed: int
    curve: list[Point]
    outcomes: dict[str, float | None]  # None: it has no such value
    reached: dict[str, Reached]  # of the outcomes of the threshold
    device: str
    problems: tuple[str, str | None]  # the settings that choose them; their digest, which older versions did not store

    @classmethod
    def of(cls, line: Line, metrics: Sequence[str], threshold: float | None, cohort_rollouts: int) -> FinishedRun:
        curve, lengths, rollouts = curve_of(line), line["series"]["length"], line["rollouts_per_update"]
        last = last_cohorts(rollouts, cohort_rollouts)
        axes = {} if threshold is None else NEEDS_THRESHOLD
        times = {name: reached(curve, threshold or 0.0, axis) for name, axis in axes.items()}
        outcomes = {
            "final_score": curve[-1].score,
            "curve_area": curve_area(curve),
            "seconds": curve[-1].seconds,
            "response_length": _mean(lengths, rollouts),
            "final_response_length": _mean(lengths[last], rollouts[last]),
            "rollouts_per_second": curve[-1].rollouts / curve[-1].seconds if curve[-1].seconds > 0 else None,
            **{name: line["metrics"].get(name) for name in FROM_THE_SUMMARY},  # an older version may have fewer
            **{name: _mean(values := line["series"].get(name, []), [1] * len(values)) for name in metrics},
            **{name: time.at for name, time in times.items()},
        }
        asked = json.dumps([line["settings"].get(key) for key in PROBLEM_SETTINGS], default=str)
        problems = asked, line.get("problems")
        return cls(line["arm"], line["seed"], curve, outcomes, times, line["device"], problems)


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
    places = [float(getattr(point, axis)) for point in curve]
    if curve[0].score >= threshold:
        return Reached(places[0], censored=False)
    for (below, above), (start, end) in zip(pairwise(curve), pairwise(places), strict=True):
        if above.score >= threshold:
            share = (threshold - below.score) / (above.score - below.score)
            return Reached(start + share * (end - start), censored=False)
    return Reached(places[-1], censored=True)


def _mean(values: Sequence[float | None], weights: Sequence[int]) -> float | None:
    """Of the values that are known."""
    known = [(x, weight) for x, weight in zip(values, weights, strict=True) if x is not None and math.isfinite(x)]
    total = sum(weight for _, weight in known)
    return math.fsum(value * weight for value, weight in known) / total if total else None


# results.jsonl


@dataclass(frozen=True, slots=True)
class Plan:
    digest: str
    values: dict[str, Any]  # `Study.plan`
    results_known: int  # finished runs when it was recorded


@dataclass(frozen=True, slots=True)
class Results:
    """The last line of every run, and all plans in their order."""

    runs: dict[Key, Line] = field(default_factory=dict)
    plans: list[Plan] = field(default_factory=list)

    @property
    def finished(self) -> dict[Key, Line]:
        return {key: line for key, line in self.runs.items() if "error" not in line}


def append(path: Path, line: Line) -> None:
    if path.exists() and not (text := path.read_text(encoding="utf-8")).endswith("\n"):
        write_atomically(path, "".join(f"{one}\n" for one in _whole_lines(text)))
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_results(path: Path) -> Results:
    """A torn last line is left out: its run is finished and will be added again."""
    try:
        texts = _whole_lines(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        fix = "Name a results.jsonl or the folder of a study."
        raise ConfigurationError("from", str(path), plain_reason(error), fix) from None
    found = Results()
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
            if "plan" in line:
                found.plans.append(Plan(str(line["study"]), dict(line["plan"]), len(found.finished)))
            elif _is_result(line):
                found.runs[line["arm"], line["seed"]] = line
            else:
                raise ValueError
        except (ValueError, KeyError, TypeError, RecursionError):
            why = f"line {number} is not the result of a run"
            raise ConfigurationError("from", str(path), why, "Name a results.jsonl of sortedrl compare.") from None
    return found


def _is_result(line: Line) -> bool:
    """Whether it has what a comparison needs. May raise `KeyError`, `TypeError` or `ValueError` if not."""
    if not isinstance(line["arm"], str) or type(line["seed"]) is not int:
        return False
    return "error" in line or (
        all(isinstance(line[key], dict) for key in RESULT)
        and len(curve_of(line)) > 0
        and len(line["series"]["length"]) == len(line["rollouts_per_update"])
        and isinstance(line["device"], str)
    )


def _whole_lines(text: str) -> list[str]:
    """All lines but a torn last one. An editor may leave out the last line feed: then the line is still JSON."""
    *lines, last = text.split("\n")
    try:
        json.loads(last)
    except (ValueError, RecursionError):
        return lines
    return [*lines, last]
