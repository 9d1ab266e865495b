"""A comparison in words and tables of a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from sortedrl.core.wording import counted
from sortedrl.studies.compare.comparison import Compared, Comparison, Summary
from sortedrl.studies.compare.paired import Interval

DIGITS = {
    "final_score": ".3f",
    "curve_area": ".3f",
    "samples_to_threshold": ",.0f",
    "seconds_to_threshold": ",.1f",
    "seconds": ",.1f",
    "response_length": ",.1f",
    "final_response_length": ",.1f",
    "staleness": ".2f",
    "rollouts_per_second": ",.1f",
    "bubble": ".3f",
    "goodput": ",.0f",
    "waste": ".3f",
    "length_bias": ".3f",
}
UNKNOWN = "-"
IN_THE_TERMINAL = ("final_score", "curve_area", "samples_to_threshold", "staleness", "seconds")  # the page has all


def number(outcome: str, value: float | None, sign: str = "") -> str:
    """A value of an outcome; any other metric gets four digits."""
    return UNKNOWN if value is None else f"{value:{sign}{DIGITS.get(outcome, '.4g')}}"


def interval(outcome: str, found: Interval | None) -> str:
    return UNKNOWN if found is None else f"[{number(outcome, found.low, '+')}, {number(outcome, found.high, '+')}]"


# Sentences


def answer(compared: Compared) -> str:
    """The result of one contrast, in one sentence."""
    outcome, found = compared.contrast.outcome, compared.difference
    head = f"{compared.contrast.name}, {outcome}: "
    if found is None:
        lacks = (
            "on one device"
            if compared.on_two_devices
            else "on the same problems"
            if compared.on_other_problems
            else "yet"
        )
        return head + f"no seed has both runs {lacks}."
    if found.t_interval is None:
        mean = f"{head}{number(outcome, found.mean, '+')}"
        if found.pairs > 1:
            return f"{mean} with each of {found.pairs} seeds: without spread there is no interval."
        return f"{mean} with one seed, which shows nothing."
    result = f"{number(outcome, found.mean, '+')} +- {number(outcome, found.standard_error)}"
    text = f"{head}{result} (standard error, {found.pairs} seeds), 95 % interval {interval(outcome, found.t_interval)}"
    if not found.t_interval.excludes_zero:
        return f"{text}: no difference shown."
    return f"{text}: {compared.contrast.arm} is {'higher' if found.mean > 0 else 'lower'}."


def caveats(comparison: Comparison) -> Iterator[str]:
    """Limits of the answer that a reader must know."""
    yield study_as_planned(comparison)
    primary = comparison.primary
    found, outcome = primary.difference, primary.contrast.outcome
    if found is not None and found.smallest_visible is not None:
        if primary.is_anecdote:
            yield f"An anecdote: {found.pairs} seeds prove nothing. Use 8 or more."
        yield (
            f"Smallest difference that {found.pairs} seeds show with 80 % probability: "
            f"{number(outcome, found.smallest_visible)}."
        )
    if primary.censoring is not None:
        yield censoring(primary)
    if primary.missing:
        yield f"Seeds without both runs, left out: {', '.join(map(str, primary.missing))}."
    if comparison.failures:
        yield f"Failed: {counted(len(comparison.failures), 'run')}. Run the study again to retry."
    if comparison.not_run:
        yield f"Not finished: {counted(len(comparison.not_run), 'run')}. Run the study again to continue."
    yield from (f"{notice[0].upper()}{notice[1:]}." for notice in comparison.notices)


def study_as_planned(comparison: Comparison) -> str:
    """Whether the study is the one that was planned before its results were known."""
    known = comparison.planned_after
    if known:
        state = f"first recorded after {counted(known, 'result')} were known"
    else:
        state = "these results have no record of the study as planned" if known is None else ""
    changes = [
        f"changed after {counted(one.after_results, 'result')} were known: {one.key} {_said(one.before)} -> "
        f"{_said(one.now)}"
        for one in comparison.changes
    ]
    if changes:
        changes.append("what was not planned is exploratory")
    elif known == 0:
        state = "as planned before the first result"
    return f"Study {comparison.study.digest}: {'; '.join([state] * bool(state) + changes)}."


def _said(value: Any) -> str:
    if not isinstance(value, list):
        return "none" if value is None else str(value)
    is_range = len(value) > 1 and all(type(b) is int and b - a == 1 for a, b in pairwise(value))
    return f"{value[0]} to {value[-1]}" if is_range else ", ".join(map(str, value))


def censoring(compared: Compared) -> str:
    """How many runs never reached the threshold, and what that does to the difference."""
    found, contrast = compared.censoring, compared.contrast
    assert found is not None
    medians = " and ".join(
        f"{number(contrast.outcome, value)} ({arm})" if value is not None else f"not reached ({arm})"
        for arm, value in ((contrast.arm, found.arm_median), (contrast.minus, found.minus_median))
    )
    first = f"{contrast.arm} was first in {counted(found.arm_first, 'pair')}, {contrast.minus} in {found.minus_first}"
    text = f"Medians {medians}. {first} (sign test p = {found.sign_test_p:.2g})."
    if found.horizon is None:
        return f"All runs reached the threshold. {text}"
    never = f"{counted(found.arm_censored, 'run')} of {contrast.arm} and {found.minus_censored} of {contrast.minus}"
    horizon = number(contrast.outcome, found.horizon)
    return f"{never} never reached the threshold: all runs count up to {horizon}. {text}"


# Tables


def parts(comparison: Comparison) -> list[RenderableType]:
    """What the terminal shows at the end."""
    found: list[RenderableType] = [contrast_table(comparison), arm_table(comparison)]
    if comparison.failures:
        found.append(failure_table(comparison))
    return [*found, "", answer(comparison.primary), *caveats(comparison)]


def contrast_table(comparison: Comparison) -> Table:
    table = _table("Contrasts, paired by seed; the first one is primary", "contrast", "outcome")
    for heading in ("difference", "95 % interval", "relative", "seeds"):
        table.add_column(heading, justify="right")
    for compared in comparison.contrasts:
        name, outcome, difference, t_interval, _, relative, _, seeds = contrast_row(compared)
        table.add_row(name, outcome, difference, t_interval, relative, seeds)
    return table


def contrast_row(compared: Compared) -> list[str]:
    """For the page. The terminal leaves out the bootstrap interval and the smallest visible difference."""
    outcome, found = compared.contrast.outcome, compared.difference
    seeds = f"{len(compared.seeds)}{' (anecdote)' if compared.is_anecdote else ''}"
    if found is None:
        return [compared.contrast.name, outcome, *[UNKNOWN] * 5, seeds]
    return [
        compared.contrast.name,
        outcome,
        number(outcome, found.mean, "+")
        + ("" if found.standard_error is None else f" +- {number(outcome, found.standard_error)}"),
        interval(outcome, found.t_interval),
        interval(outcome, found.bootstrap_interval),
        UNKNOWN if found.relative is None else f"{found.relative:+.1%}",
        number(outcome, found.smallest_visible),
        seeds,
    ]


def arm_table(comparison: Comparison) -> Table:
    shown = [name for name in IN_THE_TERMINAL if name in comparison.study.outcomes]
    table = _table("Arms, mean over seeds", "arm")
    for name in ("runs", *shown):
        table.add_column(name.replace("_", " "), justify="right")
    for arm, summaries in comparison.summaries.items():
        runs = len(comparison.of_arm(arm))
        table.add_row(arm, str(runs), *(summary_text(name, summaries.get(name)) for name in shown))
    return table


def summary_text(outcome: str, summary: Summary | None) -> str:
    """The mean; where runs are censored, the median, and how many are."""
    if summary is None:
        return UNKNOWN
    if not summary.censored:
        return number(outcome, summary.mean)
    middle = "not reached" if summary.median is None else f"median {number(outcome, summary.median)}"
    return f"{middle} ({summary.censored} of {summary.runs} censored)"


def failure_table(comparison: Comparison) -> Table:
    table = _table("Failed runs", "arm")
    table.add_column("seed", justify="right")
    table.add_column("error")
    for failure in comparison.failures:
        table.add_row(failure.arm, str(failure.seed), failure.error)
    return table


def _table(title: str, *names: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in names:
        table.add_column(name, no_wrap=True)
    return table
