"""The simulated tables of docs/results.md. `python benchmarks/reference_tables.py [SECTION ...]` (default: all).

reference staleness oversubscribe groups update-size kv-limited re-prefill turns slow-environments: each is written to
docs/data/simulated_SECTION.csv (benchmarks/LOG.md, section 11, explains the columns).
paper speed cpu: printed as Markdown.
Seeds 0 to 4 unless the page states otherwise; means, and for `of_limit` the lowest and highest seed.
"""

from __future__ import annotations

import csv
import math
import platform
import resource
import subprocess
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from sortedrl import Schedule
from sortedrl.core.rollout import Rollout
from sortedrl.core.strategies.base import SchedulerState
from sortedrl.core.strategies.ours import ElevatorPartial
from sortedrl.core.strategies.registry import STRATEGIES
from sortedrl.engines.episodes import DrawnEpisodes
from sortedrl.engines.lengths import LognormalLengths
from sortedrl.engines.step_time import PRESETS
from sortedrl.log.lines import JsonLines
from sortedrl.studies.simulate import FILTER_ROUNDS, Case, cases, compare
from sortedrl.studies.workload import Workload, run, with_mode

SEEDS = (0, 1, 2, 3, 4)
QUALITIES = ("cold", "warm", "oracle")
Row = dict[str, Any]
Column = Callable[[Row], str]
DATA = Path(__file__).parent.parent / "docs" / "data"


def rounded(key: str, digits: int) -> Column:
    """An empty cell where a run cannot measure the metric."""
    return lambda f: "" if f[key] is None else f"{f[key]:z.{digits}f}"


COLUMNS: dict[str, Column] = {
    "of_limit": rounded("of_limit", 3),
    "of_limit_low": lambda f: f"{f['spread']['of_limit'][0]:.3f}",
    "of_limit_high": lambda f: f"{f['spread']['of_limit'][1]:.3f}",
    "goodput": lambda f: f"{f['goodput']:.0f}" if f["goodput"] >= 1000 else f"{f['goodput']:.4g}",
    "bubble": rounded("bubble", 3),
    "waste": rounded("waste", 3),
    "staleness_mean": rounded("staleness_mean", 2),
    "staleness_max": rounded("staleness_max", 0),
    "sortedness": rounded("sortedness", 2),
    "length_bias": rounded("length_bias", 3),
    "longest_wait_updates": rounded("longest_wait_updates", 0),
    "expectation_quality": rounded("expectation_quality", 2),
}


def table(name: str, rows: dict[str, Row], extra: dict[str, Column] | None = None) -> list[dict[str, str]]:
    columns = COLUMNS | (extra or {})
    return [
        {"table": name, "schedule": schedule} | {column: show(run_metrics) for column, show in columns.items()}
        for schedule, run_metrics in rows.items()
    ]


def reference() -> Iterator[dict[str, str]]:
    left_out = ("async-pool", "cohort-at-once+sorted-descending", *FILTER_ROUNDS)
    modes = [mode for mode in STRATEGIES if mode not in left_out]
    for preset in ("compute-bound", "memory-bound", "h200-8b"):
        workload = Workload(step_time=PRESETS[preset], prompt_tokens=128)
        rows = cases(workload, Schedule(), modes, QUALITIES)
        capped = replace(with_mode(Schedule(), "on-policy+planned"), oversubscribe=1.15)
        rows += [
            Case(f"on-policy+planned, oversubscribe 1.15 ({q})", replace(workload, expectation=q), capped)
            for q in QUALITIES
        ]
        asynchronous = Schedule(mode="async-pool", overlap=True, max_staleness=4)
        rows.append(Case("async-pool, bound 4, overlap", workload, asynchronous))
        yield from table(preset, compare(rows, SEEDS))


def staleness() -> Iterator[dict[str, str]]:
    for mode in ("partial", "partial+lookahead", "partial+elevator"):
        rows = []
        for bound in (None, 4, 3, 2, 1):
            schedule = Schedule(mode=mode, max_staleness=bound)
            quality = "warm" if mode == "partial+elevator" else "cold"
            rows.append(Case(f"{mode} ({quality}), max_staleness {bound}", Workload(expectation=quality), schedule))
        yield from table(
            mode, compare(rows, SEEDS), {"rollouts_per_update_mean": rounded("rollouts_per_update_mean", 0)}
        )


def oversubscribe() -> Iterator[dict[str, str]]:
    """Fewer responses in flight at an update: lower staleness and less re-prefill, but more empty slots."""
    for preset in ("memory-bound", "h200-8b"):
        workload = Workload(step_time=PRESETS[preset], prompt_tokens=128)
        rows = [
            Case(f"partial+elevator ({quality}), oversubscribe {cap}", replace(workload, expectation=quality), schedule)
            for quality in QUALITIES
            for cap in (None, 1.5, 1.3, 1.15)
            for schedule in (Schedule(mode="partial+elevator", oversubscribe=cap),)
        ]
        yield from table(preset, compare(rows, SEEDS))


def groups() -> Iterator[dict[str, str]]:
    for size in (8, 16):
        schedule = Schedule(
            rollouts_per_prompt=size, whole_groups=True, rollouts_per_update=128, prompts_per_cohort=512 // size
        )
        workload = Workload(prompts=20 * 512 // size)
        modes = (
            "baseline",
            "on-policy",
            "on-policy+planned",
            "partial",
            "partial+lookahead",
            "partial+elevator",
            "april",
        )
        yield from table(f"groups of {size}", compare(cases(workload, schedule, modes, QUALITIES), SEEDS))


def update_size() -> Iterator[dict[str, str]]:
    for ratio in (0.5, 1, 2, 4, 8):
        size = int(128 * ratio)
        schedule = Schedule(rollouts_per_update=size, prompts_per_cohort=4 * size)
        workload = Workload(prompts=max(20 * 512, 8 * 4 * size))
        modes = (
            "baseline",
            "baseline+longest-first",
            "cohort-at-once+longest-first",
            "on-policy+planned",
            "partial",
            "partial+elevator",
            "april",
        )
        yield from table(f"U/Q = {ratio}", compare(cases(workload, schedule, modes, ("cold", "warm")), SEEDS))


def kv_limited() -> Iterator[dict[str, str]]:
    kv = 427_000  # 8B, 8 KV heads, bf16: 131 kB per token; 80 GB x 0.9 minus 16 GB of weights
    for limit, median in ((8192, 1273.7), (16384, 2547.4)):
        lengths = LognormalLengths(mu=math.log(median), limit=limit)
        schedule = Schedule(rollouts_per_update=256, prompts_per_cohort=1024, max_response_tokens=limit)
        modes = ("baseline", "on-policy+planned", "partial", "partial+elevator", "april")
        rows = []
        for kv_tokens in (None, kv):
            workload = Workload(
                lengths=lengths, step_time=PRESETS["a100-8b"], slots=256, prompts=10 * 1024, kv_tokens=kv_tokens
            )
            label = "unlimited" if kv_tokens is None else f"{kv_tokens:,} tokens"
            rows += [
                Case(f"{case.name}, KV {label}", case.workload, case.schedule)
                for case in cases(workload, schedule, modes, ("warm",))
            ]
        extra = {
            "kv_limited": lambda f: f"{f['bubble_parts']['kv_limited']:.3f}",
            "preemptions": rounded("preemptions", 0),
            "re_prefill_per_generated": lambda f: f"{f['re_prefill_tokens'] / f['generated_tokens']:.2f}",
        }
        yield from table(f"limit {limit}", compare(rows, SEEDS[:3]), extra)


def re_prefill() -> Iterator[dict[str, str]]:
    for share in (0.0, 0.16, 0.25, 0.34):
        for preset in ("compute-bound", "memory-bound"):
            base = PRESETS[preset]
            step_time = base.scaled(per_prefill_token=share * base.at(128) / 128)
            modes = ("baseline", "on-policy+planned", "partial", "partial+elevator", "april")
            rows = cases(Workload(step_time=step_time), Schedule(), modes, ("warm", "oracle"))
            double = Schedule(rollouts_per_update=256, prompts_per_cohort=1024)
            wide = cases(Workload(step_time=step_time), double, ("partial+elevator", "april"), ("warm",))
            rows += [Case(f"{case.name}, U = 2Q", case.workload, case.schedule) for case in wide]
            yield from table(f"{preset}, prefill {share}", compare(rows, SEEDS[:3]))


def five_turns(seconds_mean: float, prompts: int) -> Workload:
    """Five turns per response, and a tool call of this mean duration after each but the last."""
    lengths = LognormalLengths(mu=math.log(255))
    return Workload(
        episodes=DrawnEpisodes(lengths=lengths, turns=5, observation_tokens=128, seconds_mean=seconds_mean),
        step_time=PRESETS["h200-8b"],
        prompts=prompts,
        expectation="warm",
    )


class HoldsSlots(ElevatorPartial):
    """Starts no rollout in the slot of one that is between two turns, as agent loops do that run one request per slot
    from the first turn to the last."""

    def may_start(self, rollout: Rollout, s: SchedulerState) -> bool:
        between_turns = len(s.buffer.in_environment) + len(s.buffer.returning)
        return between_turns < s.free_slots and super().may_start(rollout, s)


def turns() -> Iterator[dict[str, str]]:
    """Five turns per response: slots freed or held while environments work, with and without reuse of the KV cache."""
    schedule = Schedule(rollouts_per_prompt=8, prompts_per_cohort=64)
    workload = five_turns(seconds_mean=5.0, prompts=20 * 64)
    rows = []
    for reuse in (False, True):
        keeping = replace(workload, reuse_kv_cache=reuse)
        label = ", KV cache reused" if reuse else ""
        rows.append(Case(f"partial+elevator{label}", keeping, schedule))
        held = replace(schedule, mode="reference_tables:HoldsSlots")
        rows.append(Case(f"partial+elevator, slots held{label}", keeping, held))
    rows += [Case(mode, workload, with_mode(schedule, mode)) for mode in ("on-policy+planned", "baseline")]
    extra = {
        "environment": lambda f: f"{f['bubble_parts']['environment']:.3f}",
        "turns_mean": rounded("turns_mean", 2),
    }
    yield from table("mean latency 5 s", compare(rows, SEEDS), extra)


def slow_environments() -> Iterator[dict[str, str]]:
    """How many rollouts to open while environments work: the default bound, none, and `oversubscribe`. 48 updates of
    each; no run is drained."""
    schedule = Schedule(rollouts_per_prompt=8, prompts_per_cohort=64, max_environment_seconds=1e6)
    extra = {
        "environment": lambda f: f"{f['bubble_parts']['environment']:.3f}",
        "in_environments_mean": lambda f: f"{f['environment_seconds'] / f['seconds']:.0f}",
        "staleness_p95": lambda f: f"{percentile(f['staleness_histogram'], 0.95)}",
        "updates_per_hour": rounded("updates_per_hour", 0),
    }
    for seconds in (1, 5, 20, 60, 300):
        workload = replace(five_turns(seconds, prompts=25 * 64), reuse_kv_cache=True)
        rows = [Case("partial", workload, with_mode(schedule, "partial"))]
        for cap, label in ((None, ""), (1.5, "1.5"), (2.0, "2"), (4.0, "4"), (8.0, "8"), (1e6, "unlimited")):
            name = "partial+elevator" + (f", oversubscribe {label}" if label else "")
            rows.append(Case(name, workload, replace(schedule, oversubscribe=cap)))
        yield from table(f"mean latency {seconds} s", compare(rows, (0,), max_updates=48), extra)


def percentile(histogram: dict[str, int], fraction: float) -> int:
    """The smallest staleness that this fraction of the tokens does not exceed."""
    ages = sorted(map(int, histogram))
    below = list(accumulate(histogram[str(age)] for age in ages))
    return ages[bisect_left(below, fraction * below[-1])]


def paper() -> None:
    """512 samples in 4 batches, one cold cohort, equal lengths across modes (regenerating keeps the length)."""
    print("| mode | tok/s kept | tok/s generated | bubble, whole run | without the last harvest | per harvest |")
    print("|---|---|---|---|---|---|")
    for mode in ("baseline", "on-policy", "partial", "partial+lookahead"):
        runs = [
            run(
                Workload(step_time=PRESETS["h200-8b"], prompts=512 if mode != "partial+lookahead" else 1024),
                Schedule(mode=mode, keep_seed=True, seed=seed),
                max_updates=4,
            )
            for seed in SEEDS
        ]
        kept = fmean([f.kept for f in runs])
        generated = fmean([f.generated_tokens / f.seconds for f in runs])
        harvests = [fmean(column) for column in zip(*(f.bubble_per_harvest for f in runs), strict=True)]
        print(
            f"| {mode} | {kept:,.0f} | {generated:,.0f} | {fmean([f.bubble for f in runs]):.1%} |"
            f" {fmean([without_last(f) for f in runs]):.1%} | {', '.join(f'{b:.1%}' for b in harvests)} |"
        )
    print()


def without_last(run_metrics: Any) -> float:
    """The bubble of all harvests except the last, weighted by time (from goodput, equal slots)."""
    harvests = run_metrics.bubble_per_harvest[:-1]
    return sum(harvests) / len(harvests) if harvests else 0.0


def speed() -> None:
    """Controller, simulated engine, metrics and an event log file, in a separate process."""
    print("| mode | rollouts | seconds | us per rollout | peak memory MB | log MB |")
    print("|---|---|---|---|---|---|")
    for mode in ("partial", "partial+elevator", "on-policy"):
        for rollouts in (10_000, 100_000, 1_000_000):
            if rollouts == 1_000_000 and mode != "partial":
                continue
            line = subprocess.run(
                [sys.executable, __file__, "one-speed-run", mode, str(rollouts)],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            print(line, end="", flush=True)
    print()


def one_speed_run(mode: str, rollouts: int) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        began = time.perf_counter()
        with path.open("w", encoding="utf-8") as file:
            run(Workload(prompts=rollouts), Schedule(mode=mode), JsonLines(file))
        seconds = time.perf_counter() - began
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        log = path.stat().st_size / 1e6
    print(f"| {mode} | {rollouts:,} | {seconds:.1f} | {seconds / rollouts * 1e6:.0f} | {memory:.0f} | {log:.0f} |")


def cpu() -> None:
    """Controller, simulated engine and metrics without a log file. CPU time does not count other processes."""
    print(f"| mode | CPU-seconds for 100,000 rollouts, Python {platform.python_version()} |")
    print("|---|---|")
    for mode in ("partial+elevator", "partial", "on-policy", "baseline"):
        began = time.process_time()
        run(Workload(prompts=100_000), Schedule(mode=mode))
        print(f"| {mode} | {time.process_time() - began:.1f} |", flush=True)
    print()


WRITTEN: dict[str, Callable[[], Iterator[dict[str, str]]]] = {
    "reference": reference,
    "staleness": staleness,
    "oversubscribe": oversubscribe,
    "groups": groups,
    "update-size": update_size,
    "kv-limited": kv_limited,
    "re-prefill": re_prefill,
    "turns": turns,
    "slow-environments": slow_environments,
}
PRINTED: dict[str, Callable[[], None]] = {"paper": paper, "speed": speed, "cpu": cpu}


def write(section: str) -> Path:
    rows = list(WRITTEN[section]())
    DATA.mkdir(exist_ok=True)
    path = DATA / f"simulated_{section.replace('-', '_')}.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


def main(words: Sequence[str]) -> None:
    if words[:1] == ["one-speed-run"]:
        one_speed_run(words[1], int(words[2]))
        return
    if not {*words} <= {*WRITTEN, *PRINTED}:
        sys.exit(__doc__)
    for name in words or [*WRITTEN, *PRINTED]:
        began = time.perf_counter()
        if name in PRINTED:
            print(f"## {name}\n", flush=True)
            PRINTED[name]()
        else:
            print(write(name))
        print(f"({time.perf_counter() - began:.0f} s)\n", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
