"""A worker process that holds environment instances and answers many calls at a time, in one event loop."""

import asyncio
import os
import pickle
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context, ContextVar
from typing import Any

from sortedrl.tasks.environment_host import Call, Instances
from sortedrl.tasks.worker_server import CANCELED, OUT_OF_MEMORY, Answer, Connection, Note, Page, Request, built

TICK_SECONDS = 0.5  # how often an idle event loop notes that it is not blocked
BUSY_SECONDS = 0.05  # a callback that takes longer delays the others
_RUNS_FOR: ContextVar[tuple[int, int]] = ContextVar("runs_for", default=(0, 0))  # the owner and the call of a task


def serve(descriptor: int, parent: int, memory_bytes: int, page: int) -> None:
    """The main loop of a worker process: answers calls until the connection closes."""
    connection, instances = built(descriptor, parent, memory_bytes)
    loop = _NotingLoop(Page(page), instances.excuse)
    server = _Server(connection, instances, loop)
    loop.call_soon(server.tick)
    threading.Thread(target=server.read, daemon=True).start()
    while True:
        with suppress(BaseException):  # of an environment: stopping the loop, or SystemExit in a task of its own
            loop.run_forever()


class _NotingLoop(asyncio.SelectorEventLoop):
    """Notes for which call it works. `on_busy(call, seconds)`: for the time that a call did not leave to others."""

    def __init__(self, page: Page, on_busy: Callable[[int, float], None]) -> None:
        super().__init__()
        self._page = page
        self._on_busy = on_busy

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        return super().call_soon(self._noted, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return super().call_at(when, self._noted, callback, *args, context=context)

    def _noted(self, callback: Callable[..., Any], *args: Any) -> None:
        owner, call = _RUNS_FOR.get()
        began = time.monotonic()
        self._page.write(Note(owner, call, began))
        try:
            callback(*args)
        finally:
            now = time.monotonic()
            self.note_nothing(now)
            if now - began > BUSY_SECONDS:
                self._on_busy(call, now - began)

    def note_nothing(self, now: float) -> None:
        self._page.write(Note(0, 0, now))


class _Server:
    def __init__(self, connection: Connection, instances: Instances, loop: _NotingLoop) -> None:
        self._connection = connection
        self._instances = instances
        self._loop = loop
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by instance
        self._closing: set[asyncio.Task[None]] = set()

    def tick(self) -> None:
        self._loop.call_later(TICK_SECONDS, self.tick)

    def read(self) -> None:
        while True:
            self._loop.call_soon_threadsafe(self._take, self._connection.receive())

    def _take(self, request: Request) -> None:
        _RUNS_FOR.set((request.owner, request.number))  # of the tasks that are created from here
        message: Call | int = pickle.loads(request.content)
        if isinstance(message, Call):
            self._tasks[message.instance] = self._loop.create_task(self._answer(message, request))
        else:
            task = self._loop.create_task(self._drop(message, request.seconds))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _answer(self, call: Call, request: Request) -> None:
        try:
            result = await self._instances.answer(call, request.seconds)
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except asyncio.CancelledError:
            if call.instance in self._tasks:  # not by us
                self._loop.note_nothing(time.monotonic())
                os._exit(CANCELED)
            raise
        self._connection.require_modules()
        self._tasks.pop(call.instance, None)
        has_threads = threading.active_count() > 2  # this one, and the one that reads
        self._connection.send(Answer(request.number, "returned", result, has_threads), request.answer_bytes)

    async def _drop(self, instance: int, limit_seconds: float) -> None:
        task = self._tasks.pop(instance, None)
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await self._instances.close(instance, limit_seconds)
