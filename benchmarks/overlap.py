"""What overlap gains: the same training run with the server idle, and generating, while the learner steps.

    python benchmarks/overlap.py [--updates 20] [--repeats 3]      # in the environment of `make test-vllm`

vLLM's server is pinned to one core and the learner to another, like two devices. Runs alternate.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from server_process import serving
from sortedrl.cli import main as sortedrl
from sortedrl.models import BUILT_IN_MODEL
from sortedrl.studies.measurements import machine

SLOTS = 32
SIZES = [
    "--slots",
    str(SLOTS),
    "--rollouts-per-update",
    "32",
    "--prompts-per-cohort",
    "16",
    "--rollouts-per-prompt",
    "8",
]
SIZES += ["--max-prompt-tokens", "128", "--max-response-tokens", "256", "--eval-problems", "200", "--dtype", "float32"]
SIZES += ["--checkpoint-every", "0", "--threads", "1", "--max-staleness", "4"]


def server_command() -> list[str]:
    command = ["taskset", "--cpu-list", "0", sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(BUILT_IN_MODEL), "--host", "127.0.0.1", "--port", "{port}", "--dtype", "float32"]
    command += ["--max-model-len", "384", "--max-num-seqs", str(SLOTS)]
    return [*command, "--tokens-only", "--logprobs-mode", "processed_logprobs"]


def run(url: str, folder: Path, flags: list[str]) -> dict[str, Any]:
    at = ["--engine", "vllm-server", "--engine-urls", url, "--out", str(folder)]
    if sortedrl(["train", *at, *SIZES, *flags]) != 0:
        raise RuntimeError(f"training failed: {folder}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    updates = [line for line in lines if "reward" in line]
    summary = json.loads((folder / "summary.json").read_text())
    run_metrics = summary["metrics"]
    return {
        "seconds_per_update": (updates[-1]["seconds"] - updates[0]["seconds"]) / (len(updates) - 1),
        "rollouts_per_update": run_metrics["rollouts_per_update_mean"],
        "bubble": run_metrics["bubble"],
        "idle": run_metrics["idle"],
        "staleness_mean": run_metrics["staleness_mean"],
        "staleness_max": run_metrics["staleness_max"],
        "gain": summary["gain"]["value"],
        "weight_difference": max(line["weight_difference"] for line in updates if "weight_difference" in line),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--mode", default="partial+elevator")
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {"in turn": [], "overlap": []}
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"}
    with (
        tempfile.TemporaryDirectory() as scratch,
        serving(server_command(), Path(scratch) / "server.log", **environment) as server,
    ):
        os.sched_setaffinity(0, {1})
        for repeat in range(arguments.repeats):
            for name, flags in (("in turn", []), ("overlap", ["--overlap"])):
                flags += ["--updates", str(arguments.updates), "--seed", str(repeat), "--mode", arguments.mode]
                found[name].append(run(server.url, Path(scratch) / f"{name}-{repeat}", flags))
                print(name, json.dumps(found[name][-1]), flush=True)
    ratios = [
        (one["seconds_per_update"] / one["rollouts_per_update"])
        / (other["seconds_per_update"] / other["rollouts_per_update"])
        for one, other in zip(found["in turn"], found["overlap"], strict=True)
    ]
    print(f"{machine()}: trained rollouts per second, overlap over in turn: median {median(ratios):.2f}, {ratios}")


if __name__ == "__main__":
    main()
