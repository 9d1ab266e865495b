"""verl's own configuration, composed as its main program composes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import job

JOB = Path(job.__file__).parent
MODEL = JOB.parents[1] / "src" / "sortedrl" / "models" / "knights-tiny"


def compose(setting: str, *more: str, data: Path = Path("data"), out: Path = Path("out"), **changed: Any) -> Any:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module

    folders = ["--model", str(MODEL), "--data", str(data), "--out", str(out)]
    asked = job.command_line().parse_args([setting, *folders])
    small = {
        "steps": 4, "prompts": 4, "siblings": 2, "slots": 4, "prompt_tokens": 64, "response_tokens": 128, "workers": 1,
        "cpu": True, "override": list(more),
    }  # fmt: skip
    vars(asked).update(small | changed)
    with initialize_config_module("verl.trainer.config", version_base=None):
        return hydra_compose("ppo_trainer", overrides=job.overrides(asked))
