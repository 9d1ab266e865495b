"""A streamed training run as a process of its own, to be killed: `python streamed_run.py FOLDER MODE [PART]`.

A real learner with a tiny model, a paced engine, a checkpoint after every update and at an interrupt. It continues from
the checkpoint in FOLDER. When the learner starts on part number PART, it prints `working` and waits for a signal. It
prints `done` with all trained ids.
"""

import json
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from paced import PacedEngine
from sortedrl.core import Controller, Prompts, Schedule, ScoreAtOnce
from sortedrl.core.rollout import Prompt, Rollout
from sortedrl.learner.learner import Learner
from sortedrl.learner.settings import LearnerSettings

PROMPTS, PER_PROMPT = 16, 2
SHAPE: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


class StreamedRun:
    def __init__(self, folder: Path, mode: str, waits_at: int | None) -> None:
        self.waits_at = waits_at
        self.parts = 0
        self.interrupted = threading.Event()
        self.checkpoint = folder / "checkpoint.pt"
        self.trained: list[int] = []
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(Qwen2Config(vocab_size=64, num_key_value_heads=2, **SHAPE))  # type: ignore[no-untyped-call]
        self.learner = Learner(model, LearnerSettings(algorithm="grpo", learning_rate=1e-3))
        engine = PacedEngine(slots=8, length_of=lambda request: 2 + 7 * (request.id % 5), step_seconds=0.01)
        prompts = [Prompt(str(i), [1, 2, 3]) for i in range(PROMPTS)]
        schedule = Schedule(
            mode=mode, rollouts_per_update=8, prompts_per_cohort=8, rollouts_per_prompt=PER_PROMPT, whole_groups=True
        )
        scorer = ScoreAtOnce(lambda rollout: float(rollout.id % 3))
        self.controller = Controller(engine, Prompts(prompts), scorer, schedule, stream_to=self.accumulate)
        if self.checkpoint.exists():
            saved = torch.load(self.checkpoint, weights_only=True)
            self.learner.load_state_dict(saved["learner"])
            engine.update_weights(None, saved["version"])
            self.controller.restore(json.loads(saved["controller"]))
            self.trained = saved["trained"]

    def accumulate(self, rollouts: Sequence[Rollout], version: int) -> None:
        self.parts += 1
        if self.parts == self.waits_at:
            print("working", flush=True)
            self.interrupted.wait()
        self.learner.accumulate(rollouts, version)

    def interrupt(self) -> None:
        self.controller.interrupt()
        self.interrupted.set()

    def train(self) -> None:
        for batch in self.controller:
            metrics = self.learner.step(batch)
            assert metrics["rollouts"] == len(batch)
            self.controller.publish()
            self.trained += [rollout.id for rollout in batch]
            self.save()
        self.save()
        if len(self.trained) == PROMPTS * PER_PROMPT:
            print("done", json.dumps({"trained": self.trained, "updates": self.learner.updates}), flush=True)

    def save(self) -> None:
        state = {
            "learner": self.learner.state_dict(),
            "controller": json.dumps(self.controller.state()),
            "version": self.controller.version,
            "trained": self.trained,
        }
        new = self.checkpoint.with_suffix(".new")
        torch.save(state, new)
        new.replace(self.checkpoint)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run = StreamedRun(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else None)
    signal.signal(signal.SIGINT, lambda *_: run.interrupt())
    run.train()
