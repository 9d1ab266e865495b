"""From settings to what PyTorch and the learner need, and what goes wrong there: too little memory, gradients that are
not finite."""

import copy
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.errors import UserError, first_sentences
from sortedrl.engines.embedded.engine import copy_weights
from sortedrl.learner.learner import Learner
from sortedrl.learner.settings import LearnerSettings, learner_settings_from
from sortedrl.models import model_named
from sortedrl.observe.console import Log
from sortedrl.training.cpu_threads import threads_here
from sortedrl.training.run_dir import replace_folder
from sortedrl.training.settings import ModelSettings, TrainSettings

LARGE_MODEL = 50_000_000  # parameters


class OutOfMemory(UserError, RuntimeError):
    """The GPU has too little memory for the learner; the text has the fix."""


def device_of(settings: ModelSettings) -> str:
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError("device", "cuda", "PyTorch finds no CUDA device", "Leave it out.")
    return settings.device if settings.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def dtype_of(settings: ModelSettings) -> torch.dtype:
    if settings.dtype == "auto":
        return torch.bfloat16 if device_of(settings) == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[settings.dtype]


def learner_settings_of(settings: TrainSettings) -> LearnerSettings:
    return learner_settings_from(
        settings,
        settings.mode,
        normalizer_tokens=settings.rollouts_per_update * settings.max_response_tokens,
        temperature=settings.temperature,
        bf16=dtype_of(settings).itemsize == 2,
    )


def copy_on(device: torch.device, model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the model on a device. Where the model is, there need not be room for two."""
    own = model.device
    copied = copy.deepcopy(model.to(device))
    model.to(own)
    return copied


def learning_rate_notice(settings: TrainSettings, parameters: int) -> str | None:
    """A notice if a large model is about to be trained with the default learning rate, which is a tiny model's."""
    default = TrainSettings().learning_rate
    if settings.lora_rank or settings.learning_rate != default or parameters < LARGE_MODEL:
        return None
    return (
        f"learning_rate = {default:g} (the default) suits the built-in model of 0.3 million parameters; "
        f"this one has {parameters / 1e6:,.0f} million. Set --learning-rate, for example 1e-6."
    )


def out_of_memory(error: torch.OutOfMemoryError, settings: TrainSettings, folder: Path) -> OutOfMemory:
    """In an update."""
    checkpointing = "" if settings.gradient_checkpointing else " or set gradient_checkpointing = true"
    return OutOfMemory(
        f"the learner ran out of memory ({first_sentences(error)}). Lower tokens_per_micro_batch = "
        f"{settings.tokens_per_micro_batch}{checkpointing} in a TOML file, then continue with "
        f"sortedrl train --resume {folder} --config FILE"
    )


def out_of_memory_at_start(error: torch.OutOfMemoryError, settings: TrainSettings) -> OutOfMemory:
    """Before the first update: the weights and the optimizer's state do not fit, even without activations."""
    engine = " Or lower gpu_memory_utilization in engine_options." if settings.engine == "vllm" else ""
    return OutOfMemory(
        f"the model and its optimizer do not fit ({first_sentences(error)}): in bfloat16, training takes 12 bytes per "
        f"weight. Use a smaller model, or train adapters with lora_rank = 16.{engine}"
    )


def set_threads(settings: ModelSettings, model: PreTrainedModel) -> None:
    """As set; otherwise, on the CPU, chosen by model size and machine load."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    elif device_of(settings) == "cpu":
        torch.set_num_threads(threads_here(model.num_parameters()))


class PlainModel:
    """The learner's own module, or a copy of it: with LoRA, and where an embedded engine would decode with layers that
    are recomputed. Make it before the learner changes the module."""

    def __init__(self, settings: TrainSettings, trained: PreTrainedModel) -> None:
        embedded = settings.engine == "embedded"
        self._settings = settings
        self._is_copy = settings.lora_rank > 0 or (embedded and settings.gradient_checkpointing)
        self._decodes_with_learner = embedded and not self._is_copy
        self.module = trained
        if self._is_copy:  # another engine has weights of its own: the copy is for the export, off the GPU
            self.module = copy_on(trained.device if embedded else torch.device("cpu"), trained)

    def weights_for_engine(self, learner: Learner) -> Any:
        """None if the engine decodes with the learner's own module."""
        return None if self._decodes_with_learner else learner.weights()

    def export(self, learner: Learner, tokenizer: PreTrainedTokenizerBase, run: Path, log: Log) -> None:
        """The trained model in Hugging Face format. LoRA is merged, by way of the copy; the adapter is beside it."""
        if self._is_copy:
            device = self.module.device  # one weight at a time: merged ones may not fit beside the others
            copy_weights(self.module, {name: weight.to(device) for name, weight in learner.weights()})

        def save_model(folder: Path) -> None:
            self.module.save_pretrained(folder)
            tokenizer.save_pretrained(folder)

        replace_folder(run / "model", save_model)
        if self._settings.lora_rank:
            base = model_named(self._settings.model, self._settings.task)
            replace_folder(run / "adapter", lambda folder: learner.save_adapter(folder, base))
            log(f"LoRA adapter in {run / 'adapter'} (peft format), merged weights in {run / 'model'}")


MOST_IN_A_ROW = 8  # updates without a step: after that, no rollout is to blame


class NotFinite(UserError, RuntimeError):
    """The gradients of many updates in a row were not finite."""


class SkippedSteps:
    """Logs an update with a skipped step, the first one in a row; raises `NotFinite` after `MOST_IN_A_ROW` updates of
    which no step was made."""

    def __init__(self, steps_per_update: int, learning_rate: float, log: Callable[[str], None]) -> None:
        self._steps_per_update = steps_per_update
        self._fix = f"Start again with a lower learning_rate than {learning_rate:g}; in bfloat16 try --dtype float32"
        self._log = log
        self._in_a_row = 0
        self._was_skipped = False

    def check(self, update: int, stats: Mapping[str, float]) -> None:
        """`stats` are the learner's metrics of this update; without a trained rollout they have no `skipped_steps`."""
        skipped = stats.get("skipped_steps", math.nan)
        if math.isnan(skipped):
            return
        if skipped and not self._was_skipped:
            self._log(
                f"update {update}: {skipped:g} of {self._steps_per_update} optimizer steps skipped, because the "
                "gradient is not finite"
            )
        self._was_skipped = skipped > 0
        self._in_a_row = self._in_a_row + 1 if skipped >= self._steps_per_update else 0
        if self._in_a_row >= MOST_IN_A_ROW:
            raise NotFinite(
                f"the gradients of the last {self._in_a_row} updates, up to {update}, were not finite, so their steps "
                f"were skipped. {self._fix}"
            )
