"""Runs a script with FSDP2 or ZeRO on the CPU, which accelerate activates only on GPUs.

`fsdp_on_cpu.py SCRIPT ARGUMENTS`, with the variables that `accelerate launch` sets: ACCELERATE_USE_FSDP, FSDP_*,
ACCELERATE_USE_DEEPSPEED, ACCELERATE_DEEPSPEED_*.
"""

import os
import runpy
import sys
from typing import Any

from accelerate import DeepSpeedPlugin, DistributedType, FullyShardedDataParallelPlugin, PartialState
from transformers import Trainer
from transformers.integrations.deepspeed import propagate_args_to_deepspeed

_create = Trainer.create_accelerator_and_postprocess


def create(trainer: Any) -> None:
    _create(trainer)
    state = trainer.accelerator.state
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        activate(state, DistributedType.FSDP)
        state.fsdp_plugin = FullyShardedDataParallelPlugin()
        trainer.is_fsdp_enabled = True
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        activate(state, DistributedType.DEEPSPEED)
        state.deepspeed_plugins = {"default": DeepSpeedPlugin()}
        state.deepspeed_plugins["default"].select(_from_accelerator_state=True)
        trainer.is_deepspeed_enabled = True
        propagate_args_to_deepspeed(trainer.accelerator, trainer.args)


def activate(state: Any, kind: DistributedType) -> None:
    state.distributed_type = kind
    PartialState._shared_state["distributed_type"] = kind  # copied into the state at times


Trainer.create_accelerator_and_postprocess = create
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
