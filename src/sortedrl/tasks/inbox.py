"""Hands results from any thread to the one that waits for them."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """Results in the order in which they came, each collected once."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._items: list[T] = []

    def add(self, items: Iterable[T]) -> None:
        with self._changed:
            self._items += items
            self._changed.notify_all()

    def collect(self) -> list[T]:
        with self._changed:
            items, self._items = self._items, []
        return items

    def wait(self, timeout_seconds: float) -> None:
        """Until there is something to collect."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._items), timeout_seconds)
