"""What streaming gains: the same updates with the learner after each harvest, and during it.

    python benchmarks/streaming.py [--slots 64] [--updates 4] [--repeats 3] [--out OUT]  # needs vLLM (`make test-vllm`)
    python benchmarks/streaming.py --simulate                                            # 8B on an H200, 8 seeds

vLLM's server is pinned to one core; controller and learner share another: two devices. The model has random weights.
Response lengths are forced, so that both runs of a pair train on equally many tokens in every update. Pairs alternate:
in turn, streamed, with groups of 8 (GRPO), then with single rollouts (reinforce++), then the next repeat. The first
update of a run is not counted. Times are per update.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from update_rows import UpdateRows

from server_process import serving
from sortedrl.core import Controller, EventLog, Prompts, Schedule, events
from sortedrl.core.seeds import derive_seed
from sortedrl.engines.checked_weights import CheckedWeights
from sortedrl.engines.lengths import ForcedLengths, LognormalLengths, length_of_request
from sortedrl.engines.servers.vllm import VllmServerEngine
from sortedrl.engines.step_time import PRESETS
from sortedrl.learner.learner import Learner
from sortedrl.learner.settings import LearnerSettings
from sortedrl.studies.measurements import machine, random_prompts
from sortedrl.studies.workload import Workload
from sortedrl.studies.workload import run as simulate
from sortedrl.tasks.scoring import DirectScorer
from sortedrl.tasks.task import Reward

PROMPT_TOKENS, MAX_RESPONSE_TOKENS, MEDIAN_LENGTH = 24, 512, 40  # the limit is 13 medians, as in the reference lengths
VOCABULARY = 512
KINDS = {"groups of 8": (8, "grpo"), "single rollouts": (1, "reinforce++")}  # rollouts per prompt, algorithm


def server_command(model: Path, slots: int) -> list[str]:
    command = ["taskset", "--cpu-list", "0", sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--host", "127.0.0.1", "--port", "{port}", "--dtype", "float32"]
    command += ["--max-model-len", str(PROMPT_TOKENS + MAX_RESPONSE_TOKENS + 8), "--max-num-seqs", str(slots)]
    command += ["--stream-interval", "32", "--gpu-memory-utilization", "0.3"]  # the latter: of the CPU's memory
    return [*command, "--tokens-only", "--logprobs-mode", "processed_logprobs"]


class StreamedSeconds:
    """Sums the learner's work during harvests; a sink of the event log."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, event: events.Event) -> None:
        if isinstance(event, events.Streamed):
            self.seconds += event.seconds


def run(
    engine: VllmServerEngine, model: Path, kind: str, seed: int, options: argparse.Namespace, *, stream: bool
) -> Any:
    """One row per update after the first, and a summary."""
    per_prompt, algorithm = KINDS[kind]
    prompts = options.slots // per_prompt
    schedule = Schedule(
        mode=options.mode,
        rollouts_per_update=options.slots,
        rollouts_per_prompt=per_prompt,
        prompts_per_cohort=prompts,
        whole_groups=per_prompt > 1,
        max_response_tokens=MAX_RESPONSE_TOKENS,
        seed=seed,
    )
    learner = Learner(
        LlamaForCausalLM.from_pretrained(model),
        LearnerSettings(
            algorithm=algorithm,
            normalizer_tokens=options.slots * MAX_RESPONSE_TOKENS,
            tokens_per_micro_batch=options.tokens_per_micro_batch,
            learning_rate=1e-5,
        ),
    )
    learner.set_initial_rewards([0.0, 1.0])
    probes = [prompt.tokens for prompt in random_prompts((-1, -2), PROMPT_TOKENS, VOCABULARY)]
    checked = CheckedWeights(engine, learner.logprobs_of, probes)
    checked.update_weights(learner.weights(), 0)
    rows, streamed = UpdateRows(0.0), StreamedSeconds()
    lengths = LognormalLengths(mu=math.log(MEDIAN_LENGTH), limit=MAX_RESPONSE_TOKENS, shortest=4, seed=seed)
    controller = Controller(
        ForcedLengths(checked, length_of_request(lengths)),
        Prompts(random_prompts(range(prompts * options.updates), PROMPT_TOKENS, VOCABULARY), seed=seed),
        DirectScorer(lambda rollout: Reward(float(derive_seed(rollout.id, 3) & 1), correct=False)),
        schedule,
        log=EventLog(rows, streamed),
        max_updates=options.updates,
        stream_to=learner.accumulate if stream else None,
    )
    for batch in controller:
        learner.step(batch)
        controller.publish(learner.weights())
    counted = rows.rows[1:]
    total = {key: sum(getattr(row, key) for row in counted) for key in ("generate", "learner", "weights")}
    return {
        "harvest": total["generate"] / len(counted),
        "learner_after_harvest": total["learner"] / len(counted),
        "weights": total["weights"] / len(counted),
        "harvest_and_learner": (total["generate"] + total["learner"]) / len(counted),
        "with_weights": sum(total.values()) / len(counted),
        "tokens": sum(row.trained_tokens for row in counted) / len(counted),
        "streamed_seconds": streamed.seconds / len(rows.rows),
        "staleness_sum": sum(row.staleness_sum for row in counted),
    }


def summary(in_turn: list[dict[str, float]], streamed: list[dict[str, float]]) -> dict[str, Any]:
    """Ratios of seconds per update, per pair of neighboring runs."""
    ratio = median(one["learner_after_harvest"] / one["harvest"] for one in in_turn)
    found: dict[str, Any] = {"learner_of_harvest": round(ratio, 3), "pairs": len(in_turn)}
    for key in ("harvest_and_learner", "with_weights"):
        pairs = zip(in_turn, streamed, strict=True)
        gains = sorted(one[key] / other[key] for one, other in pairs)
        found[key] = {"median": round(median(gains), 3), "low": round(gains[0], 3), "high": round(gains[-1], 3)}
    return found


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


def measured(options: argparse.Namespace) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    results = (options.out / "streaming.jsonl").open("a", encoding="utf-8")

    def record(**fields: Any) -> None:
        line = json.dumps({"at": round(time.perf_counter() - began, 1), "load": os.getloadavg()[0], **fields})
        print(line, flush=True)
        results.write(line + "\n")
        results.flush()

    began = time.perf_counter()
    torch.set_num_threads(1)
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"}
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=options.hidden_size,
            intermediate_size=4 * options.hidden_size,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            tie_word_embeddings=False,
        )
        LlamaForCausalLM(config).save_pretrained(model)  # type: ignore[no-untyped-call]
        with serving(server_command(model, options.slots), Path(scratch) / "server.log", **environment) as server:
            os.sched_setaffinity(0, {1})
            engine = VllmServerEngine(server.url, slots=options.slots, eos_token_ids=(), vocabulary=VOCABULARY)
            record(machine=machine(), mode=options.mode, slots=options.slots, hidden_size=options.hidden_size)
            found: dict[str, dict[bool, list[dict[str, float]]]] = {kind: {False: [], True: []} for kind in KINDS}
            for repeat in range(options.repeats):
                for kind, runs in found.items():
                    for stream in runs if repeat % 2 == 0 else reversed(runs):
                        runs[stream].append(run(engine, model, kind, repeat, options, stream=stream))
                        record(kind=kind, repeat=repeat, stream=stream, **runs[stream][-1])
                    record(kind=kind, summary=summary(runs[False], runs[True]))
            engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--slots", type=int, default=64, help="and rollouts per update; sets the number of groups")
    parser.add_argument("--updates", type=int, default=4, help="per run; the first is not counted")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--mode", default="baseline")
    parser.add_argument("--hidden-size", type=int, default=128, help="sets the learner's time against the engine's")
    parser.add_argument("--tokens-per-micro-batch", type=int, default=512)
    parser.add_argument("--out", type=Path, default=Path("streaming"))
    parser.add_argument("--simulate", action="store_true")
    options = parser.parse_args()
    if options.simulate:
        simulated(options.mode)
    else:
        measured(options)


if __name__ == "__main__":
    main()
