"""The trained model without what the learner adds to it, for the engine and for the export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sortedrl.engines.embedded.engine import copy_weights
from sortedrl.learner.learner import Learner
from sortedrl.models import model_named
from sortedrl.observe.console import Log
from sortedrl.training.build import copy_on
from sortedrl.training.run_dir import replace_folder
from sortedrl.training.settings import TrainSettings


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
