"""Which schedule on 1, 8, 32 and 128 GPUs, with the learner on the engines' GPUs or on its own? Simulated.

    python benchmarks/cluster_table.py          # writes docs/data/simulated_cluster.csv; about 6 CPU-minutes
    python benchmarks/cluster_table.py --controllers    # writes docs/data/simulated_controllers.csv; about 1 CPU-minute

Groups of 8, median 2,500 tokens, limit 16,384; 3 cohorts of 4 updates. Updates of 64 rollouts per GPU, 64 slots per GPU
of an engine. 8B: our profile of one H200. 32B with tensor parallelism 4: a roofline of four H200 (`ROOFLINE_32B`). The
learner is ideally parallel: 1.45e-4 s per token of the 8B model on one H200 (measured), four times that for 32B. A
separate learner has half of the GPUs, and sends the weights at 25 GB/s per GPU.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from sortedrl.core.schedule import Schedule
from sortedrl.engines.lengths import LognormalLengths
from sortedrl.engines.step_time import StepTime, linear
from sortedrl.studies import profile_file
from sortedrl.studies.workload import Workload, run

ROOT = Path(__file__).parents[1]
DATA = ROOT / "docs" / "data"
PROFILE = ROOT / "benchmarks" / "measured" / "h200-8b" / "profile.json"
GPUS, PER_GPU, GROUP, COHORTS, LIMIT = (1, 8, 32, 128), 64, 8, 3, 16_384
# Per step: 64 GB of weights at 70% of 4 x 4.8 TB/s and 1.5 ms of all-reduce; per request 64 GFLOP at 60% of 4 x 990
# TFLOP/s; per cached token 262 kB at the same bandwidth; per prefilled token 64 GFLOP at 50%.
ROOFLINE_32B = linear(0.0063, 2.7e-5, 2.0e-8, 3.2e-5, source="roofline of 32B on four H200")


@dataclass(frozen=True)
class Model:
    name: str
    step_time: StepTime
    gpus_per_engine: int
    kv_tokens: int  # of one engine
    learner_seconds: float  # per token, on one GPU
    transfer_seconds: float  # of a weight update from a separate learner


def models() -> list[Model]:
    profile = profile_file.read(PROFILE)
    return [
        Model("8B", profile.step_time(), 1, profile.kv_tokens or 0, 1.45e-4, 16 / 25),
        Model("32B TP 4", ROOFLINE_32B, 4, 1_580_000, 5.8e-4, 64 / 100),
    ]


def workload_of(model: Model, gpus: int, engine_gpus: int, learner_gpus: int) -> Workload:
    engines = engine_gpus // model.gpus_per_engine
    return Workload(
        lengths=LognormalLengths(mu=7.824, limit=LIMIT),
        step_time=model.step_time,
        slots=PER_GPU * engine_gpus,
        engines=engines,
        kv_tokens=model.kv_tokens,
        prompts=COHORTS * 4 * PER_GPU * gpus // GROUP,
        learner_seconds_per_token=model.learner_seconds / learner_gpus,
        weight_update_seconds=0.01 if learner_gpus == gpus else model.transfer_seconds,
    )


def schedule_of(gpus: int, mode: str, **more: Any) -> Schedule:
    return Schedule(
        mode=mode, rollouts_per_update=PER_GPU * gpus, rollouts_per_prompt=GROUP, whole_groups=True,
        prompts_per_cohort=4 * PER_GPU * gpus // GROUP, max_response_tokens=LIMIT, **more,
    )  # fmt: skip


def cluster_cases() -> list[tuple[dict[str, Any], Workload, Schedule]]:
    cases = []
    for model in models():
        for gpus in GPUS:
            if gpus < model.gpus_per_engine:
                continue
            together = workload_of(model, gpus, gpus, gpus)
            rows = [
                ("colocated", "baseline", together, schedule_of(gpus, "baseline")),
                ("colocated", "elevator", together, schedule_of(gpus, "partial+elevator")),
                ("colocated", "streamed on-policy", replace(together, stream=True, share_gpu=True),
                 schedule_of(gpus, "baseline")),
            ]  # fmt: skip
            if gpus >= 2 * model.gpus_per_engine:
                apart = workload_of(model, gpus, gpus // 2, gpus // 2)
                bounded = {"overlap": True, "max_staleness": 4}
                rows += [
                    ("separate", "baseline", apart, schedule_of(gpus, "baseline")),
                    ("separate", "elevator", apart, schedule_of(gpus, "partial+elevator", overlap=True)),
                    ("separate", "streamed on-policy", replace(apart, stream=True), schedule_of(gpus, "baseline")),
                    ("separate", "async pool, bound 4", apart, schedule_of(gpus, "async-pool", **bounded)),
                ]
            for placement, name, workload, schedule in rows:
                case = {"model": model.name, "gpus": gpus, "placement": placement, "schedule": name}
                cases.append((case, workload, schedule))
    return cases


def controller_cases() -> list[tuple[dict[str, Any], Workload, Schedule]]:
    model, gpus = models()[0], 8
    return [
        ({"controllers": count, "schedule": mode},
         replace(workload_of(model, gpus, gpus, gpus), controllers=count), schedule_of(gpus, mode))
        for count in (1, 2, 4, 8)
        for mode in ("baseline", "partial+elevator")
    ]  # fmt: skip


def measured(job: tuple[dict[str, Any], Workload, Schedule]) -> dict[str, Any]:
    case, workload, schedule = job
    seeds = range({1: 8, 8: 3}.get(case.get("gpus", 8), 1))
    found = [run(workload, replace(schedule, seed=seed)) for seed in seeds]
    return case | {
        "tokens_per_second": round(fmean(one.trained_tokens_per_hour for one in found) / 3600),
        "bubble": round(fmean(one.bubble for one in found), 3),
        "staleness_mean": round(fmean(one.staleness_mean for one in found), 2),
        "staleness_max": max(one.staleness_max for one in found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--controllers", action="store_true", help="the cost of several controllers instead")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    cases = controller_cases() if arguments.controllers else cluster_cases()
    with multiprocessing.Pool(arguments.processes) as pool:
        rows = pool.map(measured, cases, chunksize=1)
    for row in rows:  # against the first row of its kind: the colocated baseline, or one controller
        same = ("schedule",) if arguments.controllers else ("model", "gpus")
        first = next(other for other in rows if all(other[key] == row[key] for key in same))
        row["gain"] = round(row["tokens_per_second"] / first["tokens_per_second"], 2)
    path = DATA / ("simulated_controllers.csv" if arguments.controllers else "simulated_cluster.csv")
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
