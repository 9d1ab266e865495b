"""A comparison in words and tables of a terminal, and as a page: the answer, the contrasts, the learning curves with
bands, all outcomes, and failed runs."""

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import RenderableType

from sortedrl import __version__
from sortedrl.core.wording import counted, printable
from sortedrl.observe.report.build import render
from sortedrl.observe.report.charts import Chart, Dot, layout, mean_curve, rounded
from sortedrl.observe.report.runs import colors_of
from sortedrl.studies.compare.comparison import Compared, Comparison, Summary
from sortedrl.studies.compare.paired import Interval, half_width
from sortedrl.studies.compare.results import OUTCOMES
from sortedrl.studies.tables import table

UNKNOWN = "-"
FOLDER = Path(__file__).parent / "page"
AXES = {  # of the learning curves: a field of `Point`, and its title
    "rollouts": ("rollouts", "rollouts trained on"),
    "seconds": ("seconds", "seconds, without evaluations"),
    "updates": ("update", "update"),
}
IN_THE_TERMINAL = ("final_score", "curve_area", "samples_to_threshold", "staleness", "seconds")  # the page has all


def number(outcome: str, value: float | None, sign: str = "") -> str:
    """A value of an outcome; any other metric gets four digits."""
    digits = OUTCOMES[outcome].digits if outcome in OUTCOMES else ".4g"
    return UNKNOWN if value is None else f"{value:{sign}{digits}}"


def interval(outcome: str, found: Interval | None) -> str:
    return UNKNOWN if found is None else f"[{number(outcome, found.low, '+')}, {number(outcome, found.high, '+')}]"


# Sentences


def answer(compared: Compared) -> str:
    """The result of one contrast, in one sentence."""
    outcome, found = compared.outcome, compared.difference
    text = f"{compared.name}, {outcome}: "
    if found is None:
        return (
            f"{text}no seed has both runs {'on one device and the same problems' if compared.other_seeds else 'yet'}."
        )
    text += number(outcome, found.mean, "+")
    if found.pairs == 1:
        return f"{text} with one seed, which shows nothing."
    if found.t_interval is None:
        return f"{text} with each of {found.pairs} seeds: without spread there is no interval."
    text += f" +- {number(outcome, found.standard_error)} (standard error, {found.pairs} seeds)"
    text += f", 95% interval {interval(outcome, found.t_interval)}"
    if found.t_interval.low <= 0 <= found.t_interval.high:
        return f"{text}: no difference shown."
    return f"{text}: {compared.arm} is {'higher' if found.mean > 0 else 'lower'}."


def caveats(comparison: Comparison) -> Iterator[str]:
    """Limits of the answer that a reader must know."""
    yield study_as_planned(comparison)
    primary, found = comparison.primary, comparison.primary.difference
    if found is not None and found.smallest_visible is not None:
        if primary.anecdote:
            yield f"An anecdote: {found.pairs} seeds prove nothing. Use 8 or more."
        visible = number(primary.outcome, found.smallest_visible)
        yield f"Smallest difference that {found.pairs} seeds show with 80% probability: {visible}."
    if primary.censoring is not None:
        yield censoring(primary)
    if primary.missing_seeds:
        yield f"Seeds without both runs, left out: {', '.join(map(str, primary.missing_seeds))}."
    if comparison.failures:
        yield f"Failed: {counted(len(comparison.failures), 'run')}. Run the study again to retry."
    if comparison.not_run:
        yield f"Not finished: {counted(len(comparison.not_run), 'run')}. Run the study again to continue."
    yield from (f"{notice[0].upper()}{notice[1:]}." for notice in comparison.notices)


def study_as_planned(comparison: Comparison) -> str:
    """Whether the study is the one that was planned before its results were known."""
    known, said = comparison.planned_after, []
    if known is None:
        said.append("these results have no record of the study as planned")
    elif known:
        said.append(f"first recorded after {counted(known, 'result')} were known")
    for one in comparison.changes:
        after = f"changed after {counted(one['after_results'], 'result')} were known"
        said.append(f"{after}: {one['key']} {one['before']} -> {one['now']}")
    said += ["what was not planned is exploratory"] * bool(comparison.changes)
    return f"Study {comparison.study.digest}: {'; '.join(said) or 'as planned before the first result'}."


def censoring(compared: Compared) -> str:
    """How many runs never reached the threshold, and what that does to the difference."""
    found, arm, minus = compared.censoring, compared.arm, compared.minus
    assert found is not None
    medians = " and ".join(
        f"{'not reached' if value is None else number(compared.outcome, value)} ({name})"
        for name, value in ((arm, found.arm_median), (minus, found.minus_median))
    )
    first = f"{arm} was first in {counted(found.arm_first, 'pair')}, {minus} in {found.minus_first}"
    text = f"Medians {medians}. {first} (sign test p = {found.sign_test_p:.2g})."
    if found.horizon is None:
        return f"All runs reached the threshold. {text}"
    never = f"{counted(found.arm_censored, 'run')} of {arm} and {found.minus_censored} of {minus} never reached"
    return f"{never} the threshold: all runs count up to {number(compared.outcome, found.horizon)}. {text}"


# Tables


def parts(comparison: Comparison) -> list[RenderableType]:
    """What the terminal shows at the end."""
    headings = "contrast", "outcome", "difference", "95% interval", "relative", "seeds"
    rows = ([printable(row[0]), *row[1:4], row[5], row[7]] for row in map(contrast_row, comparison.contrasts))
    contrasts = table("Contrasts, paired by seed; the first one is primary", headings, rows)
    shown = [name for name in IN_THE_TERMINAL if name in comparison.study.outcomes]
    arms = table(
        "Arms, mean over seeds",
        ("arm", "runs", *shown),
        (
            (arm, str(len(comparison.of_arm(arm))), *(summary_text(name, found.get(name)) for name in shown))
            for arm, found in comparison.summaries.items()
        ),
    )
    failed = [f"FAILED: {one['arm']} seed {one['seed']}: {one['error']}" for one in comparison.failures]
    return [contrasts, "", arms, "", *map(printable, (*failed, answer(comparison.primary), *caveats(comparison)))]


def contrast_row(compared: Compared) -> list[str]:
    """For the page. The terminal leaves out the bootstrap interval and the smallest visible difference."""
    name, outcome, found = compared.name, compared.outcome, compared.difference
    seeds = f"{len(compared.seeds)}{' (anecdote)' if compared.anecdote else ''}"
    if found is None:
        return [name, outcome, *[UNKNOWN] * 5, seeds]
    error = "" if found.standard_error is None else f" +- {number(outcome, found.standard_error)}"
    intervals = [interval(outcome, one) for one in (found.t_interval, found.bootstrap_interval)]
    relative = UNKNOWN if found.relative is None else f"{found.relative:+.1%}"
    mean = number(outcome, found.mean, "+")
    return [name, outcome, f"{mean}{error}", *intervals, relative, number(outcome, found.smallest_visible), seeds]


def summary_text(outcome: str, summary: Summary | None) -> str:
    """The mean; where runs are censored, the median, and how many are."""
    if summary is None:
        return UNKNOWN
    if not summary.censored:
        return number(outcome, summary.mean)
    middle = "not reached" if summary.median is None else f"median {number(outcome, summary.median)}"
    return f"{middle} ({summary.censored} of {summary.runs} censored)"


# The page


def page(comparison: Comparison) -> str:
    study = comparison.study
    modes = [str(study.settings_of(arm).get("mode")) for arm in study.arms]
    colors = dict(zip(study.arms, colors_of(modes), strict=True))
    charts = [learning_chart(comparison, colors), *difference_charts(comparison)]
    sizes = counted(len(study.arms), "arm"), counted(len(study.seeds), "seed")
    devices = sorted({run.device for run in comparison.finished})
    content = {
        "subtitle": ", ".join((f"study {study.name}", *sizes, *(devices or ["no finished run"]))),
        "comparison": comparison,
        "colors": colors,
        "charts": charts,
        "meanings": {name: outcome.meaning for name, outcome in OUTCOMES.items()},
        **{one.__name__: one for one in (answer, caveats, censoring, contrast_row, number, summary_text)},
    }
    return render("compare.html.j2", content, charts, __version__, folder=FOLDER)


def learning_chart(comparison: Comparison, colors: dict[str, str]) -> Chart:
    """Mean score per arm; the band is the 95% interval of the mean over seeds."""
    at = comparison.study.threshold
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": at, "y1": at}
    line |= {"line": {"color": "#888888", "width": 1, "dash": "dot"}}
    t_interval = {"low": lambda y: fmean(y) - half_width(y), "high": lambda y: fmean(y) + half_width(y)}
    views = {}
    for name, (axis, title) in AXES.items():
        axes = layout(title, "held-out score", hovermode="x", showlegend=True, shapes=[] if at is None else [line])
        axes["xaxis"]["rangemode"] = "tozero"
        data = []
        for arm, color in colors.items():
            curves = [[Dot(p.update, getattr(p, axis), p.score) for p in run.curve] for run in comparison.of_arm(arm)]
            data += mean_curve(arm, color, curves, t_interval)
        views[name] = {"data": data, "layout": axes}
    return Chart("learning", "Held-out score", views, height=380)


def difference_charts(comparison: Comparison) -> list[Chart]:
    """One chart per outcome that a contrast names: differences of several pairs with their t intervals. The same
    difference in all pairs has none."""
    charts = []
    for outcome in dict.fromkeys(compared.outcome for compared in comparison.contrasts):
        all_of = [(one.name, one.difference) for one in comparison.contrasts if one.outcome == outcome]
        if not (found := [(name, one) for name, one in all_of if one and one.pairs > 1]):
            continue
        halves = [rounded(one.t_interval.high - one.mean) if one.t_interval else None for _, one in found]
        marks: dict[str, Any] = {"type": "scatter", "mode": "markers", "orientation": "h", "name": outcome}
        marks |= {"y": [name for name, _ in found], "x": [rounded(one.mean) for _, one in found]}
        marks |= {"error_x": {"type": "data", "array": halves, "thickness": 1.5, "width": 5}}
        marks |= {"marker": {"size": 9, "color": "#2b7fb8"}}
        axes = layout(f"{outcome}: difference, 95% t interval", "", hovermode="closest")
        axes["xaxis"]["rangemode"] = "tozero"
        axes["yaxis"] |= {"autorange": "reversed", "ticksuffix": "  "}
        view = {"data": [marks], "layout": axes}
        charts.append(Chart(f"difference-{outcome}", outcome, {"": view}, height=110 + 34 * len(found)))
    return charts
