"""Rollouts of several turns on vLLM: its log-probabilities are the learner's after each turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sortedrl.engines.vllm import VllmEngine
from tiny_llama import ON_GPU, tiny_model
from turns_on_engines import largest_gap_of_turns

BASE: dict[str, Any] = {"enforce_eager": True, "dtype": "float32", "seed": 0} | (
    {"gpu_memory_utilization": 0.1} if ON_GPU else {}
)


def test_log_probabilities_are_the_learners_after_each_turn(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, tied=False)
    engine = VllmEngine(str(tmp_path), slots=3, eos_token_ids=[2, 3, 4, 5], max_length=256, **BASE)
    try:
        assert largest_gap_of_turns(engine, model) < (2e-2 if ON_GPU else 1e-3)
    finally:
        engine.close()
