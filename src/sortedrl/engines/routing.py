"""Which engine of several gets a request: one rule for real pools and for simulated ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar


class HasSlots(Protocol):
    slots: int

    @property
    def free_slots(self) -> int: ...


Member = TypeVar("Member", bound=HasSlots)


def route(home: Member | None, free: Sequence[Member]) -> Member:
    """The request's home, which may have its KV cache, if that is among `free`; else the least loaded of them."""
    return home if home is not None and home in free else max(free, key=lambda m: m.free_slots / m.slots)


def even_split(total: int, parts: int) -> list[int]:
    """So many slots, or rollouts, on each of the parts: they differ by one at most."""
    return [(total + place) // parts for place in range(parts)]
