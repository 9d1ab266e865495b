"""Losses against direct formulas, written out as loops."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from sortedrl.learner.losses import (
    PolicyLoss,
    effective_sample_fraction,
    kl_k3,
    loss_normalizer,
    policy_loss,
    selected_logprobs,
    token_weights,
)
from sortedrl.learner.settings import Aggregation, OffPolicyCorrection, RatioLevel
from sortedrl.learner.update import GradientCosine

CLIP_LOW, CLIP_HIGH, CAP = 0.2, 0.28, 1.5
CORRECTIONS: list[OffPolicyCorrection] = ["ppo_clip", "cispo", "mask", "decoupled"]
LEVELS: list[RatioLevel] = ["token", "sequence"]


def random_policies(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """New, behavior and proximal log-probabilities, advantages, mask; ratios on both sides of the clip."""
    generator = torch.Generator().manual_seed(seed)
    new = -torch.rand(5, 7, generator=generator) * 3
    behavior = new + 0.5 * torch.randn(5, 7, generator=generator)
    proximal = new + 0.3 * torch.randn(5, 7, generator=generator)
    advantages = torch.randn(5, 1, generator=generator).expand(5, 7)
    mask = torch.rand(5, 7, generator=generator) < 0.8
    mask[0] = False
    return new.requires_grad_(), behavior, proximal, advantages, mask


def loss_of(off_policy_correction: OffPolicyCorrection, level: RatioLevel, *tensors: Tensor) -> PolicyLoss:
    clip: dict[str, Any] = {"clip_low": CLIP_LOW, "clip_high": CLIP_HIGH, "cap": CAP}
    return policy_loss(*tensors, off_policy_correction=off_policy_correction, level=level, **clip)


def direct_loss(off_policy_correction: OffPolicyCorrection, level: RatioLevel, *tensors: Tensor) -> Tensor:
    """Token by token on scalars, with autograd only through the new log-probability."""
    new, behavior, proximal, advantages, mask = tensors
    out = torch.zeros_like(new)
    for b in range(new.shape[0]):
        places = [t for t in range(new.shape[1]) if mask[b, t]]

        def ratio(top: Tensor, bottom: Tensor, t: int, b: int = b, places: list[int] = places) -> Tensor:
            if level == "token":
                return torch.exp(top[b, t] - bottom[b, t])
            return torch.exp(sum((top[b, u] - bottom[b, u] for u in places), torch.tensor(0.0)) / len(places))

        for t in places:
            if off_policy_correction == "cispo":
                weight = min(ratio(new, behavior, t).item(), CAP)
                pushes = new[b, t] if level == "token" else new[b, places].mean()
                # the value of a policy gradient's surrogate is free; it is chosen as -weight x advantage
                out[b, t] = -weight * advantages[b, t] * (1 + pushes - pushes.detach())
                continue
            r = ratio(new, proximal if off_policy_correction == "decoupled" else behavior, t)
            a = advantages[b, t]
            if a > 0:
                surrogate = r * a if r < 1 + CLIP_HIGH else (1 + CLIP_HIGH) * a
            else:
                surrogate = r * a if r > 1 - CLIP_LOW else (1 - CLIP_LOW) * a
            weight = 1.0
            if off_policy_correction == "mask" and not 1 / CAP <= r.item() <= CAP:
                weight = 0.0
            if off_policy_correction == "decoupled":
                weight = min(ratio(proximal, behavior, t).item(), CAP)
            out[b, t] = -weight * surrogate
    return out


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("off_policy_correction", CORRECTIONS)
def test_loss_and_gradient_are_the_formula(off_policy_correction: OffPolicyCorrection, level: RatioLevel) -> None:
    tensors = random_policies()
    weights = torch.rand(5, 7, generator=torch.Generator().manual_seed(9))
    ours = loss_of(off_policy_correction, level, *tensors).loss_bt
    direct = direct_loss(off_policy_correction, level, *tensors)
    assert torch.allclose(ours, direct, atol=1e-5)
    (gradient,) = torch.autograd.grad((ours * weights).sum(), tensors[0])
    (expected,) = torch.autograd.grad((direct * weights).sum(), tensors[0])
    assert expected.abs().max() > 0.05
    assert torch.allclose(gradient, expected, atol=1e-5)


def test_an_absurd_ratio_stays_finite() -> None:
    new = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    behavior, advantages, mask = torch.tensor([[-500.0, -500.0]]), torch.tensor([[0.0, 1.0]]), torch.ones(1, 2).bool()
    for off_policy_correction in CORRECTIONS:
        loss = loss_of(off_policy_correction, "token", new, behavior, new.detach(), advantages, mask).loss_bt
        (gradient,) = torch.autograd.grad(loss.sum(), new)
        assert loss.isfinite().all() and gradient.isfinite().all()


def test_k3_is_its_formula_and_estimates_the_divergence() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(10, generator=generator).log_softmax(0) for _ in range(2))
    samples = torch.multinomial(p.exp(), 200_000, replacement=True, generator=generator)
    estimate = kl_k3(p[samples], q[samples])
    for index in range(20):
        gap = q[samples[index]].item() - p[samples[index]].item()
        assert estimate[index].item() == pytest.approx(math.exp(gap) - gap - 1, abs=1e-5)
    assert estimate.min() >= 0
    assert estimate.mean().item() == pytest.approx((p.exp() * (p - q)).sum().item(), rel=0.03)


def test_k3_is_never_negative_and_keeps_its_digits_for_small_gaps() -> None:
    """An engine that agrees with the learner leaves gaps of 1e-7 to 1e-3, about the rounding of fp32 beside 1."""
    powers = torch.arange(-40, 4).float().exp2()  # where rounding is coarsest: just above and below powers of 2
    near = [powers, powers.nextafter(torch.tensor(0.0)), powers.nextafter(torch.tensor(99.0))]
    gap = torch.cat([*near, torch.logspace(-12, 1.2, 20_000)])
    gap = torch.cat([gap, -gap])
    estimate = kl_k3(torch.zeros_like(gap), gap)
    assert estimate.min() >= 0
    exact = gap.double().expm1() - gap.double()
    large = gap.abs() > 1e-4
    torch.testing.assert_close(estimate[large].double(), exact[large], rtol=5e-3, atol=0.0)


@pytest.mark.parametrize("aggregation", ["constant", "token_mean", "sequence_mean"])
def test_weights_sum_to_the_aggregation(aggregation: Aggregation) -> None:
    *_, mask = random_policies()
    values = torch.randn(5, 7, generator=torch.Generator().manual_seed(3))
    rows = [[values[b, t].item() for t in range(7) if mask[b, t]] for b in range(5)]
    trained = [row for row in rows if row]
    expected = {
        "constant": sum(sum(row) for row in rows) / 100.0,
        "token_mean": sum(sum(row) for row in rows) / sum(len(row) for row in rows),
        "sequence_mean": sum(sum(row) / len(row) for row in trained) / len(trained),
    }[aggregation]
    summed = (values * token_weights(mask, aggregation)).sum().item()
    found = summed / loss_normalizer(mask, aggregation, 100.0)
    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_chunked_logprobs_equal_a_full_softmax(temperature: float, entropy_gradient: bool) -> None:
    torch.manual_seed(0)
    head = nn.Linear(8, 50, bias=False)
    hidden, targets = torch.randn(23, 8, requires_grad=True), torch.randint(0, 50, (23,))
    pull = torch.randn(2, 23)

    def gradients(score: Callable[[], tuple[Tensor, Tensor]]) -> list[Tensor]:
        logprobs, entropy = score()
        total = (logprobs * pull[0]).sum()
        if entropy_gradient:
            total = total + (entropy * pull[1]).sum()
        return [logprobs, entropy, *torch.autograd.grad(total, [hidden, head.weight])]

    def direct() -> tuple[Tensor, Tensor]:
        full = (head(hidden) / temperature).log_softmax(-1)
        return full[torch.arange(23), targets], -(full.exp() * full).sum(-1)

    expected = gradients(direct)
    for logits_per_chunk in (1, 4 * 50, 10**9):
        found = gradients(
            lambda size=logits_per_chunk: selected_logprobs(  # type: ignore[misc]
                hidden, targets, head, temperature, entropy_gradient, size
            )
        )
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.allclose(ours, theirs, atol=1e-5)


# Rules that look at the whole update


@given(st.lists(st.floats(-8, 8), min_size=1, max_size=40))
def test_effective_sample_fraction_is_the_formula(log_weights: list[float]) -> None:
    weights = [math.exp(value) for value in log_weights]
    expected = sum(weights) ** 2 / sum(weight * weight for weight in weights) / len(weights)
    found = effective_sample_fraction(torch.tensor(log_weights, dtype=torch.float64))
    assert found == pytest.approx(expected, rel=1e-9)
    assert 1 / len(weights) - 1e-9 <= found <= 1 + 1e-9


def test_effective_sample_fraction_has_no_largest_weight() -> None:
    """exp(5000) and exp(-5000) are not numbers."""
    assert effective_sample_fraction(torch.full((4,), 5000.0)) == pytest.approx(1.0)
    assert effective_sample_fraction(torch.full((4,), -5000.0)) == pytest.approx(1.0)
    assert effective_sample_fraction(torch.tensor([5000.0, 0.0, -5000.0, 10.0])) == pytest.approx(0.25)


def test_cosine_with_the_gradient_before() -> None:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(5)), nn.Parameter(torch.zeros(2))]
    cosine = GradientCosine(parameters)
    flat = []
    found = []
    for _ in range(3):
        for parameter in parameters[:2]:  # the third has no gradient
            parameter.grad = torch.randn_like(parameter)
        flat.append(torch.cat([parameter.grad.flatten() for parameter in parameters[:2] if parameter.grad is not None]))
        found += cosine.with_previous()
    expected = [torch.cosine_similarity(a, b, dim=0).item() for a, b in pairwise(flat)]
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("useless", [0.0, math.inf, math.nan])
def test_a_gradient_without_direction_is_skipped(useless: float) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    cosine = GradientCosine([parameter])
    found = []
    for gradient in ([1.0, 0.0], [useless, useless], [1.0, 1.0]):
        parameter.grad = torch.tensor(gradient)
        found.append(cosine.with_previous())
    assert found[:2] == [[], []] and found[2] == pytest.approx([math.sqrt(0.5)])
