"""Several engines as one. Requests wait in the pool and go to the least loaded member that has a free slot, in the
order of submission. An aborted request, and the next turn of a rollout, return to their member if that has room,
because it may have their KV cache (pool_members.py).

    submit -> the pool's queue -> a member's free slot -> its changes, merged on one clock -> poll

A member never holds more requests than it has slots, so a slow member does not hold requests that another could run.
All calls to a member are made in its own thread, which refills a freed slot without waiting for the caller: members may
block in `poll`. Those that have `deliver_to` are not polled. They must run in real time, which excludes the simulated
engine.

A member that is temporarily unavailable (`is_available`) gets no requests while another can take them. Its requests
that are not in a slot move to free slots elsewhere. A member is lost when a call raises `EngineDied`, when a weight
update fails, or when it fails requests that others complete: one that refuses everything at once always has free slots,
so it would get most of the requests. The pool then continues without it:
- its requests return to the head of the queue and continue elsewhere after the tokens delivered so far. The caller sees
  a preemption: no retry is used up, no delivered token is lost, and no token is delivered twice;
- its slots stay empty and still count in `slots`, so that the metrics show the loss (as KV-limited or queued), until
  another engine takes its place (`rejoin`), which starts to work at the next `update_weights`;
- when the last member is lost, `poll`, `update_weights` and `sleep` raise `EngineDied`.

A request that fails on one member is tried on others, too. It fails if `_MEMBERS_TO_TRY` of them, or all, fail it.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from operator import methodcaller
from typing import Any

from sortedrl.core.engine import (
    Change,
    Engine,
    EngineBase,
    EngineDied,
    EngineInfo,
    Request,
    RequestFailed,
    RequestFinished,
    RequestPreempted,
    RequestStarted,
    Tokens,
    with_defaults,
)
from sortedrl.core.engine_checks import checked_changes
from sortedrl.core.user_values import reason_of
from sortedrl.core.wording import counted
from sortedrl.engines.pool_members import Call, Entry, Member, route
from sortedrl.engines.shared import require_empty, require_new

_SLICE_SECONDS = 0.1  # how often one that delivers its changes is asked whether it is available
_CLOSE_SECONDS = 5.0
_HOMES_PER_SLOT = 16
_MEMBERS_TO_TRY = 3  # before a request counts as failed
_MOST_BLAME = 8.0  # one for each request that a member failed and another completed
_BLAME_PER_SUCCESS = 0.125  # less: up to one request in nine may fail
_log = logging.getLogger(__name__)


class Pool(EngineBase):
    """See the module docstring. The pool is itself an engine."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        if not engines:
            raise ValueError("a pool needs at least one engine")
        self.slots = sum(engine.slots for engine in engines)
        self.copies_weights = any(with_defaults(engine).copies_weights for engine in engines)
        self.has_own_device = all(with_defaults(engine).has_own_device for engine in engines)
        sizes = [with_defaults(engine).info().kv_tokens or 0 for engine in engines]
        self._info = EngineInfo(kv_tokens=sum(sizes) if all(sizes) else None)  # like the slots, also of lost members
        self._lock = threading.Lock()  # guards everything below
        self._news = threading.Condition(self._lock)
        self._entries: dict[int, Entry] = {}  # all requests in the pool
        self._queue: deque[Entry] = deque()
        self._home_of: dict[int, Member] = {}  # by id of requests that ended: the member that may have their KV cache
        self._outbox: list[Change] = []
        self._submitted = 0
        self._version = 0
        self._was_updated = False
        self._last_time = float("-inf")
        self._defect: BaseException | None = None  # unexpected error in a member's thread, raised to the caller
        self._is_closed = False
        self._members: list[Member] = []
        for engine in engines:
            self._add(engine, place=len(self._members))

    # The protocol

    def now(self) -> float:
        return time.perf_counter()

    def info(self) -> EngineInfo:
        return self._info

    def submit(self, requests: Sequence[Request]) -> None:
        with self._lock:
            require_new(requests, self._entries)
            for request in requests:
                entry = Entry(request, self._submitted)
                self._submitted += 1
                self._entries[request.id] = entry
                self._queue.append(entry)
            self._dispatch()

    def poll(self, until: float | None = None) -> list[Change]:
        with self._lock:
            while not self._outbox and (self._entries or until is not None):
                self._raise_if_none_works()
                seconds = None if until is None else until - self.now()
                if seconds is not None and seconds <= 0:
                    break
                self._news.wait(seconds)
            self._raise_defect()
            return self._report()

    def abort(self, ids: Sequence[int]) -> list[Change]:
        with self._lock:
            unwanted = {id: self._entries[id] for id in ids if id in self._entries}
            for entry in unwanted.values():
                entry.unwanted = True
            self._queue = deque(entry for entry in self._queue if not entry.unwanted)
            calls = []
            for member in self._members:
                for entry in [entry for entry in member.inbox if entry.unwanted]:
                    member.inbox.remove(entry)
                    del member.entries[entry.request.id]
                named = [id for id, entry in member.entries.items() if entry.unwanted]
                if named:
                    calls.append(self._call(member, _abort_of(named)))
            self._wait_for(calls)
            for id in unwanted:
                self._entries.pop(id, None)
                for member in self._members:
                    if member.entries.pop(id, None) is not None:
                        self._remember(id, member)
            self._dispatch()
            return self._report()

    def update_weights(self, weights: Any, version: int) -> None:
        """Update the weights of all members in parallel. A member whose update fails is lost.

        An iterator is read in this thread and to its end: gathering sharded weights is a collective.
        """
        if isinstance(weights, Iterator):
            weights = dict(weights)
        with self._lock:
            require_empty(len(self._entries), f"weight update to version {version}")
            self._version, self._was_updated = version, True
            for member in self._members:
                member.has_weights = True
            update = methodcaller("update_weights", weights, version)
            self._wait_for([self._call(member, update, loses_on_any_error=True) for member in self._present()])
            self._raise_if_none_works(f"the weight update to version {version} failed on every engine: ")

    def sleep(self) -> None:
        self._send_to_sleep(methodcaller("sleep"))

    def sleep_until_update(self) -> None:
        self._send_to_sleep(methodcaller("sleep_until_update"))

    def _send_to_sleep(self, sleep: Callable[[EngineBase], None]) -> None:
        with self._lock:
            require_empty(len(self._entries), "sleep")
            self._wait_for([self._call(member, sleep) for member in self._present()])
            if all(member.lost is not None for member in self._members):  # others may wait for the coming weights
                self._raise_if_none_works()

    # Members

    @property
    def lost(self) -> dict[int, str]:
        """Places of lost members, with the reason."""
        with self._lock:
            return {member.place: member.lost for member in self._members if member.lost is not None}

    def rejoin(self, engine: Engine) -> None:
        """Replace a lost member with an engine of as many slots.

        It starts to work at the next `update_weights`, since the pool keeps no copy of the weights, or immediately if
        there has been no update yet.
        """
        with self._lock:
            empty = {member.slots: member.place for member in reversed(self._members) if member.lost is not None}
            if engine.slots not in empty:
                had = sorted(empty)
                raise ValueError(f"the new engine has {counted(engine.slots, 'slot')}, but the lost ones had {had}")
            self._add(engine, empty[engine.slots])
            self._dispatch()

    def close(self) -> None:
        """Stop the threads, and close the engines."""
        with self._lock:
            self._is_closed = True
            for member in self._members:
                member.news.notify_all()
        for member in self._members:
            member.thread.join(_CLOSE_SECONDS)

    def _add(self, engine: Engine, place: int) -> None:
        member = Member(engine, self._lock, place)
        member.has_weights = not self._was_updated
        if member.engine.deliver_to is not None:
            member.engine.deliver_to(partial(self._receive, member))
        self._members[place : place + 1] = [member]
        member.thread = threading.Thread(target=self._serve, args=(member,), name=f"engine {place}", daemon=True)
        member.thread.start()

    # A member's thread

    def _serve(self, member: Member) -> None:
        """Run until the pool is closed or the member is lost, then close the member."""
        try:
            self._work(member)
        finally:
            with suppress(Exception, SystemExit):  # it is gone anyway
                member.engine.close()

    def _work(self, member: Member) -> None:
        call: Call | None = None
        try:
            while True:
                with self._lock:
                    while not (self._is_closed or member.lost or member.calls or member.entries):
                        member.news.wait()
                    if member.engine.deliver_to is not None and not (member.lost or member.calls or member.inbox):
                        member.news.wait(_SLICE_SECONDS)  # it delivers its changes, and there is nothing to tell it
                    if self._is_closed or member.lost:
                        return
                    new = [entry.remaining(self._version) for entry in member.inbox]
                    member.inbox.clear()
                    call = member.calls[0] if member.calls else None
                changes = member.advance(new, call)
                with self._lock:
                    if member.lost:  # taken out meanwhile
                        return
                    self._note(member, changes)
                    if self._queue:
                        self._dispatch()  # a member may have become available
                    if call is None:
                        self._move_waiting(member)
                    else:
                        member.calls.popleft()
                        given = [entry for id in call.gives_back if (entry := member.entries.pop(id, None)) is not None]
                        self._requeue(given)
                        self._dispatch()
                        call.done = True
                        self._news.notify_all()
        except BaseException as caught:  # also SystemExit: the pool would wait for this thread forever
            error = caught if isinstance(caught, Exception) else RuntimeError(reason_of(caught))
            with self._lock:
                if self._is_closed or member.lost:
                    return
                if not (isinstance(error, EngineDied) or (call is not None and call.loses_on_any_error)):
                    self._defect = error
                self._lose(member, f"{type(error).__name__}: {error}")

    def _receive(self, member: Member, changes: Sequence[Change]) -> None:
        """In a thread of the member's engine."""
        with self._lock:
            if not changes:
                member.news.notify_all()  # its `poll` raises
            elif member.lost is None:
                self._note(member, changes)

    def _note(self, member: Member, changes: Sequence[Change]) -> None:
        freed = False
        now = self.now()
        reuses_lists = member.engine.deliver_to is None  # perhaps: when it is polled again, before the pool is
        for change in changes:
            entry = member.entries.get(change.id)
            if entry is None:
                _log.warning("engine %d reports %s for a request that it does not have", member.place, change)
                continue
            if isinstance(change, Tokens):
                if reuses_lists:
                    with suppress(ValueError):  # a segment of unequal parts: the scheduler says so
                        change = change._replace(segment=change.segment.copy())
                entry.tokens.extend(change.segment.tokens)
                entry.logprobs.extend(change.segment.logprobs)
            elif isinstance(change, RequestStarted):
                entry.in_slot = True
            elif isinstance(change, RequestPreempted):
                entry.in_slot = False
            else:
                del member.entries[change.id]
                freed = True
                if isinstance(change, RequestFailed) and self._try_elsewhere(member, entry):
                    continue
                del self._entries[change.id]
                if isinstance(change, RequestFinished):
                    self._remember(change.id, member)
                    self._blame(member, entry.failed_on)
            at = max(member.last_time, min(change.at + member.clock_offset, now))
            member.last_time = at
            self._outbox.append(change if at == change.at else change._replace(at=at))
        if freed:
            self._dispatch()
        if changes:
            self._news.notify_all()

    def _try_elsewhere(self, member: Member, entry: Entry) -> bool:
        """Whether the request, which failed on this member, waits for another one."""
        entry.failed_on.append(member)
        is_last = len(entry.failed_on) >= _MEMBERS_TO_TRY or not self._untried(entry)
        if entry.left == 0 or is_last:
            return False
        self._requeue([entry])
        return True

    def _untried(self, entry: Entry) -> list[Member]:
        return [member for member in self._members if member.is_working and member not in entry.failed_on]

    def _blame(self, member: Member, failed: Sequence[Member]) -> None:
        """`member` has completed a request that others had failed."""
        member.blame = max(0.0, member.blame - _BLAME_PER_SUCCESS)
        for other in failed:
            other.blame += 1.0
            if other.blame >= _MOST_BLAME and other.lost is None:
                self._lose(other, f"it failed {_MOST_BLAME:g} requests that other engines completed")

    def _lose(self, member: Member, reason: str) -> None:
        member.lost = reason
        member.news.notify_all()
        for call in member.calls:
            call.done = True
        moved = self._requeue(member.entries.values())
        member.entries.clear()
        member.inbox.clear()
        _log.warning(
            "engine %d of %d is lost (%s): moving %s to %s",
            member.place + 1,
            len(self._members),
            member.lost,
            counted(moved, "request"),
            counted(sum(other.is_working for other in self._members), "remaining engine"),
        )
        self._dispatch()
        self._news.notify_all()

    # With the lock held

    def _dispatch(self) -> None:
        """Send each request to its previous member, or to the least loaded one with a free slot, in order.

        One that failed on a member waits for another one, and does not hold the others up.
        """
        passed: list[Entry] = []
        while self._queue and (free := self._members_with_room()):
            entry = self._queue.popleft()
            if entry.failed_on and (untried := self._untried(entry)):
                free = [member for member in free if member in untried]
                if not free:
                    passed.append(entry)
                    continue
            home = self._home_of.pop(entry.request.id, None)
            member = route(home, free)
            member.entries[entry.request.id] = entry
            member.inbox.append(entry)
            if entry.has_moved:  # clocks are inexact: its new start must not precede its preemption
                member.last_time = self.now()
            member.news.notify_all()
        self._queue.extendleft(reversed(passed))

    def _remember(self, id: int, home: Member) -> None:
        """Most requests never come back, so only the latest count."""
        self._home_of[id] = home
        if len(self._home_of) > _HOMES_PER_SLOT * self.slots:
            del self._home_of[next(iter(self._home_of))]

    def _members_with_room(self) -> list[Member]:
        """The available members; if there are none, the unavailable ones, since one of them must be tried."""
        working = [member for member in self._members if member.is_working]
        return [m for m in ([m for m in working if m.engine.is_available] or working) if m.free_slots > 0]

    def _move_waiting(self, member: Member) -> None:
        """Take requests back from an unavailable member as far as others have room."""
        if member.calls or member.engine.is_available or all(entry.in_slot for entry in member.entries.values()):
            return
        room = sum(m.free_slots for m in self._members_with_room() if m is not member and m.engine.is_available)
        waiting = [id for id, e in member.entries.items() if not (e.in_slot or e.unwanted or e in member.inbox)]
        if waiting[:room]:
            self._call(member, _abort_of(waiting[:room]), gives_back=waiting[:room])

    def _requeue(self, entries: Iterable[Entry]) -> int:
        """Requests that left their member go to the head of the queue; returns how many."""
        at = self.now()
        waiting = []
        for entry in sorted(entries, key=lambda entry: entry.order):
            entry.has_moved = True
            if entry.left == 0 and not entry.unwanted:  # it has all tokens, only its end was not reported
                self._outbox.append(RequestFinished(entry.request.id, at, truncated=True))
                del self._entries[entry.request.id]
                continue
            if entry.in_slot:
                self._outbox.append(RequestPreempted(entry.request.id, at, entry.context_tokens))
                entry.in_slot = False
            if not entry.unwanted:
                waiting.append(entry)
        self._queue.extendleft(reversed(waiting))
        return len(waiting)

    def _call(self, member: Member, do: Callable[[EngineBase], Sequence[Change] | None], **how: Any) -> Call:
        call = Call(do, **how)
        member.calls.append(call)
        member.news.notify_all()
        return call

    def _present(self) -> list[Member]:
        return [member for member in self._members if member.lost is None]

    def _wait_for(self, calls: Sequence[Call]) -> None:
        while not all(call.done for call in calls):
            self._news.wait()
        self._raise_defect()

    def _report(self) -> list[Change]:
        """Deliver in time order; a late report gets the time of the report before it."""
        changes = sorted(self._outbox, key=lambda change: change.at)
        self._outbox.clear()
        for place, change in enumerate(changes):
            self._last_time = max(self._last_time, change.at)
            changes[place] = change._replace(at=self._last_time) if change.at < self._last_time else change
        return changes

    def _raise_defect(self) -> None:
        if self._defect is not None:
            raise self._defect

    def _raise_if_none_works(self, what: str = "") -> None:
        if not any(member.is_working for member in self._members):
            self._raise_defect()
            reasons = [f"engine {m.place + 1}: {m.lost or 'waiting for weights'}" for m in self._members]
            raise EngineDied(f"{what}no engine of the pool is left ({'; '.join(reasons)})")


def _abort_of(ids: Sequence[int]) -> Callable[[Engine], Sequence[Change]]:
    return lambda engine: checked_changes(engine, "abort", engine.abort(ids))
