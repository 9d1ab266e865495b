"""Environment instances in worker processes (workers.py), and what runs there: one event loop for many calls."""

import asyncio
import os
import pickle
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import Context, ContextVar
from functools import partial
from typing import Any, NoReturn

from sortedrl.tasks.environment import Environment, EnvironmentTask
from sortedrl.tasks.environment_calls import Inbox
from sortedrl.tasks.environment_host import Call, Instances, Result
from sortedrl.tasks.worker_process import Service, WorkerError, pickled
from sortedrl.tasks.worker_server import CANCELED, OUT_OF_MEMORY, Answer, Connection, Page, Request
from sortedrl.tasks.workers import HasWorkers, Workers

MAX_ANSWER_BYTES = 4 * 1024 * 1024
AWAITS = "an environment blocks it: use `await` for calls that take long"
TICK_SECONDS = 0.5  # how often an idle event loop notes that it is not blocked
BUSY_SECONDS = 0.05  # a callback that takes longer delays the others
_RUNS_FOR: ContextVar[tuple[int, int]] = ContextVar("runs_for", default=(0, 0))  # the owner and the call of a task


class WorkerHosts(HasWorkers):
    """A host in `workers` processes; an instance stays in its process. Raises ValueError if the task cannot be pickled.

    A call that awaits too long is canceled in its process; a process whose event loop is blocked beyond the limit is
    killed.
    """

    def __init__(self, task: EnvironmentTask, *, workers: int, limit_seconds: float) -> None:
        super().__init__(Service.of(partial(_server_of, task, limit_seconds), limit_seconds, MAX_ANSWER_BYTES), workers)
        self._done: Inbox[Result] = Inbox()
        self._calls: dict[int, Future[None]] = {}  # by instance: its last call
        self.collect, self.wait = self._done.collect, self._done.wait

    def submit(self, call: Call) -> None:
        try:
            content = pickled(call)
        except ValueError as error:
            self._done.add([Result(call.number, error=f"the problem {error}")])
            return
        self._calls[call.instance] = self._workers.run(_answer(self._workers, self._done, call, content))

    def drop(self, instance: int) -> None:
        call = self._calls.pop(instance, None)
        if call is not None:
            call.cancel()
            self._workers.run(self._workers.leave(instance, pickled(instance)))


async def _answer(workers: Workers, done: Inbox[Result], call: Call, content: bytes) -> None:
    try:
        result = Result(*await workers.answer(call.instance, _owner_of(call), content))
    except TimeoutError as error:
        result = Result(call.number, error=f"{error}; {AWAITS}")
    except (WorkerError, TypeError) as error:  # TypeError: not a result
        result = Result(call.number, error=str(error))
    done.add([result._replace(call=call.number, counts=call.instance not in workers.lost)])
    workers.lost.discard(call.instance)


def _owner_of(call: Call) -> int:
    """A short name of its problem, and not 0."""
    return zlib.crc32(str(getattr(call.problem, "id", call.instance)).encode()) + 1


# In a worker process


def _server_of(task: EnvironmentTask, limit_seconds: float) -> Callable[[Connection, Page], NoReturn]:
    build: Callable[[], Environment] = task.environment
    return partial(_answer_calls, Instances(build, raises=(MemoryError,)), limit_seconds)


def _answer_calls(instances: Instances, limit_seconds: float, connection: Connection, page: Page) -> NoReturn:
    loop = _NotingLoop(page, instances.excuse)
    server = _Server(connection, instances, limit_seconds, loop)
    loop.call_soon(server.tick)
    threading.Thread(target=server.read, daemon=True).start()
    while True:
        with suppress(BaseException):  # of an environment: stopping the loop, or SystemExit in a task of its own
            loop.run_forever()


class _NotingLoop(asyncio.SelectorEventLoop):
    """Notes for which call it works. `on_busy(call, seconds)`: for the time that a call did not leave to others."""

    def __init__(self, page: Page, on_busy: Callable[[int, float], None]) -> None:
        super().__init__()
        self.page = page
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
        began = self.page.write(owner, call)
        try:
            callback(*args)
        finally:
            busy = self.page.write() - began
            if busy > BUSY_SECONDS:
                self._on_busy(call, busy)


class _Server:
    def __init__(self, connection: Connection, instances: Instances, limit_seconds: float, loop: _NotingLoop) -> None:
        self._connection = connection
        self._instances = instances
        self._limit_seconds = limit_seconds
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
            self._tasks[message.instance] = self._loop.create_task(self._answer(message, request.number))
        else:
            task = self._loop.create_task(self._drop(message))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _answer(self, call: Call, request: int) -> None:
        try:
            result = await self._instances.answer(call, self._limit_seconds)
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except asyncio.CancelledError:
            if call.instance in self._tasks:  # not by us
                self._loop.page.write()
                os._exit(CANCELED)
            raise
        self._connection.require_modules()
        self._tasks.pop(call.instance, None)
        has_threads = threading.active_count() > 2  # this one, and the one that reads
        self._connection.send(Answer(request, "returned", result, has_threads))

    async def _drop(self, instance: int) -> None:
        task = self._tasks.pop(instance, None)
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await self._instances.close(instance, self._limit_seconds)
