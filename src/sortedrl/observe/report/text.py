"""The sentences of the report that depend on the runs. The others are in page/report.html.j2."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

from sortedrl.core.wording import counted
from sortedrl.observe import wall_clock
from sortedrl.observe.metrics import BUBBLE_PARTS
from sortedrl.observe.report import charts
from sortedrl.observe.report.runs import INCIDENTAL, ReportedRun
from sortedrl.observe.report.series import Series
from sortedrl.observe.report.tables import differing_keys, percent, shown

WORKLOAD = ("task", "task_options", "data", "model")  # the settings of one workload, which schedules share


def conclusion(series: Sequence[Series], runs: Sequence[ReportedRun]) -> list[str]:
    """One sentence, then lines that limit or complete it."""
    measured = [one for one in series if one.has_updates]
    asides = []
    if not measured:
        sentence = f"No update was made in {', '.join(run.name for run in runs)}: there is nothing to measure yet."
    elif len(measured) == 1:
        sentence = _conclusion_of_one(measured[0])
    elif tasks := _different_tasks(measured):
        sentence = f"These runs have different tasks ({tasks}) and are not compared: the metrics of each are below."
    else:
        sentence = _conclusion_of_several(measured)
        apart = [key for key in differing_keys(runs) if key not in ("mode", *INCIDENTAL)]
        if apart:
            asides.append(f"The runs differ in more than the mode: {', '.join(apart)}. Compare them with care.")
    for title, of in (("Held-out score", _score), ("Bottleneck", _bottleneck), ("Streamed during harvests", _streamed)):
        found = [f"{one.label} {words}" if len(series) > 1 else words for one in series for words in of(one)]
        if found:
            asides.append(f"{title}: {'; '.join(found)}.")
    asides += [f"{', '.join(run.copies)}: a copy of {run.name}, not counted again." for run in runs if run.copies]
    return [sentence, *asides]


def _conclusion_of_one(one: Series) -> str:
    bubble = one.mean("bubble")
    parts = {part: fmean(run.run_metrics.bubble_parts[part] for run in one.measured) for part in BUBBLE_PARTS}
    most = max(parts, key=lambda part: parts[part])
    mostly = f", mostly {charts.part_name(most)}" if bubble >= 0.005 and parts[most] > bubble / 2 else ""
    return (
        f"{one.label} left {percent(bubble)} of slot-time empty while the engine could run{mostly}, and trained on "
        f"{one.mean('goodput'):,.0f} tokens per second{_cost(one)}."
    )


def _different_tasks(series: Sequence[Series]) -> str:
    """The settings that choose model and problems, as far as they differ; empty if the runs can be compared."""
    firsts = [one.runs[0].settings for one in series]
    values = {key: list(dict.fromkeys(shown(settings.get(key)) for settings in firsts)) for key in WORKLOAD}
    return "; ".join(f"{key}: {', '.join(found)}" for key, found in values.items() if len(found) > 1)


def _conclusion_of_several(series: Sequence[Series]) -> str:
    reference = next((one for one in series if one.label == "baseline"), series[0])
    best = max(series, key=lambda one: one.mean("goodput"))
    before, after = reference.mean("goodput"), best.mean("goodput")
    if best is reference:
        second = max((one for one in series if one is not reference), key=lambda one: one.mean("goodput"))
        return (
            f"No schedule here beats {reference.label}: it trained on {before:,.0f} tokens per second with "
            f"{percent(reference.mean('bubble'))} of slot-time empty; {second.label} trained on "
            f"{second.mean('goodput'):,.0f} with {percent(second.mean('bubble'))}."
        )
    gain = f"{after / before:.2f} x the tokens per second of {reference.label}" if before else "most tokens per second"
    return (
        f"{best.label} trained on {gain} ({after:,.0f} vs. {before:,.0f}): it left {percent(best.mean('bubble'))} of "
        f"slot-time empty instead of {percent(reference.mean('bubble'))}{_cost(best)}."
    )


def _cost(one: Series) -> str:
    waste, greatest = one.mean("waste"), max(run.run_metrics.staleness_max for run in one.runs)
    tokens = f"discarding {percent(waste)} of generated tokens" if waste >= 0.0005 else "discarding no tokens"
    age = f"tokens were {one.mean('staleness_mean'):.2f} versions old on average, {greatest} at most"
    return f", {tokens}; {age if greatest else 'every token was on-policy'}"


def _score(one: Series) -> Iterable[str]:
    runs = [run for run in one.runs if len(run.held_out) > 1]
    if runs:
        before = fmean(run.held_out[0].score["value"] for run in runs)
        after = [run.held_out[-1].score["value"] for run in runs]
        spread = f" ({min(after):.3f}–{max(after):.3f} over {len(after)} runs)" if len(after) > 1 else ""
        yield f"{before:.3f} → {fmean(after):.3f}{spread}"


def _bottleneck(one: Series) -> Iterable[str]:
    parts = {part: fmean(run.run_metrics.wall_parts[part] for run in one.measured) for part in wall_clock.PARTS}
    if any(parts.values()):
        most = wall_clock.bottleneck(parts)
        yield f"{wall_clock.part_name(most)}, {parts[most]:.0%} of wall-clock time"


def _streamed(one: Series) -> Iterable[str]:
    """How much of the learner's work was done during harvests; nothing for runs without streaming."""
    if fraction := one.mean("streamed_fraction"):
        yield f"{percent(fraction)} of the rollouts, {one.mean('streamed_seconds'):,.1f} s of learner time"


def subtitle(runs: Sequence[ReportedRun]) -> str:
    trained = sum(run.run_metrics.trained for run in runs)
    what = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    counts = sorted({run.slot_counts for run in runs})
    slots = " / ".join(", then ".join(f"{count:,}" for count in of_a_run) for of_a_run in counts)
    of_slots = "1 slot" if counts == [(1,)] else f"{slots} slots"
    return f"{what} · {of_slots} · {counted(trained, 'rollout')} trained on"
