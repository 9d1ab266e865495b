"""A model's weights with its peft adapters merged in, for engines and files that have only the base model."""

import copy
from collections.abc import Iterator
from typing import Any

# Modules that only wrap another one: their names are not part of a weight's name.
WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_orig_mod"})


class WholeWeights:
    """How to get at weights: here they are whole. A subclass gathers those that are sharded over ranks."""

    def whole(self, tensor: Any) -> Any:
        return tensor.detach()


def merged_weights(module: Any, access: WholeWeights | None = None) -> Iterator[tuple[str, Any]]:
    """The weights under the names of the base model, in the order of its state dict; tied ones under both names.

    The model is not changed: each adapted layer is merged in a float32 copy, one at a time, and rounded once. Whole
    weights without an adapter are the model's own tensors, so use them before the next step.
    """
    return _weights(module, "", access or WholeWeights())


def _weights(module: Any, prefix: str, access: WholeWeights) -> Iterator[tuple[str, Any]]:
    if hasattr(type(module), "unmerge"):  # a layer with adapters
        yield from _merged(module, prefix, access)
        return
    if "modules_to_save" in module._modules:  # trained in full: a copy takes the place of the module
        for adapter in module.active_adapters:
            yield from _weights(module.modules_to_save[adapter], prefix, access)
        return
    for name, tensor in _own_tensors(module):
        yield f"{prefix}{name}", access.whole(tensor)
    for name, child in module.named_children():
        yield from _weights(child, prefix if name in WRAPPERS else f"{prefix}{name}.", access)


def _own_tensors(module: Any) -> Iterator[tuple[str, Any]]:
    """As in its state dict, without those of its children."""
    yield from ((name, weight) for name, weight in module._parameters.items() if weight is not None)
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer


def _merged(layer: Any, prefix: str, access: WholeWeights) -> Iterator[tuple[str, Any]]:
    own = _float32_copy(layer, access)
    own.merge()
    merged = own.get_base_layer().state_dict()
    for name, tensor in layer.get_base_layer().state_dict(keep_vars=True).items():
        yield f"{prefix}{name}", merged.pop(name).to(tensor.dtype)


def _float32_copy(module: Any, access: WholeWeights) -> Any:
    """Of this module and its children, with whole weights and without the hooks of a library that shards them."""
    import torch

    def copied(weight: Any) -> Any:
        return torch.nn.Parameter(access.whole(weight).to(torch.float32, copy=True), requires_grad=False)

    kind: Any = type(module)
    own = kind.__new__(kind)  # a class that FSDP2 made gives an instance of the plain class
    for name, value in vars(module).items():
        if name not in ("_parameters", "_modules"):
            own.__dict__[name] = copy.copy(value) if isinstance(value, list | set | dict) else value
        if name.endswith("_hooks"):
            own.__dict__[name] = type(value)()
    weights = {name: None if weight is None else copied(weight) for name, weight in module._parameters.items()}
    own.__dict__["_parameters"] = weights
    own.__dict__["_modules"] = {name: _float32_copy(child, access) for name, child in module.named_children()}
    return own
