"""Our trainer, TRL's GRPOTrainer and SortedGRPOTrainer with the same model on one GPU: trained rollouts per second, and
the score against wall-clock time.

    python benchmarks/beside_peers.py --model OUT/model --out OUT [--updates 30] [--repeats 3] [--stop-after 900]
    python benchmarks/beside_peers.py --device cpu --model built-in --updates 4 --repeats 1 --rollouts-per-update 16 \
        --slots 16 --max-response-tokens 96 --out OUT                             a trial without vLLM
    python benchmarks/beside_peers.py --summarize OUT/beside_peers.jsonl          the table again

On a GPU, every contender generates with vLLM in its own process: `--slots` responses at once, the same share of memory.
Prompts, their order, rewards, group size, updates, token limits, learning rate, warm-up, clipping and GRPO advantages
are the same, without a KL term. Precision: bfloat16 arithmetic, and weights that keep the precision of float32: our
optimizer stores the lost bits; TRL trains float32 weights under bfloat16 autocast.

Each run is a new process. Its time counts from the start of its first rollout to the end of its last update, so
start-up, compilation and evaluation are left out. A run's result is appended to OUT/beside_peers.jsonl as soon as it
exists: rewards and end times of all updates, too. If a contender fails or takes longer than `--limit` seconds, its
error is written there, and the next one starts. Contenders take turns, and repeat r has seed r. Runs that the file has
already are not repeated, so the same command goes on where it was stopped, and more `--repeats` adds seeds. verl has
its own job with the same model, task and sizes: see verl_job/.

TRL 1.16.0 supports vLLM 0.22.0 to 0.31.0. If its packages are on PYTHONPATH rather than installed, the name of their
folder must contain `site-packages`: otherwise dill, with which `datasets` hashes a table, pickles all of pyarrow and
fails.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from beside_trl import RunFailed, prompts_in_loading_order, run_sortedrl
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
REFERENCE = "trl: GRPOTrainer"
GOAL = 1.5  # the reward whose time is reported, as a mean over GOAL_UPDATES updates
GOAL_UPDATES = 3
MAY_DIFFER = ("repeats", "contenders", "limit", "stop_after", "out", "json")  # between commands with the same OUT


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
    REFERENCE: Contender("trl"),
    "trl: SortedGRPOTrainer, baseline": Contender("sorted"),
    "trl: SortedGRPOTrainer, partial+elevator": Contender("sorted", "partial+elevator"),
}


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    own = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0], add_help=False)
    own.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    own.add_argument("--learning-rate", type=float, default=4e-5)
    own.add_argument("--micro-batches", type=int, default=8, help="per update, of TRL's trainers")
    own.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), metavar="NAME")
    own.add_argument("--limit", type=float, default=600.0, metavar="SECONDS", help="of one run, with its start")
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


def _send_run(sender: Connection, args: argparse.Namespace, contender: Contender, settings: TrainSettings) -> None:
    try:
        sender.send(run_trl(args, contender, settings))
    except Exception:
        sender.send(traceback.format_exc())


def run_trl_in_new_process(args: argparse.Namespace, contender: Contender, settings: TrainSettings) -> Run:
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_send_run, args=(sender, args, contender, settings))
    process.start()
    sender.close()  # of this process: if the other one dies, recv() then raises EOFError
    try:
        if not receiver.poll(args.limit):
            raise RunFailed(f"it took more than {args.limit:g} s")
        found: Run | str = receiver.recv()
    except EOFError:
        process.join()
        raise RunFailed(f"its process ended with exit code {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
    if isinstance(found, str):
        raise RunFailed(found)
    return found


def run(args: argparse.Namespace, contender: Contender, seed: int) -> Run:
    settings = settings_of(args, contender, seed)
    if contender.trainer == "ours":
        return run_sortedrl(settings, args.limit)
    return run_trl_in_new_process(args, contender, settings)


Runs = dict[str, dict[int, Run]]  # by contender and repeat


def measure(args: argparse.Namespace, runs: Runs, record: Callable[..., None], seconds: Callable[[], float]) -> None:
    """Adds to `runs` what is not in it."""
    for repeat in range(args.repeats):
        for name in args.contenders:
            if repeat in runs.get(name, {}):
                continue
            if seconds() > args.stop_after:
                record(contender=name, repeat=repeat, left_out=f"{args.stop_after:.0f} s have passed")
                continue
            try:
                found = run(args, CONTENDERS[name], repeat)
            except Exception as error:
                record(contender=name, repeat=repeat, error=repr(error), traceback=traceback.format_exc())
                continue
            runs.setdefault(name, {})[repeat] = found
            record(contender=name, repeat=repeat, rollouts_per_second=found.rollouts_per_second, **asdict(found))


def read_runs(results: Path) -> Runs:
    runs: Runs = {}
    names = [one.name for one in fields(Run)]
    for line in map(json.loads, results.read_text(encoding="utf-8").splitlines()):
        if "rewards" in line:
            values: dict[str, Any] = {name: line[name] for name in names}
            values |= {name: tuple(values[name]) for name in ("rewards", "update_ends")}
            runs.setdefault(line["contender"], {})[line["repeat"]] = Run(**values)
    return runs


def other_settings(results: Path, arguments: Mapping[str, Any]) -> list[str]:
    """Which arguments of the runs in the file differ from these: such runs do not belong in one table."""
    lines = map(json.loads, results.read_text(encoding="utf-8").splitlines())
    before = [line["arguments"] for line in lines if "arguments" in line]
    names = [name for name in arguments if name not in MAY_DIFFER]
    return [name for name in names if any(one.get(name) != arguments[name] for one in before)]


def seconds_to_goal(run: Run) -> float | None:
    """When the mean reward of GOAL_UPDATES successive updates first reached GOAL; None if it never did."""
    for last in range(GOAL_UPDATES, len(run.rewards) + 1):
        if statistics.fmean(run.rewards[last - GOAL_UPDATES : last]) >= GOAL:
            return run.update_ends[last - 1]
    return None


def each(values: Iterable[float | None], form: str) -> str:
    return ", ".join("-" if value is None else format(value, form) for value in values)


def table(runs: Runs) -> str:
    """One line per contender, with the values of its repeats, in order."""
    columns = (
        "rollouts/s",
        "tokens/s",
        f"x {REFERENCE}",
        f"to reward {GOAL}",
        "generation",
        "rest",
        "length",
        "last 5 rewards",
    )
    lines = [f"{'of each repeat':<40}" + "".join(f"{column:>24}" for column in columns) + f"{'staleness':>11}"]
    rates = {repeat: run.tokens_per_second for repeat, run in runs.get(REFERENCE, {}).items()}
    for name, by_repeat in runs.items():
        found = by_repeat.values()
        cells = (
            each((one.rollouts_per_second for one in found), ".1f"),
            each((one.tokens_per_second for one in found), ",.0f"),
            each((one.tokens_per_second / rates[at] if at in rates else None for at, one in by_repeat.items()), ".2f"),
            each(map(seconds_to_goal, found), ".1f"),
            each((one.generation_seconds for one in found), ".1f"),
            each((one.seconds - one.generation_seconds for one in found), ".1f"),
            each((one.mean_length for one in found), ".0f"),
            each((statistics.fmean(one.rewards[-5:]) for one in found), ".2f"),
        )
        staleness = statistics.fmean(one.staleness for one in found)
        lines.append(f"{name:<40}" + "".join(f"{cell:>24}" for cell in cells) + f"{staleness:>11.2f}")
    return "\n".join(lines)


def vllm_version() -> str | None:
    try:
        return version("vllm")
    except PackageNotFoundError:
        return None


def main(given: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if given is None else given)
    if given[:1] == ["--summarize"]:
        print(*(table(read_runs(Path(results))) for results in given[1:]), sep="\n")
        return 0
    args, began = arguments(given), time.perf_counter()
    args.out.mkdir(parents=True, exist_ok=True)
    results = args.out / "beside_peers.jsonl"
    shown = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    runs: Runs = {}
    if results.exists():
        if differing := other_settings(results, shown):
            print(
                f"{results} has runs with other settings ({', '.join(differing)}): use another --out", file=sys.stderr
            )
            return 2
        runs = read_runs(results)

    def seconds() -> float:
        return time.perf_counter() - began

    def record(**fields: Any) -> None:
        line = {"at": round(seconds(), 1), **fields}
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        short = {key: value for key, value in line.items() if key not in ("rewards", "update_ends", "traceback")}
        print(json.dumps(short), flush=True)

    record(arguments=shown, machine=machine(), versions={**versions(), "vllm": vllm_version()})
    measure(args, runs, record, seconds)
    print(table(runs), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
