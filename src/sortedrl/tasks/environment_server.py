"""A worker process that holds environment instances: its event loop, and a note about it that outlives the process."""

from __future__ import annotations

import asyncio
import mmap
import os
import pickle
import signal
import struct
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context, ContextVar
from typing import Any, NamedTuple

from sortedrl.tasks.environment import Environment, EnvironmentTask
from sortedrl.tasks.environment_host import Call, Instances
from sortedrl.tasks.worker_process import (
    CANCELED,
    LOST_CONNECTION,
    LOST_MODULES,
    OUT_OF_MEMORY,
    Answer,
    Channel,
    Modules,
    built,
    end_group,
    message_of,
)

SERVER = __name__
GRACE_SECONDS = 2.0  # for a process to answer that a call exceeded its limit
MAX_ANSWER_BYTES = 4 * 1024 * 1024
BUSY_SECONDS = 0.05  # a callback that takes longer delays the others
_RUNS_FOR: ContextVar[tuple[int, int]] = ContextVar("runs_for", default=(0, 0))  # the problem and the call of a task


class Note(NamedTuple):
    """What the event loop of a process works for, and since when; 0: for no problem, or no call."""

    problem: int
    call: int
    since: float  # by time.monotonic, which all processes of a machine share


class Page:
    """Shared memory for a note, which outlives the process that writes it."""

    _FORMAT = struct.Struct("=QQd")

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, self._FORMAT.size)

    def write(self, note: Note) -> None:
        self._FORMAT.pack_into(self._memory, 0, *note)

    def read(self) -> Note:
        return Note(*self._FORMAT.unpack_from(self._memory))

    def close(self) -> None:
        self._memory.close()


def problem_of(call: Call) -> int:
    """A short name of its problem, the same in all processes, and not 0."""
    return zlib.crc32(str(getattr(call.problem, "id", call.instance)).encode()) + 1


def instances_of(task: EnvironmentTask) -> Instances:
    build: Callable[[], Environment] = task.environment
    return Instances(build, ends_process=True)


def serve(descriptor: int, parent: int, memory_bytes: int, page: int) -> None:
    """The main loop of a worker process: answers calls until the connection closes."""
    channel, instances = built(descriptor, parent, memory_bytes)
    loop = _NotingLoop(Page(page), instances.excuse)
    server = _Server(channel, instances, loop)
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
        problem, call = _RUNS_FOR.get()
        began = time.monotonic()
        self._page.write(Note(problem, call, began))
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
    def __init__(self, channel: Channel, instances: Instances, loop: _NotingLoop) -> None:
        self._channel = channel
        self._instances = instances
        self._loop = loop
        self._modules = Modules()
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by instance
        self._problems: dict[int, int] = {}  # by instance
        self._closing: set[asyncio.Task[None]] = set()
        self._limit_seconds = 0.0

    def tick(self) -> None:
        # On systems where a process does not end with its parent, nothing else would end a blocked loop.
        signal.setitimer(signal.ITIMER_REAL, self._limit_seconds + 2 * GRACE_SECONDS if self._tasks else 0.0)
        self._loop.call_later(GRACE_SECONDS / 2, self.tick)

    def read(self) -> None:
        while True:
            try:
                limit_seconds, message = pickle.loads(self._channel.receive())
            except BaseException:  # the parent closed the connection
                end_group()
            self._loop.call_soon_threadsafe(self._take, limit_seconds, message)

    def _take(self, limit_seconds: float, message: Call | int | None) -> None:
        self._limit_seconds = limit_seconds
        if isinstance(message, Call):
            self._problems[message.instance] = problem_of(message)
            _RUNS_FOR.set((problem_of(message), message.number))  # of the tasks that are created from here
            self._tasks[message.instance] = self._loop.create_task(self._answer(message))
        elif message is not None:
            _RUNS_FOR.set((self._problems.pop(message, 0), 0))
            task = self._loop.create_task(self._drop(message))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _answer(self, call: Call) -> None:
        try:
            result = await self._instances.answer(call, self._limit_seconds)
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except asyncio.CancelledError:
            if call.instance in self._tasks:  # not by us
                self._loop.note_nothing(time.monotonic())
                os._exit(CANCELED)
            raise
        if not self._modules.are_intact():
            os._exit(LOST_MODULES)
        self._tasks.pop(call.instance, None)
        try:
            self._channel.send(message_of(Answer(call.number, "returned", result), MAX_ANSWER_BYTES))
        except BaseException:
            os._exit(LOST_CONNECTION)

    async def _drop(self, instance: int) -> None:
        task = self._tasks.pop(instance, None)
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await self._instances.close(instance, self._limit_seconds)
