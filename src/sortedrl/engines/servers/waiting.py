"""The requests that wait in the engine for a slot at the server, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Container

from sortedrl.core.engine import Request
from sortedrl.core.rollout import Segment
from sortedrl.engines.servers.dialect import Waiting

_TURNS_AT_THE_HEAD = 3  # of a refused request, before others are tried first


class WaitingRequests:
    """In the order of submission. A refused request goes back to its place, and after three turns to the end."""

    def __init__(self) -> None:
        self._queue: deque[Waiting] = deque()
        self._places_given = 0

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, request: Request) -> None:
        self._queue.append(Waiting(request, self._new_place()))

    def pop(self) -> Waiting:
        return self._queue.popleft()

    def take_back(self, waiting: Waiting, made: Segment | None) -> None:
        """A request that the server turned away; `made`: what it has generated."""
        waiting.turned_away += 1
        if waiting.turned_away % _TURNS_AT_THE_HEAD == 0:
            waiting.place = self._new_place()
        if made is not None:
            request = waiting.request
            waiting.request = request._replace(
                prefix=(*request.prefix, made), max_new_tokens=request.max_new_tokens - len(made)
            )
        self._queue = deque(sorted((*self._queue, waiting), key=lambda entry: entry.place))

    def remove(self, ids: Container[int]) -> None:
        self._queue = deque(waiting for waiting in self._queue if waiting.request.id not in ids)

    def _new_place(self) -> int:
        self._places_given += 1
        return self._places_given
