"""The thread of all engines on servers: what it passes to the threads that call the engines, and their tasks in it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from sortedrl.core.engine import Change, RequestFailed, RequestFinished, RequestPreempted, RequestStarted

_log = logging.getLogger(__name__)
T = TypeVar("T")


class Outbox:
    """Changes are held back, in order, until it is confirmed that the right weights generated them. If the weights turn
    out to be wrong, the held changes are dropped.

    All changes of one round of the event loop are delivered together: waking another thread takes longer than reading a
    message. `news` guards `inside`, `death` and the delivered changes; all others belong to the engine's thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.news = threading.Condition()
        self.inside: set[int] = set()  # requests that have not ended
        self.death: str | None = None  # why the engine is dead
        self.receive: Callable[[list[Change]], None] | None = None  # gets the changes in place of `take`
        self.delivered: list[Change] = []
        self._ready: list[Change] = []
        self.held: list[tuple[Change, bool]] = []  # and whether it is safe to deliver in any case

    def take(self) -> list[Change]:
        with self.news:
            changes, self.delivered = self.delivered, []
            return changes

    def add(self, *changes: Change, trusted: bool = True) -> None:
        """Deliver atomically, so that the last tokens and the end arrive together."""
        if self.held or not trusted:
            self.held += [(change, trusted) for change in changes]
            return
        if not self._ready:
            self._loop.call_soon(self.deliver)
        self._ready += changes

    def release(self) -> None:
        """Deliver all held changes: they are confirmed."""
        held, self.held = self.held, []
        self._ready += [change for change, _ in held]
        self.deliver()

    def drop_untrusted(self, id: int) -> None:
        """Drop the unconfirmed changes of this request."""
        self.held = [(change, trusted) for change, trusted in self.held if trusted or change.id != id]

    def die(self, reason: str) -> None:
        """Mark the engine as dead; the first reason stays. Safe changes are still delivered."""
        held, self.held = self.held, []
        self._ready += [c for c, trusted in held if trusted and not isinstance(c, RequestStarted | RequestPreempted)]
        with self.news:
            self.death = self.death or reason
        self.deliver(also_none=True)

    def deliver(self, *, also_none: bool = False) -> None:
        changes, self._ready = self._ready, []
        if not changes and not also_none:
            return
        with self.news:
            self.inside.difference_update([c.id for c in changes if isinstance(c, RequestFinished | RequestFailed)])
            if self.receive is None:
                self.delivered += changes
            self.news.notify_all()
        if self.receive is not None:
            self.receive(changes)


class _LoopThread:
    """For all engines, from the first to the last: with a thread each they would mostly wait for Python's lock."""

    _now: _LoopThread | None = None
    _starting_or_ending = threading.Lock()

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(self._note_unhandled)
        self.users: list[BackgroundTasks] = []
        self._thread = threading.Thread(target=self._run, name="engines on servers", daemon=True)
        self._thread.start()

    @classmethod
    def joined_by(cls, user: BackgroundTasks) -> _LoopThread:
        with cls._starting_or_ending:
            if cls._now is None or not cls._now._thread.is_alive():
                cls._now = cls()
            cls._now.users.append(user)
            return cls._now

    def left_by(self, user: BackgroundTasks) -> None:
        with self._starting_or_ending:
            self.users.remove(user)
            if not self.users and self._thread.is_alive():
                _LoopThread._now = None
                with suppress(RuntimeError):  # it is closed: the thread is about to end
                    self.loop.call_soon_threadsafe(self.loop.stop)
                self._thread.join()

    def _run(self) -> None:
        try:
            self.loop.run_forever()
        finally:
            for user in list(self.users):  # a callback raised SystemExit, which no engine would notice
                user.end("the engine's thread has ended")
            self.loop.close()  # and with it three file descriptors

    def _note_unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An error in a callback: it may be of any engine."""
        for user in list(self.users):
            user.note_unhandled(context)


class BackgroundTasks:
    """The tasks of an engine in the event loop. An error in one of them, or in a callback, is never lost.

    `failed` gets the reason if a task fails: nothing else would notice, so the engine is dead then.
    """

    def __init__(self, name: str, failed: Callable[[str], None]) -> None:
        self._name = name
        self._failed = failed
        self.running: set[asyncio.Task[Any]] = set()
        self.has_ended = False
        self._thread = _LoopThread.joined_by(self)
        self.loop = self._thread.loop

    def leave(self) -> None:  # with the last engine, the thread ends
        self.has_ended = True
        self._thread.left_by(self)

    def end(self, reason: str) -> None:  # the thread ended first
        self.has_ended = True
        self._failed(reason)

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = self.loop.create_task(work)
        self.running.add(task)
        task.add_done_callback(self._note_end_of)
        return task

    def _note_end_of(self, task: asyncio.Task[Any]) -> None:
        self.running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(f"the engine's own task failed: {error!r}")

    def note_unhandled(self, context: dict[str, Any]) -> None:
        if "handle" in context and "exception" in context:  # a callback of ours, or one that our streams rely on
            self._failed(f"the engine's own task failed: {context['exception']!r}")
        else:
            _log.debug("%s: %s", self._name, context.get("message"))
