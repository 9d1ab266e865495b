"""Does the order of update batches change what is learned? The same cohort, split by length or in load order.

    python benchmarks/studies/order_and_normalizer.py --out OUT [--jobs 14] [--seeds 8] [--minutes 60]     # runs it
    python benchmarks/studies/order_and_normalizer.py --table benchmarks/studies/results                  # prints it

Two orders (`cohort-at-once`, `cohort-at-once+sorted`) x three ways to normalize advantages (each update batch by
itself, as the paper does; previous cohorts; groups), paired by seed. Every rollout of a cohort is sampled before its
first update, so the two orders train on rollouts of the same weights. The built-in model, Knights & Knaves small, 60
updates of 128, all 600 held-out problems with 4 samples each.

Primary outcome, named beforehand: the held-out score after 60 updates, sorted minus not sorted, for each normalizer.
One line per run goes to OUT/order_and_normalizer.jsonl as soon as the run ends; runs that are in the file already are
skipped, and a run that fails has a line with its error.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from queue import SimpleQueue
from statistics import fmean, stdev
from typing import Any

ORDERS = {"load order": "cohort-at-once", "sorted": "cohort-at-once+sorted"}
NORMALIZERS = {
    "batch": ["--algorithm", "reinforce++", "--advantage-baseline", "batch"],
    "previous_cohorts": ["--algorithm", "reinforce++", "--advantage-baseline", "previous_cohorts"],
    "group": ["--algorithm", "grpo"],
}
COMMON = ["--updates", "60", "--checkpoint-every", "0", "--eval-problems", "600"]
RARE = "save_rollouts = 0\neval_samples = 4\n"  # settings without a flag
LAST_UPDATES = 20  # five cohorts: whole cohorts, so that both orders count the same kind of rollouts


def run(order: str, normalizer: str, seed: int, folder: Path, core: int, deadline: float) -> dict[str, Any]:
    config = folder.with_name(f"{folder.name}.toml")
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(RARE, encoding="utf-8")
    words = ["train", "--mode", ORDERS[order], *NORMALIZERS[normalizer], *COMMON, "--config", str(config)]
    words += ["--seed", str(seed), "--json"]
    began = time.monotonic()
    done = subprocess.run(
        ["taskset", "-c", str(core), sys.executable, "-m", "sortedrl", *words, "--threads", "1", "--out", str(folder)],
        capture_output=True,
        text=True,
        timeout=max(1.0, deadline - began),
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    line: dict[str, Any] = {"order": order, "normalizer": normalizer, "seed": seed}
    if done.returncode:
        return line | {"error": done.stderr.strip().splitlines()[-1:]}
    summary = json.loads(done.stdout.strip().splitlines()[-1])
    updates = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines() if '"reward"' in text]
    return line | {
        "score_before": summary["score_before"]["value"],
        "score_after": summary["score_after"]["value"],
        "correct_last_updates": fmean(update["correct"] for update in updates[-LAST_UPDATES:]),
        "length_last_updates": fmean(update["length"] for update in updates[-LAST_UPDATES:]),
        "grad_norm_max": max(update["grad_norm"] for update in updates),
        "correct": [round(update["correct"], 4) for update in updates],
        "length": [round(update["length"], 1) for update in updates],
        "seconds": time.monotonic() - began,
    }


def table(lines: list[dict[str, Any]]) -> list[str]:
    """Sorted minus load order, paired by seed: mean +- standard error over seeds."""
    found = {(line["order"], line["normalizer"], line["seed"]): line for line in lines if "error" not in line}
    rows = ["normalizer        outcome               load order  sorted  difference         seeds"]
    for normalizer, outcome in product(NORMALIZERS, ("score_after", "correct_last_updates", "length_last_updates")):
        seeds = [s for o, n, s in found if (o, n) == ("sorted", normalizer) and ("load order", n, s) in found]
        first, second = ([found[order, normalizer, seed][outcome] for seed in seeds] for order in ORDERS)
        differences = [b - a for a, b in zip(first, second, strict=True)]
        error = stdev(differences) / math.sqrt(len(seeds)) if len(seeds) > 1 else math.nan
        rows.append(
            f"{normalizer:17} {outcome:21} {fmean(first):10.3f} {fmean(second):7.3f}"
            f"  {fmean(differences):+.3f} +- {error:.3f}  {len(seeds):6}"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path)
    what.add_argument("--table", type=Path, metavar="FOLDER")
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=60.0)
    args = parser.parse_args()
    results = (args.out or args.table) / "order_and_normalizer.jsonl"
    if args.table:
        print("\n".join(table([json.loads(text) for text in results.read_text().splitlines()])))
        return
    deadline = time.monotonic() + 60 * args.minutes
    args.out.mkdir(parents=True, exist_ok=True)
    lines = [json.loads(text) for text in results.read_text().splitlines()] if results.exists() else []
    done = {(line["order"], line["normalizer"], line["seed"]) for line in lines if "error" not in line}
    todo = [c for seed in range(args.seeds) for c in product(ORDERS, NORMALIZERS, [seed]) if c not in done]
    cores: SimpleQueue[int] = SimpleQueue()
    for core in range(args.jobs):
        cores.put(core)

    def one(choice: tuple[str, str, int]) -> None:
        core = cores.get()
        folder = args.out / "runs" / "-".join(map(str, choice)).replace(" ", "_") / f"{time.time_ns()}"
        try:
            line = run(*choice, folder=folder, core=core, deadline=deadline)
        except subprocess.TimeoutExpired:
            line = dict(zip(("order", "normalizer", "seed"), choice, strict=True)) | {"error": "out of time"}
        finally:
            cores.put(core)
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps({key: value for key, value in line.items() if not isinstance(value, list)}), flush=True)

    with ThreadPoolExecutor(args.jobs) as threads:
        list(threads.map(one, todo))


if __name__ == "__main__":
    main()
