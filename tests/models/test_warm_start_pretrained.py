"""The warm start of pretrained models: its loss, which positions get logits, and its allocator settings."""

import random
import sys
from pathlib import Path
from typing import Any

import pytest

from sortedrl.models import BUILT_IN_MODEL

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import warm_start_pretrained as script  # noqa: E402

from small_models import VOCABULARY, model_of  # noqa: E402


def random_batch() -> tuple[Any, Any]:
    """Five rows: prompts of 4 to 12 tokens, responses of 1 to 5, padding after them."""
    generator = torch.Generator().manual_seed(3)

    def tokens(low: int, high: int) -> list[int]:
        count = int(torch.randint(low, high + 1, (), generator=generator))
        return torch.randint(1, VOCABULARY, (count,), generator=generator).tolist()

    rows = [(tokens(4, 12), tokens(1, 5)) for _ in range(5)]
    inputs, targets = script.padded(rows)
    assert len(inputs) == 5
    return inputs, targets


def test_each_example_is_in_one_batch_beside_others_of_similar_length() -> None:
    source = random.Random(5)
    rows = [([1], [2] * source.randint(5, 200)) for _ in range(2 * script.EXAMPLES_TO_SORT)]
    found, left = [], sum(len(response) for _, response in rows)
    for inputs, targets in script.batches(iter(rows), 1000, random.Random(0)):
        assert inputs.numel() <= 1000
        found.append(inputs.numel())
        left -= int((targets != script.NO_TARGET).sum())
        if not left:
            break
    assert left == 0
    assert sum(found) < 1.1 * sum(len(prompt) + len(response) for prompt, response in rows)


@pytest.mark.parametrize("family", ["Llama", "GPT2", "Gemma2"])  # Gemma2 caps its logits
def test_the_loss_and_its_gradient_are_those_of_all_logits(family: str) -> None:
    model = model_of(family)
    inputs, targets = random_batch()
    loss = script.Loss(model)(inputs, targets)
    loss.backward()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    logits = model(input_ids=inputs, use_cache=False).logits
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets[:, 1:].flatten())
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(gradients[name], weight.grad, rtol=1e-4, atol=1e-5)


def test_it_trains_a_model_from_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments = ["--model", str(BUILT_IN_MODEL), "--out", str(tmp_path), "--steps", "2", "--tokens-per-step", "600"]
    monkeypatch.setattr(sys, "argv", ["warm_start_pretrained.py", *arguments])
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    script.main()
    before = transformers.AutoModelForCausalLM.from_pretrained(BUILT_IN_MODEL, dtype=torch.bfloat16).state_dict()
    after = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    assert after.keys() == before.keys()
    assert any(not torch.equal(after[name], weight) for name, weight in before.items())
