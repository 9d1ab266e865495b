"""Several ranks: what rank 0 shares with the others if it schedules for all.

If a rank fails, the launcher (torchrun, accelerate) ends the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from itertools import islice
from typing import Any

import torch.distributed as dist

_HARVEST = timedelta(days=7)  # how long others wait for rank 0: the default would end a long harvest


class Ranks:
    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._group: Any = None

    def scatter(self, parts: Sequence[Any] | None) -> Any:
        """This rank's part of what rank 0 gives."""
        received: list[Any] = [None]
        dist.scatter_object_list(received, None if parts is None else list(parts), src=0, group=self._objects())
        return received[0]

    def on_rank_0(self, do: Callable[[list[Any]], list[Any]], asked: list[Any]) -> list[Any]:
        """What rank 0 makes of each of the values that this rank asks for; it gets those of all ranks at once."""
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(asked, values, dst=0, group=self._objects())
        if values is None:
            return list(self.scatter(None))
        made = iter(do([value for part in values for value in part]))
        return list(self.scatter([list(islice(made, len(part))) for part in values]))

    def _objects(self) -> Any:
        """A group on the CPU: with NCCL, a rank that waits would keep its GPU busy."""
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=_HARVEST)
        return self._group


class FollowedRun:
    """In the place of a `ScheduledRun` on the ranks that rank 0 schedules for."""

    has_batch_in_hand = False
    metrics = None
    reward_mean = 0.0

    def __init__(self) -> None:
        self.version = 0

    def mark_phase(self, phase: str) -> None: ...

    def score(self, reward_of: dict[int, float]) -> None: ...

    def publish(self, weights: Iterable[Any] | None, *, at_once: bool) -> None: ...

    def end(self) -> None: ...
