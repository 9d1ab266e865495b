"""Our trainer, TRL's GRPOTrainer and SortedGRPOTrainer with the same model on one GPU: trained rollouts per second, and
the score against wall-clock time.

    python benchmarks/beside_peers.py --model OUT/model --out OUT [--updates 30] [--repeats 3] [--stop-after 900]
    python benchmarks/beside_peers.py --device cpu --model built-in --updates 4 --repeats 1 --rollouts-per-update 16 \
        --slots 16 --max-response-tokens 96 --out OUT                             a trial without vLLM

On a GPU, every contender generates with vLLM in its own process: `--slots` responses at once, the same share of memory.
Prompts, their order, rewards, group size, updates, token limits, learning rate, warm-up, clipping and GRPO advantages
are the same, without a KL term. Precision: bfloat16 arithmetic, and weights that keep the precision of float32: our
optimizer stores the lost bits; TRL trains float32 weights under bfloat16 autocast.

Each run is a new process. Its time counts from the start of its first rollout to the end of its last update, so
start-up, compilation and evaluation are left out. A run's result is appended to OUT/beside_peers.jsonl as soon as it
exists: rewards and end times of all updates, too. If a contender fails, its error is written there, and the next one
starts. Contenders take turns, and repeat r has seed r. verl has its own job with the same model, task and sizes: see
verl_job/.

TRL 1.16.0 supports vLLM 0.22.0 to 0.31.0.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from beside_trl import prompts_in_loading_order, run_sortedrl
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl_integration import result_of
from trl_runs import Run, TrlSetting, parsed_arguments, settings_for, train, trl_config, versions

from sortedrl.integrations.trl import SortedGRPOTrainer
from sortedrl.studies.measurements import machine
from sortedrl.training.resources import read_resources
from sortedrl.training.settings import TrainSettings

MEMORY_FRACTION = 0.3  # of the GPU, for vLLM
REUSE = {"reuse_kv_cache": "True"}


@dataclass(frozen=True, slots=True)
class Contender:
    """`trainer`: ours, trl, or sorted (SortedGRPOTrainer). `more`: settings of our trainer on a GPU."""

    trainer: str
    mode: str = "baseline"
    engine_options: Mapping[str, str] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)


CONTENDERS = {
    "ours: baseline": Contender("ours"),
    "ours: partial+elevator": Contender("ours", "partial+elevator"),
    "ours: partial+elevator, reuse, stream": Contender(
        "ours", "partial+elevator", REUSE, {"stream": True, "stream_sms": 96}
    ),
    "trl: GRPOTrainer": Contender("trl"),
    "trl: SortedGRPOTrainer, baseline": Contender("sorted"),
    "trl: SortedGRPOTrainer, partial+elevator": Contender("sorted", "partial+elevator"),
}


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    own = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0], add_help=False)
    own.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    own.add_argument("--learning-rate", type=float, default=4e-5)
    own.add_argument("--micro-batches", type=int, default=8, help="per update, of TRL's trainers")
    own.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), metavar="NAME")
    own.add_argument("--stop-after", type=float, default=float("inf"), metavar="SECONDS", help="start no run later")
    own.add_argument("--out", type=Path, default=Path("h200"))
    options, rest = own.parse_known_args(given)
    sizes = ["--rollouts-per-update", "128", "--max-response-tokens", "1024", "--slots", "128", "--updates", "30"]
    shared = parsed_arguments([*sizes, *rest], own.format_help())
    if shared.model != "built-in" and not Path(shared.model).is_dir():
        own.error(f"--model {shared.model}: there is no such folder")  # each contender would start first and then fail
    return argparse.Namespace(**(vars(shared) | vars(options)))


def settings_of(args: argparse.Namespace, contender: Contender, seed: int) -> TrainSettings:
    """What `sortedrl train` runs with; TRL's trainers get their values from here."""
    settings = settings_for(args, contender.mode, seed)
    values: dict[str, Any] = settings.model_dump(mode="json", exclude_unset=True)
    values["learning_rate"] = args.learning_rate
    if args.device == "cuda":
        memory = {"gpu_memory_utilization": str(MEMORY_FRACTION)}
        values |= {"device": "cuda", "dtype": "bfloat16", "engine": "vllm", "threads": 0, **contender.more}
        values["engine_options"] = {**memory, **contender.engine_options}
    return TrainSettings(**values)


def config_of(args: argparse.Namespace, contender: Contender, settings: TrainSettings, folder: str) -> GRPOConfig:
    setting = TrlSetting(micro_batches=args.micro_batches)
    if args.device == "cpu":
        return trl_config(setting, settings, folder)
    return trl_config(
        setting,
        settings,
        folder,
        use_cpu=False,
        bf16=True,
        dataloader_pin_memory=True,
        use_vllm=contender.trainer == "trl",
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=MEMORY_FRACTION,
        vllm_max_model_length=settings.longest_context(),
        # On-policy without a KL term: TRL then needs no further forward pass, as we do not.
        vllm_importance_sampling_correction=False,
    )


def run_trl(args: argparse.Namespace, contender: Contender, settings: TrainSettings) -> Run:
    """In this process."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    resources = read_resources(settings, print)
    resources.model.float()  # TRL casts to bfloat16 in each pass
    prompts = prompts_in_loading_order(resources, settings)
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(args, contender, settings, folder)
        if contender.trainer == "trl":
            return train(GRPOTrainer, config, settings, resources, prompts).result()
        options: dict[str, Any] = {"schedule": contender.mode, "slots": settings.slots}
        if args.device == "cuda":
            options["engine"] = "vllm"
        recorder = train(SortedGRPOTrainer, config, settings, resources, prompts, **options)
        return result_of(recorder, Path(folder) / "events.jsonl").run


def run(args: argparse.Namespace, contender: Contender, seed: int) -> Run:
    settings = settings_of(args, contender, seed)
    if contender.trainer == "ours":
        return run_sortedrl(settings)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(run_trl, args, contender, settings).result()


def measure(
    args: argparse.Namespace, record: Callable[..., None], seconds: Callable[[], float]
) -> dict[str, list[Run]]:
    runs: dict[str, list[Run]] = {}
    for repeat in range(args.repeats):
        for name in args.contenders:
            if seconds() > args.stop_after:
                record(contender=name, repeat=repeat, left_out=f"{args.stop_after:.0f} s have passed")
                continue
            try:
                found = run(args, CONTENDERS[name], repeat)
            except Exception as error:
                record(contender=name, repeat=repeat, error=repr(error), traceback=traceback.format_exc())
                continue
            runs.setdefault(name, []).append(found)
            record(contender=name, repeat=repeat, rollouts_per_second=found.rollouts_per_second, **asdict(found))
    return runs


def table(runs: Mapping[str, Sequence[Run]]) -> str:
    columns = ("runs", "rollouts/s", "tokens/s", "length", "staleness", "last reward", "generation")
    lines = [f"{'median over runs':<44}" + "".join(f"{column:>13}" for column in columns)]
    for name, found in runs.items():
        cells = (
            str(len(found)),
            f"{statistics.median(one.rollouts_per_second for one in found):.1f}",
            f"{statistics.median(one.tokens_per_second for one in found):,.0f}",
            f"{statistics.fmean(one.mean_length for one in found):.1f}",
            f"{statistics.fmean(one.staleness for one in found):.2f}",
            f"{statistics.fmean(statistics.fmean(one.rewards[-5:]) for one in found):.3f}",
            f"{statistics.median(one.generation_seconds / one.seconds for one in found):.0%}",
        )
        lines.append(f"{name:<44}" + "".join(f"{cell:>13}" for cell in cells))
    return "\n".join(lines)


def vllm_version() -> str | None:
    try:
        return version("vllm")
    except PackageNotFoundError:
        return None


def main(given: Sequence[str] | None = None) -> int:
    args, began = arguments(given), time.perf_counter()
    args.out.mkdir(parents=True, exist_ok=True)
    results = args.out / "beside_peers.jsonl"

    def seconds() -> float:
        return time.perf_counter() - began

    def record(**fields: Any) -> None:
        line = {"at": round(seconds(), 1), **fields}
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        shown = {key: value for key, value in line.items() if key not in ("rewards", "update_ends", "traceback")}
        print(json.dumps(shown), flush=True)

    shown = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    record(arguments=shown, machine=machine(), versions={**versions(), "vllm": vllm_version()})
    print(table(measure(args, record, seconds)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
