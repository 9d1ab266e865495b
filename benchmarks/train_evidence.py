"""Does training work? The default run in several modes and seeds, and with shuffled rewards as a control.

python benchmarks/train_evidence.py --json evidence.json            # sequentially, two threads each
python benchmarks/train_evidence.py --jobs 7 --json evidence.json   # on 14 cores: seven in parallel, two cores each

Each run is `sortedrl train` with its defaults; extra flags go after `--`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from tempfile import TemporaryDirectory
from typing import Any

MODES = ("on-policy+planned", "on-policy", "partial", "partial+elevator", "baseline")


def train(mode: str, seed: int, *, shuffled: bool, cores: set[int], flags: list[str]) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        words = ["train", "--json", "--mode", mode, "--seed", str(seed), "--threads", str(len(cores)), *flags]
        words += ["--out", str(Path(folder) / "run")]
        if shuffled:
            control = Path(folder) / "control.toml"
            control.write_text("shuffle_rewards = true\n", encoding="utf-8")
            words += ["--config", str(control)]
        done = subprocess.run(
            [sys.executable, "-m", "sortedrl", *words],
            capture_output=True,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        if done.returncode:
            raise RuntimeError(f"{mode}, seed {seed}: {done.stderr[-2000:]}")
        summary: dict[str, Any] = json.loads(done.stdout)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    rewards = [line["reward"] for line in map(json.loads, lines) if "reward" in line]
    print(row(summary, shuffled), flush=True)
    return summary | {"shuffled": shuffled, "rewards": rewards}


def row(run: dict[str, Any], shuffled: bool) -> str:
    f, gain = run["metrics"], run["gain"]
    cells = [
        f"{run['mode']}{', shuffled rewards' if shuffled else ''}",
        run["seed"],
        f"{run['score_before']['value']:.3f}",
        f"{run['score_after']['value']:.3f}",
        f"{gain['value']:+.3f} [{gain['low']:+.3f}, {gain['high']:+.3f}]",
        f"{run['seconds']:.0f}",
        f["trained"],
        f["trained_tokens"],
        f"{f['bubble']:.1%}",
        f"{f['idle']:.1%}",
        f"{f['goodput']:,.0f}",
        f"{f['waste']:.1%}",
        f"{f['staleness_mean']:.2f}",
        "unknown" if f["length_bias"] is None else f"{f['length_bias']:+.1%}",
    ]
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", default=list(MODES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--shuffled", nargs="*", default=["partial+elevator"], help="modes of the control")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--cores", type=int, default=2, help="per run")
    parser.add_argument("--json", type=Path)
    parser.add_argument("flags", nargs="*", help="more flags of `sortedrl train`, after --")
    args = parser.parse_args()
    available = sorted(os.sched_getaffinity(0))
    places: Queue[set[int]] = Queue()
    for job in range(args.jobs):
        places.put(set(available[job * args.cores : (job + 1) * args.cores]))
    print(
        "| mode | seed | before | after | gain | seconds | rollouts | tokens | bubble | idle | goodput | waste |",
        end="",
    )
    print(" staleness | length bias |\n" + "|---" * 14 + "|")

    def one(job: tuple[str, int, bool]) -> dict[str, Any]:
        cores = places.get()
        try:
            return train(job[0], job[1], shuffled=job[2], cores=cores, flags=args.flags)
        finally:
            places.put(cores)

    jobs = [(mode, seed, False) for seed in args.seeds for mode in args.modes]
    jobs += [(mode, seed, True) for seed in args.seeds for mode in args.shuffled]
    with ThreadPoolExecutor(args.jobs) as pool:
        runs = list(pool.map(one, jobs))
    if args.json is not None:
        args.json.write_text(json.dumps({"python": platform.python_version(), "runs": runs}))


if __name__ == "__main__":
    main()
