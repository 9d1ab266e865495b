"""When a request got which slot and how many tokens it had: what the event log records about the engine."""

from __future__ import annotations

import heapq
import math

from sortedrl.core.engine import Engine
from sortedrl.core.rollout import Rollout


class SlotClock:
    """Stamps events with the engine's time, numbers its slots, and counts tokens since submission.

    Invariants: stamps never go back, even if an engine reports late or a run is resumed. A slot number belongs to at
    most one rollout, and the lowest free number is given out first.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._offset = 0.0
        self._last_stamp = -math.inf
        self._free_slots = list(range(engine.slots))
        self._slot_of: dict[int, int] = {}  # by rollout id
        self._submitted_length: dict[int, int] = {}  # by rollout id

    def now(self) -> float:
        return self.stamp(self._engine.now())

    def stamp(self, at: float) -> float:
        """The time of an event that happened at `at` on the engine's clock."""
        at += self._offset
        if at > self._last_stamp:
            self._last_stamp = at
        return self._last_stamp

    def continue_from(self, last_time: float) -> None:
        """Stamp the next event at `last_time` or later: a resumed run continues the clock of its log."""
        self._offset = last_time - self._engine.now()
        self._last_stamp = last_time  # rounding of the offset must not move the clock back

    def submit(self, rollout: Rollout) -> None:
        self._submitted_length[rollout.id] = rollout.length

    def slot_of(self, rollout: Rollout) -> int | None:
        return self._slot_of.get(rollout.id)

    def take_slot(self, rollout: Rollout) -> int | None:
        """The slot number that the rollout gets; None if all slots are taken."""
        if not self._free_slots:
            return None
        slot = self._slot_of[rollout.id] = heapq.heappop(self._free_slots)
        return slot

    def free_slot(self, rollout: Rollout) -> None:
        """Free the rollout's slot, if it has one."""
        slot = self._slot_of.pop(rollout.id, None)
        if slot is not None:
            heapq.heappush(self._free_slots, slot)

    def leave(self, rollout: Rollout) -> int:
        """The rollout leaves the engine; returns how many tokens it made since it was submitted."""
        self.free_slot(rollout)
        return rollout.length - self._submitted_length.pop(rollout.id)
