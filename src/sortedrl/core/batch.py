"""The update batch that the controller hands out, and the check that none of its tokens is too old."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import SupportsIndex, overload

from sortedrl.core.rollout import Rollout


class StaleTokens(RuntimeError):
    """A batch would have held tokens older than the mode allows: a bug in a strategy, never a user error."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One update: scored rollouts, shortest first. `version` is the learner's when the batch was handed out.

    `complete_cohorts`: no later batch has a rollout of a cohort with a lower number than this. `filtered_rewards`:
    (cohort, reward) of the rollouts that were filtered since the batch before, for statistics of rewards."""

    update: int
    harvest: int
    version: int
    rollouts: tuple[Rollout, ...]
    complete_cohorts: int = 0
    filtered_rewards: tuple[tuple[int, float], ...] = ()

    def __len__(self) -> int:
        return len(self.rollouts)

    def __iter__(self) -> Iterator[Rollout]:
        return iter(self.rollouts)

    @overload
    def __getitem__(self, index: SupportsIndex) -> Rollout: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Rollout, ...]: ...

    def __getitem__(self, index: SupportsIndex | slice) -> Rollout | tuple[Rollout, ...]:
        """With `len`, all that PyTorch's DataLoader needs."""
        return self.rollouts[index]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.rollouts))


def check_staleness(rollouts: Iterable[Rollout], version: int, bound: int | None, mode: str) -> None:
    """Raise `StaleTokens` if a token is more than `bound` versions older than `version`; None: no bound."""
    if bound is None:
        return
    for rollout in rollouts:
        oldest = rollout.oldest_version
        if oldest is not None and version - oldest > bound:
            versions = f"tokens of version {oldest}, the learner holds version {version}"
            raise StaleTokens(f"rollout {rollout.id} has {versions}, and mode {mode} allows a staleness of {bound}")
