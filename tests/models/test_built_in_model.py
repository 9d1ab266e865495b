"""The built-in model: small, whole, in step with the script that makes it, and as able as it should be."""

import json
import random
from dataclasses import asdict
from typing import Any

import pytest
from worked_reasoning import Flaws, phrases, worked_response

from sortedrl.models import BUILT_IN_MODEL
from sortedrl.tasks.knights_and_knaves import COMPACT_NAMES, KnightsAndKnaves, random_puzzle

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import warm_start  # noqa: E402


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(BUILT_IN_MODEL)


@pytest.fixture(scope="module")
def model() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(BUILT_IN_MODEL)


@pytest.fixture(scope="module")
def sampled(model: Any, tokenizer: Any) -> list[Any]:
    """Responses to 64 held-out puzzles at temperature 1."""
    task = KnightsAndKnaves.small()
    torch.manual_seed(0)
    return list(warm_start.sample(model, tokenizer, task.held_out()[:64], task))


def test_it_is_small_and_of_a_kind_that_every_engine_loads(model: Any) -> None:
    assert sum(file.stat().st_size for file in BUILT_IN_MODEL.iterdir()) <= 5_000_000
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.config.head_dim in (32, 64)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_it_is_what_the_script_makes(tokenizer: Any) -> None:
    report = json.loads((BUILT_IN_MODEL / "recipe.json").read_text(encoding="utf-8"))
    assert report["recipe"] == asdict(warm_start.Recipe())
    assert warm_start.make_tokenizer(phrases()).get_vocab() == tokenizer.get_vocab()


def test_the_recorded_figures_are_those_that_were_asked_for() -> None:
    report = json.loads((BUILT_IN_MODEL / "recipe.json").read_text(encoding="utf-8"))
    run_metrics = report["measured_at_temperature_1"]
    assert run_metrics["held_out_puzzles"] >= 500
    assert 0.25 <= run_metrics["score"] <= 0.55
    assert min(run_metrics["ended_by_itself"], run_metrics["format_right"]) >= 0.95
    assert run_metrics["length_p95"] >= 4 * run_metrics["length_median"]


def test_its_responses_end_have_the_format_and_are_sometimes_right(sampled: list[Any]) -> None:
    count = len(sampled)
    assert sum(one.ended for one in sampled) >= 0.95 * count
    assert sum(one.reward.parts["format"] > 0 for one in sampled) >= 0.95 * count
    assert 0.25 <= sum(one.reward.correct for one in sampled) / count <= 0.60


def test_its_lengths_have_a_tail(sampled: list[Any]) -> None:
    lengths = sorted(one.length for one in sampled)
    assert lengths[int(0.95 * len(lengths))] >= 4 * lengths[len(lengths) // 2]
    assert sum(lengths) / len(lengths) <= 80


def test_puzzles_and_reasoning_survive_the_tokenizer(tokenizer: Any) -> None:
    rng = random.Random(0)
    for characters in (2, 3, 4, len(COMPACT_NAMES)):
        response = worked_response(random_puzzle(characters, rng), rng, Flaws(overlook=0.1, give_up=0.1))
        tokens = tokenizer(response, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(tokens, skip_special_tokens=True) == response
    for problem in KnightsAndKnaves.small(count=200).train():
        assert tokenizer.unk_token_id not in tokenizer(problem.question)["input_ids"]
    assert all(len(tokenizer(phrase, add_special_tokens=False)["input_ids"]) == 1 for phrase in phrases())
    assert tokenizer("Joann says hello")["input_ids"] == [tokenizer.unk_token_id] * 3


def test_the_chat_template_leads_up_to_the_response(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "guess"}, {"role": "user", "content": "Ann says Bob is a knave."}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|system|>guess<|user|>Ann says Bob is a knave.<|assistant|>"
    assert len(tokenizer(text, add_special_tokens=False)["input_ids"]) == 7
    answered = [*messages, {"role": "assistant", "content": "yes"}]
    assert tokenizer.apply_chat_template(answered, tokenize=False).endswith(f"yes{tokenizer.eos_token}")
