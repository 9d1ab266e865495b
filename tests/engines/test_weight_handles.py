"""Weights by CUDA IPC, as far as a machine without CUDA shows: which weights qualify, and what servers get to read.

In tests/with_vllm and tests/with_sglang the servers' own code reads it; benchmarks/weight_transfer.py needs a GPU.
"""

import base64
import pickle

import pytest
import torch
from torch.multiprocessing import reductions

from sortedrl.engines.servers.weight_handles import WeightHandles, _in_own_storage, are_on_one_gpu, exported
from sortedrl.engines.shared import with_output_layer
from weight_handles import fabricated


def test_weights_on_a_cpu_or_on_two_devices_go_through_a_file() -> None:
    assert not are_on_one_gpu({})
    assert not are_on_one_gpu({"a": torch.zeros(2)})
    assert not are_on_one_gpu({"a": torch.zeros(2), "b": torch.zeros(2, device="meta")})


def test_what_is_exported_is_the_same_memory_in_another_storage() -> None:
    """Torch marks a storage that it exports: a parameter's would keep the mark until the process ends."""
    base = torch.arange(24.0).view(4, 6)
    for tensor in (base, base[1:3, 2:], base.T, torch.ones((), dtype=torch.bfloat16)):
        own = _in_own_storage(tensor)
        assert torch.equal(own, tensor) and own.data_ptr() == tensor.data_ptr() and own.stride() == tensor.stride()
        assert own.untyped_storage()._cdata != tensor.untyped_storage()._cdata


def test_a_tied_output_layer_is_exported_under_its_own_name() -> None:
    embedding = torch.zeros(2)
    assert dict(with_output_layer(iter([("model.embed_tokens.weight", embedding)])))["lm_head.weight"] is embedding
    own = torch.ones(2)
    both = {"model.embed_tokens.weight": embedding, "lm_head.weight": own}
    assert dict(with_output_layer(both))["lm_head.weight"] is own


def test_vllm_gets_every_handle_under_the_gpu() -> None:
    weights = fabricated()
    read = pickle.loads(base64.b64decode(weights.for_vllm()["ipc_handles_pickled"]))
    assert read == [{weights.gpu: handle} for handle in weights.handles]


def test_sglang_gets_tensors_that_are_rebuilt_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = fabricated()
    payload = weights.for_sglang()  # before the patch: it refers to torch's function by name
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", lambda *arguments: calls.append(arguments) or len(calls))
    assert pickle.loads(base64.b64decode(payload)) == [(name, i + 1) for i, name in enumerate(weights.tensors)]
    for call, handle in zip(calls, weights.handles, strict=True):
        assert call[6] == weights.gpu and call[:6] + call[7:] == handle[:6] + handle[7:]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_handles_describe_their_tensors_and_name_no_event_to_open() -> None:
    named = {"a": torch.ones(2, 3, device="cuda", dtype=torch.bfloat16), "b": torch.ones(4, 2, device="cuda").T}
    with exported(named) as weights:
        assert isinstance(weights, WeightHandles)
        told = weights.for_vllm()
        assert told["shapes"] == [[2, 3], [2, 4]] and told["dtype_names"] == ["bfloat16", "float32"]
        assert all(tensor.is_contiguous() for tensor in weights.tensors.values())
        assert [handle[-1] for handle in weights.handles] == [False, False]
