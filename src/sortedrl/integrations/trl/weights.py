"""The weights of a model that accelerate has sharded over ranks, gathered tensor by tensor.

FSDP2 and ZeRO-3 are recognized by the model itself. ZeRO-1 and ZeRO-2 leave the weights whole. Gathering is a
collective: all ranks iterate to the end together. A rank never holds more than one gathered tensor, or adapted layer,
beyond those that the reader of the iterator keeps.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sortedrl.models.merged_weights import WholeWeights, merged_weights

_PEFT_PREFIX = "base_model.model."


def is_sharded(model: Any) -> bool:
    """Whether reading the weights is a collective."""
    return any(isinstance(weight, DTensor) or _is_zero3(weight) for weight in model.parameters())


def whole_weights(model: Any, *, on_host: bool = False) -> Iterator[tuple[str, Tensor]]:
    """As `merged_weights`, from the model of a trainer: wrapped or not. Gathered ones are tensors of their own."""
    access = _Gathered(on_host) if is_sharded(model) else None
    for name, weight in merged_weights(model, access):
        yield name.removeprefix(_PEFT_PREFIX), weight


class _Gathered(WholeWeights):
    def __init__(self, on_host: bool) -> None:
        self._on_host = on_host

    @torch.no_grad()
    def whole(self, tensor: Any) -> Any:
        gathered = self._gathered(tensor.detach() if not _is_zero3(tensor) else tensor)
        return gathered.cpu() if self._on_host else gathered

    def _gathered(self, tensor: Any) -> Any:
        if isinstance(tensor, DTensor):
            on_device: Any = tensor.to(tensor.device_mesh.device_type)  # from the CPU if it is offloaded
            return on_device.full_tensor()
        if _is_zero3(tensor):
            import deepspeed

            with deepspeed.zero.GatheredParameters([tensor]):
                return tensor.detach().clone()
        return tensor


def _is_zero3(weight: Any) -> bool:
    return hasattr(weight, "ds_id")
