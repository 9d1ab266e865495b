"""Weight handles as CUDA would make them, for machines without it: the same types in the same places."""

import torch

from sortedrl.engines.servers.weight_handles import WeightHandles

GPU = "01234567-89ab-cdef-0123-456789abcdef"


def fabricated() -> WeightHandles:
    tensors = {"model.embed_tokens.weight": torch.zeros(4, 3), "model.norm.weight": torch.zeros(5)}
    handles = [
        (
            type(tensor),
            tensor.size(),
            tensor.stride(),
            0,  # offset
            torch.storage.TypedStorage,
            tensor.dtype,
            0,  # device
            b"handle",
            tensor.nbytes,
            0,
            False,
            b"reference counter",
            0,
            b"event",
            False,
        )
        for tensor in tensors.values()
    ]
    return WeightHandles(tensors, handles, gpu=GPU)
