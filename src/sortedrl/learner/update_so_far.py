"""The part of the coming update whose gradient was added up already, and what its rollouts train with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sortedrl.core.batch import Batch
from sortedrl.core.rollout import Rollout
from sortedrl.learner.advantages import CohortStatistics
from sortedrl.learner.batching import UpdateBatch
from sortedrl.learner.update_metrics import Tally

# Advantages differ by less if the same values were summed in another order.
ROUNDING = 1e-5


@dataclass(frozen=True, slots=True)
class Assessment:
    """What rollouts train with, as if they were the whole update: their advantages, which of them have a gradient, and
    the statistics after the update."""

    advantages_br: Tensor
    trains_b: Tensor
    statistics: CohortStatistics
    metrics: dict[str, float]


@dataclass(slots=True)
class UpdateSoFar:
    """Rows of all tensors are in the order of `rollouts`: shortest first, as in a batch of the controller. So the order
    in which rollouts arrive does not change a sum over them."""

    version: int
    rollouts: tuple[Rollout, ...]
    batch: UpdateBatch  # its advantages are those that the gradient was computed with
    trains_b: Tensor
    tally: Tally = field(default_factory=Tally)
    streamed: int = 0  # rollouts, before the batch was complete

    @staticmethod
    def of(version: int, rollouts: Sequence[Rollout], batch: UpdateBatch) -> UpdateSoFar:
        nothing = UpdateSoFar(version, (), batch.select([]), torch.zeros(0, dtype=torch.bool))
        return nothing.with_more(rollouts, batch)

    def with_more(self, rollouts: Sequence[Rollout], batch: UpdateBatch) -> UpdateSoFar:
        """With rollouts whose gradient is still to be computed; row i of `batch` is rollout i."""
        together = (*self.rollouts, *rollouts)
        order = sorted(range(len(together)), key=lambda row: (len(together[row]), together[row].id))
        return replace(
            self,
            rollouts=tuple(together[row] for row in order),
            batch=self.batch.joined(batch).select(order),
            trains_b=torch.cat((self.trains_b, torch.zeros(len(rollouts), dtype=torch.bool)))[order],
        )

    def is_part_of(self, batch: Batch) -> bool:
        return batch.version == self.version and set(self.rollouts) <= set(batch)

    def rows_of(self, rollouts: Sequence[Rollout]) -> list[int]:
        wanted = set(rollouts)
        return [row for row, rollout in enumerate(self.rollouts) if rollout in wanted]

    def train_with(self, found: Assessment, rows: Sequence[int]) -> list[int]:
        """The gradient of these rows is computed next, with what was found. Returns those that have one."""
        advantages_br, trains_b = self.batch.advantages_br.clone(), self.trains_b.clone()
        advantages_br[rows], trains_b[rows] = found.advantages_br[rows], found.trains_b[rows]
        self.batch, self.trains_b = replace(self.batch, advantages_br=advantages_br), trains_b
        return [row for row in rows if found.trains_b[row]]

    def agrees_with(self, found: Assessment) -> bool:
        """Whether the gradient so far is that of the whole update: no rollout that came later has changed what an
        earlier one trains with."""
        if not torch.equal(self.trains_b, found.trains_b):
            return False
        used_br, right_br = (b[found.trains_b] for b in (self.batch.advantages_br, found.advantages_br))
        return torch.allclose(used_br, right_br, rtol=ROUNDING, atol=ROUNDING)
