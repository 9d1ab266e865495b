"""Slot-time of a run that was resumed with another number of slots: each second counts with the slots of then."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SlotTotal:
    """A total since the start of the run, times a factor that changes with the slots: seconds to slot-seconds, or back.

    Invariant: it is exactly `factor * total` until the first change.
    """

    _before: float = 0.0  # up to the last change
    _changed_at: float = 0.0  # the total then

    def of(self, total: float, factor: float) -> float:
        return self._before + factor * (total - self._changed_at)

    def change_factor(self, total: float, factor: float) -> None:
        """`factor` ends at this total, another one follows."""
        self._before, self._changed_at = self.of(total, factor), total
