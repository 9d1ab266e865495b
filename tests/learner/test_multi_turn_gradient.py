"""Rollouts of several turns in the learner: the gradient is that of the policy's tokens, with the whole context."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from as_batch import as_batch
from sortedrl.core import Prompt, Rollout, Segment
from sortedrl.learner.learner import Learner
from sortedrl.learner.settings import LearnerSettings

VOCABULARY = 31
TURNS = ((3, 2, 4), (2, 5, 1, 3, 2), (6,), (1, 1, 1, 1, 1, 1, 1))  # policy, environment, policy, ...


pytestmark = pytest.mark.usefixtures("one_thread")


def model(seed: int) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.3,
        )  # type: ignore[no-untyped-call]
    )


def rollouts(off_policy_correction: str = "ppo_clip") -> list[Rollout]:
    """Two groups of two; the versions of later turns are newer."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for id, runs in enumerate(TURNS):
        rollout = Rollout(id, Prompt(f"p{id // 2}", [4, 5, 6]), id % 2, 0, id, 0, reward=float(id % 2) + 0.3 * id)
        for place, count in enumerate(runs):
            tokens = torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()
            if place % 2:
                rollout.observe(tokens)
            else:
                logprobs = (-0.5 - 2 * torch.rand(count, generator=generator)).tolist()
                rollout.append(Segment(tokens, logprobs, version=place // 2))
        made.append(rollout)
    return made


def gradients_of(learner: Learner, batch: list[Rollout]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The normalized gradient that the optimizer gets, and the metrics of the update."""
    found: dict[str, Tensor] = {}

    def keep(learning_rate: float, gradient_scale: float = 1.0) -> None:
        for name, parameter in learner.model.named_parameters():
            if parameter.grad is not None:
                found[name] = parameter.grad * gradient_scale

    learner._optimizer.step = keep  # type: ignore[method-assign]
    return found, learner.step(as_batch(batch, 3))


def reference_loss(policy: Qwen2ForCausalLM, batch: list[Rollout], correction: str, aggregation: str) -> Tensor:
    """Token by token, from the model's own logits on the whole context, without a mask: only policy tokens appear."""
    total = torch.tensor(0.0)
    policy_tokens = sum(len(s) for r in batch for s in r.segments if not s.is_environment)
    for rollout in batch:
        group = torch.tensor([r.reward for r in batch if r.prompt.id == rollout.prompt.id])
        advantage = (rollout.reward - group.mean()) / (group.std() + 1e-4)  # type: ignore[operator]
        context = list(rollout.prompt.tokens)
        losses = []
        for segment in rollout.segments:
            for token, behavior in zip(segment.tokens, segment.logprobs, strict=True):
                if not segment.is_environment:
                    new = policy(input_ids=torch.tensor([context])).logits[0, -1].float().log_softmax(-1)[token]
                    ratio = (new - behavior).exp()
                    if correction == "cispo":
                        losses.append(-ratio.detach().clamp(max=2.0) * new * advantage)
                    else:
                        losses.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage))
                context.append(token)
        weight = {"constant": 1 / 50, "token_mean": 1 / policy_tokens, "sequence_mean": 1 / len(losses) / len(batch)}
        total = total + torch.stack(losses).sum() * weight[aggregation]
    return total


@pytest.mark.parametrize("aggregation", ["constant", "token_mean", "sequence_mean"])
@pytest.mark.parametrize("correction", ["ppo_clip", "cispo"])
def test_the_gradient_is_the_hand_written_one(correction: Any, aggregation: Any) -> None:
    settings = LearnerSettings(
        algorithm="grpo",
        off_policy_correction=correction,
        aggregation=aggregation,
        normalizer_tokens=50,
        max_grad_norm=math.inf,
    )
    policy = model(1)
    found, metrics = gradients_of(Learner(model(1), settings), rollouts())
    reference_loss(policy, rollouts(), correction, aggregation).backward()  # type: ignore[no-untyped-call]
    scale = max(p.grad.abs().max().item() for p in policy.parameters() if p.grad is not None)
    for name, parameter in policy.named_parameters():
        if parameter.grad is not None:
            assert torch.allclose(found[name], parameter.grad, rtol=0, atol=2e-5 * scale), name
    assert metrics["tokens_trained"] == sum(r.policy_length for r in rollouts())


def test_environment_tokens_count_only_as_context() -> None:
    """Log-probabilities in their places change nothing; other tokens in their places change the gradient."""
    # Nothing is clipped: these log-probabilities are far from the model's.
    settings = LearnerSettings(algorithm="grpo", off_policy_correction="cispo", max_grad_norm=math.inf)
    plain, plain_metrics = gradients_of(Learner(model(1), settings), rollouts())
    changed = rollouts()
    for rollout in changed:
        for segment in rollout.segments:
            if segment.is_environment:
                segment.logprobs = [-7.0] * len(segment)
    same, same_metrics = gradients_of(Learner(model(1), settings), changed)
    assert all(torch.equal(plain[name], same[name]) for name in plain)
    timed = {key for key in plain_metrics if "seconds" in key}
    assert {k: v for k, v in plain_metrics.items() if k not in timed} == {
        k: v for k, v in same_metrics.items() if k not in timed
    }
    other = rollouts()
    other[0].segments[1].tokens = [9] * len(other[0].segments[1])
    different, _ = gradients_of(Learner(model(1), settings), other)
    assert any(not torch.equal(plain[name], different[name]) for name in plain)
