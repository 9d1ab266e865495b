"""SortedGRPOTrainer on several ranks: real processes over gloo."""

from __future__ import annotations

import importlib.util

import pytest

pytest.importorskip("trl")
pytest.importorskip("peft")

import torchrun
from torchrun import SUPPORT

HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    "ways",
    [
        ("fsdp2", "fsdp1"),
        pytest.param(("zero3",), marks=pytest.mark.skipif(not HAS_DEEPSPEED, reason="DeepSpeed is not installed")),
    ],
)
def test_weights_gathered_from_shards_are_those_before_sharding(ways: tuple[str, ...]) -> None:
    told = torchrun.run(SUPPORT / "sharded_weights.py", *ways)
    for way in ways:
        assert told.count(f"equal: {way}") == 2 * 3  # on both ranks: whole model, LoRA, DoRA
