"""Compares SortedGRPOTrainer with GRPOTrainer on CPU: trained rollouts per second, bubble, reward curves.

Both sides run the same script with a different class: the same model, GRPOConfig, reward function, optimizer, data
order and seeds; GRPOTrainer in three settings of `trl_runs.py`. All train the same number of updates of the same
size. Time is measured from the start of the first step to the end of the last one. Every run is a new process;
contenders take turns, each repeat has its own seed, and ratios are computed within a repeat.

The bubble of SortedGRPOTrainer is measured slot-time from its event log. GRPOTrainer has no log: its bubble is computed
from the lengths, 1 - mean length / longest length of each generation, as if every decode step took the same time. Later
steps read a larger KV cache, so the real bubble is larger.

A schedule that sorts by length can leave long responses untrained when a short run ends: check that `length` agrees.

    pip install trl==1.16.0
    python benchmarks/trl_integration.py --updates 20 --repeats 3 --json trl_integration.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from trl.trainer.grpo_trainer import GRPOTrainer
from trl_runs import (
    TRL_SETTINGS,
    Run,
    Spread,
    TrlRecorder,
    TrlSetting,
    heading,
    parsed_arguments,
    reward_table,
    settings_for,
    train,
    trl_config,
    versions,
)

from sortedrl.core.prompts import Prompts
from sortedrl.integrations.trl import SortedGRPOTrainer
from sortedrl.log.reading import read_events
from sortedrl.observe.metrics import Metrics
from sortedrl.training.resources import read_resources
from sortedrl.training.settings import TrainSettings

MODES = ("baseline", "on-policy", "on-policy+planned", "partial", "partial+elevator")
PLAIN = ("trl: generate", "trl: generate, 4 micro-batches", "trl: continuous batching")


@dataclass(frozen=True, slots=True)
class Contender:
    """`mode` None: GRPOTrainer. Micro-batches are those of GRPOConfig, the same for both trainers."""

    name: str
    mode: str | None
    setting: TrlSetting
    off_policy_correction: str = "ppo_clip"


CONTENDERS = (
    *(Contender(name, None, TRL_SETTINGS[name]) for name in PLAIN),
    *(Contender(f"sorted: {mode}", mode, TrlSetting()) for mode in MODES),
    Contender("sorted: partial+elevator, 4 micro-batches", "partial+elevator", TrlSetting(micro_batches=4)),
    Contender("sorted: partial+elevator, decoupled", "partial+elevator", TrlSetting(), "decoupled"),
)


@dataclass(frozen=True, slots=True)
class Result:
    run: Run
    bubble: float
    idle: float | None  # plain GRPOTrainer keeps no event log
    waste: float


def run_contender(contender: Contender, settings: TrainSettings) -> Result:
    """Run in this process."""
    torch.set_num_threads(settings.threads)
    resources = read_resources(settings, lambda line: None)
    prompts = Prompts(resources.train, seed=settings.seed).take(len(resources.train), within_epoch=True)
    with tempfile.TemporaryDirectory() as folder:
        config = trl_config(contender.setting, settings, folder)
        if contender.mode is None:
            recorder = train(GRPOTrainer, config, settings, resources, prompts)
        else:
            if contender.off_policy_correction == "decoupled":
                config.vllm_importance_sampling_mode = "token_truncate"
            recorder = train(
                SortedGRPOTrainer,
                config,
                settings,
                resources,
                prompts,
                schedule=contender.mode,
                slots=settings.slots,
                off_policy_correction=contender.off_policy_correction,
            )
        return result_of(recorder, Path(folder) / "events.jsonl")


def result_of(recorder: TrlRecorder, event_log: Path) -> Result:
    run = recorder.result()
    if not event_log.exists():
        return Result(run, recorder.bubble_from_lengths(), None, 0.0)
    run_metrics = Metrics().fold(read_events(event_log)).run_metrics()
    measured = Run(
        rollouts=run_metrics.trained,
        tokens=run_metrics.trained_tokens,
        generation_seconds=run.generation_seconds,
        staleness=run_metrics.staleness_mean,
        rewards=run.rewards,
        update_ends=run.update_ends,
    )
    return Result(measured, run_metrics.bubble, run_metrics.idle, run_metrics.waste)


def in_fresh_process(contender: Contender, settings: TrainSettings) -> Result:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(run_contender, contender, settings).result()


def measure(args: argparse.Namespace) -> dict[str, list[Result]]:
    results: dict[str, list[Result]] = {}
    for repeat in range(args.repeats):
        for contender in CONTENDERS:
            result = in_fresh_process(contender, settings_for(args, "baseline", repeat))
            results.setdefault(contender.name, []).append(result)
            print(
                f"  repeat {repeat + 1}/{args.repeats}  {contender.name:<42} "
                f"{result.run.rollouts_per_second:>8.2f} rollouts/s in {result.run.seconds:,.1f} s",
                flush=True,
            )
    return results


def fastest_plain(results: dict[str, list[Result]]) -> str:
    return max(PLAIN, key=lambda name: statistics.median(result.run.rollouts_per_second for result in results[name]))


def table(results: dict[str, list[Result]], fastest: str) -> list[str]:
    columns = ("rollouts/s", "x plain", "tokens/s", "length", "bubble", "waste", "staleness", "last reward")
    lines = [f"{'':<42}" + "".join(f"{column:>20}" for column in columns)]
    for name, found in results.items():
        pairs = list(zip(found, results[fastest], strict=True))
        cells = (
            Spread.of(result.run.rollouts_per_second for result in found),
            Spread.of(ours.run.rollouts_per_second / theirs.run.rollouts_per_second for ours, theirs in pairs),
            f"{statistics.median(result.run.tokens_per_second for result in found):,.0f}",
            f"{statistics.fmean(result.run.mean_length for result in found):.1f}",
            f"{statistics.fmean(result.bubble for result in found):.1%}",
            f"{statistics.fmean(result.waste for result in found):.1%}",
            f"{statistics.fmean(result.run.staleness for result in found):.2f}",
            f"{statistics.fmean(statistics.fmean(result.run.rewards[-5:]) for result in found):.3f}",
        )
        lines.append(f"{name:<42}" + "".join(f"{cell!s:>20}" for cell in cells))
    return lines


def as_json(args: argparse.Namespace, results: dict[str, list[Result]], fastest: str) -> dict[str, Any]:
    return {
        "arguments": {**vars(args), "json": str(args.json)},
        "versions": versions(),
        "fastest_plain": fastest,
        "contenders": {
            name: {
                "rollouts_per_second": asdict(Spread.of(result.run.rollouts_per_second for result in found)),
                "runs": [asdict(result) for result in found],
            }
            for name, found in results.items()
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    args = parsed_arguments(arguments, "Compare SortedGRPOTrainer with GRPOTrainer on CPU.")
    print(heading(args))
    results = measure(args)
    fastest = fastest_plain(results)
    print(f"\nmedian [lowest, highest]; x plain: against {fastest}", *table(results, fastest), sep="\n")
    runs = {name: [result.run for result in found] for name, found in results.items()}
    print(f"\nmean reward per update, over {args.repeats} repeats", *reward_table(runs), sep="\n")
    if args.json is not None:
        args.json.write_text(json.dumps(as_json(args, results, fastest), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
