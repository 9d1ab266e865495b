"""Shards models over the processes and compares the gathered weights with those before. Run by torchrun; the
argument names the way to shard."""

import sys
import warnings
from typing import Any

import peft
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from small_models import model_of, with_trained_adapters
from sortedrl.integrations.trl.engine import is_sharded, whole_weights

ADAPTERS: dict[str, dict[str, Any] | None] = {
    "full": None,
    "lora": {"modules_to_save": ["lm_head"]},
    "dora": {"use_dora": True},
}


def made(adapter: dict[str, Any] | None) -> Any:
    model = model_of("Qwen2", tie_word_embeddings=adapter is None)
    if adapter is None:
        return model
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], **adapter)
    return with_trained_adapters(peft.get_peft_model(model, config))


def sharded(model: Any, way: str) -> Any:
    layers = model.get_submodule("base_model.model.model" if hasattr(model, "peft_config") else "model").layers
    if way == "fsdp2":
        for layer in layers:
            fully_shard(layer)
        return fully_shard(model)
    import deepspeed

    options = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    }
    return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=options)[0]


def main(way: str) -> None:
    warnings.simplefilter("ignore")
    if way == "zero3":
        import deepspeed

        deepspeed.init_distributed("gloo")
    else:
        dist.init_process_group("gloo")
    for name, adapter in ADAPTERS.items():
        model = made(adapter)
        before = {name: weight.clone() for name, weight in whole_weights(model)}
        wrapped = sharded(model, way)
        wrapped(input_ids=torch.arange(6)[None])  # a forward pass may leave units gathered
        inner = wrapped.module if way == "zero3" else wrapped
        assert is_sharded(inner) and not is_sharded(made(adapter))
        for on_host in (False, True):
            after = list(whole_weights(inner, on_host=on_host))  # tensors of their own: all are valid at the end
            assert [name for name, _ in after] == list(before)
            assert all(torch.equal(weight, before[name]) for name, weight in after)
        print(f"equal: {way} {name}, {len(before)} weights")
    dist.destroy_process_group()


main(sys.argv[1])
