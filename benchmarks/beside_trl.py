"""Compares `sortedrl train` with TRL's GRPOTrainer on CPU: trained rollouts per second and reward curves.

Both sides train the same model on the same problems in the same loading order, with the same rollouts per update and
per prompt, token limits, temperature, learning rate and warm-up, clipping, AdamW, GRPO advantages and number of
updates, in fp32 and without a KL term. One difference remains: the constant that divides the summed loss. TRL uses
rollouts x token limit, the learner uses the tokens of its first update. This affects gradient clipping at norm 1, but
not AdamW.

Time is measured on both sides from the start of the first rollout to the end of the last update, without loading and
evaluation. Both have generated one short response before. Every run is a new process; contenders take turns, and each
repeat has its own seed. Ratios are computed within a repeat, against the TRL setting with the highest median rate.

A schedule that sorts by length can leave long responses untrained when a short run ends: check that `length` agrees
before you trust `rollouts/s`; `tokens/s` is not affected. Our engine decodes `--slots` responses at once (vLLM
max_num_seqs, SGLang max_running_requests); TRL decodes all responses of a generation.

    pip install trl==1.16.0
    python benchmarks/beside_trl.py --updates 20 --repeats 3 --json beside_trl.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from transformers import PreTrainedTokenizerBase, PrinterCallback, TrainerCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from sortedrl.cli.parse import parsed
from sortedrl.core.events import HarvestBegan, Published, Updated, read_events
from sortedrl.core.prompts import Prompts
from sortedrl.core.rollout import Prompt
from sortedrl.core.schedule import ConfigurationError
from sortedrl.tasks.encode import prompt_text
from sortedrl.training.resources import Resources, read_resources
from sortedrl.training.settings import TrainSettings

TARGET = 2.0  # trained rollouts per second, as a multiple of TRL's
UPDATES_PER_COHORT = 4
MODES = ("partial+elevator", "on-policy+planned", "baseline")
KV_PAGE_TOKENS = 256


@dataclass(frozen=True, slots=True)
class TrlSetting:
    """Settings of GRPOTrainer: the device batches of an update, and for how many updates it generates at once.

    Generating for several updates makes all but the first of them off-policy, like our partial mode.
    """

    micro_batches: int = 1
    updates_per_generation: int = 1
    continuous_batching: bool = False


TRL_SETTINGS = {
    "trl: generate": TrlSetting(),
    "trl: generate, 4 micro-batches": TrlSetting(micro_batches=4),
    "trl: generate for 2 updates": TrlSetting(updates_per_generation=2),
    "trl: generate for 4 updates": TrlSetting(updates_per_generation=4),
    "trl: continuous batching": TrlSetting(continuous_batching=True),
    "trl: continuous, for 4 updates": TrlSetting(updates_per_generation=4, continuous_batching=True),
}


@dataclass(frozen=True, slots=True)
class Run:
    """The result of a training run. Times count from the start of the first rollout."""

    rollouts: int
    tokens: int  # of trained responses
    generation_seconds: float  # including scoring
    staleness: float  # mean over trained tokens
    rewards: tuple[float, ...]  # mean of each update
    update_ends: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return self.update_ends[-1]

    @property
    def rollouts_per_second(self) -> float:
        return self.rollouts / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def mean_length(self) -> float:
        return self.tokens / self.rollouts


class RunFailed(Exception):
    """A contender did not complete its training."""


Runs = dict[str, list[Run]]  # by contender, one per repeat


# --- ours -------------------------------------------------------------------------------------------------------


def flags_for(args: argparse.Namespace, mode: str, seed: int) -> list[str]:
    """The flags of `sortedrl train`: the only source of settings, also for TRL."""
    values = {
        "model": args.model,
        "task": args.task,
        "mode": mode,
        "algorithm": "grpo",
        "updates": args.updates,
        "rollouts-per-update": args.rollouts_per_update,
        "rollouts-per-prompt": args.rollouts_per_prompt,
        "prompts-per-cohort": UPDATES_PER_COHORT * args.rollouts_per_update // args.rollouts_per_prompt,
        "max-response-tokens": args.max_response_tokens,
        "slots": args.slots,
        "threads": args.threads,
        "seed": seed,
        "device": "cpu",
        "dtype": "float32",
        "eval-problems": 1,
        "checkpoint-every": 0,
        "save-rollouts": 0,
    }
    return [word for key, value in values.items() for word in (f"--{key}", str(value))]


def run_sortedrl(flags: Sequence[str]) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "sortedrl", "train", *flags, "--out", str(out), "--json"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RunFailed(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
        return read_run(out / "events.jsonl", json.loads(done.stdout)["metrics"])


def read_run(event_log: Path, run_metrics: dict[str, Any]) -> Run:
    events = list(read_events(event_log))
    began = next(event.at for event in events if isinstance(event, HarvestBegan))
    updates = [event for event in events if isinstance(event, Updated)]
    return Run(
        rollouts=run_metrics["trained"],
        tokens=run_metrics["trained_tokens"],
        generation_seconds=run_metrics["seconds"],
        staleness=run_metrics["staleness_mean"],
        rewards=tuple(statistics.fmean(update.rewards) for update in updates),
        update_ends=tuple(event.at - began for event in events if isinstance(event, Published)),
    )


# --- TRL --------------------------------------------------------------------------------------------------------


class TrlRecorder(TrainerCallback):
    """A reward function for TRL that also measures time: it sees every rollout and every update."""

    def __init__(self, resources: Resources, updates_per_generation: int) -> None:
        self._task = resources.task
        self._problems = {prompt.id: prompt.payload for prompt in resources.train}
        self._updates_per_generation = updates_per_generation
        self._began: float | None = None
        self._step_began = 0.0
        self._generation_seconds = 0.0
        self._lengths: list[int] = []
        self._rewards: list[float] = []
        self._ends: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step_began = time.perf_counter()
        if self._began is None:
            self._began = self._step_began

    def score(
        self, completions: list[str], completion_ids: list[list[int]], problem_id: list[str], **kwargs: Any
    ) -> list[float | None]:
        rewards = [
            self._task.score(self._problems[name], response).value
            for name, response in zip(problem_id, completions, strict=True)
        ]
        self._lengths += map(len, completion_ids)
        # The updates of one generation get shuffled parts of it, so each has the same expected reward.
        self._rewards += [statistics.fmean(rewards)] * self._updates_per_generation
        self._generation_seconds += time.perf_counter() - self._step_began
        return [*rewards]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self._began is not None
        self._ends.append(time.perf_counter() - self._began)

    def result(self) -> Run:
        return Run(
            rollouts=len(self._lengths),
            tokens=sum(self._lengths),
            generation_seconds=self._generation_seconds,
            staleness=(self._updates_per_generation - 1) / 2,
            rewards=tuple(self._rewards),
            update_ends=tuple(self._ends),
        )


def run_trl(setting: TrlSetting, flags: Sequence[str]) -> Run:
    """Run in a separate process, like `sortedrl train`."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh_process:
        return fresh_process.submit(_train_with_trl, setting, flags).result()


def _train_with_trl(setting: TrlSetting, flags: Sequence[str]) -> Run:
    settings = parsed(TrainSettings, flags, "beside_trl")
    if settings.threads:
        torch.set_num_threads(settings.threads)
    resources = read_resources(settings, print)
    prompts = prompts_in_loading_order(resources, settings)
    recorder = TrlRecorder(resources, setting.updates_per_generation)
    weights = resources.model.parameters()
    optimizer = torch.optim.AdamW(weights, lr=settings.learning_rate, weight_decay=0.0, fused=True)
    warm_up = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda update: min(1.0, (update + 1) / max(1, settings.warmup_updates))
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=resources.model,
            reward_funcs=recorder.score,
            args=trl_config(setting, settings, folder),
            train_dataset=Dataset.from_list(
                [
                    {"prompt": prompt_text(prompt.payload, resources.tokenizer), "problem_id": prompt.id}
                    for prompt in prompts
                ]
            ),
            processing_class=resources.tokenizer,
            callbacks=[recorder],
            optimizers=(optimizer, warm_up),
        )
        trainer.remove_callback(PrinterCallback)
        _generate_once(resources, prompts[0])
        trainer.train()
    return recorder.result()


def prompts_in_loading_order(resources: Resources, settings: TrainSettings) -> list[Prompt]:
    """The prompts that our run loads, in that order: TRL must not shuffle them."""
    data = Prompts(resources.train, epochs=settings.epochs, seed=settings.seed)
    return data.take(
        _updates(settings) * settings.rollouts_per_update // settings.rollouts_per_prompt, within_epoch=False
    )


def _updates(settings: TrainSettings) -> int:
    assert settings.updates is not None  # flags_for sets it
    return settings.updates


def trl_config(setting: TrlSetting, settings: TrainSettings, folder: str) -> GRPOConfig:
    rollouts_per_generation = setting.updates_per_generation * settings.rollouts_per_update
    limit = settings.max_prompt_tokens + settings.max_response_tokens
    continuous_batching = {
        "max_requests_per_batch": rollouts_per_generation,
        "num_blocks": rollouts_per_generation * -(-limit // KV_PAGE_TOKENS),
        "max_batch_tokens": rollouts_per_generation + 4 * settings.max_prompt_tokens,
        "allow_block_sharing": False,
    }  # no seed: with one, every update would sample with the same noise
    return GRPOConfig(
        output_dir=folder,
        seed=settings.seed,
        max_steps=_updates(settings),
        per_device_train_batch_size=settings.rollouts_per_update // setting.micro_batches,
        gradient_accumulation_steps=setting.micro_batches,
        steps_per_generation=setting.micro_batches * setting.updates_per_generation,
        num_generations=settings.rollouts_per_prompt,
        max_completion_length=settings.max_response_tokens,
        shuffle_dataset=False,
        temperature=settings.temperature,
        use_transformers_continuous_batching=setting.continuous_batching,
        transformers_continuous_batching_config=continuous_batching if setting.continuous_batching else None,
        loss_type="dr_grpo",
        beta=settings.kl_coefficient,
        epsilon=settings.clip_low,
        epsilon_high=settings.clip_high,
        max_grad_norm=1.0,
        # TRL's defaults save memory and time on GPUs, but take more time here.
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def _generate_once(resources: Resources, prompt: Prompt) -> None:
    """First calls are slow; our run makes them in its initial evaluation."""
    tokens = torch.tensor([list(prompt.tokens)])
    generate: Callable[..., Any] = resources.model.generate  # type: ignore[assignment]
    generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=8, do_sample=True)


# --- side by side -----------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> Runs:
    runs: Runs = {}
    for repeat in range(args.repeats):
        contenders: dict[str, Callable[[], Run]] = {
            mode: partial(run_sortedrl, flags_for(args, mode, repeat)) for mode in MODES
        }
        for name, setting in TRL_SETTINGS.items():
            contenders[name] = partial(run_trl, setting, flags_for(args, "baseline", repeat))
        for name, contender in contenders.items():
            run = contender()
            runs.setdefault(name, []).append(run)
            print(
                f"  repeat {repeat + 1}/{args.repeats}  {name:<32} {run.rollouts_per_second:>8.2f} rollouts/s "
                f"in {run.seconds:,.1f} s",
                flush=True,
            )
    return runs


def fastest_trl_setting(runs: Runs) -> str:
    return max(TRL_SETTINGS, key=lambda name: statistics.median(run.rollouts_per_second for run in runs[name]))


@dataclass(frozen=True, slots=True)
class Spread:
    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        found = list(values)
        return cls(statistics.median(found), min(found), max(found))

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.lowest:.2f}, {self.highest:.2f}]"


def ratios(runs: Runs, name: str, other: str, rate: Callable[[Run], float]) -> Spread:
    """Repeat by repeat, so that a slowdown of the machine affects both."""
    return Spread.of(rate(a) / rate(b) for a, b in zip(runs[name], runs[other], strict=True))


def rate_table(runs: Runs, fastest: str) -> list[str]:
    columns = ("rollouts/s", "x fastest TRL", "tokens/s", "x fastest TRL", "length", "staleness", "generation")
    lines = [f"{'':<32}" + "".join(f"{column:>22}" for column in columns)]
    for name, found in runs.items():
        cells = (
            Spread.of(run.rollouts_per_second for run in found),
            ratios(runs, name, fastest, lambda run: run.rollouts_per_second),
            f"{statistics.median(run.tokens_per_second for run in found):,.0f}",
            ratios(runs, name, fastest, lambda run: run.tokens_per_second),
            f"{statistics.fmean(run.mean_length for run in found):.1f}",
            f"{statistics.fmean(run.staleness for run in found):.2f}",
            f"{statistics.median(run.generation_seconds / run.seconds for run in found):.0%}",
        )
        lines.append(f"{name:<32}" + "".join(f"{cell!s:>22}" for cell in cells))
    return lines


def reward_curve(found: Sequence[Run]) -> list[float]:
    return [statistics.fmean(at_update) for at_update in zip(*(run.rewards for run in found), strict=True)]


def reward_table(runs: Runs) -> list[str]:
    curves = [reward_curve(found) for found in runs.values()]
    ends = [statistics.fmean(run.seconds for run in found) for found in runs.values()]
    letters = [chr(ord("A") + place) for place in range(len(runs))]
    lines = [f"  {letter} = {name}" for letter, name in zip(letters, runs, strict=True)]
    lines.append(f"{'update':>8}" + "".join(f"{letter:>9}" for letter in letters))
    lines += [
        f"{update + 1:>8}" + "".join(f"{reward:>9.3f}" for reward in rewards)
        for update, rewards in enumerate(zip(*curves, strict=True))
    ]
    return [*lines, f"{'seconds':>8}" + "".join(f"{end:>9.1f}" for end in ends)]


def headline(runs: Runs, fastest: str, repeats: int) -> list[str]:
    lines = [f"fastest TRL setting: {fastest}"]
    for mode in MODES:
        ratio = ratios(runs, mode, fastest, lambda run: run.rollouts_per_second)
        tokens = ratios(runs, mode, fastest, lambda run: run.tokens_per_second)
        outcome = "reached" if ratio.median >= TARGET else "missed"
        lines.append(
            f"{mode} trains {ratio.median:.2f} x its rollouts per second ({ratio.lowest:.2f} to {ratio.highest:.2f} "
            f"over {repeats} repeats) and {tokens.median:.2f} x its tokens per second: target {TARGET:g} {outcome}"
        )
    return lines


def as_json(args: argparse.Namespace, runs: Runs, fastest: str) -> dict[str, Any]:
    return {
        "arguments": {**vars(args), "json": str(args.json)},
        "settings": parsed(TrainSettings, flags_for(args, MODES[0], 0), "beside_trl").model_dump(mode="json"),
        "trl_settings": {name: asdict(setting) for name, setting in TRL_SETTINGS.items()},
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "trl": trl.__version__,
            "python": platform.python_version(),
        },
        "fastest_trl_setting": fastest,
        "contenders": {
            name: {
                "rollouts_per_second": asdict(Spread.of(run.rollouts_per_second for run in found)),
                "rollouts_ratio": asdict(ratios(runs, name, fastest, lambda run: run.rollouts_per_second)),
                "tokens_ratio": asdict(ratios(runs, name, fastest, lambda run: run.tokens_per_second)),
                "reward_per_update": reward_curve(found),
                "runs": [asdict(run) for run in found],
            }
            for name, found in runs.items()
        },
    }


def parsed_arguments(
    arguments: Sequence[str] | None, description: str = "Compare sortedrl train with TRL's GRPOTrainer on CPU."
) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", default="built-in")
    parser.add_argument("--task", default="knights_and_knaves:small")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3, help="repeat r trains with seed r")
    parser.add_argument("--rollouts-per-update", type=int, default=64)
    parser.add_argument("--rollouts-per-prompt", type=int, default=8)
    parser.add_argument("--max-response-tokens", type=int, default=512)
    parser.add_argument(
        "--slots",
        type=int,
        default=32,
        help="responses that our engine decodes at once (vLLM max_num_seqs, SGLang max_running_requests)",
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write every run to this file")
    return parser.parse_args(arguments)


def check(args: argparse.Namespace) -> None:
    """Refuse settings that would make the two sides differ, or fail after minutes."""
    for setting in TRL_SETTINGS.values():
        _require_multiple(
            "updates", args.updates, setting.updates_per_generation, "updates that TRL generates for at once"
        )
        _require_multiple("rollouts_per_update", args.rollouts_per_update, setting.micro_batches, "TRL's micro-batches")
    _require_multiple("rollouts_per_update", args.rollouts_per_update, args.rollouts_per_prompt, "siblings of a prompt")
    if args.repeats < 1:
        raise ConfigurationError("repeats", args.repeats, "nothing would be measured", "Use 3.")
    for mode in MODES:
        parsed(TrainSettings, flags_for(args, mode, 0), "beside_trl").check()
    settings = parsed(TrainSettings, flags_for(args, MODES[0], 0), "beside_trl")
    resources = read_resources(settings, print)
    check_tokens_agree(resources.train, resources.tokenizer)
    needed = args.updates * args.rollouts_per_update // args.rollouts_per_prompt
    there_are = settings.epochs * len(resources.train)
    if needed > there_are:
        raise ConfigurationError(
            "updates", args.updates,
            f"they need {needed} prompts, but the task has {there_are} in {settings.epochs} epochs",
            f"Use at most {there_are * args.rollouts_per_prompt // args.rollouts_per_update}.",
        )  # fmt: skip


def _require_multiple(key: str, value: int, of: int, what: str) -> None:
    if value < 1 or value % of:
        raise ConfigurationError(
            key, value, f"not a multiple of {of}, the {what}", f"Use {max(1, -(-value // of)) * of}."
        )


def check_tokens_agree(prompts: Iterable[Prompt], tokenizer: PreTrainedTokenizerBase) -> None:
    """TRL gets prompts as text and adds special tokens if the tokenizer does."""
    for prompt in prompts:
        theirs = tokenizer(text=prompt_text(prompt.payload, tokenizer))["input_ids"]
        if list(theirs) != list(prompt.tokens):
            raise ConfigurationError(
                "model", tokenizer.name_or_path, f"TRL makes {len(theirs)} tokens of the prompt {prompt.id}, "
                f"sortedrl {len(prompt.tokens)}: the two would not train on the same prompts",
                "Use a model whose tokenizer adds no special tokens to a text of its chat template.",
            )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    args = parsed_arguments(arguments)
    try:
        check(args)
        print(
            f"{args.model}, {args.task}: {args.updates} updates of {args.rollouts_per_update} rollouts, "
            f"{args.rollouts_per_prompt} per prompt, up to {args.max_response_tokens} tokens, {args.threads} threads, "
            f"trl {trl.__version__}, transformers {transformers.__version__}, torch {torch.__version__}"
        )
        runs = measure(args)
    except ConfigurationError as error:
        print(f"beside_trl: {error}", file=sys.stderr)
        return 2
    except RunFailed as error:
        print(f"beside_trl: {error}", file=sys.stderr)
        return 1
    fastest = fastest_trl_setting(runs)
    print(
        "\nmedian [lowest, highest] over repeats; generation: fraction of the time",
        *rate_table(runs, fastest),
        sep="\n",
    )
    print(f"\nmean reward per update, over {args.repeats} repeats", *reward_table(runs), sep="\n")
    print("", *headline(runs, fastest, args.repeats), sep="\n")
    if args.json is not None:
        args.json.write_text(json.dumps(as_json(args, runs, fastest), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
