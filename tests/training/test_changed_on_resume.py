"""Settings that a resumed run may change: those with which it can continue where it could not before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import toy
from sortedrl.learner.learner import Learner
from sortedrl.training.build import OutOfMemory
from sortedrl.training.run_dir import RunFolder
from sortedrl.training.settings import TrainSettings
from sortedrl.training.trainer import train

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_run_out_of_memory_can_be_resumed_with_smaller_micro_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ..."
        )

    small: dict[str, Any] = {"task": "toy:SayA", "reward_workers": 0, "scoring": "at-once", "slots": 8, "updates": 1}
    small |= {"rollouts_per_update": 8, "prompts_per_cohort": 8, "rollouts_per_prompt": 4, "max_response_tokens": 20}
    small |= {"model": str(toy.make_model(tmp_path)), "max_prompt_tokens": 16, "eval_problems": 4, "threads": 1}
    run = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(Learner, "step", fail)
        with pytest.raises(OutOfMemory) as stopped:
            train(TrainSettings(**small, out=run), print)
    message = str(stopped.value)
    assert "(CUDA out of memory. Tried to allocate 2.00 GiB)" in message
    assert "Lower tokens_per_micro_batch = 16384 or set gradient_checkpointing = true" in message
    assert f"sortedrl train --resume {run} --config FILE" in message
    memory = {"tokens_per_micro_batch": 32, "gradient_checkpointing": True, "recompute_above_tokens": 16}
    summary = train(TrainSettings(**small, **memory, out=run, resume=run), print)
    assert summary["updates"] == 1


def test_a_run_may_be_resumed_with_other_servers(tmp_path: Path) -> None:
    """A cluster gives a restarted server another address. The number of slots stays."""
    folder = RunFolder(tmp_path / "run")
    before: dict[str, Any] = {"engine": "vllm-server", "engine_urls": ("http://a:8000", "http://b:8000")}
    folder.create(TrainSettings(**before), print)
    folder.close()
    again = RunFolder(folder.path)
    again.open_to_resume(TrainSettings(**before | {"engine_urls": ("http://c:8001",), "resume": folder.path}), print)
    again.close()
    assert json.loads((folder.path / "config.json").read_text())["engine_urls"] == ["http://c:8001"]
