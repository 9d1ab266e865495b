"""An engine in this process with a model of its own, by import path: `own_engine:on_cpu`."""

from __future__ import annotations

from transformers import AutoModelForCausalLM

from sortedrl.core.engine import EngineSpec
from sortedrl.engines.embedded.engine import EmbeddedEngine


def on_cpu(spec: EngineSpec) -> EmbeddedEngine:
    model = AutoModelForCausalLM.from_pretrained(spec.model, dtype="float32")
    return EmbeddedEngine(
        model, slots=spec.slots, eos_token_ids=spec.eos_token_ids, max_length=spec.max_length, tokenizer=spec.tokenizer
    )
