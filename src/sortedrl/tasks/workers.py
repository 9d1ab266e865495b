"""Runs a function, or environments, in worker processes, so that they can neither crash nor block this process.

Workers are fresh interpreters without the threads, the GPU or the API key of this process. Their output is discarded,
so that it cannot mix with the output of a run. They end with this process, even if it is killed. A call that exceeds
its time limit is killed, with every process that it started (guardian.py).

If a process ends, only the call that caused it fails: all others in it are made again. Each call has an owner. If a
call ended a process that also served other owners, these may be the cause, by a thread that ends it, or by using up
its memory: so the owner of the call gets a process of its own, where its calls are made again. If it is not known for
which call the process worked, half of its owners move to another process, and so on, until the cause is alone. A call
fails if it ends a process that no other owner shares, or if it certainly blocked its process.

One thread owns all processes and their connections, in an event loop.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, NamedTuple, TypeVar

from sortedrl.core.user_values import reason_of
from sortedrl.tasks.worker_process import ENDS_A_PROCESS, Service, WorkerError, WorkerProcess, pickled
from sortedrl.tasks.worker_server import Answer, Note, server_of

GRACE_SECONDS = 1.0  # for an answer on its way, and for a process to answer that a call exceeded its limit
CLOSE_SECONDS = 5.0
MOST_EXTRA_PROCESSES = 16
MAX_ANSWER_BYTES = 16 * 1024
CLOSED = "the worker processes were closed"

T = TypeVar("T")


class _Again(Exception):
    """The process ended by the fault of another call."""


class HasWorkers:
    """Its worker processes end with it, even if it is only forgotten."""

    def __init__(self, service: Service, workers: int) -> None:
        self._workers = Workers(service, workers)
        weakref.finalize(self, self._workers.close)

    def start(self) -> Future[None]:
        """Start a worker, without waiting for it."""
        return self._workers.run(self._workers.ready())

    def wait_until_ready(self) -> None:
        """Start a worker and wait until it has built what it serves. Raises WorkerError if that fails."""
        self.start().result()

    def process_ids(self) -> list[int]:
        return self._workers.process_ids()

    def close(self) -> None:
        """Kill all workers, busy ones too: calls raise WorkerError, or those of environments get no result."""
        self._workers.close()


class WorkerPool(HasWorkers):
    """Calls a function in worker processes, one call at a time in each. Callable from any thread.

    `build` is pickled and runs once in each worker; it returns the function, so that imports do not count toward the
    time limit. The function must return JSON-compatible data of at most `max_answer_bytes`. The first worker starts
    with the first call, or with `start`.
    """

    def __init__(
        self,
        build: Callable[[], Callable[..., Any]],
        *,
        workers: int,
        limit_seconds: float,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        super().__init__(Service.of(partial(server_of, build), limit_seconds, max_answer_bytes), workers)
        self._free = asyncio.Semaphore(workers)  # first come, first served
        self._numbers = count(1)

    def __call__(self, *arguments: Any) -> Any:
        """Call the function. Raises TimeoutError after the time limit, and WorkerError if the function raised."""
        call = _call(self._workers, self._free, next(self._numbers), pickled(arguments))
        try:
            return self._workers.run(call).result()
        except CancelledError:
            raise WorkerError(CLOSED) from None


async def _call(workers: Workers, free: asyncio.Semaphore, number: int, arguments: bytes) -> Any:
    async with free:
        try:
            return await workers.answer(number, number, arguments)
        finally:
            await workers.leave(number)


class Workers:
    """`workers` processes and those of owners that ended a process. An instance stays in its process until it leaves.

    Coroutines are for the event loop (`run`), everything else for any thread."""

    def __init__(self, service: Service, workers: int) -> None:
        self._service = service
        self._processes = [_Process(service, self._after_end) for _ in range(workers)]
        self._extra: list[_Process] = []
        self._suspects: set[int] = set()  # owners that ended a process
        self.lost: set[int] = set()  # instances that were lost by the fault of another
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="workers", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        if self._is_closed:
            coroutine.close()
            raise WorkerError(CLOSED)
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def ready(self) -> None:
        await self._processes[0].started()

    def process_ids(self) -> list[int]:
        return [process.worker.process_id for process in self._all() if process.worker is not None]

    def close(self) -> None:
        """Kill all workers, busy ones too: their calls are canceled."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_SECONDS)

    async def answer(self, instance: int, owner: int, content: bytes) -> Any:
        """Raises WorkerError, or TimeoutError if the call blocked its process."""
        while True:
            process = self._process_of(instance) or self._process_for(owner)
            process.instances[instance] = owner
            with suppress(_Again):
                return await process.answer(instance, owner, content)

    async def leave(self, instance: int, content: bytes = b"") -> None:
        """The instance leaves its process, which is told `content`."""
        self.lost.discard(instance)
        process = self._process_of(instance)
        if process is not None:
            owner = process.instances.pop(instance)
            if content and process.worker is not None:
                process.worker.send(0, owner, content)

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(self._end())
        self._loop.close()

    async def _end(self) -> None:
        for process in self._all():
            process.drop_worker()
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                if task.get_name() != ENDS_A_PROCESS:
                    task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _all(self) -> list[_Process]:
        return [*self._processes, *self._extra]

    def _process_of(self, instance: int) -> _Process | None:
        return next((process for process in self._all() if instance in process.instances), None)

    def _process_for(self, owner: int) -> _Process:
        for process in self._extra:
            if owner in process.instances.values():
                return process
        if owner in self._suspects:
            return self._fresh_process() or min(self._extra, key=_size)
        return min(self._processes, key=_size)

    def _fresh_process(self) -> _Process | None:
        """One that has served no owner; None if there are too many."""
        for process in self._extra:
            if not process.instances:
                process.drop_worker()
                return process
        if len(self._extra) == MOST_EXTRA_PROCESSES:
            return None
        self._extra.append(_Process(self._service, self._after_end))
        return self._extra[-1]

    def _after_end(self, process: _Process, note: Note, error: WorkerError | TimeoutError) -> None:
        """A process has ended, for which `note` names the culprit: the calls of all others are made again."""
        is_known = note.call in process.calls
        is_certain = is_known and isinstance(error, TimeoutError) and not process.has_threads
        if note.owner:
            self._suspects.add(note.owner)
        owners = sorted(set(process.instances.values()))
        place = self._fresh_process() if len(process.served) > 1 else None
        guilty: set[int] = set()
        if is_certain or place is None:
            guilty = {note.call} if is_known else set(process.calls)
        for instance, owner in list(process.instances.items()):
            if place is not None and owner in ([note.owner] if note.owner else owners[: len(owners) // 2]):
                place.instances[instance] = process.instances.pop(instance)
            if owner != note.owner:
                self.lost.add(instance)
        for number, call in process.calls.items():
            if not call.answer.done():
                call.answer.set_exception(error if number in guilty else _Again())


class _Call(NamedTuple):
    sent_at: float
    answer: asyncio.Future[Answer]


class _Process:
    """One worker process, started with the first call and again after its end.

    `on_end(process, note, error)` answers its calls. `served`: the owners that it worked for since its start.
    """

    def __init__(self, service: Service, on_end: Callable[[_Process, Note, WorkerError | TimeoutError], None]) -> None:
        self.instances: dict[int, int] = {}  # and their owners
        self.calls: dict[int, _Call] = {}
        self.served: set[int] = set()
        self.has_threads = False  # of an earlier call
        self.worker: WorkerProcess | None = None
        self._service = service
        self._on_end = on_end
        self._starting: asyncio.Task[WorkerProcess] | None = None
        self._reading: asyncio.Task[None] | None = None

    async def started(self) -> WorkerProcess:
        """Raises WorkerError."""
        if self.worker is not None:
            return self.worker
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> WorkerProcess:
        try:
            worker = self.worker = await WorkerProcess.started(self._service)
        except OSError as error:  # no process can be made
            raise WorkerError(reason_of(error)) from None
        finally:
            self._starting = None
        self._reading = asyncio.create_task(self._read(worker))
        return worker

    async def answer(self, instance: int, owner: int, content: bytes) -> Any:
        """Raises _Again if the process ended by the fault of another call."""
        worker = await self.started()
        if worker is not self.worker or instance not in self.instances:  # it ended meanwhile
            raise _Again
        number = secrets.randbits(60)  # no earlier call can know it, and send an answer to this one
        call = self.calls[number] = _Call(time.monotonic(), asyncio.get_running_loop().create_future())
        self.served.add(owner)
        worker.send(number, owner, content)
        try:
            while not call.answer.done():
                left = self._blocked_at() - time.monotonic()
                if left <= 0:
                    limit = f"no result within {self._service.limit_seconds:g} s; the worker process was killed"
                    self._end(TimeoutError(limit))
                else:
                    await asyncio.wait([call.answer], timeout=left)
        finally:
            self.calls.pop(number, None)
        answer = call.answer.result()
        if answer.kind == "raised":
            raise WorkerError(answer.value)
        return answer.value

    async def _read(self, worker: WorkerProcess) -> None:
        error: WorkerError
        try:
            while True:
                answer = await worker.receive()
                self.has_threads = answer.has_threads
                call = self.calls.pop(answer.number, None)
                if call is not None and not call.answer.done():
                    call.answer.set_result(answer)
        except (EOFError, OSError):
            error = await worker.death()
        except WorkerError as invalid:
            error = invalid
        self._end(error)

    def _end(self, error: WorkerError | TimeoutError) -> None:
        self._on_end(self, self._note(), error)
        self.drop_worker()

    def _note(self) -> Note:
        """For which call it works, and since when."""
        assert self.worker is not None
        return self.worker.page.read()

    def _blocked_at(self) -> float:
        """The time when it has worked for too long on its calls, if nothing changes."""
        first = next(iter(self.calls.values()))
        return max(self._note().since, first.sent_at) + self._service.limit_seconds + GRACE_SECONDS

    def drop_worker(self) -> None:
        for task in (self._starting, self._reading):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
        if self.worker is not None:
            self.worker.end()
        self.worker = self._starting = self._reading = None
        self.served.clear()
        self.has_threads = False


def _size(process: _Process) -> int:
    return len(process.instances)
