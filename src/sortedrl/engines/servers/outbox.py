"""Passes changes from the engine's thread to the thread that calls the engine.

Changes are held back, in order, until it is confirmed that the right weights generated them. If the weights turn out to
be wrong, the held changes are dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from sortedrl.core.engine import Change, Failed, Finished, Preempted, Started


class Outbox:
    """`news` guards `inside`, `death` and the delivered changes; held changes belong to the engine's thread."""

    def __init__(self, clean: Callable[[str], str]) -> None:
        self._clean = clean  # removes secrets from reasons
        self.news = threading.Condition()
        self.inside: set[int] = set()  # requests that have not ended
        self.death: str | None = None  # why the engine is dead
        self._changes: list[Change] = []
        self._held: list[tuple[Change, bool]] = []  # and whether it is safe to deliver in any case

    @property
    def has_changes(self) -> bool:
        return bool(self._changes)

    @property
    def is_holding(self) -> bool:
        return bool(self._held)

    def take(self) -> list[Change]:
        with self.news:
            changes, self._changes = self._changes, []
            return changes

    def add(self, *changes: Change, trusted: bool = True) -> None:
        """Deliver atomically, so that the last tokens and the end arrive together."""
        if self._held or not trusted:
            self._held += [(change, trusted) for change in changes]
        else:
            self._hand_out(changes)

    def release(self) -> None:
        """Deliver all held changes: they are confirmed."""
        held, self._held = self._held, []
        self._hand_out([change for change, _ in held])

    def drop_untrusted(self, id: int) -> None:
        """Drop the unconfirmed changes of this request."""
        self._held = [(change, trusted) for change, trusted in self._held if trusted or change.id != id]

    def die(self, reason: str) -> None:
        """Mark the engine as dead; the first reason stays. Safe changes are still delivered."""
        with self.news:
            held, self._held = self._held, []
            self._hand_out([c for c, trusted in held if trusted and not isinstance(c, Started | Preempted)])
            self.death = self.death or self._clean(reason)
            self.news.notify_all()

    def _hand_out(self, changes: Iterable[Change]) -> None:
        with self.news:
            for change in changes:
                if isinstance(change, Failed):
                    change = change._replace(reason=self._clean(change.reason))
                self._changes.append(change)
                if isinstance(change, Finished | Failed):
                    self.inside.discard(change.id)
            self.news.notify_all()
