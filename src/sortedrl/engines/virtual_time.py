"""What engines in virtual time have in common: the loop from event to event, and alarms that end it early."""

import heapq
import math
from abc import abstractmethod
from collections.abc import Callable

from sortedrl.core.engine import Change, EngineBase


class VirtualTimeEngine(EngineBase):
    """`poll` advances to the next end or failure of a request, but not past an alarm or the caller's deadline."""

    virtual_time = True
    replicas: int = 1  # engines that share the slots

    def __init__(self) -> None:
        self._now = 0.0
        self._undelivered: list[Change] = []
        self._has_ended = False  # an undelivered change is an end or a failure
        self._alarms: list[float] = []

    @property
    @abstractmethod
    def running(self) -> int:
        """Requests in a slot."""

    @abstractmethod
    def pass_time(self, seconds: float) -> None:
        """Advance the clock without generating: the learner steps, or weights are updated."""

    @abstractmethod
    def slow_down(self, speed_at: Callable[[int], float] | None) -> None:
        """From the next step on, decode at this fraction of the speed, by the number of running requests on one engine;
        None: at full speed."""

    @abstractmethod
    def _has_work(self) -> bool: ...

    @abstractmethod
    def _idle_until(self, time: float) -> None: ...

    @abstractmethod
    def _advance(self, limit: float) -> bool:
        """Run to the next event; False if `limit` came first."""

    def poll(self, until: float | None = None) -> list[Change]:
        while not self._has_ended:
            limit = math.inf if until is None else until
            if self._alarms:
                limit = min(limit, self._next_alarm())
            if not self._has_work():
                if limit < math.inf:
                    self._idle_until(limit)
                break
            if not self._advance(limit):
                break
        return self.take_changes()

    def take_changes(self) -> list[Change]:
        """Those up to now, without advancing."""
        changes, self._undelivered, self._has_ended = self._undelivered, [], False
        return changes

    def wake_at(self, time: float) -> None:
        """Make `poll` return at this time at the latest."""
        heapq.heappush(self._alarms, time)

    def _next_alarm(self) -> float:
        while self._alarms and self._alarms[0] <= self._now:
            heapq.heappop(self._alarms)
        return self._alarms[0] if self._alarms else math.inf
