"""Rollouts of several turns in the learner: the gradient is that of the policy's tokens, with the whole context."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from as_batch import as_batch
from sortedrl.core import Prompt, Rollout, Segment
from tiny_learners import NO_CLIPPING, TWO_LAYERS, VOCABULARY, assert_close, gradients, learner_with, same, tiny_model

TEMPERATURE = 0.7
TURNS = ((3, 2, 4), (2, 5, 1, 3, 2), (6,), (1, 1, 1, 1, 1, 1, 1))  # policy, environment, policy, ...


pytestmark = pytest.mark.usefixtures("one_thread")


def rollouts() -> list[Rollout]:
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


def reference_loss(
    policy: PreTrainedModel, reference: PreTrainedModel, batch: list[Rollout], correction: str, aggregation: str
) -> Tensor:
    """Token by token, from the model's own logits on the whole context, without a mask: only policy tokens appear. With
    KL to the reference and entropy, at a temperature."""
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
                    models = [policy, reference]
                    logits = [model(input_ids=torch.tensor([context])).logits[0, -1] / TEMPERATURE for model in models]
                    every, of_reference = (one.log_softmax(-1) for one in logits)
                    new, gap = every[token], of_reference[token].detach() - every[token]
                    ratio = (new - behavior).exp()
                    if correction == "cispo":
                        loss = -ratio.detach().clamp(max=2.0) * new * advantage
                    else:
                        loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
                    kl, negative_entropy = gap.exp() - gap - 1, (every.exp() * every).sum()
                    losses.append(loss + 0.3 * kl + 0.2 * negative_entropy)
                context.append(token)
        weight = {"constant": 1 / 50, "token_mean": 1 / policy_tokens, "sequence_mean": 1 / len(losses) / len(batch)}
        total = total + torch.stack(losses).sum() * weight[aggregation]
    return total


@pytest.mark.parametrize("aggregation", ["constant", "token_mean", "sequence_mean"])
@pytest.mark.parametrize("correction", ["ppo_clip", "cispo"])
def test_the_gradient_is_the_hand_written_one(correction: Any, aggregation: Any) -> None:
    settings: dict[str, Any] = {"algorithm": "grpo", "off_policy_correction": correction, "aggregation": aggregation}
    settings |= {"kl_coefficient": 0.3, "entropy_coefficient": 0.2, "temperature": TEMPERATURE}
    reference, policy = tiny_model(0, **TWO_LAYERS), tiny_model(1, **TWO_LAYERS)
    learner = learner_with(copy.deepcopy(reference), **settings, normalizer_tokens=50, max_grad_norm=NO_CLIPPING)
    learner.load_state_dict(learner.state_dict() | {"policy": dict(policy.named_parameters())})
    found = gradients(learner, rollouts(), version=3)
    loss = reference_loss(policy, reference, rollouts(), correction, aggregation)
    loss.backward()  # type: ignore[no-untyped-call]
    assert_close(found, {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}, 2e-5)
    metrics = learner.step(as_batch(rollouts(), 3))
    assert metrics["tokens_trained"] == sum(r.policy_length for r in rollouts())


def test_environment_tokens_count_only_as_context() -> None:
    """Log-probabilities in their places change nothing; other tokens in their places change the gradient."""

    def gradients_of(batch: list[Rollout]) -> dict[str, Tensor]:
        # Nothing is clipped: these log-probabilities are far from the model's.
        settings: dict[str, Any] = {"algorithm": "grpo", "off_policy_correction": "cispo"}
        learner = learner_with(tiny_model(1, **TWO_LAYERS), **settings, max_grad_norm=NO_CLIPPING)
        return gradients(learner, batch, version=3)

    plain = gradients_of(rollouts())
    changed = rollouts()
    for rollout in changed:
        for segment in rollout.segments:
            if segment.is_environment:
                segment.logprobs = [-7.0] * len(segment)
    assert same(gradients_of(changed), plain)
    assert learner_with().step(as_batch(changed, 3)) == learner_with().step(as_batch(rollouts(), 3))
    other = rollouts()
    other[0].segments[1].tokens = [9] * len(other[0].segments[1])
    assert not same(gradients_of(other), plain)
