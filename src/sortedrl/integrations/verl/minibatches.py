"""The order of an update's rows, so that every optimizer step of verl sees the same mix of lengths.

verl gives each data-parallel rank an equal run of rows and cuts that run into mini-batches from front to back. An
update of the scheduler comes sorted by length: left in that order, the first optimizer step would see the short
responses and the last one the long.
"""

from __future__ import annotations

from collections.abc import Sequence


def dealt_out(lengths: Sequence[int], ranks: int, minibatches: int) -> list[int]:
    """The rows in their new order. Every rank keeps its rows; they are dealt out by length over its mini-batches."""
    per_rank = len(lengths) // ranks
    order: list[int] = []
    for first in range(0, len(lengths), per_rank):
        by_length = sorted(range(first, first + per_rank), key=lambda row: lengths[row])
        order += [row for start in range(minibatches) for row in by_length[start::minibatches]]
    return order
