"""Models of a few thousand weights, and the embedded engine over them."""

from typing import Any

import torch
import transformers

from sortedrl.engines.embedded.engine import EmbeddedEngine

VOCABULARY = 61
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
}


def model_of(family: str, seed: int = 0, **changes: Any) -> Any:
    """Random weights, large enough for distributions that depend strongly on the context."""
    torch.manual_seed(seed)
    shape: dict[str, Any] = {**SHAPE, **changes}
    if family == "GPT2":
        shape = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 1024, **changes}
    config = getattr(transformers, f"{family}Config")(**shape)
    model = getattr(transformers, f"{family}ForCausalLM" if family != "GPT2" else "GPT2LMHeadModel")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    return model.eval()


def with_trained_adapters(model: Any) -> Any:
    """The peft model with random adapters: new ones change nothing."""
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(0.1 * torch.randn_like(weight))
    return model


def engine_of(model: Any, slots: int = 4, **changes: Any) -> EmbeddedEngine:
    options: dict[str, Any] = {"slots": slots, "eos_token_ids": (), "max_length": 700, **changes}
    return EmbeddedEngine(model, **options)
