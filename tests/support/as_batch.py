"""Rollouts as the batch that a controller would hand out."""

from collections.abc import Sequence

from sortedrl.core.batch import Batch
from sortedrl.core.rollout import Rollout


def as_batch(rollouts: Sequence[Rollout], version: int = 0, *, update: int = 0, complete_cohorts: int = 0) -> Batch:
    return Batch(update, update, version, tuple(rollouts), complete_cohorts)
