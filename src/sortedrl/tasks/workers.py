"""Runs a function in worker processes, so that it cannot crash or block this process.

A call that exceeds its time limit is killed, with every process that it started. Workers are fresh interpreters without
the threads or the GPU of this process. Their output is discarded, so that it cannot mix with the output of a run. They
end with this process, even if it is killed. One spare worker is kept ready, so that after a kill the next call does not
wait for imports.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from sortedrl.core.scoring import one_line, reason_of, shown

START_LIMIT_SECONDS = 300.0  # imports can be slow on a busy machine
EXIT_SECONDS = 2.0  # for a process that closed its connection to exit
MAX_ANSWER_BYTES = 16 * 1024
MAX_FRACTION_OF_MEMORY = 0.5  # of the machine or container, per worker
_PR_SET_PDEATHSIG = 1
LOST_CONNECTION = 76  # exit code of a worker whose function closed its connection
_SIZE = struct.Struct("!Q")


class WorkerError(RuntimeError):
    """The function raised in its worker process, or the process died."""


class _FairSemaphore:
    """Serves waiting threads in order. Python's semaphore may give a thread that has just released it the next turn,
    again and again: an evaluation would wait for the whole scoring backlog of training."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._lock = threading.Lock()
        self._waiting: deque[threading.Event] = deque()

    def __enter__(self) -> None:
        with self._lock:
            if self._free:
                self._free -= 1
                return
            turn = threading.Event()
            self._waiting.append(turn)
        try:
            turn.wait()
        except BaseException:
            with self._lock:
                if turn not in self._waiting:  # its turn had come
                    self._pass_on()
                else:
                    self._waiting.remove(turn)
            raise

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._pass_on()

    def _pass_on(self) -> None:
        if self._waiting:
            self._waiting.popleft().set()
        else:
            self._free += 1


class WorkerPool:
    """Calls a function in worker processes. Callable from any thread.

    `build` is pickled and runs once in each worker; it returns the function, so that imports do not count toward the
    time limit. The function must return JSON-compatible data. The first worker starts with the first call, or with
    `start`. `memory_bytes` limits the memory of one worker; the default is half of the total.
    """

    def __init__(
        self,
        build: Callable[[], Callable[..., Any]],
        *,
        workers: int,
        limit_seconds: float,
        memory_bytes: int | None = None,
    ) -> None:
        self._build = pickled(build)
        self._limit_seconds = limit_seconds
        self._memory_bytes = memory_bytes or memory_per_worker()
        self._free = _FairSemaphore(workers)
        self._most = workers + 1  # including the spare one
        self._lock = threading.Lock()
        self._idle: list[WorkerProcess] = []  # the last one is used first, since it is warm
        self._all: set[WorkerProcess] = set()
        self._starting = 0
        self._closed = False
        # Linux kills a child with the *thread* that started it, so one thread of the pool starts all of them.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="worker-starter")
        weakref.finalize(self, _kill_all, self._all)

    def __call__(self, *arguments: Any) -> Any:
        """Call the function. Raises TimeoutError after the time limit, and WorkerError if the function raised."""
        call = pickle.dumps((self._limit_seconds, arguments))
        with self._borrowed() as worker:
            kind, value = worker.call(call, self._limit_seconds)
        if kind == "raised":
            raise WorkerError(value)
        return value

    def start(self) -> None:
        """Start a worker, without waiting for it."""
        self._keep_spare()

    def wait_until_ready(self) -> None:
        """Start a worker and wait until its function is built. Raises WorkerError if that fails."""
        with self._borrowed() as worker:
            worker.wait_until_ready()

    def close(self) -> None:
        """Kill all workers, busy ones too: their calls raise WorkerError."""
        with self._lock:
            self._closed = True
            self._idle.clear()
            workers = set(self._all)
            self._all.clear()
        _kill_all(workers)

    def process_ids(self) -> list[int]:
        with self._lock:
            return [worker.process_id for worker in self._all]

    @contextmanager
    def _borrowed(self) -> Iterator[WorkerProcess]:
        """A worker for one call. It is killed if it did not answer."""
        with self._free:
            worker = self._take()
            try:
                yield worker
            except BaseException:
                self._drop(worker)
                raise
            with self._lock:
                self._idle.append(worker)

    def _take(self) -> WorkerProcess:
        """A live idle worker, or a new one. Starts another spare worker if this was the last."""
        while True:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
            if worker is None:
                worker = self._starter.submit(self._started).result()
            if worker.is_alive():
                break
            self._drop(worker)  # it died after its last call, unrelated to this one
        self._keep_spare()
        return worker

    def _keep_spare(self) -> None:
        with self._lock:
            if self._closed or self._idle or len(self._all) + self._starting >= self._most:
                return
            self._starting += 1
        self._starter.submit(self._add_spare)

    def _add_spare(self) -> None:
        try:
            worker = self._started()
            with self._lock:
                if worker in self._all:
                    self._idle.insert(0, worker)
        finally:
            with self._lock:
                self._starting -= 1

    def _started(self) -> WorkerProcess:
        if self._closed:
            raise WorkerError("the worker processes were closed")
        worker = WorkerProcess(self._build, self._memory_bytes)
        with self._lock:
            self._all.add(worker)
            closed_meanwhile = self._closed
        if closed_meanwhile:
            self.close()
        return worker

    def _drop(self, worker: WorkerProcess) -> None:
        with self._lock:
            self._all.discard(worker)
        worker.kill()
        self._keep_spare()


class WorkerProcess:
    """A process that builds an object and serves it: `serve` of the module `served_by`."""

    def __init__(self, pickled_build: bytes, memory_bytes: int, served_by: str = __name__) -> None:
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        self._first_words = tempfile.TemporaryFile()  # noqa: SIM115 (what it prints until it is ready)
        self._ready = False
        serve_it = f"from {served_by} import serve; serve({theirs.fileno()}, {os.getpid()}, {memory_bytes})"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", serve_it],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._first_words,
                # Ctrl-C is only for this process, which decides what happens to its workers.
                process_group=0,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            )
        with suppress(OSError):  # it died, which the waiting call will notice
            self.channel.send(pickled_build, START_LIMIT_SECONDS)

    @property
    def process_id(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        # A worker that died during startup is used, so that its call reports why.
        return not self._ready or self._process.poll() is None

    def wait_until_ready(self) -> None:
        if self._ready:
            return
        try:
            kind, value = self._receive(START_LIMIT_SECONDS)
        except TimeoutError:
            raise WorkerError(f"a worker process was not ready within {START_LIMIT_SECONDS:g} s") from None
        if kind == "raised":
            raise WorkerError(f"a worker process could not start: {value}")
        self._ready = True
        self._first_words.close()

    def call(self, call: bytes, limit_seconds: float) -> tuple[str, Any]:
        self.wait_until_ready()
        try:
            self.channel.send(call, limit_seconds)
        except TimeoutError:
            raise TimeoutError(f"its worker process took no call within {limit_seconds:g} s, and was killed") from None
        except OSError:
            raise self.death() from None
        deadline = time.monotonic() + limit_seconds
        too_late = TimeoutError(f"no result within {limit_seconds:g} s; the worker process was killed")
        try:
            return self._receive(limit_seconds)
        except TimeoutError:
            raise too_late from None
        except WorkerError:
            if self.ended_by_its_timer and time.monotonic() >= deadline:
                raise too_late from None
            raise

    def _receive(self, limit_seconds: float) -> tuple[str, Any]:
        try:
            kind, value = json.loads(self.channel.receive(limit_seconds, MAX_ANSWER_BYTES))
        except TimeoutError:
            raise
        except (EOFError, OSError):
            raise self.death() from None
        except (ValueError, TypeError):
            raise WorkerError("a worker process sent an invalid message and was killed") from None
        return str(kind), value

    def death(self) -> WorkerError:
        """Why its connection ended."""
        try:
            code = self._process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            code = LOST_CONNECTION
        if code == LOST_CONNECTION:
            return WorkerError("a worker process lost its connection: its file descriptor was closed")
        how = f"exit code {code}" if code >= 0 else f"signal {_signal_name(-code)}"
        return WorkerError(f"a worker process died with {how}{self._last_words()}")

    @property
    def ended_by_its_timer(self) -> bool:
        """As a call that exceeds its limit does if this process, on a busy machine, does not kill it in time."""
        return self._process.returncode == -signal.SIGALRM

    def _last_words(self) -> str:
        if self._ready:
            return ""
        self._first_words.seek(0)
        lines = self._first_words.read().decode(errors="replace").strip().splitlines()
        return f" before it was ready: {one_line(lines[-1])}" if lines else " before it was ready"

    def kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        self.channel.close()
        self._first_words.close()


class Channel:
    """Length-prefixed messages over a socket; sending and receiving have deadlines."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def send(self, message: bytes, limit_seconds: float | None = None) -> None:
        self._end.settimeout(limit_seconds)
        self._end.sendall(_SIZE.pack(len(message)) + message)

    def receive(self, limit_seconds: float | None = None, most: int | None = None) -> bytes:
        deadline = None if limit_seconds is None else time.monotonic() + limit_seconds
        (size,) = _SIZE.unpack(self._exactly(_SIZE.size, deadline))
        if most is not None and size > most:
            raise ValueError(f"a message of {size} bytes")
        return self._exactly(size, deadline)

    def _exactly(self, size: int, deadline: float | None) -> bytes:
        parts = []
        while size:
            if deadline is not None:
                self._end.settimeout(max(deadline - time.monotonic(), 1e-3))
            part = self._end.recv(min(size, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def fileno(self) -> int:
        return self._end.fileno()

    def close(self) -> None:
        self._end.close()


# In the worker process


def serve(descriptor: int, parent: int, memory_bytes: int) -> None:
    """The main loop of a worker process: build the function, then answer calls until the connection closes."""
    home = os.getcwd()
    channel, function = built(descriptor, parent, memory_bytes)
    while True:
        try:
            call = channel.receive()
        except BaseException:  # the parent closed the connection
            end_group()
        answer = _answer(function, call)
        try:
            channel.send(answer)
            os.chdir(home)
        except BaseException:
            os._exit(LOST_CONNECTION)


def built(descriptor: int, parent: int, memory_bytes: int) -> tuple[Channel, Any]:
    """The connection to the parent, and what this process serves. Ends the process if that cannot be built."""
    _end_with(parent)
    _limit_resources(memory_bytes)
    os.set_inheritable(descriptor, False)
    channel = Channel(socket.socket(fileno=descriptor))
    os.register_at_fork(after_in_child=channel.close)  # otherwise a child process of the reward would keep it open
    try:
        served = pickle.loads(channel.receive())()
    except BaseException as error:
        channel.send(message_of("raised", reason_of(error)))
        end_group()
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    channel.send(message_of("ready", None))
    return channel, served


def _answer(function: Callable[..., Any], call: bytes) -> bytes:
    try:
        limit_seconds, arguments = pickle.loads(call)
        # On systems where a process does not end with its parent, nothing else would end an endless call.
        signal.setitimer(signal.ITIMER_REAL, limit_seconds + 1)
        answer = message_of("returned", function(*arguments))
    except BaseException as error:  # including SystemExit and KeyboardInterrupt from the function
        answer = message_of("raised", reason_of(error))
    signal.setitimer(signal.ITIMER_REAL, 0)
    return answer


def message_of(kind: str, value: Any, most: int = MAX_ANSWER_BYTES) -> bytes:
    try:
        message = json.dumps((kind, value)).encode()
    except (TypeError, ValueError, RecursionError) as error:
        return message_of("raised", f"its result, {shown(value)}, is not plain data: {reason_of(error)}")
    if len(message) > most:
        return message_of("raised", f"its result has {len(message)} bytes; the maximum is {most}")
    return message


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when the parent is gone, even during a call."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _limit_resources(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    with suppress(OSError):  # if memory runs out anyway, the kernel kills this process first
        Path("/proc/self/oom_score_adj").write_text("1000")


def end_group() -> NoReturn:
    """Exit immediately, together with all processes that the function started."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


# Helpers


def pickled(build: Callable[[], Any]) -> bytes:
    try:
        return pickle.dumps(build)
    except Exception as error:  # __reduce__ and __getstate__ may raise anything
        raise ValueError(
            f"cannot be sent to a worker process: {reason_of(error)}; define it at the top level of a module that can "
            "be imported"
        ) from error


def memory_per_worker() -> int:
    """The default memory limit of a worker process."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):
        memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return int(MAX_FRACTION_OF_MEMORY * memory)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def _kill_all(workers: set[WorkerProcess]) -> None:
    while workers:
        workers.pop().kill()
