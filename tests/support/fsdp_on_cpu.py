"""Runs a script with FSDP2 on the CPU, which accelerate activates only on GPUs: `fsdp_on_cpu.py SCRIPT ARGUMENTS`.

With DeepSpeed in its environment, accelerate's own variables choose ZeRO instead (ACCELERATE_USE_DEEPSPEED).
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

from accelerate import DistributedType, FullyShardedDataParallelPlugin
from transformers import Trainer

_create = Trainer.create_accelerator_and_postprocess
_prepare = Trainer._prepare_for_training


def activate(trainer: Any) -> None:
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        state = trainer.accelerator.state
        state.distributed_type = DistributedType.FSDP
        state.fsdp_plugin = FullyShardedDataParallelPlugin()  # reads FSDP_*
        trainer.is_fsdp_enabled = True


def create(trainer: Any) -> None:
    _create(trainer)
    activate(trainer)


def prepare(trainer: Any, *arguments: Any) -> Any:
    activate(trainer)  # TrainingArguments has reset it
    return _prepare(trainer, *arguments)


Trainer.create_accelerator_and_postprocess = create
Trainer._prepare_for_training = prepare
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
