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
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from trl.trainer.grpo_trainer import GRPOTrainer
from trl_runs import (
    TRL_SETTINGS,
    Run,
    Spread,
    TrlSetting,
    heading,
    parsed_arguments,
    reward_curve,
    reward_table,
    settings_for,
    train,
    trl_config,
    updates_of,
    versions,
)

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.events import HarvestBegan, Published, Updated
from sortedrl.core.prompts import Prompts
from sortedrl.core.rollout import Prompt
from sortedrl.log.reading import read_events
from sortedrl.studies.compare.study_folder import toml_of
from sortedrl.tasks.encode import prompt_text
from sortedrl.training.resources import Resources, read_resources
from sortedrl.training.settings import TrainSettings

TARGET = 2.0  # trained rollouts per second, as a multiple of TRL's
MODES = ("partial+elevator", "on-policy+planned", "baseline")


class RunFailed(Exception):
    """A contender did not complete its training."""


Runs = dict[str, list[Run]]  # by contender, one per repeat


# --- ours -------------------------------------------------------------------------------------------------------


def run_sortedrl(settings: TrainSettings, limit: float | None = None) -> Run:
    """In a new process. `limit`: seconds after which the run has failed."""
    with tempfile.TemporaryDirectory() as folder:
        out, config = Path(folder) / "run", Path(folder) / "settings.toml"
        config.write_text(toml_of(settings.model_dump(mode="json", exclude_unset=True)), encoding="utf-8")
        command = [sys.executable, "-m", "sortedrl", "train", "--config", str(config), "--out", str(out), "--json"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
        except subprocess.TimeoutExpired as late:
            raise RunFailed(f"{' '.join(command)} took more than {late.timeout:g} s") from None
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


def run_trl(setting: TrlSetting, settings: TrainSettings) -> Run:
    """Run in a separate process, like `sortedrl train`."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh_process:
        return fresh_process.submit(_train_with_trl, setting, settings).result()


def _train_with_trl(setting: TrlSetting, settings: TrainSettings) -> Run:
    if settings.threads:
        torch.set_num_threads(settings.threads)
    resources = read_resources(settings, print)
    prompts = prompts_in_loading_order(resources, settings)
    with tempfile.TemporaryDirectory() as folder:
        return train(GRPOTrainer, trl_config(setting, settings, folder), settings, resources, prompts).result()


def prompts_in_loading_order(resources: Resources, settings: TrainSettings) -> list[Prompt]:
    """The prompts that our run loads, in that order: TRL must not shuffle them."""
    data = Prompts(resources.train, epochs=settings.epochs, seed=settings.seed)
    return data.take(
        updates_of(settings) * settings.rollouts_per_update // settings.rollouts_per_prompt, within_epoch=False
    )


# --- side by side -----------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> Runs:
    runs: Runs = {}
    for repeat in range(args.repeats):
        contenders: dict[str, Callable[[], Run]] = {
            mode: partial(run_sortedrl, settings_for(args, mode, repeat)) for mode in MODES
        }
        for name, setting in TRL_SETTINGS.items():
            contenders[name] = partial(run_trl, setting, settings_for(args, "baseline", repeat))
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


def headline(runs: Runs, fastest: str, repeats: int) -> list[str]:
    lines = [f"fastest TRL setting: {fastest}"]
    for mode in MODES:
        ratio = ratios(runs, mode, fastest, lambda run: run.rollouts_per_second)
        tokens = ratios(runs, mode, fastest, lambda run: run.tokens_per_second)
        outcome = "reached" if ratio.median >= TARGET else "missed"
        lines.append(
            f"{mode} trains {ratio.median:.2f}x its rollouts per second ({ratio.lowest:.2f} to {ratio.highest:.2f} "
            f"over {repeats} repeats) and {tokens.median:.2f}x its tokens per second: target {TARGET:g} {outcome}"
        )
    return lines


def as_json(args: argparse.Namespace, runs: Runs, fastest: str) -> dict[str, Any]:
    return {
        "arguments": {**vars(args), "json": str(args.json)},
        "settings": settings_for(args, MODES[0], 0).model_dump(mode="json"),
        "trl_settings": {name: asdict(setting) for name, setting in TRL_SETTINGS.items()},
        "versions": versions(),
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


def check(args: argparse.Namespace) -> None:
    """Refuse settings that would make the two sides differ, or fail after minutes."""
    for setting in TRL_SETTINGS.values():
        _require_multiple(
            "updates", args.updates, setting.updates_per_generation, "updates that TRL generates for at once"
        )
        _require_multiple("rollouts_per_update", args.rollouts_per_update, setting.micro_batches, "TRL's micro-batches")
    _require_multiple("rollouts_per_update", args.rollouts_per_update, args.rollouts_per_prompt, "rollouts per prompt")
    if args.repeats < 1:
        raise ConfigurationError("repeats", args.repeats, "nothing would be measured", "Use 3.")
    settings = {mode: settings_for(args, mode, 0) for mode in MODES}[MODES[0]]
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
    args = parsed_arguments(arguments, "Compare sortedrl train with TRL's GRPOTrainer on CPU.")
    try:
        check(args)
        print(heading(args))
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
