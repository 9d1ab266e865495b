"""The requests that wait in the engine for a slot at the server, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Container

from sortedrl.core.engine import Request
from sortedrl.core.rollout import Segment
from sortedrl.engines.servers.dialect import Waiting


class WaitingRequests:
    """In the order of submission, also of those that a server turned away."""

    def __init__(self) -> None:
        self._queue: deque[Waiting] = deque()
        self._places_given = 0

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, request: Request) -> None:
        self._places_given += 1
        self._queue.append(Waiting(request, self._places_given))

    def pop(self) -> Waiting:
        return self._queue.popleft()

    def pop_least_refused(self) -> Waiting:
        """For a server that may be unavailable: it may refuse one request and take all others."""
        waiting = min(self._queue, key=lambda entry: entry.turned_away)
        self._queue.remove(waiting)
        return waiting

    def take_back(self, waiting: Waiting, made: Segment | None) -> None:
        """A request that the server turned away; `made`: what it has generated."""
        waiting.turned_away += 1
        if made is not None:
            waiting.turned_away = 1
            request = waiting.request
            waiting.request = request._replace(
                prefix=(*request.prefix, made), max_new_tokens=request.max_new_tokens - len(made)
            )
        self._queue = deque(sorted((*self._queue, waiting), key=lambda entry: entry.place))

    def remove(self, ids: Container[int]) -> None:
        self._queue = deque(waiting for waiting in self._queue if waiting.request.id not in ids)
