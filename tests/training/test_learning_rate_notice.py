"""The default learning rate is that of the built-in model: a larger one gets a notice."""

from __future__ import annotations

import pytest

from sortedrl.training.build import learning_rate_notice
from sortedrl.training.settings import TrainSettings


def test_a_large_model_with_the_default_learning_rate_is_noted() -> None:
    notice = learning_rate_notice(TrainSettings(model="mine"), 7_615_616_512)
    assert notice is not None and "learning_rate = 0.0003" in notice and "7,616 million" in notice


@pytest.mark.parametrize(
    ("settings", "parameters"),
    [
        (TrainSettings(), 341_280),
        (TrainSettings(model="mine", learning_rate=1e-6), 7_615_616_512),
        (TrainSettings(model="mine", lora_rank=16), 7_615_616_512),
    ],
)
def test_otherwise_there_is_no_notice(settings: TrainSettings, parameters: int) -> None:
    assert learning_rate_notice(settings, parameters) is None
