"""Environment instances in worker processes, so that they can neither crash nor block this process.

Each process holds many instances and answers their calls concurrently, in one event loop. A call that awaits too long
is canceled in its process. A process whose event loop is blocked beyond the limit is killed.

Only the culprit pays for a process that ends: all other calls in it are made again, and instances that were lost are
brought back with their next call (environment_host.py). The culprit is known from a note that a process keeps in shared
memory: for which problem and call its event loop works at the moment. That problem gets a process of its own, where its
calls are made again. If nothing was noted, because a thread ended the process, half of the problems in it move to
another process, and so on, until the culprit is alone. Only a call that ends a process which no other problem shares
is answered with an error.

One thread per process owns the process and its connection. Calls and results pass through queues.
"""

from __future__ import annotations

import json
import math
import mmap
import pickle
import selectors
import socket
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from sortedrl.core.user_values import reason_of
from sortedrl.tasks.environment import EnvironmentTask
from sortedrl.tasks.environment_calls import Inbox
from sortedrl.tasks.environment_host import Call, Result
from sortedrl.tasks.environment_server import (
    GRACE_SECONDS,
    MAX_ANSWER_BYTES,
    SERVER,
    Note,
    Page,
    instances_of,
    problem_of,
)
from sortedrl.tasks.worker_process import Answer, WorkerError, WorkerProcess, checked_limit, memory_per_worker, pickled

CLOSE_SECONDS = 5.0
MOST_EXTRA_PROCESSES = 16


class WorkerHosts:
    """A host (environment_host.py) in `workers` processes and those of problems that ended a process; an instance stays
    in its process. Raises ValueError if the task cannot be pickled."""

    def __init__(
        self, task: EnvironmentTask, *, workers: int, limit_seconds: float, memory_bytes: int | None = None
    ) -> None:
        build, memory_bytes = pickled(partial(instances_of, task)), memory_bytes or memory_per_worker()
        self._done: Inbox[Result] = Inbox()
        limit_seconds = checked_limit(limit_seconds)
        self._new = partial(_Process, build, memory_bytes, limit_seconds, self._take, self._after_end)
        self._lock = threading.Lock()  # of what follows: the threads of processes use it, too
        self._processes = [self._new() for _ in range(workers)]
        self._extra: list[_Process] = []
        self._process_of: dict[int, _Process] = {}  # by instance
        self._alone: set[int] = set()  # problems that ended a process
        self._lost: set[int] = set()  # instances that were lost by the fault of another
        weakref.finalize(self, _close_all, self._processes, self._extra)

    def submit(self, call: Call) -> None:
        with self._lock:
            process = self._process_of.get(call.instance)
            if process is None:
                process = self._process_for(problem_of(call))
                process.instances[call.instance] = problem_of(call)
                self._process_of[call.instance] = process
            process.send(call)

    def collect(self) -> list[Result]:
        return self._done.collect()

    def wait(self, timeout_seconds: float) -> None:
        self._done.wait(timeout_seconds)

    def drop(self, instance: int) -> None:
        with self._lock:
            self._lost.discard(instance)
            process = self._process_of.pop(instance, None)
            if process is not None:
                del process.instances[instance]
                process.send(instance)

    def wait_until_ready(self) -> None:
        """Start a process and wait until the task is there. Raises WorkerError if that fails."""
        self._processes[0].wait_until_ready()

    def process_ids(self) -> list[int]:
        processes = [*self._processes, *self._extra]
        return [process.process_id for process in processes if process.process_id is not None]

    def close(self) -> None:
        """Kill all processes; calls that are pending stay without a result."""
        _close_all(self._processes, self._extra)

    def _process_for(self, problem: int) -> _Process:
        for process in self._extra:
            if problem in process.instances.values():
                return process
        if problem in self._alone:
            return self._empty_process() or min(self._extra, key=_size)
        return min(self._processes, key=_size)

    def _empty_process(self) -> _Process | None:
        """None if there are too many."""
        for process in self._extra:
            if not process.instances:
                return process
        if len(self._extra) == MOST_EXTRA_PROCESSES:
            return None
        self._extra.append(self._new())
        return self._extra[-1]

    # In the thread of a process

    def _take(self, call: Call, result: Result) -> None:
        with self._lock:
            counts = call.instance not in self._lost
            self._lost.discard(call.instance)
        self._done.add([result._replace(counts=counts)])

    def _after_end(self, process: _Process, note: Note, error: str) -> None:
        """Its process has ended, for which `note` names the culprit: the calls of all others are made again."""
        with self._lock:
            calls = process.take_unanswered()
            problems = set(process.instances.values())
            if note.problem:
                self._alone.add(note.problem)
            place = self._empty_process() if len(problems) > 1 else None
            if place is not None:
                guilty, known = [], {i for i, problem in process.instances.items() if problem == note.problem}
                half = sorted(problems)[: len(problems) // 2]
                self._lost.update(process.instances.keys() - known)
                self._move({note.problem} if note.problem else set(half), process, place)
            else:
                guilty = [call for call in calls if call.number == note.call] or calls
                if len(guilty) < len(calls):
                    self._lost.update(process.instances.keys() - {call.instance for call in guilty})
            for call in calls:
                if call not in guilty and call.instance in self._process_of:
                    self._process_of[call.instance].send(call)
        self._done.add([Result(call.number, error=error) for call in guilty])

    def _move(self, problems: set[int], process: _Process, place: _Process) -> None:
        for instance in [instance for instance, problem in process.instances.items() if problem in problems]:
            place.instances[instance] = process.instances.pop(instance)
            self._process_of[instance] = place


class _Process:
    """One worker process, started with the first message and again after its end.

    `on_end(process, note, error)` takes care of the calls without an answer (`take_unanswered`).
    """

    def __init__(
        self,
        build: bytes,
        memory_bytes: int,
        limit_seconds: float,
        on_result: Callable[[Call, Result], None],
        on_end: Callable[[_Process, Note, str], None],
    ) -> None:
        self.instances: dict[int, int] = {}  # and their problems
        self._build = (build, memory_bytes, SERVER)
        self._limit_seconds = limit_seconds
        self._on_result = on_result
        self._on_end = on_end
        self._outbox: deque[Call | int | None] = deque()  # calls, instances to close, None to start the process
        self._calls: dict[int, Call] = {}  # that were sent, by number
        self._worker: WorkerProcess | None = None
        self._page: Page | None = None
        self._ready_at = 0.0
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

    def take_unanswered(self) -> list[Call]:
        """The calls that were sent or are to be sent. From now on they are none of its own."""
        calls = [*self._calls.values(), *(message for message in self._outbox if isinstance(message, Call))]
        self._calls.clear()
        self._outbox.clear()
        return calls

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
                except Exception as error:  # this thread must not end before the run
                    self._end(str(error) if isinstance(error, WorkerError | TimeoutError) else reason_of(error))
        finally:
            self._drop_worker()
            self._woken.close()

    def _send_messages(self) -> None:
        while self._outbox and not self._closed:
            message = self._outbox.popleft()
            if isinstance(message, Call):
                self._calls[message.number] = message  # from here on an error is a result
            elif message is not None:
                self._calls = {number: call for number, call in self._calls.items() if call.instance != message}
                if self._worker is None:
                    continue  # the instance is gone with its process
            try:
                content = pickle.dumps((self._limit_seconds, message))
            except Exception as error:  # __reduce__ and __getstate__ may raise anything
                self._fail(message, f"the problem cannot be sent to a worker process: {reason_of(error)}")
                continue
            worker = self._worker or self._started()
            if worker is None:
                return
            try:
                worker.channel.send(content, self._limit_seconds)
            except TimeoutError:
                raise TimeoutError(self._killed("took no call")) from None
            except OSError:
                raise self._death(worker) from None

    def _started(self) -> WorkerProcess | None:
        """None if it cannot be started, which is an error of all calls."""
        try:
            with tempfile.TemporaryFile() as file:
                file.truncate(mmap.PAGESIZE)
                self._page = Page(file.fileno())
                self._worker = WorkerProcess(*self._build, file.fileno())
            self._worker.wait_until_ready()
        except (WorkerError, OSError) as error:  # OSError: no process can be made
            self._start_error = error if isinstance(error, WorkerError) else WorkerError(reason_of(error))
            for call in self.take_unanswered():
                self._on_result(call, Result(call.number, error=str(self._start_error)))
            self._drop_worker()
        finally:
            self._ready_at = time.monotonic()
            self._ready.set()
        return self._worker

    def _note(self) -> Note:
        note = Note(0, 0, 0.0) if self._page is None else self._page.read()
        return note._replace(since=max(note.since, self._ready_at))

    def _receive_results(self) -> None:
        """Waits for results, messages to send, or the time when the event loop has been blocked for too long."""
        deadline = self._note().since + self._limit_seconds + GRACE_SECONDS if self._calls else math.inf
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
        elif self._calls and self._is_blocked():
            raise TimeoutError(self._killed("gave no answer"))

    def _is_blocked(self) -> bool:
        return time.monotonic() >= self._note().since + self._limit_seconds + GRACE_SECONDS

    def _take_result(self, worker: WorkerProcess) -> None:
        try:
            answer = Answer(*json.loads(worker.channel.receive(self._limit_seconds, MAX_ANSWER_BYTES)))
            is_error = answer.kind == "raised"
            result = Result(answer.number, error=answer.value) if is_error else Result(*answer.value)
        except TimeoutError:
            raise TimeoutError(self._killed("sent half an answer")) from None
        except (EOFError, OSError):
            raise self._death(worker) from None
        except (ValueError, TypeError):
            raise WorkerError("a worker process sent an invalid message and was killed") from None
        call = self._calls.pop(answer.number, None)
        if call is not None:
            self._on_result(call, result)

    def _death(self, worker: WorkerProcess) -> WorkerError | TimeoutError:
        death = worker.death()
        is_late = worker.ended_by_its_timer and self._is_blocked()
        return TimeoutError(self._killed("gave no answer")) if is_late else death

    def _killed(self, what: str) -> str:
        return (
            f"a worker process {what} within {self._limit_seconds:g} s and was killed; an environment blocks it: use "
            "`await` for calls that take long"
        )

    def _fail(self, message: Call | int | None, error: str) -> None:
        if isinstance(message, Call) and self._calls.pop(message.number, None) is not None:
            self._on_result(message, Result(message.number, error=error))

    def _end(self, error: str) -> None:
        note = self._note()
        self._drop_worker()
        self._on_end(self, note, error)

    def _drop_worker(self) -> None:
        if self._worker is not None:
            self._worker.kill()
        if self._page is not None:
            self._page.close()
        self._worker = self._page = None


def _close_all(*parts: list[_Process]) -> None:
    for process in [process for part in parts for process in part]:
        process.close()


def _size(process: _Process) -> int:
    return len(process.instances)
