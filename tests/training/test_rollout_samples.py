"""Which responses of an update are written to rollouts.jsonl."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from sortedrl.core.batch import Batch
from sortedrl.core.rollout import Prompt, Rollout
from sortedrl.training.run_record import sampled


def batch_of(size: int) -> Batch:
    return Batch(0, 0, 0, tuple(Rollout(id, Prompt("p", [1]), 0, 0, 0, 0) for id in range(size)))


@pytest.mark.parametrize(
    ("size", "count", "ids"),
    [(9, 3, [0, 4, 8]), (9, 1, [0]), (9, 0, []), (3, 8, [0, 1, 2]), (1, 8, [0]), (2, 2, [0, 1]), (10, 4, [0, 3, 6, 9])],
)
def test_a_sample_reaches_from_the_shortest_to_the_longest(size: int, count: int, ids: list[int]) -> None:
    assert [rollout.id for rollout in sampled(batch_of(size), count)] == ids
