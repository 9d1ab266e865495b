"""Rollouts of several turns on the embedded engine: its log-probabilities are the learner's after each turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from sortedrl.engines.embedded.engine import EmbeddedEngine
from tiny_llama import tiny_model
from turns_on_engines import largest_gap_of_turns


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("mode", ["partial+elevator", "on-policy"])
def test_log_probabilities_are_the_learners_after_each_turn(mode: str, tmp_path: Path) -> None:
    model = tiny_model(tmp_path, tied=False)
    engine = EmbeddedEngine(model, slots=3, eos_token_ids=(2, 3, 4, 5), max_length=200)
    assert largest_gap_of_turns(engine, tiny_model(tmp_path, tied=False), mode) < 1e-4
