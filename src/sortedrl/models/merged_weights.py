"""A model's weights with its peft adapters merged in, for engines and files that have only the base model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any


def merged_weights(module: Any) -> Iterator[tuple[str, Any]]:
    """The weights under the names of the base model, in the order of its state dict; tied ones under both names.

    The model is not changed: each adapted layer is merged in a float32 copy and rounded once. Weights without an
    adapter are the model's own tensors, so use them before the next step.
    """
    adapted = {name: layer for name, layer in module.named_modules() if hasattr(layer, "unmerge")}
    fully_trained = {name: layer for name, layer in module.named_modules() if hasattr(layer, "modules_to_save")}
    merged: dict[str, dict[str, Any]] = {}
    for name, tensor in module.state_dict().items():
        layer = next((layer for layer in (*adapted, *fully_trained) if name.startswith(f"{layer}.")), None)
        if layer is None:
            yield name, tensor
            continue
        part, _, leaf = name.removeprefix(f"{layer}.").partition(".")
        if part == "base_layer":
            if layer not in merged:
                merged = {layer: _merged(adapted[layer])}  # one layer at a time: a copy of the model may not fit
            yield f"{layer}.{leaf}", merged[layer][leaf].to(tensor.dtype)
        elif part == "modules_to_save":
            adapter, _, leaf = leaf.partition(".")
            if adapter in fully_trained[layer].active_adapters:
                yield f"{layer}.{leaf}", tensor


def _merged(layer: Any) -> dict[str, Any]:
    own = copy.deepcopy(layer).float()
    own.merge()
    weights: dict[str, Any] = own.get_base_layer().state_dict()
    return weights
