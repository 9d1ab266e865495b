"""SortedGRPOTrainer, or GRPOTrainer, on the built-in model and a few questions, for tests."""

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PrinterCallback, ProgressCallback
from trl.trainer.grpo_config import GRPOConfig

from sortedrl.core.engine import RequestFailed
from sortedrl.core.events import Event, Updated
from sortedrl.engines.embedded.engine import EmbeddedEngine
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
    """A reward function that remembers its rewards, which vary."""

    __name__ = "varied"

    def __init__(self) -> None:
        self.rewards: list[list[float]] = []

    def __call__(self, completions: Any, **columns: Any) -> list[float]:
        self.rewards.append([float(sum(map(ord, str(completion))) % 7) for completion in completions])
        return self.rewards[-1]


def engine_for(network: Any, tokenizer: Any, kind: type = EmbeddedEngine) -> Any:
    return kind(network, slots=8, eos_token_ids=[tokenizer.eos_token_id], max_length=128)


def on_own_engine(tokenizer: Any, kind: type) -> dict[str, Any]:
    """Arguments of a trainer: an engine that decodes with the trainer's model."""
    network = model()
    return {"model": network, "engine": engine_for(network, tokenizer, kind)}


def losing(lost: int | None) -> type:
    """An engine that loses the requests of this rollout, or of all."""

    class Losing(EmbeddedEngine):
        def submit(self, requests: Any) -> None:
            found = [request for request in requests if lost in (None, request.id)]
            super().submit([request for request in requests if request not in found])
            self._unreported += [RequestFailed(request.id, self.now(), "out of memory") for request in found]

    return Losing


def trainer_for(folder: Path, tokenizer: Any, kind: type = SortedGRPOTrainer, **arguments: Any) -> Any:
    defaults = {"model": model, "reward_funcs": Recorder, "args": lambda: config(folder), "train_dataset": questions}
    missing = {name: make() for name, make in defaults.items() if name not in arguments}
    made = kind(**arguments | missing, processing_class=tokenizer)
    made.remove_callback(PrinterCallback)
    made.remove_callback(ProgressCallback)
    return made


def events_in(folder: Path) -> list[Event]:
    return without_rolled_back(read_events(folder / "events.jsonl"))


def updates_in(folder: Path) -> list[Updated]:
    return [event for event in events_in(folder) if isinstance(event, Updated)]


def check_resumed(make: Callable[[], Any], folder: Path, checkpoint: str, whole: Any) -> Any:
    """A new trainer goes on from the checkpoint: its updates and weights are those of `whole`, which ran through."""
    told = [event._replace(at=0.0) for event in updates_in(folder)]
    resumed = make()
    resumed.train(resume_from_checkpoint=str(folder / checkpoint))
    assert [event._replace(at=0.0) for event in updates_in(folder)] == told  # the second telling counts
    expected = weights_of(whole)
    for name, value in weights_of(resumed).items():
        assert torch.equal(value, expected[name]), name
    return resumed


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}


def losses_in(trainer: Any) -> list[dict[str, Any]]:
    """What was logged about each step."""
    return [entry for entry in trainer.state.log_history if "loss" in entry]
