"""What benchmarks/two_servers.sh measures on two servers of one GPU, beside the simulator's prediction for two engines.

python benchmarks/two_servers.py profile OUT --urls A B    # OUT/profile-0.json, profile-1.json and their mean
python benchmarks/two_servers.py predict OUT --slots 256 ...  # what follows from OUT/profile.json, before the modes run
python benchmarks/two_servers.py table OUT                 # OUT/profile.json and OUT/*.json of sortedrl bench
python benchmarks/two_servers.py table OUT --engines 1     # a bench of one engine

Profiled: each server by itself, both at the same time and in step, so that each has the load of the other one.
- Step time and prefill at 1 to all slots, contexts of 32, 400 and 800 tokens (a resumed request of the bench has 400 on
  average). Both servers have as many requests; in a pool, one request leaves the other server idle.

Predicted: `--engines 2` with the mean of both profiles and chunked prefill, for the lengths, seed and updates of the
bench. Not predicted: slots that are empty while requests are aborted and sent again over HTTP, and that a decode step
which also prefills a prompt takes longer (an attempt to measure this over HTTP gave nonsense). The lines below each
prediction show slot-seconds by cause, how long the client leaves a slot empty (OUT/events), and from /metrics of each
server (OUT/metrics) its steps, those with more tokens than slots, which prefill, and how long requests waited for their
first token.
"""

from __future__ import annotations

import argparse
import json
import threading
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

from sortedrl.core.engine import Change, Engine, ForwardingEngine
from sortedrl.studies import bench, profile, profile_file
from sortedrl.studies.bench import BenchSettings, bench_schedule, bench_workload
from sortedrl.studies.measurements import machine, warm_up
from sortedrl.studies.profile import ProfileSettings
from sortedrl.studies.profile_file import Cell, Profile
from sortedrl.training.engine import bare_engine

TAKEN = ("median_length", "max_response_tokens", "prompt_tokens", "slots", "rollouts_per_update", "prompts_per_cohort")
STEPS = 96  # per cell
FEW_RUNNING = 4  # one more level: the end of a long harvest
WAIT_SECONDS = 120.0


class InStep(ForwardingEngine):
    """Waits for the others before it reads the clock, as each measurement does once when it starts, and before the
    abort at its end: each engine has its load until all have measured."""

    def __init__(self, inner: Engine, others: threading.Barrier) -> None:
        super().__init__(inner)
        self._others = others

    def now(self) -> float:
        self._others.wait(WAIT_SECONDS)
        return self.inner.now()

    def abort(self, ids: Sequence[int]) -> list[Change]:
        self._others.wait(WAIT_SECONDS)
        return self.inner.abort(ids)


def profiled(url: str, arguments: argparse.Namespace, others: threading.Barrier) -> Profile:
    try:
        settings = ProfileSettings(
            engine="vllm-server", engine_urls=(url,), model=str(arguments.model), slots=arguments.slots
        )
        inner, vocabulary = bare_engine(settings, settings.model, arguments.longest)
        engine = InStep(inner, others)
        warm_up(engine, vocabulary, arguments.longest)
        wanted = profile.cells_for(engine.slots, arguments.longest, engine.slots * arguments.longest, STEPS)
        wanted = sorted({*wanted, *((FEW_RUNNING, context) for _, context in wanted)})
        cells = profile.measure(
            engine,
            wanted,
            vocabulary,
            steps=STEPS,
            repeats=1,
            on_cell=lambda cell: print(f"{url} {described(cell)}\n", end="", flush=True),
        )
        inner.close()
    except BaseException:
        others.abort()
        raise
    return Profile(
        engine=settings.engine,
        model=settings.model,
        slots=engine.slots,
        cells=tuple(cells),
        prefill_seconds_per_token=profile.prefill_of(cells),
        prefill_tokens_per_step=arguments.tokens_per_step,
        kv_tokens=None,
        weight_update_seconds=None,
        machine=machine(),
    )


def described(cell: Cell) -> str:
    prefill = cell.prefill_seconds_per_token * cell.running * cell.context
    step = f"{1e3 * cell.step_seconds:.3f} ms per step"
    return f"{cell.running:4d} running, contexts of {cell.context:4d}: {step}, prefill {1e3 * prefill:.0f} ms in all"


def mean_of(profiles: Sequence[Profile]) -> Profile:
    """Of servers with the same cells."""
    cells = [
        replace(
            same[0],
            step_seconds=fmean(cell.step_seconds for cell in same),
            prefill_seconds_per_token=fmean(cell.prefill_seconds_per_token for cell in same),
        )
        for same in zip(*(one.cells for one in profiles), strict=True)
    ]
    per_token = fmean(one.prefill_seconds_per_token for one in profiles)
    return replace(profiles[0], cells=tuple(cells), prefill_seconds_per_token=per_token)


def write_profiles(arguments: argparse.Namespace) -> None:
    others = threading.Barrier(len(arguments.urls))
    with ThreadPoolExecutor(len(arguments.urls)) as threads:
        found = list(threads.map(partial(profiled, arguments=arguments, others=others), arguments.urls))
    for place, one in enumerate(found):
        one.write(arguments.out / f"profile-{place}.json")
    mean_of(found).write(arguments.out / "profile.json")


def profile_of_one(pool: Profile, engines: int) -> Profile:
    """Of one engine in a pool that was measured as a whole: its share of the requests and tokens, the same seconds."""
    cells = [
        replace(
            cell,
            running=max(1, cell.running // engines),
            cached_tokens=cell.cached_tokens / engines,
            prefill_seconds_per_token=cell.prefill_seconds_per_token * engines,
        )
        for cell in pool.cells
    ]
    per_token = pool.prefill_seconds_per_token * engines
    return replace(pool, cells=tuple(cells), slots=pool.slots // engines, prefill_seconds_per_token=per_token)


def predicted(measured: Profile, engines: int, settings: BenchSettings, mode: str, updates: int) -> dict[str, float]:
    """Of a profile of one engine, or of a pool that was measured as a whole."""
    is_of_pool = engines > 1 and measured.slots == settings.slots
    one = profile_of_one(measured, engines) if is_of_pool else measured
    workload = replace(bench_workload(settings), engines=engines, step_time=one.step_time())
    return bench.predicted(bench.case_of(mode, workload, bench_schedule(settings)), updates)


def print_predictions(arguments: argparse.Namespace) -> None:
    measured = profile_file.read(arguments.out / "profile.json")
    settings = BenchSettings(
        cohorts=arguments.cohorts, seed=arguments.seed, **{key: getattr(arguments, key) for key in TAKEN}
    )
    for mode in arguments.modes:
        said = predicted(measured, arguments.engines, settings, mode, arguments.updates)
        print(f"{mode:24} predicted {said['goodput']:10,.0f} tokens/s, bubble {said['bubble']:.1%}", flush=True)


def print_table(arguments: argparse.Namespace) -> None:
    measured = profile_file.read(arguments.out / "profile.json")
    for path in sorted(arguments.out.glob("*.json")):
        written = json.loads(path.read_text(encoding="utf-8"))
        for mode, found in written.get("modes", {}).items():
            saved = written["settings"]
            settings = BenchSettings(
                cohorts=saved["cohorts"],
                seed=saved["seed"],
                **{key: saved[key] for key in TAKEN},
            )
            said = predicted(measured, arguments.engines, settings, mode, found["updates"])
            off = said["goodput"] / found["goodput"] - 1
            print(f"{mode:24}{found['goodput']:10,.0f} tokens/s, bubble {found['bubble']:.1%}; predicted {off:+.1%}")
            for key in ("seconds", "generated_tokens", "trained_tokens", "re_prefill_tokens"):
                print(f"  {key:30}{found[key]:14,.1f}, predicted {said[key]:14,.1f}")
            slot_seconds = found["wall_seconds"] * found["slots"]
            empty = {name: part * slot_seconds for name, part in found["idle_parts"].items() if part}
            print("  slot-seconds empty:", ", ".join(f"{name} {seconds:,.1f}" for name, seconds in empty.items()))
            for log in arguments.out.glob(f"events/{mode}.jsonl"):
                print_gaps(log)
            for after in sorted(arguments.out.glob(f"metrics/{path.stem}-after-*.txt")):
                before = after.with_name(after.name.replace("-after-", "-before-"))
                print_server(before, after, settings.slots // arguments.engines)


def print_gaps(log: Path) -> None:
    """How long a slot was empty, as the client sees it, between two requests of one harvest."""
    slot_of, freed_at, gaps = dict[int, int](), dict[int, float](), list[float]()
    with log.open(encoding="utf-8") as lines:
        for event in map(json.loads, lines):
            if event["event"] == "HarvestBegan":
                freed_at.clear()
            elif event["event"] == "Started":
                slot_of[event["rollout"]] = event["slot"]
                if (at := freed_at.pop(event["slot"], None)) is not None:
                    gaps.append(event["at"] - at)
            elif event["event"] in ("Finished", "Aborted", "Preempted") and event["rollout"] in slot_of:
                freed_at[slot_of.pop(event["rollout"])] = event["at"]
    if gaps:
        mean, worst = 1e3 * fmean(gaps), 1e3 * max(gaps)
        print(f"  {len(gaps)} slots refilled, empty for {mean:.1f} ms on average, {worst:.0f} ms at most")


def print_server(before: Path, after: Path, slots: int) -> None:
    """What the server counted meanwhile: its steps, and how long requests waited there for their first token."""
    first, last = counters(before), counters(after)

    def passed(name: str) -> float:
        return last[name] - first[name]

    steps, tokens = passed("iteration_tokens_total_count"), passed("iteration_tokens_total_sum")
    prefilled = steps - passed(f"iteration_tokens_total_bucket {slots}")
    requests = passed("time_to_first_token_seconds_count")
    waits = [
        f"{name} {1e3 * passed(f'{key}_seconds_sum') / max(1.0, passed(f'{key}_seconds_count')):.1f} ms"
        for name, key in (
            ("first token", "time_to_first_token"),
            ("queue", "request_queue_time"),
            ("prefill", "request_prefill_time"),
        )
    ]
    made = f"{steps:,.0f} steps of {tokens / max(1.0, steps):.1f} tokens, {prefilled:,.0f} of more than {slots}"
    print(f"  {after.stem}: {made}; {requests:,.0f} requests, on average {', '.join(waits)}")


def counters(path: Path) -> dict[str, float]:
    """Of a server's /metrics, by name; buckets also by their limit."""
    found: dict[str, float] = defaultdict(float)
    for line in path.read_text(encoding="utf-8").splitlines():
        head, _, value = line.rpartition(" ")
        name, _, labels = head.removeprefix("vllm:").partition("{")
        limit = labels.partition('le="')[2].partition('"')[0]
        found[f"{name} {float(limit):g}" if limit else name] += float(value)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True)
    profiles = commands.add_parser("profile")
    profiles.add_argument("out", type=Path)
    profiles.add_argument("--urls", nargs="+", required=True)
    profiles.add_argument("--model", type=Path, required=True)
    profiles.add_argument("--slots", type=int, default=128, help="of each server")
    profiles.add_argument("--longest", type=int, default=1600, help="contexts are a quarter and half of it")
    profiles.add_argument("--tokens-per-step", type=int, default=8192, help="the servers' max_num_batched_tokens")
    profiles.set_defaults(do=write_profiles)
    predictions = commands.add_parser("predict")
    predictions.add_argument("out", type=Path)
    predictions.add_argument("--engines", type=int, default=2)
    predictions.add_argument("--modes", nargs="+", required=True)
    for name in (*TAKEN, "cohorts", "updates", "seed"):
        kind = float if name == "median_length" else int
        predictions.add_argument(f"--{name.replace('_', '-')}", type=kind, required=True)
    predictions.set_defaults(do=print_predictions)
    table = commands.add_parser("table")
    table.add_argument("out", type=Path)
    table.add_argument("--engines", type=int, default=2)
    table.set_defaults(do=print_table)
    arguments = parser.parse_args()
    arguments.do(arguments)


if __name__ == "__main__":
    main()
