"""The engine of docs/engine_authors.md keeps the contract of all engines."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from engine_contract import EngineContract
from sortedrl.core import Engine
from sortedrl.models import BUILT_IN_MODEL

EXAMPLE = Path(__file__).parents[2] / "examples" / "hugging_face_engine.py"


class TestHuggingFaceEngine(EngineContract):
    deterministic = False  # `generate` has one random state for all requests

    def make_engine(self, slots: int) -> Engine:
        transformers = pytest.importorskip("transformers")
        spec = importlib.util.spec_from_file_location("hugging_face_engine", EXAMPLE)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        model = transformers.AutoModelForCausalLM.from_pretrained(BUILT_IN_MODEL)
        engine: Engine = module.HuggingFaceEngine(model, slots, model.config.eos_token_id, tokens_per_round=4)
        return engine
