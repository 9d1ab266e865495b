"""The members of a pool, the requests that they hold, and which member gets a request."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sortedrl.core.engine import Change, Engine, EngineBase, Request, with_defaults
from sortedrl.core.engine_checks import checked_changes
from sortedrl.core.rollout import Segment

_SLICE_SECONDS = 0.01  # how often a polling member checks for new requests and aborts
_SAME_CLOCK_SECONDS = 1e-3


@dataclass(slots=True, eq=False)
class Entry:
    """A request in the pool with the tokens generated so far, so that another member can continue it."""

    request: Request
    order: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    in_slot: bool = False
    has_moved: bool = False  # it was on another member
    failed_on: list[Member] = field(default_factory=list)
    unwanted: bool = False  # is being aborted

    @property
    def left(self) -> int:
        return self.request.max_new_tokens - len(self.tokens)

    @property
    def context_tokens(self) -> int:
        return len(self.request.prompt.tokens) + self.request.prefix_length + len(self.tokens)

    def remaining(self, version: int) -> Request:
        """The remaining part, as a new request."""
        if not self.tokens:
            return self.request
        return self.request.continued(Segment(self.tokens[:], self.logprobs[:], version))


@dataclass(slots=True, eq=False)
class Call:
    """A call to make in a member's thread."""

    do: Callable[[EngineBase], Sequence[Change] | None]
    loses_on_any_error: bool = False
    gives_back: Sequence[int] = ()  # requests that return to the pool's queue
    done: bool = False


class HasSlots:
    """An engine of a pool, real or simulated, with the requests that it has or is about to get."""

    slots: int
    entries: dict[int, Any]

    @property
    def free_slots(self) -> int:
        return self.slots - len(self.entries)


AnyMember = TypeVar("AnyMember", bound=HasSlots)


class Member(HasSlots):
    def __init__(self, engine: Engine, lock: threading.Lock, place: int) -> None:
        self.engine = with_defaults(engine)
        self.place = place
        self.slots = engine.slots
        offset = time.perf_counter() - engine.now()
        self.clock_offset = offset if abs(offset) > _SAME_CLOCK_SECONDS else 0.0
        self.last_time = float("-inf")  # of its last change, on the pool's clock
        self.thread = threading.current_thread()  # until its own starts
        self.news = threading.Condition(lock)
        self.entries: dict[int, Entry] = {}  # in the engine, or on the way there
        self.inbox: list[Entry] = []  # on the way there
        self.calls: deque[Call] = deque()
        self.has_weights = True
        self.blame = 0.0
        self.lost: str | None = None  # why

    def advance(self, new: Sequence[Request], call: Call | None) -> Sequence[Change]:
        """In its thread: what changes with the new requests, and with the call or else within a short time."""
        if new:
            self.engine.submit(new)
        if call is not None:
            return call.do(self.engine) or ()
        seconds = _SLICE_SECONDS if self.engine.deliver_to is None else 0.0
        return checked_changes(self.engine, "poll", self.engine.poll(self.engine.now() + seconds))

    @property
    def is_working(self) -> bool:
        return self.lost is None and self.has_weights


def route(home: AnyMember | None, free: Sequence[AnyMember]) -> AnyMember:
    """The request's home, which may have its KV cache, if that is among `free`; else the least loaded of them. One rule
    for real pools and for simulated ones."""
    return home if home is not None and home in free else max(free, key=lambda m: m.free_slots / m.slots)


def even_split(total: int, parts: int) -> list[int]:
    """So many slots, or rollouts, on each of the parts: they differ by one at most."""
    return [(total + place) // parts for place in range(parts)]
