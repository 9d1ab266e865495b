"""verl's own configuration, composed as its main program composes it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import job

JOB = Path(job.__file__).parent
MODEL = JOB.parents[1] / "src" / "sortedrl" / "models" / "knights-tiny"


def compose(
    setting: str, *more: str, data: Path = Path("data"), out: Path = Path("out"), leave_out: Sequence[str] = (),
    **changed: Any,
) -> Any:  # fmt: skip
    """`leave_out`: how settings begin that the job has and this configuration cannot have."""
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
        overrides = [one for one in job.overrides(asked) if not one.lstrip("+").startswith(tuple(leave_out))]
        return hydra_compose("ppo_trainer", overrides=overrides)


ROLLOUT = "actor_rollout_ref.rollout"
SEPARATE = [  # servers with GPUs of their own
    "actor_rollout_ref.hybrid_engine=False",
    f"{ROLLOUT}.nnodes=1",
    f"{ROLLOUT}.n_gpus_per_node=2",
    f"{ROLLOUT}.checkpoint_engine.backend=file",
    f"{ROLLOUT}.checkpoint_engine.custom_backend_module=file_engine",
]
