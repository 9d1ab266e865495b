"""What streaming gains: the same training run with the learner after each harvest, and during it.

    python benchmarks/streaming.py [--updates 12] [--repeats 3] [--mode baseline]   # environment of `make test-vllm`
    python benchmarks/streaming.py --simulate                                       # an 8B model on an H200, 8 seeds

vLLM's server is pinned to one core and the learner to another, like two devices. Runs alternate: in turn, streamed,
with groups of 8 (GRPO) and with single rollouts (reinforce++). Times are per update, of harvests, learner and weight
updates only. `--tokens-per-micro-batch` and the KL term set how long the learner takes for a model this small.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from overlap import SLOTS, server_command

from config_file import config_file
from server_process import serving
from sortedrl.cli import main as sortedrl
from sortedrl.core.schedule import Schedule
from sortedrl.engines.step_time import PRESETS
from sortedrl.studies.measurements import machine
from sortedrl.studies.workload import Workload
from sortedrl.studies.workload import run as simulate

SIZES = ["--slots", str(SLOTS), "--rollouts-per-update", str(SLOTS), "--max-prompt-tokens", "128"]
SIZES += ["--max-response-tokens", "256", "--eval-problems", "1", "--dtype", "float32"]
SIZES += ["--checkpoint-every", "0", "--threads", "1"]
KINDS = {
    "groups of 8": ["--rollouts-per-prompt", "8", "--prompts-per-cohort", "16", "--algorithm", "grpo"],
    "single rollouts": ["--rollouts-per-prompt", "1", "--prompts-per-cohort", "128", "--algorithm", "reinforce++"],
}


def run(url: str, folder: Path, flags: list[str]) -> dict[str, float]:
    at = ["--engine", "vllm-server", "--engine-urls", url, "--out", str(folder)]
    if sortedrl(["train", *at, *SIZES, *flags]) != 0:
        raise RuntimeError(f"training failed: {folder}")
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())["metrics"]
    per_update = found["wall_seconds"] / found["updates"]
    harvest = found["seconds"] / found["updates"]
    learner = found["idle_parts"]["learner"] * per_update
    weights = found["idle_parts"]["weights"] * per_update
    return {
        "harvest": harvest,
        "learner_after_harvest": learner,
        "weights": weights,
        "harvest_and_learner": harvest + learner,
        "with_weights": harvest + learner + weights,
        "tokens": found["trained_tokens"] / found["updates"],
        "streamed_fraction": found["streamed_fraction"],
        "streamed_seconds": found["streamed_seconds"] / found["updates"],
        "staleness_max": found["staleness_max"],
    }


def summary(in_turn: list[dict[str, float]], streamed: list[dict[str, float]]) -> str:
    """Ratios of seconds per update, per pair of neighboring runs. Their prompts are the same, their responses are not:
    few updates give a wide spread."""

    def gains(key: str) -> list[float]:
        pairs = zip(in_turn, streamed, strict=True)
        return sorted(one[key] / other[key] for one, other in pairs)

    ratio = median(one["learner_after_harvest"] / one["harvest"] for one in in_turn)
    parts = [f"learner / harvest {ratio:.2f}"]
    for key, name in (("harvest_and_learner", "harvest and learner"), ("with_weights", "with weight updates")):
        found = gains(key)
        parts.append(f"{name} {median(found):.2f} x [{found[0]:.2f}, {found[-1]:.2f}]")
    return ", ".join(parts)


def simulated(mode: str) -> None:
    """128 slots and rollouts per update, reference lengths, learners of different speed."""
    for kind, per_prompt in (("groups of 8", 8), ("single rollouts", 1)):
        for per_token in (0.7e-4, 1.4e-4, 2.1e-4):
            rows = [_simulated(mode, per_prompt, per_token, seed) for seed in range(8)]
            columns = zip(*rows, strict=True)
            names = ("learner / harvest", "gain", "with 1 s weight updates", "shared GPU")
            texts = [
                f"{name} {median(c):.2f} [{min(c):.2f}, {max(c):.2f}]" for name, c in zip(names, columns, strict=True)
            ]
            print(f"{mode}, {kind}, {per_token:.1e} s per token: {', '.join(texts)}", flush=True)


def _simulated(mode: str, per_prompt: int, per_token: float, seed: int) -> tuple[float, float, float, float]:
    prompts = 128 // per_prompt
    schedule = Schedule(
        mode=mode,
        rollouts_per_prompt=per_prompt,
        whole_groups=per_prompt > 1,
        prompts_per_cohort=(1 if mode.startswith("baseline") else 4) * prompts,
        seed=seed,
    )
    workload = Workload(step_time=PRESETS["h200-8b"], prompts=16 * prompts, learner_seconds_per_token=per_token)
    alone = simulate(workload, schedule)

    def gain(**changes: Any) -> float:
        other = replace(workload, **changes)
        return simulate(replace(other, stream=False), schedule).wall_seconds / simulate(other, schedule).wall_seconds

    learner = alone.idle_parts["learner"] * alone.wall_seconds / alone.seconds
    return learner, gain(stream=True), gain(stream=True, weight_update_seconds=1.0), gain(stream=True, share_gpu=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--mode", default="baseline")
    parser.add_argument("--kl-coefficient", type=float, default=0.001)
    parser.add_argument("--tokens-per-micro-batch", type=int, default=256)
    parser.add_argument("--simulate", action="store_true")
    arguments = parser.parse_args()
    if arguments.simulate:
        return simulated(arguments.mode)
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"}
    with (
        tempfile.TemporaryDirectory() as scratch,
        serving(server_command(), Path(scratch) / "server.log", **environment) as server,
    ):
        os.sched_setaffinity(0, {1})
        learner = config_file(
            Path(scratch),
            kl_coefficient=arguments.kl_coefficient,
            tokens_per_micro_batch=arguments.tokens_per_micro_batch,
        )
        for kind, flags in KINDS.items():
            found: dict[str, list[dict[str, float]]] = {"in turn": [], "streamed": []}
            for repeat in range(arguments.repeats):
                for name in found:
                    words = [*flags, *learner, "--updates", str(arguments.updates), "--seed", str(repeat)]
                    words += ["--mode", arguments.mode, *(["--stream"] if name == "streamed" else [])]
                    found[name].append(run(server.url, Path(scratch) / f"{kind}-{name}-{repeat}", words))
                    print(kind, name, json.dumps(found[name][-1]), flush=True)
            print(f"{machine()}: {arguments.mode}, {kind}: {summary(found['in turn'], found['streamed'])}", flush=True)


if __name__ == "__main__":
    main()
