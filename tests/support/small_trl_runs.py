"""SortedGRPOTrainer, or GRPOTrainer, on the built-in model and a few questions, for tests."""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PrinterCallback, ProgressCallback
from trl.trainer.grpo_config import GRPOConfig

from sortedrl.core.events import Event, Updated
from sortedrl.integrations.trl import SortedGRPOTrainer
from sortedrl.log.reading import read_events, without_rolled_back
from sortedrl.models import BUILT_IN_MODEL

GROUP = 4


@cache
def _model_as_loaded() -> Any:
    return AutoModelForCausalLM.from_pretrained(BUILT_IN_MODEL, dtype=torch.float32)


def model() -> Any:
    return copy.deepcopy(_model_as_loaded())  # loading takes longer


def questions(count: int = 24) -> Dataset:
    people = ("Ann", "Bob", "Cid", "Dan")
    rows = [{"prompt": f"{people[i % 4]} says {people[(i + 1) % 4]} is a knight.", "number": i} for i in range(count)]
    return Dataset.from_list(rows)


def small_config(folder: Path, **fields: Any) -> GRPOConfig:
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return GRPOConfig(**defaults | fields)


def config(folder: Path, **fields: Any) -> GRPOConfig:
    defaults: dict[str, Any] = {
        "max_steps": 3,
        "gradient_accumulation_steps": 2,
        "num_generations": GROUP,
        "max_completion_length": 24,
        "learning_rate": 1e-3,
    }
    return small_config(folder, **defaults | fields)


class Recorder:
    """A reward function that remembers what it was asked: how many a's, or the length, so that rewards vary."""

    __name__ = "varied"

    def __init__(self) -> None:
        self.rewards: list[list[float]] = []
        self.completions: list[list[Any]] = []
        self.numbers: list[list[int]] = []

    def __call__(self, prompts: Any, completions: Any, number: list[int], **columns: Any) -> list[float]:
        rewards = [float(sum(map(ord, str(completion))) % 7) for completion in completions]
        self.rewards.append(rewards)
        self.completions.append(list(completions))
        self.numbers.append(list(number))
        return rewards


def trainer_for(folder: Path, tokenizer: Any, kind: type = SortedGRPOTrainer, **arguments: Any) -> Any:
    arguments.setdefault("model", None)
    made = kind(
        **{
            "model": arguments.pop("model") or model(),
            "reward_funcs": arguments.pop("reward_funcs", None) or Recorder(),
            "args": arguments.pop("args", None) or config(folder),
            "train_dataset": arguments.pop("train_dataset", None) or questions(),
            "processing_class": tokenizer,
        }
        | arguments
    )
    made.remove_callback(PrinterCallback)
    made.remove_callback(ProgressCallback)
    return made


def events_in(folder: Path) -> list[Event]:
    return without_rolled_back(read_events(folder / "events.jsonl"))


def updates_in(folder: Path) -> list[Updated]:
    return [event for event in events_in(folder) if isinstance(event, Updated)]


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}


def losses_in(trainer: Any) -> list[dict[str, Any]]:
    """What was logged about each step."""
    return [entry for entry in trainer.state.log_history if "loss" in entry]
