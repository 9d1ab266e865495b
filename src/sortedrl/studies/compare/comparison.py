"""The numbers of a comparison, from a study and its results: what compare.json, the page and the terminal show."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any

from sortedrl import __version__
from sortedrl.studies.compare import paired
from sortedrl.studies.compare.results import NEEDS_ONE_DEVICE, NEEDS_THRESHOLD, FinishedRun, Key, Plan, Results
from sortedrl.studies.compare.study import Contrast, Study

EQUAL_ROLLOUTS = 1.1  # arms whose numbers of trained rollouts differ by a larger factor get a notice


Runs = Mapping[Key, FinishedRun]


@dataclass(frozen=True, slots=True)
class Compared:
    """A contrast with its result, as compare.json has it. `difference` is None if no seed has both runs."""

    name: str
    arm: str
    minus: str
    outcome: str
    primary: bool
    seeds: tuple[int, ...]  # that are compared
    missing_seeds: tuple[int, ...]  # without both runs
    other_seeds: tuple[int, ...]  # left out: their two runs have different devices, or the problems changed in between
    anecdote: bool
    difference: paired.Difference | None
    censoring: paired.Censoring | None


@dataclass(frozen=True, slots=True)
class Summary:
    """An outcome over the runs of one arm. Of censored runs, `mean` counts the time until they ended."""

    runs: int
    mean: float
    standard_deviation: float | None
    censored: int
    median: float | None  # of outcomes of the threshold; None if half of the runs or more are censored


@dataclass(frozen=True, slots=True)
class Comparison:
    study: Study
    planned_after: int | None  # results that were known when the study was first recorded; None: it never was
    changes: tuple[dict[str, Any], ...]  # of `Study.plan` after results were known: after_results, key, before, now
    finished: tuple[FinishedRun, ...]
    failures: tuple[dict[str, Any], ...]  # arm, seed and error
    not_run: tuple[Key, ...]
    contrasts: tuple[Compared, ...]  # the primary one first
    exploratory: tuple[Compared, ...]  # every other outcome of the same pairs of arms
    summaries: dict[str, dict[str, Summary]]  # by arm and outcome
    notices: tuple[str, ...]

    @property
    def primary(self) -> Compared:
        return self.contrasts[0]

    def of_arm(self, arm: str) -> list[FinishedRun]:
        return [run for run in self.finished if run.arm == arm]


def compare(study: Study, results: Results) -> Comparison:
    lines, finished = results.runs, results.finished
    wanted = [(arm, seed) for seed in study.seeds for arm in study.arms]
    runs = {
        (arm, seed): FinishedRun.of(finished[arm, seed], study.metrics, study.threshold, study.cohort_rollouts(arm))
        for arm, seed in wanted
        if (arm, seed) in finished
    }
    asked = {(contrast.arm, contrast.minus, contrast.outcome) for contrast in study.contrasts}
    others = [
        Contrast(name=f"{arm} minus {minus}", arm=arm, minus=minus, outcome=outcome, primary=False)
        for arm, minus in study.pairs_of_arms
        for outcome in study.outcomes
        if (arm, minus, outcome) not in asked
    ]
    failed = [key for key in wanted if key in lines and key not in finished]
    return Comparison(
        study=study,
        planned_after=results.plans[0].results_known if results.plans else None,
        changes=tuple(_changes(study, results)),
        finished=tuple(runs.values()),
        failures=tuple({"arm": arm, "seed": seed, "error": lines[arm, seed]["error"]} for arm, seed in failed),
        not_run=tuple(key for key in wanted if key not in lines),
        contrasts=tuple(_compared(one, study, runs) for one in study.contrasts),
        exploratory=tuple(_compared(one, study, runs) for one in others),
        summaries={arm: _summaries(study, [run for run in runs.values() if run.arm == arm]) for arm in study.arms},
        notices=tuple(_notices(study, runs)),
    )


def as_json(comparison: Comparison) -> dict[str, Any]:
    """compare.json: everything but the learning curves, which are in results.jsonl."""
    study = comparison.study
    return {
        "version": __version__,
        "study": study.name,
        **{key: getattr(study, key) for key in ("question", "seeds", "threshold", "settings")},
        "study_digest": study.digest,
        "study_planned_after_results": comparison.planned_after,
        "study_changes": comparison.changes,
        "arms": {
            arm: {"settings": own, "outcomes": {name: asdict(one) for name, one in comparison.summaries[arm].items()}}
            for arm, own in study.arms.items()
        },
        "contrasts": [asdict(compared) for compared in comparison.contrasts],
        "exploratory": [asdict(compared) for compared in comparison.exploratory],
        "runs": [{"arm": run.arm, "seed": run.seed, "outcomes": run.outcomes} for run in comparison.finished],
        "failed": comparison.failures,
        "not_run": [{"arm": arm, "seed": seed} for arm, seed in comparison.not_run],
        "notices": comparison.notices,
    }


def _changes(study: Study, results: Results) -> Iterator[dict[str, Any]]:
    """Between the plans recorded, and up to this study. Lines of runs have their threshold, also without any plan."""
    thresholds = [line["threshold"] for line in results.runs.values() if "threshold" in line]
    plans = [Plan("", {"threshold": thresholds[0]} if thresholds else {}, 0), *results.plans]
    for before, now in pairwise([*plans, Plan(study.digest, study.plan, len(results.finished))]):
        for key, value in now.values.items() if now.results_known else ():
            if before.values.get(key, value) != value:
                yield {"after_results": now.results_known, "key": key, "before": before.values[key], "now": value}


def _compared(contrast: Contrast, study: Study, runs: Runs) -> Compared:
    outcome, pairs = contrast.outcome, _pairs(contrast.arm, contrast.minus, study, runs)
    complete = [seed for seed, pair in pairs.items() if all(run.outcomes[outcome] is not None for run in pair)]
    rules = [_have_other_problems, *[_have_two_devices] * (outcome in NEEDS_ONE_DEVICE)]
    others = tuple(seed for seed in complete if any(differ(*pairs[seed]) for differ in rules))
    seeds = tuple(seed for seed in complete if seed not in others)
    found, censoring = None, None
    sides = [[pairs[seed][side] for seed in seeds] for side in (0, 1)]
    if seeds and outcome in NEEDS_THRESHOLD:
        found, censoring = paired.threshold_difference(*([run.reached[outcome] for run in side] for side in sides))
    elif seeds:
        found = paired.difference(*(_values(side, outcome) for side in sides))
    return Compared(
        **contrast.model_dump(),
        seeds=seeds,
        missing_seeds=tuple(seed for seed in study.seeds if seed not in complete),
        other_seeds=others,
        anecdote=len(seeds) < paired.ENOUGH_SEEDS,
        difference=found,
        censoring=censoring,
    )


def _pairs(arm: str, minus: str, study: Study, runs: Runs) -> dict[int, tuple[FinishedRun, FinishedRun]]:
    """By seed, where both runs are finished."""
    seeds = [seed for seed in study.seeds if {(arm, seed), (minus, seed)} <= runs.keys()]
    return {seed: (runs[arm, seed], runs[minus, seed]) for seed in seeds}


def _have_two_devices(one: FinishedRun, other: FinishedRun) -> bool:
    """A difference of their seconds is one of the devices."""
    return one.device != other.device


def _have_other_problems(one: FinishedRun, other: FinishedRun) -> bool:
    """Different problems, although the settings ask for the same ones."""
    (asked, digest), (also_asked, other_digest) = one.problems, other.problems
    return asked == also_asked and None not in (digest, other_digest) and digest != other_digest


def _values(runs: Iterable[FinishedRun], outcome: str) -> list[float]:
    return [value for run in runs if (value := run.outcomes[outcome]) is not None]


def _summaries(study: Study, runs: Sequence[FinishedRun]) -> dict[str, Summary]:
    found = {}
    for outcome in study.outcomes:
        if values := _values(runs, outcome):
            times = [run.reached[outcome] for run in runs if outcome in run.reached]
            spread = stdev(values) if len(values) > 1 else None
            censored, middle = sum(time.censored for time in times), paired.median_time(times) if times else None
            found[outcome] = Summary(len(values), fmean(values), spread, censored, middle)
    return found


def _notices(study: Study, runs: Runs) -> Iterator[str]:
    finished, threshold = list(runs.values()), study.threshold
    for name in study.metrics:
        if finished and all(run.outcomes[name] is None for run in finished):
            yield f"no run has the metric {name} in its metrics.jsonl"
    if threshold is not None and (early := sum(run.curve[0].score >= threshold for run in finished)):
        at_start = f"{early} of {len(finished)} runs are at the threshold of {threshold:g} before their first update"
        yield f"{at_start}: set it higher"
    for arm, minus in study.pairs_of_arms:
        yield from _notices_of_pairs(arm, minus, study, runs)


def _notices_of_pairs(arm: str, minus: str, study: Study, runs: Runs) -> Iterator[str]:
    trained = [[run.curve[-1].rollouts for run in runs.values() if run.arm == name] for name in (arm, minus)]
    ours, theirs = (fmean(one) if one else 0.0 for one in trained)
    if all(trained) and max(ours, theirs) > EQUAL_ROLLOUTS * min(ours, theirs):
        yield (
            f"the runs of {arm} trained on {ours:,.0f} rollouts, those of {minus} on {theirs:,.0f}: final_score and "
            "curve_area favor the longer runs. Compare samples_to_threshold instead"
        )
    why = "the task or its data changed in between, or draws problems without a fixed seed"
    for differ, how, left_out in (
        (_have_two_devices, "are on different devices", "; these pairs are left out of outcomes of time"),
        (_have_other_problems, "have different problems", f": {why}; these pairs are left out"),
    ):
        if seeds := [str(seed) for seed, pair in _pairs(arm, minus, study, runs).items() if differ(*pair)]:
            yield f"the runs of {arm} and {minus} {how} for seeds {', '.join(seeds)}{left_out}"
