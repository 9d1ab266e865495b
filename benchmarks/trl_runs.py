"""Shared by beside_trl.py and trl_integration.py: runs of TRL's GRPOTrainer and its subclasses, and what they measured.

Every trainer gets the same model, optimizer, warm-up, reward function and data order. Time is measured from the start
of the first step to the end of the last one.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from sortedrl.cli.parse import validated
from sortedrl.core.rollout import Prompt
from sortedrl.tasks.encode import prompt_text
from sortedrl.training.resources import Resources
from sortedrl.training.settings import TrainSettings

UPDATES_PER_COHORT = 4
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


def settings_for(args: argparse.Namespace, mode: str, seed: int) -> TrainSettings:
    """The settings of `sortedrl train`: the only source of settings, also for TRL."""
    return validated(
        TrainSettings,
        {
            "model": args.model,
            "task": args.task,
            "mode": mode,
            "algorithm": "grpo",
            "updates": args.updates,
            "rollouts_per_update": args.rollouts_per_update,
            "rollouts_per_prompt": args.rollouts_per_prompt,
            "prompts_per_cohort": UPDATES_PER_COHORT * args.rollouts_per_update // args.rollouts_per_prompt,
            "max_response_tokens": args.max_response_tokens,
            "slots": args.slots,
            "threads": args.threads,
            "seed": seed,
            "device": "cpu",
            "dtype": "float32",
            "eval_problems": 1,
            "checkpoint_every": 0,
            "save_rollouts": 0,
        },
    )


class TrlRecorder(TrainerCallback):
    """A reward function for TRL that also measures time: it sees every rollout and every update."""

    def __init__(self, resources: Resources, updates_per_generation: int) -> None:
        self._task = resources.task
        self._problems = {prompt.id: prompt.payload for prompt in resources.train}
        self._updates_per_generation = updates_per_generation
        self._began: float | None = None
        self._step_began = 0.0
        self._generation_seconds = 0.0
        self._calls: list[list[int]] = []  # lengths of the responses that were scored together
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
        self._calls.append([len(ids) for ids in completion_ids])
        # The updates of one generation get shuffled parts of it, so each has the same expected reward.
        self._rewards += [statistics.fmean(rewards)] * self._updates_per_generation
        self._generation_seconds += time.perf_counter() - self._step_began
        return [*rewards]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self._began is not None
        self._ends.append(time.perf_counter() - self._began)

    def result(self) -> Run:
        return Run(
            rollouts=sum(map(len, self._calls)),
            tokens=sum(map(sum, self._calls)),
            generation_seconds=self._generation_seconds,
            staleness=(self._updates_per_generation - 1) / 2,
            rewards=tuple(self._rewards),
            update_ends=tuple(self._ends),
        )

    def bubble_from_lengths(self) -> float:
        """Of GRPOTrainer, which decodes all responses of a call until the longest ends."""
        slot_steps = sum(len(lengths) * max(lengths) for lengths in self._calls)
        return 1 - sum(map(sum, self._calls)) / slot_steps


def train(
    trainer_class: type[GRPOTrainer],
    config: GRPOConfig,
    settings: TrainSettings,
    resources: Resources,
    prompts: Sequence[Prompt],
    **options: Any,
) -> TrlRecorder:
    """Train in this process; `options` go to the trainer."""
    recorder = TrlRecorder(resources, config.steps_per_generation // config.gradient_accumulation_steps)
    optimizer = torch.optim.AdamW(resources.model.parameters(), lr=settings.learning_rate, weight_decay=0.0, fused=True)
    warm_up = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda update: min(1.0, (update + 1) / max(1, settings.warmup_updates))
    )
    texts = [
        {"prompt": prompt_text(prompt.payload, resources.tokenizer), "problem_id": prompt.id} for prompt in prompts
    ]
    trainer = trainer_class(
        model=resources.model,
        reward_funcs=recorder.score,
        args=config,
        train_dataset=Dataset.from_list(texts),
        processing_class=resources.tokenizer,
        callbacks=[recorder],
        optimizers=(optimizer, warm_up),
        **options,
    )
    trainer.remove_callback(PrinterCallback)
    _generate_once(resources, prompts[0])
    trainer.train()
    return recorder


def updates_of(settings: TrainSettings) -> int:
    assert settings.updates is not None  # settings_for sets it
    return settings.updates


def trl_config(setting: TrlSetting, settings: TrainSettings, folder: str, **more: Any) -> GRPOConfig:
    """For a run on a CPU; `more` are further fields, or other values of the last three."""
    on_cpu = {"bf16": False, "use_cpu": True, "dataloader_pin_memory": False}
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
        max_steps=updates_of(settings),
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
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **(on_cpu | more),
    )


def _generate_once(resources: Resources, prompt: Prompt) -> None:
    """First calls are slow; our run makes them in its initial evaluation."""
    tokens = torch.tensor([list(prompt.tokens)], device=resources.model.device)
    generate: Callable[..., Any] = resources.model.generate  # type: ignore[assignment]
    generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=8, do_sample=True)


def reward_curve(found: Sequence[Run]) -> list[float]:
    return [statistics.fmean(at_update) for at_update in zip(*(run.rewards for run in found), strict=True)]


def reward_table(runs: Mapping[str, Sequence[Run]]) -> list[str]:
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


def parsed_arguments(arguments: Sequence[str] | None, description: str) -> argparse.Namespace:
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


def versions() -> dict[str, str]:
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "trl": trl.__version__,
        "python": platform.python_version(),
    }


def heading(args: argparse.Namespace) -> str:
    return (
        f"{args.model}, {args.task}: {args.updates} updates of {args.rollouts_per_update} rollouts, "
        f"{args.rollouts_per_prompt} per prompt, up to {args.max_response_tokens} tokens, {args.threads} threads, "
        f"trl {trl.__version__}, transformers {transformers.__version__}, torch {torch.__version__}"
    )
