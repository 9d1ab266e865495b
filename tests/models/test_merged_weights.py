"""Adapters merged into the weights of the base model: as peft merges them, and without a change to the model."""

import copy
from typing import Any

import pytest
import torch

from small_models import model_of, with_trained_adapters
from sortedrl.models.merged_weights import merged_weights

peft = pytest.importorskip("peft", reason="LoRA needs peft: pip install peft")
LAYERS = ["q_proj", "v_proj", "up_proj"]


def adapted_model(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    config = peft.LoraConfig(r=4, target_modules=LAYERS, **options)
    return with_trained_adapters(peft.get_peft_model(model_of("Qwen2").to(dtype), config))


@pytest.mark.parametrize(
    "options",
    [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"rank_pattern": {"q_proj": 2}}],
    ids=["lora", "dora", "modules_to_save", "rank_pattern"],
)
def test_the_weights_are_those_of_peft(options: dict[str, Any]) -> None:
    model = adapted_model(**options)
    untouched = copy.deepcopy(model.state_dict())
    merged = {name: weight.clone() for name, weight in merged_weights(model.get_base_model())}
    assert all(torch.equal(weight, untouched[name]) for name, weight in model.state_dict().items())
    expected = model.merge_and_unload().state_dict()
    assert list(merged) == list(model_of("Qwen2").state_dict())
    for name, weight in merged.items():
        assert torch.allclose(weight, expected[name], atol=1e-6), name


def test_a_bf16_sum_is_rounded_once() -> None:
    model = adapted_model(torch.bfloat16)
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    delta = layer.lora_B["default"].weight.float() @ layer.lora_A["default"].weight.float() * layer.scaling["default"]
    merged = dict(merged_weights(model.get_base_model()))["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(merged, (layer.base_layer.weight.float() + delta).bfloat16())


def test_a_model_without_adapters_gives_its_own_tensors() -> None:
    model = model_of("Qwen2")
    own = model.state_dict()
    assert all(weight.data_ptr() == own[name].data_ptr() for name, weight in merged_weights(model))
