"""Environment instances in worker processes, so that they can neither crash nor block this process.

Each process holds many instances and answers their calls concurrently, in one event loop. A call has a time limit: one
that awaits too long is canceled in its process; one that blocks the event loop beyond the limit gets the process
killed, and every call in it is answered with an error. The next call to an instance that was lost with its process
brings it back (environment_host.py).

One thread per process owns the process and its connection. Calls and results pass through queues.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import pickle
import selectors
import signal
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from sortedrl.core.scoring import reason_of
from sortedrl.tasks.environment import Environment, EnvironmentTask
from sortedrl.tasks.environment_host import Call, Instances, Result
from sortedrl.tasks.inbox import Inbox
from sortedrl.tasks.workers import (
    LOST_CONNECTION,
    Channel,
    WorkerError,
    WorkerProcess,
    built,
    end_group,
    memory_per_worker,
    message_of,
    pickled,
)

GRACE_SECONDS = 2.0  # for a process to answer that a call exceeded its limit
MAX_ANSWER_BYTES = 4 * 1024 * 1024
CLOSE_SECONDS = 5.0
_NUMBER = struct.Struct("!Q")  # of the call, before each answer


class WorkerHosts:
    """A host (environment_host.py) in `workers` processes; an instance stays in its process. Raises ValueError if the
    task cannot be pickled."""

    def __init__(
        self, task: EnvironmentTask, *, workers: int, limit_seconds: float, memory_bytes: int | None = None
    ) -> None:
        build = pickled(partial(_instances_of, task))
        self._done: Inbox[Result] = Inbox()
        self._processes = [
            _Process(build, memory_bytes or memory_per_worker(), limit_seconds, self._done.add) for _ in range(workers)
        ]
        self._process_of: dict[int, _Process] = {}  # by instance
        weakref.finalize(self, _close_all, self._processes)

    def submit(self, call: Call) -> None:
        process = self._process_of.get(call.instance)
        if process is None:
            process = min(self._processes, key=lambda one: one.instances)
            process.instances += 1
            self._process_of[call.instance] = process
        process.send(call)

    def collect(self) -> list[Result]:
        return self._done.collect()

    def wait(self, timeout_seconds: float) -> None:
        self._done.wait(timeout_seconds)

    def drop(self, instance: int) -> None:
        process = self._process_of.pop(instance, None)
        if process is not None:
            process.instances -= 1
            process.send(instance)

    def wait_until_ready(self) -> None:
        """Start a process and wait until the task is there. Raises WorkerError if that fails."""
        self._processes[0].wait_until_ready()

    def process_ids(self) -> list[int]:
        return [process.process_id for process in self._processes if process.process_id is not None]

    def close(self) -> None:
        """Kill all processes; calls that are pending stay without a result."""
        _close_all(self._processes)


class _Process:
    """One worker process, started with the first message and again after its death."""

    def __init__(
        self, build: bytes, memory_bytes: int, limit_seconds: float, on_results: Callable[[list[Result]], None]
    ) -> None:
        self.instances = 0
        self._start = partial(WorkerProcess, build, memory_bytes, __name__)
        self._limit_seconds = limit_seconds
        self._on_results = on_results
        self._outbox: deque[Call | int | None] = deque()  # calls, instances to close, None to start the process
        self._deadlines: dict[int, float] = {}  # by number of the call
        self._call_of: dict[int, int] = {}  # by instance: the number of its last call
        self._worker: WorkerProcess | None = None
        self._ready = threading.Event()
        self._start_error: WorkerError | None = None
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def process_id(self) -> int | None:
        worker = self._worker
        return None if worker is None else worker.process_id

    def send(self, message: Call | int | None) -> None:
        self._outbox.append(message)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="environments", daemon=True)
            self._thread.start()
        with suppress(OSError):  # full: the thread wakes up anyway
            self._wake.send(b"x")

    def wait_until_ready(self) -> None:
        self.send(None)
        self._ready.wait()
        if self._start_error is not None:
            raise self._start_error

    def close(self) -> None:
        self._closed = True
        if self._thread is not None:
            with suppress(OSError):
                self._wake.send(b"x")
            self._thread.join(CLOSE_SECONDS)
        self._wake.close()

    def _run(self) -> None:
        try:
            while not self._closed:
                try:
                    self._send_messages()
                    self._receive_results()
                except (WorkerError, TimeoutError) as error:
                    self._lose_all(str(error))
                except Exception as error:  # this thread must not end before the run
                    self._lose_all(reason_of(error))
        finally:
            if self._worker is not None:
                self._worker.kill()
            self._woken.close()

    def _send_messages(self) -> None:
        while self._outbox and not self._closed:
            message = self._outbox.popleft()
            if isinstance(message, Call):
                self._deadlines[message.number] = math.inf  # from here on an error is a result
                self._call_of[message.instance] = message.number
            elif message is not None:
                self._deadlines.pop(self._call_of.pop(message, -1), None)
                if self._worker is None:
                    continue  # the instance is gone with its process
            try:
                call = pickle.dumps((self._limit_seconds, message))
            except Exception as error:  # __reduce__ and __getstate__ may raise anything
                self._fail(message, f"the problem cannot be sent to a worker process: {reason_of(error)}")
                continue
            worker = self._worker or self._started()
            try:
                worker.channel.send(call, self._limit_seconds)
            except TimeoutError:
                raise TimeoutError(self._killed("took no call")) from None
            except OSError:
                raise self._death(worker) from None
            if isinstance(message, Call):
                self._deadlines[message.number] = time.monotonic() + self._limit_seconds + GRACE_SECONDS

    def _started(self) -> WorkerProcess:
        try:
            self._worker = worker = self._start()
            worker.wait_until_ready()
        except (WorkerError, OSError) as error:  # OSError: no process can be made
            self._start_error = error if isinstance(error, WorkerError) else WorkerError(reason_of(error))
            raise
        finally:
            self._ready.set()
        return worker

    def _receive_results(self) -> None:
        """Waits for results, messages to send, or the first deadline."""
        deadline = min(self._deadlines.values(), default=math.inf)
        left = None if deadline == math.inf else max(deadline - time.monotonic(), 0.0)
        with selectors.PollSelector() as selector:  # opens no file
            selector.register(self._woken, selectors.EVENT_READ)
            if self._worker is not None:
                selector.register(self._worker.channel, selectors.EVENT_READ)
            readable = {key.fileobj for key, _ in selector.select(left)}
        if self._woken in readable:
            self._woken.recv(4096)
        if self._worker is not None and self._worker.channel in readable:
            self._take_result(self._worker)
        elif deadline <= time.monotonic():
            raise TimeoutError(self._killed("gave no answer"))

    def _take_result(self, worker: WorkerProcess) -> None:
        try:
            answer = worker.channel.receive(self._limit_seconds, MAX_ANSWER_BYTES + _NUMBER.size)
            (number,) = _NUMBER.unpack_from(answer)
            kind, value = json.loads(answer[_NUMBER.size :])
            result = Result(number, error=value) if kind == "raised" else Result(*value)
        except TimeoutError:
            raise TimeoutError(self._killed("sent half an answer")) from None
        except (EOFError, OSError):
            raise self._death(worker) from None
        except (ValueError, TypeError, struct.error):
            raise WorkerError("a worker process sent an invalid message and was killed") from None
        if self._deadlines.pop(number, None) is not None:
            self._on_results([result])

    def _death(self, worker: WorkerProcess) -> WorkerError | TimeoutError:
        death = worker.death()
        is_late = min(self._deadlines.values(), default=math.inf) <= time.monotonic()
        return TimeoutError(self._killed("gave no answer")) if is_late and worker.ended_by_its_timer else death

    def _killed(self, what: str) -> str:
        return (
            f"a worker process {what} within {self._limit_seconds:g} s and was killed; an environment blocks it: use "
            "`await` for calls that take long"
        )

    def _fail(self, message: Call | int | None, error: str) -> None:
        if isinstance(message, Call) and self._deadlines.pop(message.number, None) is not None:
            self._on_results([Result(message.number, error=error)])

    def _lose_all(self, error: str) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker = None
        lost, self._deadlines = list(self._deadlines), {}
        self._call_of.clear()
        self._on_results([Result(number, error=error) for number in lost])


def _close_all(processes: list[_Process]) -> None:
    for process in processes:
        process.close()


def _instances_of(task: EnvironmentTask) -> Instances:
    build: Callable[[], Environment] = task.environment
    return Instances(build)


# In the worker process


def serve(descriptor: int, parent: int, memory_bytes: int) -> None:
    """The main loop of a worker process: answers calls until the connection closes."""
    channel, instances = built(descriptor, parent, memory_bytes)
    asyncio.run(_Server(channel, instances).run())


class _Server:
    def __init__(self, channel: Channel, instances: Instances) -> None:
        self._channel = channel
        self._instances = instances
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by instance
        self._closing: set[asyncio.Task[None]] = set()
        self._limit_seconds = 0.0

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        reader = threading.Thread(target=self._read, args=(loop,), daemon=True)
        reader.start()
        while True:
            # On systems where a process does not end with its parent, nothing else would end a blocked loop.
            signal.setitimer(signal.ITIMER_REAL, self._limit_seconds + 2 * GRACE_SECONDS if self._tasks else 0.0)
            await asyncio.sleep(GRACE_SECONDS / 2)

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            try:
                limit_seconds, message = pickle.loads(self._channel.receive())
            except BaseException:  # the parent closed the connection
                end_group()
            loop.call_soon_threadsafe(self._take, limit_seconds, message)

    def _take(self, limit_seconds: float, message: Call | int | None) -> None:
        self._limit_seconds = limit_seconds
        if isinstance(message, Call):
            self._tasks[message.instance] = asyncio.create_task(self._answer(message))
        elif message is not None:
            task = asyncio.create_task(self._drop(message))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _answer(self, call: Call) -> None:
        result = await self._instances.answer(call, self._limit_seconds)
        self._tasks.pop(call.instance, None)
        try:
            self._channel.send(_NUMBER.pack(call.number) + message_of("returned", result, MAX_ANSWER_BYTES))
        except BaseException:
            os._exit(LOST_CONNECTION)

    async def _drop(self, instance: int) -> None:
        task = self._tasks.pop(instance, None)
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await self._instances.close(instance, self._limit_seconds)
