"""The cosine of successive gradients against one computed from all numbers at once."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from sortedrl.learner.update_metrics import GradientCosine


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
