"""AdamW that trains bf16 weights with fp32 precision, in 12 bytes per weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class AdamW:
    """AdamW for fp32 and bf16 weights, with 12 bytes per bf16 weight, including the gradient.

    A bf16 weight has 8 bits of precision: at a learning rate of 1e-6, nearly every step would round to zero. So the 16
    bits lost in rounding are stored separately: weight and remainder together are an exact fp32 weight, and all
    arithmetic is in fp32. The first moment is bf16, the second fp32 (in bf16, its decay by 0.1 % would round to no
    decay). fp32 weights have fp32 moments and no remainder. Weight decay applies to matrices only.
    """

    BETAS = (0.9, 0.999)
    EPSILON = 1e-8
    ELEMENTS_AT_ONCE = 1 << 26  # limits the fp32 temporaries to a few times 0.25 GiB

    def __init__(self, parameters: Sequence[nn.Parameter], weight_decay: float) -> None:
        self.parameters = list(parameters)
        self.weight_decay = weight_decay
        self.steps = 0
        self._first = [torch.zeros_like(parameter) for parameter in self.parameters]
        self._second = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in self.parameters]
        self._remainder = [
            torch.zeros_like(parameter, dtype=torch.int16) if parameter.dtype == torch.bfloat16 else None
            for parameter in self.parameters
        ]

    @torch.no_grad()
    def grad_norm(self) -> float:
        """The norm over all weights, summed in fp32."""
        norms = [
            torch.linalg.vector_norm(parameter.grad, dtype=torch.float32)
            for parameter in self.parameters
            if parameter.grad is not None
        ]
        return float(torch.stack(norms).norm())

    def forget_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self, learning_rate: float, gradient_scale: float = 1.0) -> None:
        self.steps += 1
        for parameter, first, second, remainder in zip(
            self.parameters, self._first, self._second, self._remainder, strict=True
        ):
            if parameter.grad is None:
                continue
            decay = 1.0 - learning_rate * self.weight_decay if parameter.ndim > 1 else 1.0
            flat = [
                torch.split(tensor.view(-1), self.ELEMENTS_AT_ONCE)
                for tensor in (parameter, parameter.grad.contiguous(), first, second)
            ]
            remainders = torch.split(remainder.view(-1), self.ELEMENTS_AT_ONCE) if remainder is not None else None
            for index, (weight, gradient, m, v) in enumerate(zip(*flat, strict=True)):
                change = self._change(gradient.float() * gradient_scale, m, v)
                if remainders is None:
                    weight.mul_(decay).sub_(change, alpha=learning_rate)
                else:
                    exact = join_bf16(weight, remainders[index]).mul_(decay).sub_(change, alpha=learning_rate)
                    split_bf16(exact, weight, remainders[index])

    def _change(self, gradient: Tensor, first: Tensor, second: Tensor) -> Tensor:
        beta1, beta2 = self.BETAS
        mean = first.float().lerp_(gradient, 1 - beta1)
        first.copy_(mean)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        spread = (second / (1 - beta2**self.steps)).sqrt_().add_(self.EPSILON)
        return (mean / (1 - beta1**self.steps)).div_(spread)

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "first": self._first,
            "second": self._second,
            "remainder": [remainder for remainder in self._remainder if remainder is not None],
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = int(state["steps"])
        remainders = [remainder for remainder in self._remainder if remainder is not None]
        for own, saved in (
            (self._first, state["first"]),
            (self._second, state["second"]),
            (remainders, state["remainder"]),
        ):
            for tensor, value in zip(own, saved, strict=True):
                tensor.copy_(value)


def join_bf16(weight: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 number that `split_bf16` split."""
    bits = (weight.view(torch.int16).to(torch.int32) << 16) + remainder
    return bits.view(torch.float32)


def split_bf16(exact: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Write an fp32 number, rounded to bf16, into `weight`, and its remaining bits into `remainder`."""
    bits = exact.view(torch.int32)
    upper = (bits + 0x8000) >> 16
    weight.copy_(upper.to(torch.int16).view(torch.bfloat16))
    remainder.copy_(bits - (upper << 16))
