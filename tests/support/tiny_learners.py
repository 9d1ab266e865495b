"""Learners of tiny real models, rollouts for them, and the gradients of their updates."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from as_batch import as_batch
from sortedrl.core.rollout import Prompt, Rollout, Segment
from sortedrl.learner.learner import Learner
from sortedrl.learner.settings import LearnerSettings

VOCABULARY = 31
NO_CLIPPING = math.inf  # as max_grad_norm
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}
TWO_LAYERS: dict[str, Any] = {"num_hidden_layers": 2}


def tiny_model(seed: int = 0, **changes: Any) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(Qwen2Config(**{**SHAPE, **changes}))  # type: ignore[no-untyped-call]


def learner_with(model: PreTrainedModel | None = None, **settings: Any) -> Learner:
    return Learner(tiny_model() if model is None else model, LearnerSettings(**settings))


def tokens_of(seed: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()


def random_rollouts(
    prompts: int = 4,
    siblings: int = 3,
    cohort: int = 0,
    seed: int = 0,
    versions: Sequence[int] = (0,),
    reward: Callable[[int], float] | None = None,
) -> list[Rollout]:
    """Rollouts of 2 to 13 tokens from one segment per version, with log-probabilities of no model in particular.

    `reward`: by id; default: random.
    """
    generator = torch.Generator().manual_seed(seed)
    rollouts = []
    for index in range(prompts * siblings):
        prompt = index // siblings
        segments = []
        for version in versions:
            length = int(torch.randint(2, 14, (1,), generator=generator))
            logprobs = (-3 * torch.rand(length, generator=generator)).tolist()
            segments.append(Segment(tokens_of(seed + 97 * index + version, length), logprobs, version))
        rollouts.append(
            Rollout(
                id=index,
                prompt=Prompt(f"p{prompt}", tokens_of(1000 + prompt, 2 + 3 * prompt)),
                index_in_group=index % siblings,
                cohort=cohort,
                seed=index,
                loaded_at_update=0,
                segments=segments,
                reward=float(torch.randn(1, generator=generator)) if reward is None else reward(index),
            )
        )
    return rollouts


def full_logprobs(model: nn.Module, rollout: Rollout, temperature: float = 1.0) -> Tensor:
    """Straight from the model's own logits, one rollout at a time, no padding."""
    prompt = list(rollout.prompt.tokens)
    logits = model(input_ids=torch.tensor([[*prompt, *rollout.tokens]])).logits[0].float() / temperature
    predicted = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    chosen: Tensor = predicted[torch.arange(len(rollout)), torch.tensor(rollout.tokens)]
    return chosen


def sampled_with(model: nn.Module, rollouts: list[Rollout], temperature: float = 1.0) -> list[Rollout]:
    """The same rollouts, as if this model had sampled them."""
    for rollout in rollouts:
        with torch.no_grad():
            values = full_logprobs(model, rollout, temperature).tolist()
        place = 0
        for segment in rollout.segments:
            segment.logprobs = values[place : place + len(segment)]
            place += len(segment)
    return rollouts


def gradients(learner: Learner, rollouts: list[Rollout], version: int = 0) -> dict[str, Tensor]:
    """Of one update: what its last optimizer step gets, normalized. Use it without clipping."""
    found: dict[str, Tensor] = {}
    optimizer = learner._optimizer
    step = optimizer.step

    def keep(learning_rate: float, gradient_scale: float = 1.0) -> None:
        named = {name: weight.grad for name, weight in learner.model.named_parameters()}
        found.update({name: grad.float() * gradient_scale for name, grad in named.items() if grad is not None})
        step(learning_rate, gradient_scale)

    optimizer.step = keep  # type: ignore[method-assign]
    try:
        learner.step(as_batch(rollouts, version))
    finally:
        optimizer.step = step  # type: ignore[method-assign]
    return found


def assert_close(first: dict[str, Tensor], second: dict[str, Tensor], tolerance: float = 2e-6) -> None:
    """Up to `tolerance` of the largest gradient."""
    scale = max(tensor.abs().max().item() for tensor in second.values())
    assert first.keys() == second.keys() and scale > 0
    for name, tensor in first.items():
        assert torch.allclose(tensor, second[name], rtol=0, atol=tolerance * scale), name


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """To the bit."""
    return first.keys() == second.keys() and all(torch.equal(tensor, second[name]) for name, tensor in first.items())
