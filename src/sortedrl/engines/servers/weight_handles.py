"""Passes weights to a server on the learner's GPU by CUDA IPC: the server opens the learner's tensors and copies them.

No file is written, and the weights never leave the GPU. A handle is valid only as long as its tensor exists, so
`WeightHandles` keeps every exported tensor (a merged LoRA weight is a temporary one) until the weight update has
finished. The server unpickles the handles: bind it to loopback.
"""

import base64
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_DEVICE = 6  # place of the device in the arguments of rebuild_cuda_tensor


@dataclass(frozen=True)
class _Rebuilt:
    """Unpickles as a tensor."""

    arguments: tuple[Any, ...]

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        return rebuild_cuda_tensor, self.arguments


@dataclass(frozen=True, slots=True)
class WeightHandles:
    """One handle per weight; `tensors` holds the exported memory, in the same order."""

    tensors: Mapping[str, Any]
    handles: list[tuple[Any, ...]]  # arguments of torch's rebuild_cuda_tensor
    gpu: str  # UUID

    def for_vllm(self) -> dict[str, Any]:
        """As vLLM's IPC backend reads them over HTTP: handles by GPU, pickled, in base64."""
        return described(self.tensors) | {
            "ipc_handles_pickled": _pickled([{self.gpu: handle} for handle in self.handles])
        }

    def for_sglang(self) -> str:
        """As SGLang reads them: a list of names and tensors, each rebuilt on the GPU of this UUID."""
        named = [
            (name, _Rebuilt((*handle[:_DEVICE], self.gpu, *handle[_DEVICE + 1 :])))
            for name, handle in zip(self.tensors, self.handles, strict=True)
        ]
        return _pickled(named)


def described(weights: Mapping[str, Any]) -> dict[str, Any]:
    """As vLLM's weight transfer expects it: one entry per weight in each list."""
    return {
        "names": list(weights),
        "dtype_names": [str(tensor.dtype).rpartition(".")[2] for tensor in weights.values()],  # such as bfloat16
        "shapes": [list(tensor.shape) for tensor in weights.values()],
    }


def _pickled(value: object) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def are_on_one_gpu(weights: Mapping[str, Any]) -> bool:
    devices = {getattr(tensor, "device", None) for tensor in weights.values()}
    return len(devices) == 1 and getattr(devices.pop(), "type", None) == "cuda"


@contextmanager
def exported(weights: Mapping[str, Any]) -> Iterator[WeightHandles]:
    """Handles of these weights, which must be on one GPU. The server must be done with them when the block ends."""
    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    tensors = {name: _in_own_storage(tensor.detach().contiguous()) for name, tensor in weights.items()}
    device = next(iter(tensors.values())).device
    torch.cuda.synchronize(device)  # so there is no event to wait for: torch never closes one that a server opens
    handles = [(*reduce_tensor(tensor)[1][:-1], False) for tensor in tensors.values()]  # type: ignore[no-untyped-call]
    try:
        yield WeightHandles(tensors, handles, gpu=str(torch.cuda.get_device_properties(device).uuid))
    finally:
        tensors.clear()
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


def _in_own_storage(tensor: Any) -> Any:
    """The same memory in another storage. Torch marks the storage that it exports until that is freed: a parameter's
    would gain one mark per weight update, and the process would end with a warning about tensors in use elsewhere."""
    import torch

    whole = tensor.new_empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    storage = torch.from_dlpack(whole).untyped_storage()  # type: ignore[attr-defined]
    return tensor.new_empty(0).set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
