"""The numbers of a comparison, from a study and its results: what compare.json, the page and the terminal show."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any

from sortedrl.studies.compare.outcomes import (
    NEEDS_ONE_DEVICE,
    NEEDS_THRESHOLD,
    Point,
    Reached,
    curve_of,
    outcomes_of,
    reached,
)
from sortedrl.studies.compare.paired import (
    ENOUGH_SEEDS,
    Censoring,
    Difference,
    difference,
    median_time,
    threshold_difference,
)
from sortedrl.studies.compare.results import Key, Line, Plan, Results, problems_used, versions_used
from sortedrl.studies.compare.study import Contrast, Study

EQUAL_ROLLOUTS = 1.1  # arms whose numbers of trained rollouts differ by a larger factor get a notice


@dataclass(frozen=True, slots=True)
class Finished:
    """One finished run: its outcomes by name, for the threshold of the study."""

    arm: str
    seed: int
    curve: tuple[Point, ...]
    outcomes: dict[str, float | None]
    reached: dict[str, Reached]  # of the outcomes of the threshold
    device: str
    versions: dict[str, str]
    problems: tuple[str, str] | None  # settings and digest


@dataclass(frozen=True, slots=True)
class Compared:
    """A contrast with its result. `difference` is None if no seed has both runs."""

    contrast: Contrast
    seeds: tuple[int, ...]  # that are compared
    missing: tuple[int, ...]  # seeds of the study without both runs
    on_two_devices: tuple[int, ...]  # seeds left out because the outcome depends on the device
    on_other_problems: tuple[int, ...]  # seeds left out because the problems changed between the two runs
    difference: Difference | None
    censoring: Censoring | None

    @property
    def is_anecdote(self) -> bool:
        return len(self.seeds) < ENOUGH_SEEDS


@dataclass(frozen=True, slots=True)
class Summary:
    """An outcome over the runs of one arm. Of censored runs, `mean` counts the time until they ended."""

    runs: int
    mean: float
    standard_deviation: float | None
    censored: int
    median: float | None  # of outcomes of the threshold; None if half of the runs or more are censored


@dataclass(frozen=True, slots=True)
class Failure:
    arm: str
    seed: int
    error: str


@dataclass(frozen=True, slots=True)
class Change:
    """Of the study, after results were known."""

    after_results: int
    key: str  # of `Study.plan`
    before: Any
    now: Any


@dataclass(frozen=True, slots=True)
class Comparison:
    study: Study
    planned_after: int | None  # results that were known when the study was first recorded; None: it never was
    changes: tuple[Change, ...]
    finished: tuple[Finished, ...]
    failures: tuple[Failure, ...]
    not_run: tuple[Key, ...]
    contrasts: tuple[Compared, ...]  # the primary one first
    exploratory: tuple[Compared, ...]  # every other outcome of the same pairs of arms, without a bootstrap
    summaries: dict[str, dict[str, Summary]]  # by arm and outcome
    notices: tuple[str, ...]

    @property
    def primary(self) -> Compared:
        return self.contrasts[0]

    def of_arm(self, arm: str) -> list[Finished]:
        return [run for run in self.finished if run.arm == arm]


def compare(study: Study, found: Results) -> Comparison:
    results = found.runs
    wanted = [(arm, seed) for seed in study.seeds for arm in study.arms]
    finished = [_finished(results[key], study) for key in wanted if key in results and "error" not in results[key]]
    by_key = {(run.arm, run.seed): run for run in finished}
    named = sorted(study.contrasts, key=lambda contrast: not contrast.primary)
    asked = {(contrast.arm, contrast.minus, contrast.outcome) for contrast in named}
    pairs = dict.fromkeys((contrast.arm, contrast.minus) for contrast in named)
    others = [
        Contrast(f"{arm} minus {minus}", arm, minus, outcome, primary=False)
        for arm, minus in pairs
        for outcome in study.outcomes
        if (arm, minus, outcome) not in asked
    ]
    return Comparison(
        study=study,
        planned_after=found.plans[0].results_known if found.plans else None,
        changes=tuple(_changes(study, found)),
        finished=tuple(finished),
        failures=tuple(Failure(*key, results[key]["error"]) for key in wanted if "error" in results.get(key, {})),
        not_run=tuple(key for key in wanted if key not in results),
        contrasts=tuple(_compared(contrast, study, by_key) for contrast in named),
        exploratory=tuple(_compared(contrast, study, by_key, resample=False) for contrast in others),
        summaries={arm: _summaries(study, [run for run in finished if run.arm == arm]) for arm in study.arms},
        notices=tuple(_notices(study, finished, results)),
    )


def _changes(study: Study, results: Results) -> Iterator[Change]:
    """Between the plans recorded, and up to this study. Lines of runs have their threshold, also without any plan."""
    thresholds = [line["threshold"] for line in results.runs.values() if "threshold" in line]
    plans = [Plan("", {"threshold": thresholds[0]} if thresholds else {}, 0), *results.plans]
    for before, now in pairwise([*plans, Plan(study.digest, study.plan, results.finished)]):
        for key, value in now.values.items() if now.results_known else ():
            if before.values.get(key, value) != value:
                yield Change(now.results_known, key, before.values[key], value)


def as_json(comparison: Comparison, version: str) -> dict[str, Any]:
    """compare.json: everything but the learning curves, which are in results.jsonl."""
    study = comparison.study
    return {
        "version": version,
        "study": study.name,
        "question": study.question,
        "seeds": list(study.seeds),
        "threshold": study.threshold,
        "settings": study.settings,
        "study_digest": study.digest,
        "study_planned_after_results": comparison.planned_after,
        "study_changes": [asdict(change) for change in comparison.changes],
        "arms": {
            arm: {"settings": own, "outcomes": {name: asdict(one) for name, one in comparison.summaries[arm].items()}}
            for arm, own in study.arms.items()
        },
        "contrasts": [_plain(compared) for compared in comparison.contrasts],
        "exploratory": [_plain(compared) for compared in comparison.exploratory],
        "runs": [{"arm": run.arm, "seed": run.seed, "outcomes": run.outcomes} for run in comparison.finished],
        "failed": [asdict(failure) for failure in comparison.failures],
        "not_run": [{"arm": arm, "seed": seed} for arm, seed in comparison.not_run],
        "notices": list(comparison.notices),
    }


def _plain(compared: Compared) -> dict[str, Any]:
    return {
        **asdict(compared.contrast),
        "seeds": list(compared.seeds),
        "missing_seeds": list(compared.missing),
        "seeds_on_two_devices": list(compared.on_two_devices),
        "seeds_on_other_problems": list(compared.on_other_problems),
        "anecdote": compared.is_anecdote,
        "difference": asdict(compared.difference) if compared.difference else None,
        "censoring": asdict(compared.censoring) if compared.censoring else None,
    }


def _finished(line: Line, study: Study) -> Finished:
    curve = curve_of(line)
    times = {} if study.threshold is None else {
        name: reached(curve, study.threshold, axis) for name, axis in NEEDS_THRESHOLD.items()
    }  # fmt: skip
    outcomes = outcomes_of(line, study.threshold, study.metrics, study.cohort_rollouts(line["arm"]))
    return Finished(
        line["arm"],
        line["seed"],
        tuple(curve),
        outcomes,
        times,
        line["device"],
        versions_used(line),
        problems_used(line),
    )


def _compared(contrast: Contrast, study: Study, runs: Mapping[Key, Finished], *, resample: bool = True) -> Compared:
    outcome = contrast.outcome
    has = {key for key, run in runs.items() if run.outcomes[outcome] is not None}
    complete = [seed for seed in study.seeds if {(contrast.arm, seed), (contrast.minus, seed)} <= has]
    missing = tuple(seed for seed in study.seeds if seed not in complete)
    apart = _on_two_devices(contrast.arm, contrast.minus, runs) if outcome in NEEDS_ONE_DEVICE else ()
    other_problems = _on_other_problems(contrast.arm, contrast.minus, runs)
    on_two_devices, on_other_problems = (
        tuple(seed for seed in complete if seed in left_out) for left_out in (apart, other_problems)
    )
    seeds = tuple(seed for seed in complete if seed not in {*apart, *other_problems})
    if not seeds:
        return Compared(contrast, seeds, missing, on_two_devices, on_other_problems, None, None)
    arm, minus = ([runs[name, seed] for seed in seeds] for name in (contrast.arm, contrast.minus))
    if outcome in NEEDS_THRESHOLD:
        times = [[run.reached[outcome] for run in runs_of_arm] for runs_of_arm in (arm, minus)]
        found, censoring = threshold_difference(*times, resample=resample)
        return Compared(contrast, seeds, missing, on_two_devices, on_other_problems, found, censoring)
    found = difference(_values(arm, outcome), _values(minus, outcome), resample=resample)
    return Compared(contrast, seeds, missing, on_two_devices, on_other_problems, found, None)


def _on_two_devices(arm: str, minus: str, runs: Mapping[Key, Finished]) -> tuple[int, ...]:
    """Seeds whose two runs are on different devices: a difference of their seconds is one of the devices."""
    seeds = [seed for name, seed in runs if name == arm and (minus, seed) in runs]
    return tuple(seed for seed in seeds if runs[arm, seed].device != runs[minus, seed].device)


def _on_other_problems(arm: str, minus: str, runs: Mapping[Key, Finished]) -> tuple[int, ...]:
    """Seeds whose two runs have different problems, although their settings ask for the same ones."""
    pairs = [
        (seed, run.problems, runs[minus, seed].problems)
        for (name, seed), run in runs.items()
        if name == arm and (minus, seed) in runs
    ]
    return tuple(seed for seed, one, other in pairs if one and other and one[0] == other[0] and one[1] != other[1])


def _values(runs: Iterable[Finished], outcome: str) -> list[float]:
    return [value for run in runs if (value := run.outcomes[outcome]) is not None]


def _summaries(study: Study, runs: Sequence[Finished]) -> dict[str, Summary]:
    found = {}
    for outcome in study.outcomes:
        values = _values(runs, outcome)
        if values:
            times = [run.reached[outcome] for run in runs if outcome in run.reached]
            found[outcome] = Summary(
                runs=len(values),
                mean=fmean(values),
                standard_deviation=stdev(values) if len(values) > 1 else None,
                censored=sum(time.censored for time in times),
                median=median_time(times) if times else None,
            )
    return found


def _differing_versions(finished: Iterable[Finished]) -> list[str]:
    """Packages of which runs use two versions. One that only some runs use is a matter of their settings."""
    found: dict[str, set[str]] = {}
    for run in finished:
        for name, version in run.versions.items():
            found.setdefault(name, set()).add(version)
    return [f"{name} {' and '.join(sorted(versions))}" for name, versions in found.items() if len(versions) > 1]


def _unequal_rollouts(arm: str, minus: str, finished: Iterable[Finished]) -> str:
    """Empty if the runs of both arms trained on about as many rollouts. Updates may be larger than their size."""
    trained = {name: [run.curve[-1].rollouts for run in finished if run.arm == name] for name in (arm, minus)}
    if not all(trained.values()):
        return ""
    ours, theirs = (fmean(trained[name]) for name in (arm, minus))
    if max(ours, theirs) <= EQUAL_ROLLOUTS * min(ours, theirs):
        return ""
    return (
        f"the runs of {arm} trained on {ours:,.0f} rollouts, those of {minus} on {theirs:,.0f}: final_score and "
        "curve_area favor the longer runs. Compare samples_to_threshold instead"
    )


def _notices(study: Study, finished: Sequence[Finished], results: Mapping[Key, Line]) -> Iterable[str]:
    for name in study.metrics:
        if finished and all(run.outcomes[name] is None for run in finished):
            yield f"no run has the metric {name} in its metrics.jsonl"
    if study.threshold is not None:
        at_start = sum(1 for run in finished if run.curve and run.curve[0].score >= study.threshold)
        if at_start:
            runs = f"{at_start} of {len(finished)} runs"
            yield f"{runs} are at the threshold of {study.threshold:g} before their first update: set it higher"
    devices = sorted({run.device for run in finished})
    if len(devices) > 1:
        yield f"runs have different devices: {'; '.join(devices)}"
    if differing := _differing_versions(finished):
        yield f"runs have different versions: {'; '.join(differing)}"
    by_key = {(run.arm, run.seed): run for run in finished}
    for arm, minus in dict.fromkeys((contrast.arm, contrast.minus) for contrast in study.contrasts):
        if notice := _unequal_rollouts(arm, minus, finished):
            yield notice
        if apart := _on_two_devices(arm, minus, by_key):
            names = ", ".join(name for name in NEEDS_ONE_DEVICE if name in study.outcomes)
            pairs = f"the runs of {arm} and {minus} are on different devices for seeds {', '.join(map(str, apart))}"
            yield f"{pairs}; these pairs are left out of {names}"
        if changed := _on_other_problems(arm, minus, by_key):
            pairs = f"the runs of {arm} and {minus} have different problems for seeds {', '.join(map(str, changed))}"
            why = "the task or its data changed in between, or draws problems without a fixed seed"
            yield f"{pairs}: {why}; these pairs are left out"
    others = sorted({arm for arm, _ in results if arm not in study.arms})
    if others:
        yield f"results of other arms are left out: {', '.join(others)}"
    seeds = sorted({seed for arm, seed in results if arm in study.arms and seed not in study.seeds})
    if seeds:
        yield f"results of other seeds are left out: {', '.join(map(str, seeds))}"
