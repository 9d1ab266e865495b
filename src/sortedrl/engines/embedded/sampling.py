"""Sampling whose noise depends only on (seed, position in the response).

Each token is the argmax of scaled logits plus Gumbel noise, and the noise of a vocabulary entry is a hash of
(seed, position, entry). Slot, batch and aborts do not matter, so a rollout's tokens are a function of its seed and the
weights. Gumbel noise, rather than one uniform number per token, also couples runs under slightly different weights: two
distributions sample different tokens about as rarely as they differ.
"""

import torch
from torch import Tensor

_TWO_63 = 1 << 63
_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, as a signed integer
_MIX_64 = (-4658895280553007687, -7723592293110705685)  # the multipliers of splitmix64
_LAST_BELOW_ONE = 1 - 2.0**-24  # in 32 bits
_MIX_32 = (-2048144789, -1028477387)  # the multipliers of murmur3's finalizer


def seed_key(seed: int) -> int:
    """Hashes any integer to the signed 64-bit integer that `draw` takes."""
    signed = (seed + _TWO_63) % (2 * _TWO_63) - _TWO_63
    return int(_mixed(torch.tensor(signed)))


class TokenSampler:
    """Samples one token per row of logits. Its only state are constants of the vocabulary."""

    def __init__(self, device: torch.device) -> None:
        self._entry_keys = torch.empty(0, dtype=torch.int32, device=device)

    def draw(
        self,
        logits: Tensor,  # [rows, vocabulary]
        seed_keys: Tensor,  # [rows], int64
        positions: Tensor,  # [rows], int64: number of response tokens so far
        temperatures: Tensor,  # [rows]; 0 is greedy
        top_p: Tensor | None,  # [rows]; None if all are 1
    ) -> tuple[Tensor, Tensor]:
        """Tokens and the log-probabilities they were sampled with, after temperature and top-p.

        A greedy row samples from a point mass: its log-probability is 0.
        """
        greedy = temperatures == 0
        scaled = logits.float() / torch.where(greedy, 1.0, temperatures)[:, None]
        if top_p is not None:
            scaled = _nucleus(scaled, top_p)
        # Gumbel noise is minus the logarithm of an exponential.
        negative_noise = self.exponentials(seed_keys, positions, logits.shape[-1]).log_()
        tokens = torch.addcmul(scaled, negative_noise, greedy[:, None].float() - 1).argmax(-1)
        drawn = scaled.gather(1, tokens[:, None])[:, 0]
        return tokens, torch.where(greedy, 0.0, drawn - scaled.logsumexp(-1))

    def exponentials(self, seed_keys: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
        """Standard exponential noise, [rows, vocabulary], a pure function of its arguments."""
        if len(self._entry_keys) != vocabulary:
            entries = torch.arange(vocabulary, device=self._entry_keys.device)
            self._entry_keys = _words(_mixed(entries * _GOLDEN))[:, 0].contiguous()
        low, high = _words(_mixed(seed_keys + positions * _GOLDEN)).split_with_sizes((1, 1), dim=1)
        words = self._entry_keys ^ low
        words ^= (words >> 16) & 0xFFFF
        words *= _MIX_32[0]
        words ^= (words >> 13) & 0x7FFFF
        words += high
        words *= _MIX_32[1]
        words ^= (words >> 16) & 0xFFFF
        words &= 0x7FFFFFFF
        # Small exponentials decide, so log1p keeps their precision; the largest must not be infinite.
        return words.to(torch.float32).add_(0.5).mul_(_LAST_BELOW_ONE * -(2.0**-31)).log1p_().neg_()


def _nucleus(scaled: Tensor, top_p: Tensor) -> Tensor:
    """Minus infinity outside the smallest set of most likely tokens with a total probability of `top_p`."""
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.softmax(-1)
    mass_before = probabilities.cumsum(-1) - probabilities
    # Rounding must not cut a row with top_p = 1.
    bound = torch.where(top_p < 1, top_p, torch.inf)[:, None]
    kept = torch.zeros_like(scaled, dtype=torch.bool).scatter_(1, order, mass_before < bound)
    return scaled.masked_fill(~kept, -torch.inf)


def _mixed(values: Tensor) -> Tensor:
    """A bijective hash of 64-bit integers; multiplication wraps around."""
    values = (values ^ _shifted_right(values, 30)) * _MIX_64[0]
    values = (values ^ _shifted_right(values, 27)) * _MIX_64[1]
    return values ^ _shifted_right(values, 31)


def _shifted_right(values: Tensor, bits: int) -> Tensor:
    """Logical shift, which torch lacks for signed integers."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _words(values: Tensor) -> Tensor:
    """The two 32-bit words of each 64-bit integer, [values, 2]."""
    return values.view(torch.int32).view(-1, 2)
