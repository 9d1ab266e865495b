"""TRL's configuration for small runs on a CPU that print and save nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trl.trainer.grpo_config import GRPOConfig


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
