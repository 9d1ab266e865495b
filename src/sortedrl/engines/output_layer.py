"""A tied output layer under its own name: neither vLLM nor SGLang updates it otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

OUTPUT_LAYER = "lm_head.weight"


def with_output_layer(
    weights: Mapping[str, Any] | Iterable[tuple[str, Any]], *, is_tied: bool = True
) -> Iterator[tuple[str, Any]]:
    """All weights by name, and the embedding as the output layer if that is not among them."""
    is_named = False
    embedding = None
    for name, weight in weights.items() if isinstance(weights, Mapping) else weights:
        is_named = is_named or name == OUTPUT_LAYER
        if name.endswith("embed_tokens.weight"):
            embedding = weight
        yield name, weight
    if is_tied and not is_named and embedding is not None:
        yield OUTPUT_LAYER, embedding
