"""How much successive gradients agree, as a metric."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class GradientCosine:
    """The cosine between each gradient and the one before it. Keeps a copy of the last gradient."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._previous = [torch.zeros_like(parameter) for parameter in parameters]
        self._previous_norm = 0.0

    @torch.no_grad()
    def with_previous(self) -> list[float]:
        """The cosine, or none: for the first gradient, and for one that is zero or not finite, which is skipped."""
        gradient = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self._parameters]
        norm = math.sqrt(_product(gradient, gradient))
        if not (math.isfinite(norm) and norm > 0):
            return []
        found = [_product(self._previous, gradient) / (self._previous_norm * norm)] if self._previous_norm else []
        for kept, new in zip(self._previous, gradient, strict=True):
            kept.copy_(new)
        self._previous_norm = norm
        return found


def _product(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """The inner product over all parameters, in fp32."""
    parts = [torch.dot(a.flatten().float(), b.flatten().float()) for a, b in zip(first, second, strict=True)]
    return float(torch.stack(parts).sum())
