"""Reorders an update's rows so that every optimizer step of verl sees the same mix of lengths.

verl gives each data-parallel rank consecutive rows and splits them into mini-batches from front to back. Updates are
sorted by length: in that order, the first optimizer step would see the short responses and the last one the long ones.
"""

from __future__ import annotations

from collections.abc import Sequence


def dealt_out(lengths: Sequence[int], ranks: int, minibatches: int) -> list[int]:
    """The new order of the rows. Every rank keeps its rows, distributed by length over its mini-batches."""
    per_rank = len(lengths) // ranks
    order: list[int] = []
    for first in range(0, len(lengths), per_rank):
        by_length = sorted(range(first, first + per_rank), key=lambda row: lengths[row])
        order += [row for start in range(minibatches) for row in by_length[start::minibatches]]
    return order
