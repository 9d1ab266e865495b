"""How well updates are sorted by length, and how well expected lengths predict real ones."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from operator import mul
from typing import NamedTuple


def rank_correlation(first: Iterable[float], second: Iterable[float]) -> float | None:
    """Spearman's rank correlation, ties at their mean rank; None if one side is constant."""
    a, b = _ranks(list(first)), _ranks(list(second))
    if len(a) < 2:
        return None
    covariance = sum(map(mul, a, b))
    spread = math.sqrt(sum(map(mul, a, a)) * sum(map(mul, b, b)))
    return covariance / spread if spread else None


def _ranks(values: list[float]) -> list[float]:
    """The rank of each value, minus the mean rank."""
    rank_of: dict[float, float] = {}
    below = 0
    for value, count in sorted(Counter(values).items()):
        rank_of[value] = below + (count - 1) / 2 - (len(values) - 1) / 2
        below += count
    return [rank_of[value] for value in values]


class UpdateLengths(NamedTuple):
    """Sums over the log lengths of one update. A unit is trained on as a whole: a rollout, or a group."""

    rollouts: int
    units: int
    total: float
    squares: float
    unit_squares: float  # sum over units of size x mean squared

    @classmethod
    def of(cls, units: Iterable[Sequence[int]]) -> UpdateLengths:
        logs = [[math.log(max(1, length)) for length in unit] for unit in units]
        return cls(
            rollouts=sum(map(len, logs)),
            units=len(logs),
            total=sum(map(sum, logs)),
            squares=sum(x * x for unit in logs for x in unit),
            unit_squares=sum(sum(unit) ** 2 / len(unit) for unit in logs),
        )


def sortedness(updates: Sequence[UpdateLengths]) -> float | None:
    """1 minus the ratio of the variance of log length within updates to its expected value with random updates.

    Randomly assigning units to updates of the same sizes leaves (units - updates) / (units - 1) of the variance between
    units within the updates; the variance within units stays. So random updates score 0 on average for any update size
    (units of one size), and a single result may be below 0. None if each update is one unit: every order would score
    the same.
    """
    units = sum(u.units for u in updates)
    if units < 2 or units == len(updates):
        return None
    rollouts, total = sum(u.rollouts for u in updates), sum(u.total for u in updates)
    squares, unit_squares = sum(u.squares for u in updates), sum(u.unit_squares for u in updates)
    within = sum(u.squares - u.total * u.total / u.rollouts for u in updates)
    between_units = unit_squares - total * total / rollouts
    at_random = squares - unit_squares + between_units * (units - len(updates)) / (units - 1)
    return 1 - within / at_random if at_random > 1e-9 else 0.0
