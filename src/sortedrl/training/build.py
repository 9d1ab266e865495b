"""From settings to what PyTorch and the learner need, and what its errors mean for them."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from transformers import PreTrainedModel

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.errors import UserError, first_sentences
from sortedrl.learner.settings import LearnerSettings, learner_settings_from
from sortedrl.training.cpu_threads import threads_here
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
