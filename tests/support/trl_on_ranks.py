"""A few updates of SortedGRPOTrainer, as one of several ranks. Its argument is a JSON object (see `main`)."""

import copy
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from small_trl_runs import small_config
from sortedrl.core.engine import EngineDied
from sortedrl.core.schedule import Schedule
from sortedrl.engines.embedded.engine import EmbeddedEngine
from sortedrl.integrations.trl import SortedGRPOTrainer
from sortedrl.integrations.trl.engine import is_sharded, whole_weights
from sortedrl.models import BUILT_IN_MODEL

RANK = int(os.environ.get("RANK", "0"))
FOLDER = json.loads(sys.argv[1])["folder"]


class Faulty(EmbeddedEngine):
    """Fails as `fault` says when it has been polled 5 times."""

    fault = ""
    polls = 0

    def poll(self, until: float | None = None) -> Any:
        self.polls += 1
        if self.polls == 5:
            fail(self.fault)
        return super().poll(until)


def note_failure() -> None:
    Path(FOLDER, "failed-at").write_text(str(time.time()))


def fail(fault: str) -> None:
    if fault == "engine":
        note_failure()
        raise EngineDied("the server does not answer")
    if fault == "SIGKILL":
        note_failure()
        os.kill(os.getpid(), signal.SIGKILL)


def main(
    folder: str, *, engine: str, steps: int = 3, accumulation: int = 2, resume: str | None = None, fault: str = "",
    on_rank: int = 0, lora: bool = False, evaluate: bool = False, filter_groups: str | None = None,
) -> None:  # fmt: skip
    """`engine`: own (one per rank), shared (on rank 0), or a name. `fault` happens on `on_rank`. With a filter, every
    third prompt has equal rewards."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(BUILT_IN_MODEL)
    model = AutoModelForCausalLM.from_pretrained(BUILT_IN_MODEL, dtype=torch.float32)
    copied = copy.deepcopy(model)

    def made() -> EmbeddedEngine:
        engine = Faulty(copied, slots=8, eos_token_ids=[tokenizer.eos_token_id], max_length=128)
        engine.fault = fault if on_rank == RANK else ""
        return engine

    def reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        if fault == "reward" and on_rank == RANK:
            note_failure()
            raise KeyError("solution")
        with Path(folder, f"scored-{RANK}").open("a") as lines:
            lines.write("scored\n" * len(completions))
        if filter_groups:
            return [0.0 if int(prompts[0].split()[1]) % 3 == 1 else float(place) for place in range(len(completions))]
        return [float(sum(map(ord, str(completion))) % 7) for completion in completions]

    options: dict[str, Any] = {}
    if lora:
        from peft import LoraConfig

        options["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    prompts = Dataset.from_list([{"prompt": f"Puzzle {i} says that Ann is a knight."} for i in range(24)])
    trainer = SortedGRPOTrainer(
        model,
        reward,
        small_config(
            Path(folder), max_steps=steps, gradient_accumulation_steps=accumulation, num_generations=4,
            max_completion_length=24, learning_rate=1e-3, save_strategy="steps", save_steps=2, ddp_backend="gloo",
            gradient_checkpointing=False, eval_strategy="steps" if evaluate else "no", eval_steps=2,
            per_device_eval_batch_size=4, **{"vllm_max_model_length": 128} if engine == "vllm" else {},
        ),
        prompts,
        prompts.select(range(8)) if evaluate else None,
        tokenizer,
        schedule=Schedule(filter_groups=filter_groups),
        engine=made() if engine == "own" else made if engine == "shared" else engine,
        **options,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    weights = {name: weight.clone() for name, weight in whole_weights(trainer.model)}
    if RANK == 0:
        told = {
            "sharded": is_sharded(trainer.model),
            "history": [entry for entry in trainer.state.log_history if "loss" in entry or "eval_reward" in entry],
        }
        Path(folder, "told.json").write_text(json.dumps(told))
        torch.save(weights, Path(folder, "weights.pt"))
    if torch.distributed.is_initialized() and engine != "vllm":  # which still uses it when it shuts down
        torch.distributed.destroy_process_group()


main(**json.loads(sys.argv[1]))
