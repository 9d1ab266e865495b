"""AdamW that trains bf16 weights with fp32 precision, in 12 bytes per weight."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

ELEMENTS_AT_ONCE = 1 << 26  # limits the fp32 temporaries to a few times 0.25 GiB


class AdamW:
    """AdamW for fp32 and bf16 weights, with 12 bytes per bf16 weight, including the gradient.

    A bf16 weight has 8 bits of precision: at a learning rate of 1e-6, nearly every step would round to zero. So the 16
    bits lost in rounding are stored separately: weight and remainder together are an exact fp32 weight, and all
    arithmetic is in fp32. The first moment is bf16, the second fp32 (in bf16, its decay by 0.1% would round to no
    decay). fp32 weights have fp32 moments and no remainder. Weight decay applies to matrices only.
    """

    BETAS = (0.9, 0.999)
    EPSILON = 1e-8

    def __init__(self, parameters: Sequence[nn.Parameter], weight_decay: float, *, compiled: bool = False) -> None:
        """`compiled`: with torch.compile, which reads and writes each number once instead of about ten times."""
        self.parameters = list(parameters)
        self._compiled = compiled
        self._step_flat = torch.compile(_step_flat, dynamic=True) if compiled else _step_flat
        self.weight_decay = weight_decay
        self.steps = 0
        self._first = [torch.zeros_like(parameter) for parameter in self.parameters]
        self._second = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in self.parameters]
        in_bf16 = [parameter for parameter in self.parameters if parameter.dtype == torch.bfloat16]
        self._remainder = [torch.zeros_like(parameter, dtype=torch.int16) for parameter in in_bf16]

    @torch.no_grad()
    def grad_norm(self) -> float:
        """The norm over all weights, summed in fp32."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        return float(torch.stack(torch._foreach_norm(gradients, dtype=torch.float32)).norm())

    def forget_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self, learning_rate: float, gradient_scale: float = 1.0) -> None:
        """In place, a part at a time; parameters without a gradient stay as they are."""
        self.steps += 1
        remainders = iter(self._remainder)
        for parameter, first, second in zip(self.parameters, self._first, self._second, strict=True):
            remainder = next(remainders) if parameter.dtype == torch.bfloat16 else None
            if parameter.grad is None:
                continue
            numbers, gradient = self._numbers(parameter, learning_rate, gradient_scale), parameter.grad.contiguous()
            for begin in range(0, parameter.numel(), ELEMENTS_AT_ONCE):
                self._step_flat(
                    _part(parameter, begin),
                    _part(remainder, begin) if remainder is not None else None,
                    _part(gradient, begin),
                    _part(first, begin),
                    _part(second, begin),
                    *numbers,
                )

    def _numbers(
        self, parameter: nn.Parameter, learning_rate: float, gradient_scale: float
    ) -> Sequence[float | Tensor]:
        """What `_step_flat` needs beside tensors. A compiled one takes tensors: numbers would be part of its code."""
        decay = 1.0 - learning_rate * self.weight_decay if parameter.ndim > 1 else 1.0
        numbers = (gradient_scale, learning_rate, decay, *(1 - beta**self.steps for beta in self.BETAS))
        if not self._compiled:
            return numbers
        return torch.tensor(numbers, dtype=torch.float32, device=parameter.device).unbind()

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "first": self._first, "second": self._second, "remainder": self._remainder}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = int(state["steps"])
        for own, saved in (
            (self._first, state["first"]),
            (self._second, state["second"]),
            (self._remainder, state["remainder"]),
        ):
            for tensor, value in zip(own, saved, strict=True):
                tensor.copy_(value)


def _part(tensor: Tensor, begin: int) -> Tensor:
    """As `data` it is not a view: torch.compile would compile again for each shape of what it is a view of."""
    return tensor.view(-1)[begin : begin + ELEMENTS_AT_ONCE].data


def _step_flat(
    weight: Tensor,
    remainder: Tensor | None,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    gradient_scale: float | Tensor,
    learning_rate: float | Tensor,
    decay: float | Tensor,
    first_correction: float | Tensor,
    second_correction: float | Tensor,
) -> None:
    """In place. With a remainder, the weight is bf16, and both together are the fp32 weight."""
    beta1, beta2 = AdamW.BETAS
    gradient = gradient.float() * gradient_scale
    mean = first.float().lerp_(gradient, 1 - beta1)
    first.copy_(mean)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    spread = (second / second_correction).sqrt_().add_(AdamW.EPSILON)
    change = (mean / first_correction).div_(spread)
    if remainder is None:
        _subtract(weight.mul_(decay), change, learning_rate)
    else:
        exact = join_bf16(weight, remainder).mul_(decay)
        split_bf16(_subtract(exact, change, learning_rate), weight, remainder)


def _subtract(exact: Tensor, change: Tensor, factor: float | Tensor) -> Tensor:
    """In place: exact - factor * change. As `alpha`, PyTorch takes numbers only."""
    return exact.sub_(change * factor) if isinstance(factor, Tensor) else exact.sub_(change, alpha=factor)


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
