"""AdamW that trains bf16 weights with fp32 precision, in 12 bytes per weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

ELEMENTS_AT_ONCE = 1 << 26  # limits the fp32 temporaries to a few times 0.25 GiB


@dataclass(frozen=True, slots=True)
class _Joined:
    """Parameters of one type that are stepped as one tensor, and their moments, flat."""

    parameters: tuple[nn.Parameter, ...]
    first: Tensor
    second: Tensor
    remainder: Tensor | None  # of bf16 parameters

    @staticmethod
    def of(parameters: Sequence[nn.Parameter]) -> _Joined:
        model, size = parameters[0], sum(parameter.numel() for parameter in parameters)
        is_bf16 = model.dtype == torch.bfloat16
        return _Joined(
            tuple(parameters),
            first=torch.zeros(size, dtype=model.dtype, device=model.device),
            second=torch.zeros(size, dtype=torch.float32, device=model.device),
            remainder=torch.zeros(size, dtype=torch.int16, device=model.device) if is_bf16 else None,
        )

    def split(self, flat: Tensor) -> list[Tensor]:
        """The part of each parameter, in its shape."""
        parts = torch.split(flat, [parameter.numel() for parameter in self.parameters])
        return [part.view_as(parameter) for part, parameter in zip(parts, self.parameters, strict=True)]


class AdamW:
    """AdamW for fp32 and bf16 weights, with 12 bytes per bf16 weight, including the gradient.

    A bf16 weight has 8 bits of precision: at a learning rate of 1e-6, nearly every step would round to zero. So the 16
    bits lost in rounding are stored separately: weight and remainder together are an exact fp32 weight, and all
    arithmetic is in fp32. The first moment is bf16, the second fp32 (in bf16, its decay by 0.1 % would round to no
    decay). fp32 weights have fp32 moments and no remainder. Weight decay applies to matrices only.
    """

    BETAS = (0.9, 0.999)
    EPSILON = 1e-8
    # On a GPU, small parameters are stepped together: launching kernels for each one takes longer than the arithmetic.
    JOINED_ON, JOINED_ELEMENTS = ("cuda",), 1 << 22

    def __init__(self, parameters: Sequence[nn.Parameter], weight_decay: float, *, compiled: bool = False) -> None:
        """`compiled`: with torch.compile, which reads and writes each number once instead of about ten times."""
        self.parameters = list(parameters)
        self._compiled = compiled
        self._step_flat = torch.compile(_step_flat, dynamic=True) if compiled else _step_flat
        self.weight_decay = weight_decay
        self.steps = 0
        self._joined = [_Joined.of(members) for members in self._neighbors()]
        self._first = self._split(lambda joined: joined.first)
        self._second = self._split(lambda joined: joined.second)
        self._remainder = self._split(lambda joined: joined.remainder)

    def _neighbors(self) -> list[list[nn.Parameter]]:
        """The parameters in order, in runs that can be stepped as one tensor."""
        runs: list[list[nn.Parameter]] = []
        for parameter in self.parameters:
            last = runs[-1] if runs else []
            size = sum(member.numel() for member in last) + parameter.numel()
            alike = [(p.device, p.dtype, self._decays(p)) for p in (*last[:1], parameter)]
            joins = parameter.device.type in self.JOINED_ON and size <= self.JOINED_ELEMENTS
            if last and joins and alike[0] == alike[1]:
                last.append(parameter)
            else:
                runs.append([parameter])
        return runs

    def _split(self, flat_of: Callable[[_Joined], Tensor | None]) -> list[Tensor]:
        """One tensor per parameter, without those that have none."""
        return [part for joined in self._joined if (flat := flat_of(joined)) is not None for part in joined.split(flat)]

    def _decays(self, parameter: nn.Parameter) -> bool:
        return self.weight_decay > 0 and parameter.ndim > 1

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
        self.steps += 1
        for joined in self._joined:
            numbers = self._numbers(joined.parameters[0], learning_rate, gradient_scale)
            gradients = [parameter.grad for parameter in joined.parameters if parameter.grad is not None]
            if len(joined.parameters) == 1 or len(gradients) < len(joined.parameters):
                self._step_each(joined, numbers)
                continue
            weight = torch.cat([parameter.view(-1) for parameter in joined.parameters])
            gradient = torch.cat([gradient.flatten() for gradient in gradients])
            self._step_flat(weight, joined.remainder, gradient, joined.first, joined.second, *numbers)
            torch._foreach_copy_(joined.parameters, joined.split(weight))

    def _numbers(
        self, parameter: nn.Parameter, learning_rate: float, gradient_scale: float
    ) -> Sequence[float | Tensor]:
        """What `_step_flat` needs beside tensors. A compiled one takes tensors: numbers would be part of its code."""
        decay = 1.0 - learning_rate * self.weight_decay if self._decays(parameter) else 1.0
        numbers = (gradient_scale, learning_rate, decay, *(1 - beta**self.steps for beta in self.BETAS))
        if not self._compiled:
            return numbers
        return torch.tensor(numbers, dtype=torch.float32, device=parameter.device).unbind()

    def _step_each(self, joined: _Joined, numbers: Sequence[float | Tensor]) -> None:
        """In place, a part at a time; parameters without a gradient stay as they are."""
        moments = zip(joined.split(joined.first), joined.split(joined.second), strict=True)
        remainders = joined.split(joined.remainder) if joined.remainder is not None else [None] * len(joined.parameters)
        for parameter, (first, second), remainder in zip(joined.parameters, moments, remainders, strict=True):
            if parameter.grad is None:
                continue
            gradient = parameter.grad.contiguous()
            for begin in range(0, parameter.numel(), ELEMENTS_AT_ONCE):
                self._step_flat(
                    _part(parameter, begin),
                    _part(remainder, begin) if remainder is not None else None,
                    _part(gradient, begin),
                    _part(first, begin),
                    _part(second, begin),
                    *numbers,
                )

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
