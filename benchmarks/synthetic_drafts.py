"""Drafts for models with random weights: heads of random weights, and vLLM's synthetic acceptance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

DRAFT_TOKENS = 3


def geometric(mean: float) -> float:
    """The chance that the next drafted token is accepted, for this mean of tokens per step."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**n for n in range(DRAFT_TOKENS + 1)) < mean:
            low = middle
        else:
            high = middle
    return low


def eagle3_head(model: Path) -> dict[str, Any]:
    """The drafter of the folder beside a model's, for `speculative_config`."""
    from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

    # Published heads have an output layer of their own, of fewer tokens. vLLM learns that from names of weights, and
    # dummy weights have none: then the head would use the larger one of the policy.
    Eagle3LlamaForCausalLM.has_own_lm_head = True
    return {"method": "eagle3", "model": f"{model}-eagle3", "num_speculative_tokens": DRAFT_TOKENS}


def accepting(mean: float) -> dict[str, Any]:
    """Options of `speculative_config` on a GPU, for this mean of tokens per step."""
    chance = geometric(mean)
    rates = [chance ** (n + 1) for n in range(DRAFT_TOKENS)]
    return {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
