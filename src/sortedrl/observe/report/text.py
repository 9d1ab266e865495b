"""The text of the report: its conclusion, the glossary, and an introduction to each section."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from sortedrl.core.wording import counted
from sortedrl.observe import wall_clock
from sortedrl.observe.metrics import BUBBLE_PARTS
from sortedrl.observe.report import charts
from sortedrl.observe.report.runs import INCIDENTAL, Run
from sortedrl.observe.report.series import Series
from sortedrl.observe.report.tables import differing_keys, percent, shown

WORKLOAD = ("task", "task_options", "data", "model")  # the settings of one workload, which schedules share

GLOSSARY = (
    ("slot", "one place in the engine's running batch (vLLM max_num_seqs, SGLang max_running_requests)"),
    ("bubble", "empty slot-time / (slots x T), where T is the total time of all harvests, including prefill"),
    ("drain", "part of the bubble: no rollouts are left to start in this cohort"),
    ("held back", "part of the bubble: the schedule starts no more rollouts in this harvest"),
    ("environment", "part of the bubble: rollouts are in their environments, and nothing else may start"),
    ("refill", "part of the bubble: a freed slot waits for the controller"),
    ("queued", "part of the bubble: requests are queued in the engine, waiting for prefill"),
    ("KV-limited", "part of the bubble: requests wait for KV cache memory, as preemptions show"),
    ("idle", "like bubble, but over wall-clock time: learner, weights, scores, evaluation and checkpoints count too"),
    ("bottleneck", "what the run waited for most: generation, environments, the learner, scoring or weight updates"),
    ("streamed", "the learner computed the gradient during the harvest, while other responses were generated"),
    ("goodput", "tokens trained on / T"),
    ("kept", "(tokens trained on + tokens cached for resume when the run ends) / T: the fair metric for few cohorts"),
    ("waste", "fraction of generated tokens that were discarded"),
    ("staleness", "the learner's version at the update minus the version that sampled the token"),
    ("segment", "consecutive tokens sampled by one weight version; an aborted and resumed response has several"),
    ("sortedness", "how much sorting reduces the variance of log length within updates: 0 random, 1 sorted"),
    ("length bias", "mean trained length relative to uncut responses, estimated from all attempts"),
    ("trained, kept, dropped", "what happened to the tokens: trained on; aborted and kept for resume; discarded"),
    ("stepped", "a turn ended, and the rollout went to its environment; it holds no slot there"),
)  # fmt: skip


def conclusion(series: Sequence[Series], runs: Sequence[Run]) -> dict[str, Any]:
    asides = []
    measured = [one for one in series if one.has_updates]
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
    scores = [score for one in series for score in _score(one)]
    if scores:
        asides.append(f"Held-out score: {'; '.join(scores)}.")
    waited = [line for one in series for line in _bottleneck(one, named=len(series) > 1)]
    if waited:
        asides.append(f"Bottleneck: {'; '.join(waited)}.")
    streamed = [line for one in series for line in _streamed(one, named=len(series) > 1)]
    if streamed:
        asides.append(f"Streamed during harvests: {'; '.join(streamed)}.")
    for run in runs:
        if run.copies:
            asides.append(f"{', '.join(run.copies)}: a copy of {run.name}, not counted again.")
    if any(run.is_aggregated for run in runs):
        asides.append("Charts of large runs are aggregated; the metrics count every rollout.")
    return {"sentence": sentence, "asides": asides}


def _streamed(one: Series, *, named: bool) -> list[str]:
    """How much of the learner's work was done during harvests; nothing for runs without streaming."""
    fraction, seconds = one.mean("streamed_fraction"), one.mean("streamed_seconds")
    if not fraction:
        return []
    return [f"{f'{one.label} ' if named else ''}{percent(fraction)} of the rollouts, {seconds:,.1f} s of learner time"]


def _conclusion_of_one(one: Series) -> str:
    bubble, goodput = one.mean("bubble"), one.mean("goodput")
    part, share = max(
        ((part, fmean(run.run_metrics.bubble_parts[part] for run in one.measured)) for part in BUBBLE_PARTS),
        key=lambda pair: pair[1],
    )
    mostly = f", mostly {charts.part_name(part)}" if bubble >= 0.005 and share > bubble / 2 else ""
    return (
        f"{one.label} left {percent(bubble)} of slot-time empty while the engine could run{mostly}, and trained on "
        f"{goodput:,.0f} tokens per second{_waste_clause(one)}; {_staleness_clause(one)}."
    )


def _different_tasks(series: Sequence[Series]) -> str:
    """The settings that choose model and problems, as far as they differ; empty if the runs can be compared."""
    firsts = [one.runs[0].settings for one in series]
    values = {key: list(dict.fromkeys(shown(settings.get(key)) for settings in firsts)) for key in WORKLOAD}
    return "; ".join(f"{key}: {', '.join(found)}" for key, found in values.items() if len(found) > 1)


def _conclusion_of_several(series: Sequence[Series]) -> str:
    reference = next((one for one in series if one.label == "baseline"), series[0])
    best = max(series, key=lambda one: one.mean("goodput"))
    if best is reference:
        second = max((one for one in series if one is not reference), key=lambda one: one.mean("goodput"))
        return (
            f"No schedule here beats {reference.label}: it trained on {reference.mean('goodput'):,.0f} tokens per "
            f"second with {percent(reference.mean('bubble'))} of slot-time empty; {second.label} trained on "
            f"{second.mean('goodput'):,.0f} with {percent(second.mean('bubble'))}."
        )
    before, after = reference.mean("goodput"), best.mean("goodput")
    gain = (
        f"{after / before:.2f} x the tokens per second of {reference.label}" if before else "the most tokens per second"
    )
    return (
        f"{best.label} trained on {gain} ({after:,.0f} vs. {before:,.0f}): it left "
        f"{percent(best.mean('bubble'))} of slot-time empty instead of {percent(reference.mean('bubble'))}"
        f"{_waste_clause(best)}; {_staleness_clause(best)}."
    )


def _waste_clause(one: Series) -> str:
    waste = one.mean("waste")
    return f", discarding {percent(waste)} of generated tokens" if waste >= 0.0005 else ", discarding no tokens"


def _staleness_clause(one: Series) -> str:
    if not max(run.run_metrics.staleness_max for run in one.runs):
        return "every token was on-policy"
    greatest = max(run.run_metrics.staleness_max for run in one.runs)
    return f"tokens were {one.mean('staleness_mean'):.2f} versions old on average, {greatest} at most"


def _score(one: Series) -> Iterable[str]:
    runs = [run for run in one.runs if len(run.held_out) > 1]
    if runs:
        before = fmean(run.held_out[0].score["value"] for run in runs)
        after = [run.held_out[-1].score["value"] for run in runs]
        spread = f" ({min(after):.3f}–{max(after):.3f} over {len(after)} runs)" if len(after) > 1 else ""
        yield f"{one.label} {before:.3f} → {fmean(after):.3f}{spread}"


def _bottleneck(one: Series, *, named: bool) -> Iterable[str]:
    parts = {part: fmean(run.run_metrics.wall_parts[part] for run in one.measured) for part in wall_clock.PARTS}
    if any(parts.values()):
        most = wall_clock.bottleneck(parts)
        yield f"{f'{one.label} ' if named else ''}{wall_clock.part_name(most)}, {parts[most]:.0%} of wall-clock time"


def scoring_lead(runs: Sequence[Run]) -> str:
    rejected, loaded = (sum(getattr(run.run_metrics, name) for run in runs) for name in ("rejected", "loaded"))
    if not rejected:
        return f"No rollout of {loaded:,} was rejected."
    return (
        f"{rejected:,} of {loaded:,} rollouts were rejected: no update trained on them. Reasons that differ only in "
        "numbers count as one."
    )


def subtitle(runs: Sequence[Run]) -> str:
    trained = sum(run.run_metrics.trained for run in runs)
    what = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    counts = sorted({run.slot_counts for run in runs})
    slots = " / ".join(", then ".join(f"{count:,}" for count in of_a_run) for of_a_run in counts)
    of_slots = "1 slot" if counts == [(1,)] else f"{slots} slots"
    return f"{what} · {of_slots} · {counted(trained, 'rollout')} trained on"


def metrics_lead(series: Sequence[Series]) -> str:
    several = any(len(one.runs) > 1 for one in series)
    return "Goodput, next to the staleness and the waste that it costs." + (
        " With several runs: the mean, and the range below it." if several else ""
    )


def occupancy_lead(series: Sequence[Series], longest: float, unit: charts.TimeUnit) -> str:
    bins = max(len(one.measured[0].occupancy.edges) - 1 for one in series)
    first = " One run per series is shown." if any(len(one.runs) > 1 for one in series) else ""
    return (
        "Dark blue: rollouts that finished and were trained on. Light blue: aborted, tokens kept for resume. Red: "
        "discarded. Yellow to orange is bubble: slots that were empty while the engine could run. Gray is the "
        "remaining wall-clock time, in which the engine does not generate. Each stack adds up to all slots; a step is "
        f"the mean over 1/{bins} of the run, {unit.of(longest / max(1, bins)):.2g} {unit.name} in the longest.{first}"
    )


def timeline_lead(series: Sequence[Series]) -> str:
    text = (
        "Each bar is a rollout in a slot, colored by its outcome; vertical lines are updates. Drag to zoom, "
        "double-click to reset, Ctrl + wheel to zoom in place, or use the arrow keys, + and −."
    )
    merged = [one for one in series if one.measured[0].timeline.grid]
    if merged:
        counts = ", ".join(f"{one.label}: {one.measured[0].timeline.slice_count:,}" for one in merged)
        bins = len(merged[0].measured[0].timeline.grid[0])
        text += (
            f" Aggregated where there are too many bars to draw one by one ({counts}): the whole run is a grid with "
            f"{bins:,} time bins per slot, and each cell shows the outcome that took the longest."
        )
    return text


def lengths_lead(series: Sequence[Series]) -> str:
    means = [(one.label, one.mean_sortedness()) for one in series]
    sortedness = ", ".join(f"{label} {'unknown' if mean is None else format(mean, 'z.2f')}" for label, mean in means)
    pooled = max((point.pooled for one in series for point in one.measured[0].points), default=1)
    note = f" Aggregated: each point pools {pooled} updates." if pooled > 1 else ""
    return (
        "The line is the median; the bands cover the middle 50 % and 90 % of an update's responses. A sawtooth is the "
        f"micro-curriculum: short responses first in every cohort. Sortedness: {sortedness}.{note}"
    )


def staleness_lead(series: Sequence[Series]) -> str:
    floors = [
        f"{one.label} {one.mean('staleness_mean'):.2f}, floor {run.floor[0]:.2f} unsorted and {run.floor[1]:.2f} sorted"
        for one in series
        for run in one.measured[:1]
        if run.floor and one.mean("staleness_mean") > 0
    ]
    text = "How old tokens were when they were trained on, and how many segments a response has."
    if floors:
        text += f" Mean, and the lower bound for full slots where tokens are kept: {'; '.join(floors)}."
    return text


def learning_lead(series: Sequence[Series]) -> str:
    if any(len(one.runs) > 1 for one in series):
        return "The mean over the runs, with a band from the lowest to the highest run, as far as all runs go."
    return "Error bars on held-out scores are 95 % confidence intervals of the evaluation."
