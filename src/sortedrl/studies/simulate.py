"""All modes side by side on one workload: what would you gain on your lengths?"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean, stdev
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.events import Event, Updated
from sortedrl.core.schedule import Schedule
from sortedrl.core.strategies.registry import STRATEGIES, strategy_named
from sortedrl.observe.run_metrics import RunMetrics
from sortedrl.settings.schedule import Oversubscribe
from sortedrl.studies.workload import Workload, limit, merged, run, with_mode
from sortedrl.studies.workload_settings import Expectation, SimulatedSettings, check_simulated, simulated_schedule

DECIDING_MODES = (  # what `simulate` and `plan` choose from; `--all` has all modes
    "baseline", "baseline+longest-first", "on-policy", "on-policy+planned", "partial", "partial+lookahead",
    "partial+elevator", "april", "cohort-at-once",
)  # fmt: skip
FILTER_ROUNDS = ("filter-rounds", "filter-rounds+refill")  # how others filter; without a filter the baseline


class SimulateSettings(SimulatedSettings):
    """Compare schedules on one simulated workload: what would I gain on my lengths?"""

    oversubscribe: Oversubscribe = None
    modes: Annotated[tuple[str, ...], Field(min_length=1)] = DECIDING_MODES
    """schedules to compare; your.module:Class is your own"""
    all_modes: bool = False
    """every mode, each with cold, warm and oracle lengths; async-pool only with --overlap and --max-staleness"""
    details: bool = False
    """more tables: parts of the bubble, staleness, waiting, prefill"""
    expectations: Annotated[tuple[Expectation, ...], Field(min_length=1)] = ("cold", "warm")
    """how well lengths are known in advance; the first one has the plain mode name"""
    updates: Annotated[int | None, Field(ge=1)] = None
    """stop after this many updates"""

    def modes_and_expectations(self) -> tuple[tuple[str, ...], tuple[Expectation, ...]]:
        if self.all_modes:
            return _modes_that_run(simulated_schedule(self)), ("cold", "warm", "oracle")
        modes = deciding_modes(simulated_schedule(self)) if self.modes == DECIDING_MODES else self.modes
        return modes, self.expectations

    def check(self) -> None:
        if self.all_modes and self.modes != DECIDING_MODES:
            raise ConfigurationError("modes", self.modes, "--all has every mode", "Leave out --all or --modes.")
        for mode in self.modes_and_expectations()[0]:
            _check_mode(mode, simulated_schedule(self))
        check_simulated(self)


def deciding_modes(schedule: Schedule) -> tuple[str, ...]:
    return DECIDING_MODES if schedule.filter_groups is None else DECIDING_MODES + FILTER_ROUNDS


def _check_mode(mode: str, schedule: Schedule) -> None:
    strategy = strategy_named(mode)
    strategy.check(with_mode(schedule, mode))
    if schedule.filter_groups is not None:
        strategy.check_filter()


def _modes_that_run(schedule: Schedule) -> tuple[str, ...]:
    """All modes but those that need settings which the schedule lacks, and rounds that would be the baseline."""
    found = []
    for mode in STRATEGIES:
        if mode in FILTER_ROUNDS and schedule.filter_groups is None:
            continue
        with suppress(ConfigurationError):
            _check_mode(mode, schedule)
            found.append(mode)
    return tuple(found)


@dataclass(frozen=True)
class Case:
    """One row of a comparison: a mode with one kind of length expectation."""

    name: str
    workload: Workload
    schedule: Schedule


def cases(workload: Workload, schedule: Schedule, modes: Sequence[str], expectations: Sequence[str]) -> list[Case]:
    """With the first expectation a mode keeps its plain name. Modes that use no expectation appear once."""
    rows = []
    for mode in modes:
        for quality in expectations if strategy_named(mode).uses_expectation else expectations[:1]:
            name = mode if quality == expectations[0] else f"{mode} ({quality})"
            rows.append(Case(name, replace(workload, expectation=quality), with_mode(schedule, mode)))
    return rows


def compare(
    rows: Sequence[Case],
    seeds: Sequence[int],
    *,
    max_updates: int | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, dict[str, Any]]:
    """The summary of every case over the seeds, in row order. Runs on all cores.

    Its `goodput_error` is the relative standard error of tokens per second.
    """
    found: dict[tuple[Any, int], Any] = {}  # limits by KV cache and seed, runs by row and seed
    jobs: dict[tuple[Any, int], tuple[Any, ...]] = {}
    for row, seed in product(rows, seeds):  # limits first, since one takes longer than any run if slots are many
        baseline = replace(with_mode(rows[0].schedule, "baseline"), seed=seed)
        of_slots = replace(rows[0].workload, kv_tokens=row.workload.kv_tokens)
        jobs[row.workload.kv_tokens or 0, seed] = limit, of_slots, baseline
    for row, seed in product(rows, seeds):
        jobs[row.name, seed] = simulated, row.workload, replace(row.schedule, seed=seed), max_updates
    on_progress(0, len(jobs))
    for key, value in _on_all_cores(jobs):
        found[key] = value
        on_progress(len(found), len(jobs))
    summaries = {}
    for row in rows:
        runs: list[Simulated] = [found[row.name, seed] for seed in seeds]
        # A run beats the steady state if its responses are shorter than others of the same distribution, because it
        # ends early or started them all at once: then its limit is its own speed.
        steady = [found[row.workload.kv_tokens or 0, seed] for seed in seeds]
        limits_of_seeds = [max(run.run_metrics.goodput, bound) for run, bound in zip(runs, steady, strict=True)]
        summaries[row.name] = summary([run.run_metrics for run in runs], limits_of_seeds)
        summaries[row.name]["goodput_error"] = _goodput_error(row.schedule.mode, runs)
    return summaries


class Simulated(NamedTuple):
    run_metrics: RunMetrics
    rates: tuple[float, ...]  # tokens per second in each part of the run, of about a cohort each


class _Rates:
    """A sink that computes the tokens per second of each part of a run."""

    def __init__(self, updates_per_part: int) -> None:
        self._updates_per_part = updates_per_part
        self._tokens = 0
        self._part_began = 0.0
        self.rates: list[float] = []

    def see(self, event: Event) -> None:
        if type(event) is Updated:
            self._tokens += sum(event.lengths)
            if (event.update + 1) % self._updates_per_part == 0 and event.at > self._part_began:
                self.rates.append(self._tokens / (event.at - self._part_began))
                self._tokens, self._part_began = 0, event.at


def simulated(workload: Workload, schedule: Schedule, max_updates: int | None = None) -> Simulated:
    per_cohort = schedule.rollouts_per_cohort or workload.prompts * schedule.rollouts_per_prompt
    rates = _Rates(max(1, per_cohort // schedule.rollouts_needed))
    found = run(workload, schedule, rates.see, max_updates=max_updates)
    return Simulated(found, tuple(rates.rates))


def _goodput_error(mode: str, runs: Sequence[Simulated]) -> float | None:
    """Over the parts of all runs, or over whole runs in modes that work ahead of a cohort's end: what one part of a run
    does in advance is missing in another, so their parts are not independent."""
    strategy = strategy_named(mode)
    if strategy.gated and not strategy.works_ahead:
        return relative_error([rate for run in runs for rate in run.rates])
    return relative_error([run.run_metrics.trained_tokens_per_hour for run in runs])


def relative_error(rates: Sequence[float]) -> float | None:
    """The relative standard error of their mean; None if there are too few."""
    mean = fmean(rates) if rates else 0.0
    return stdev(rates) / len(rates) ** 0.5 / mean if len(rates) > 2 and mean else None


def _end_with_parent() -> None:
    """In a worker. Python's own handler would keep it alive on Ctrl-C, and no worker notices that its parent died."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _on_all_cores(jobs: Mapping[Any, tuple[Any, ...]]) -> Iterator[tuple[Any, Any]]:
    """The results of functions with arguments. After an error or an interrupt nothing more is started."""
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), initializer=_end_with_parent) as pool:
        futures: dict[Any, Any] = {}
        try:
            # While workers start, Ctrl-C waits: a half-started one would print a traceback.
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            try:
                for key, job in jobs.items():
                    futures[pool.submit(*job)] = key
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def summary(runs: Sequence[RunMetrics], limits: Sequence[float]) -> dict[str, Any]:
    """Means over the seeds, with histograms summed; `spread` holds the min and max of the headline metrics."""
    of_limit = [run_metrics.goodput / bound for run_metrics, bound in zip(runs, limits, strict=True)]
    kept_of_limit = [run_metrics.kept / bound for run_metrics, bound in zip(runs, limits, strict=True)]
    result = {
        name: {str(key): number for key, number in value.items()} if isinstance(value, dict) else value
        for name, value in merged(runs).items()
    }
    result |= {"limit": fmean(limits), "of_limit": fmean(of_limit), "kept_of_limit": fmean(kept_of_limit)}
    result["spread"] = {
        "of_limit": [min(of_limit), max(of_limit)],
        **{
            name: [min(known), max(known)]
            for name in ("bubble", "goodput", "waste", "staleness_mean", "sortedness", "length_bias")
            if (known := [value for f in runs if (value := getattr(f, name)) is not None])
        },
    }
    return result
