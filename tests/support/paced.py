"""A real-time engine without a model: one token for every running request each step, delivered at once.

A token is its position in the response and its log-probability minus (position + 1), as in the simulated engine. It
can be told to die (as a killed process does: every later call raises), or to be unable to load some version.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from sortedrl.core.engine import Change, EngineDied, Request, RequestFinished, RequestStarted, Tokens
from sortedrl.core.rollout import Segment

PATIENCE_SECONDS = 60.0


class PacedEngine:
    def __init__(
        self,
        *,
        slots: int,
        length_of: Callable[[Request], int] = lambda request: 1000,
        step_seconds: float = 0.0,
        dies_at_call: int | None = None,  # of poll and stop
        cannot_load: int | None = None,  # version
        clock_offset: float = 0.0,
    ) -> None:
        self.slots = slots
        self.loaded: list[tuple[Any, int]] = []
        self.submitted: list[Request] = []
        self.most_inside = 0
        self._length_of = length_of
        self._step_seconds = step_seconds
        self._dies_at_call = dies_at_call
        self._cannot_load = cannot_load
        self.clock_offset = clock_offset
        self._calls = 0
        self._version = 0
        self._queue: deque[Request] = deque()
        self._running: dict[int, tuple[Request, int]] = {}  # and tokens made
        self._unreported: list[Change] = []
        self._noticed = threading.Event()

    def die(self) -> None:
        self._dies_at_call = self._calls

    def die_noticed(self) -> None:
        """From another thread: returns after a call has raised, however slow the caller is."""
        self.die()
        assert self._noticed.wait(PATIENCE_SECONDS)

    @property
    def polls(self) -> int:
        """And aborts."""
        return self._calls

    def now(self) -> float:
        return time.perf_counter() + self.clock_offset

    def submit(self, requests: Sequence[Request]) -> None:
        self._check_alive()
        self.submitted += requests
        self._queue += requests
        self.most_inside = max(self.most_inside, len(self._queue) + len(self._running))

    def poll(self, until: float | None = None) -> list[Change]:
        self._calls += 1
        self._check_alive()
        self._admit()
        while self._running and not self._unreported and (until is None or self.now() < until):
            self._step()
        if until is not None and not self._running and not self._unreported:
            time.sleep(max(0.0, until - self.now()))
        return self._report()

    def abort(self, ids: Sequence[int]) -> list[Change]:
        self._calls += 1
        self._check_alive()
        self._queue = deque(request for request in self._queue if request.id not in ids)
        for id in ids:
            self._running.pop(id, None)
        return self._report()

    def update_weights(self, weights: Any, version: int) -> None:
        self._check_alive()
        assert not self._queue and not self._running
        if version == self._cannot_load:
            raise ValueError(f"version {version} is beyond me")
        self.loaded.append((weights, version))
        self._version = version

    def _check_alive(self) -> None:
        if self._dies_at_call is not None and self._calls >= self._dies_at_call:
            self._noticed.set()
            raise EngineDied("killed by the test")

    def _admit(self) -> None:
        while self._queue and len(self._running) < self.slots:
            request = self._queue.popleft()
            self._running[request.id] = (request, 0)
            self._unreported.append(RequestStarted(request.id, self.now()))

    def _step(self) -> None:
        time.sleep(self._step_seconds)
        for request, made in list(self._running.values()):
            position = request.prefix_length + made
            self._unreported.append(Tokens(request.id, self.now(), Segment([position], [-position - 1], self._version)))
            self._running[request.id] = (request, made + 1)
            ended = position + 1 >= self._length_of(request) and not request.sampling.ignore_eos
            if ended or made + 1 == request.max_new_tokens:
                del self._running[request.id]
                self._unreported.append(RequestFinished(request.id, self.now(), truncated=not ended))
        self._admit()

    def _report(self) -> list[Change]:
        changes, self._unreported = self._unreported, []
        return changes
