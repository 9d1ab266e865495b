"""Several simulated engines as one, in one virtual time: engines/pool.py without threads.

Each engine has its own step time, KV cache and prefill, and runs from event to event on its own. Only the engine whose
next event comes first is advanced; the others follow when something is submitted to them or aborted. So a run costs as
much per event as on one engine.

The pool's clock is at the last event that it reported. An engine that prefills may be ahead of it, so changes wait here
until the clock has reached them.

A request goes where the pool's rule sends it (pool_members.py). On another engine than before, it finds no KV cache.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

from sortedrl.core.engine import Change, Request, RequestFailed, RequestFinished, RequestStarted
from sortedrl.engines.pool_members import HasSlots, route
from sortedrl.engines.simulated import SimulatedEngine
from sortedrl.engines.virtual_time import VirtualTimeEngine

_TIME_OF = attrgetter("at")


class Replica(HasSlots):
    """An engine of the pool. Its entries are in the order of submission."""

    def __init__(self, engine: SimulatedEngine, place: int) -> None:
        self.engine = engine
        self.place = place
        self.slots = engine.slots
        self.entries: dict[int, Request] = {}


class SimulatedPool(VirtualTimeEngine):
    def __init__(self, engines: Sequence[SimulatedEngine]) -> None:
        super().__init__()
        self.slots = sum(engine.slots for engine in engines)
        self.replicas = len(engines)
        self._replicas = [Replica(engine, place) for place, engine in enumerate(engines)]
        self._next_events = [math.inf] * len(engines)  # by place; those of touched replicas are out of date
        self._touched: dict[Replica, None] = {}
        self._queue: deque[Request] = deque()
        self._replica_of: dict[int, Replica] = {}  # by request id
        self._home_of: dict[int, Replica] = {}  # of requests that were here before

    @property
    def running(self) -> int:
        return sum(replica.engine.running for replica in self._replicas)

    # The protocol

    def now(self) -> float:
        return self._now

    def submit(self, requests: Sequence[Request]) -> None:
        self._queue.extend(requests)
        self._dispatch()

    def abort(self, ids: Sequence[int]) -> list[Change]:
        by_replica: dict[Replica, list[int]] = {}
        for id in ids:
            if id in self._replica_of:
                by_replica.setdefault(self._replica_of[id], []).append(id)
        wanted = set(ids)
        self._queue = deque(request for request in self._queue if request.id not in wanted)
        aborted = []
        for replica, named in by_replica.items():
            self._synchronize(replica)
            aborted.append((replica, replica.engine.abort(named)))
        for replica, changes in aborted:  # an engine in a prefill ends it first, and the pool waits for all of them
            self._now = max(self._now, replica.engine.now())
            self._note(replica, changes)
        for replica, named in by_replica.items():
            for id in named:
                self._remove(replica, id)
        self._dispatch()
        return self.take_changes()

    def update_weights(self, weights: Any, version: int) -> None:
        for replica in self._replicas:
            self._synchronize(replica)
            replica.engine.update_weights(weights, version)
        self._now = max(replica.engine.now() for replica in self._replicas)

    # Virtual time

    def pass_time(self, seconds: float) -> None:
        for replica in self._replicas:
            if replica.entries:
                self._synchronize(replica)
                replica.engine.pass_time(seconds)
        self._now += seconds

    def slow_down(self, speed_at: Callable[[int], float] | None) -> None:
        for replica in self._replicas:
            self._synchronize(replica)
            replica.engine.slow_down(speed_at)
            self._touched[replica] = None

    def _has_work(self) -> bool:
        return bool(self._replica_of or self._queue)

    def _idle_until(self, time: float) -> None:
        self._now = max(self._now, time)

    def _advance(self, limit: float) -> bool:
        if self._queue:
            self._dispatch()
        for replica in tuple(self._touched):
            self._next_events[replica.place] = replica.engine.next_event()
            self._note(replica, replica.engine.take_changes())  # requests may start with the coming step
        if self._has_ended:
            return True
        self._touched.clear()
        at = min(self._next_events)
        if at > limit:
            self._idle_until(limit)
            return False
        replica = self._replicas[self._next_events.index(at)]
        self._now = max(self._now, at)
        self._note(replica, replica.engine.poll(at))
        if self._queue:
            self._dispatch()
        return True

    def take_changes(self) -> list[Change]:
        """In time order; changes that are ahead of the pool's clock stay."""
        changes = super().take_changes()
        if any(change.at > self._now for change in changes):
            self._undelivered = [change for change in changes if change.at > self._now]
            changes = [change for change in changes if change.at <= self._now]
        return sorted(changes, key=_TIME_OF)

    def _synchronize(self, replica: Replica) -> None:
        """Bring the engine to the pool's time."""
        if replica.engine.now() < self._now:
            self._note(replica, replica.engine.poll(self._now))

    def _note(self, replica: Replica, changes: Iterable[Change]) -> None:
        self._touched[replica] = None
        for change in changes:
            kind = type(change)
            if change.at > self._now and kind is not RequestStarted:
                change = change._replace(at=self._now)  # of a request that fails at once, in an engine that is ahead
            if kind is RequestFinished or kind is RequestFailed:
                self._remove(replica, change.id)
                self._has_ended = True
            self._undelivered.append(change)

    def _remove(self, replica: Replica, id: int) -> None:
        if replica.entries.pop(id, None) is not None:
            del self._replica_of[id]
            self._home_of[id] = replica

    def _dispatch(self) -> None:
        while self._queue and (free := [one for one in self._replicas if one.free_slots > 0]):
            for replica, requests in self._routed(free).items():
                self._synchronize(replica)
                replica.engine.submit(requests)
                self._note(replica, replica.engine.take_changes())  # one that fails at once frees its slot

    def _routed(self, free: list[Replica]) -> dict[Replica, list[Request]]:
        """Takes requests from the queue as long as there is room for them."""
        routed: dict[Replica, list[Request]] = {}
        while self._queue and free:
            request = self._queue.popleft()
            home = self._home_of.pop(request.id, None)
            replica = route(home, free)
            if request.prefix and replica is not home:
                replica.engine.miss_kv_cache(request.id)
            replica.entries[request.id] = request
            self._replica_of[request.id] = replica
            routed.setdefault(replica, []).append(request)
            if not replica.free_slots:
                free.remove(replica)
        return routed
