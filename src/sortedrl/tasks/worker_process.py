"""A process that serves calls from this one, and ends with it. The last part runs in that process."""

from __future__ import annotations

import json
import os
import pickle
import resource
import secrets
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from sortedrl.core.configuration import checked_float
from sortedrl.core.user_values import one_line, reason_of, shown
from sortedrl.settings.api_key import VARIABLE as API_KEY
from sortedrl.tasks.guardian import guard

START_LIMIT_SECONDS = 300.0  # imports can be slow on a busy machine
EXIT_SECONDS = 2.0  # for a process that closed its connection to exit
MAX_ANSWER_BYTES = 16 * 1024
MAX_LIMIT_SECONDS = 1e6  # 11 days: the waits of an operating system end at 24
MAX_FRACTION_OF_MEMORY = 0.5  # of the machine or container, per worker
# Exit codes of a worker that cannot go on.
LOST_CONNECTION = 76
LOST_MODULES = 77
OUT_OF_MEMORY = 78
CANCELED = 79
_ENDS = {
    LOST_CONNECTION: "a worker process lost its connection: its file descriptor was closed",
    LOST_MODULES: "a worker process lost modules: they were removed from sys.modules",
    OUT_OF_MEMORY: "MemoryError: a worker process has no memory left",
    CANCELED: "a worker process lost a call: a task that is not its own was canceled",
}
_SIZE = struct.Struct("!Q")


class WorkerError(RuntimeError):
    """The function raised in its worker process, or the process died."""


class Spoiled(Exception):
    """A call failed in a worker that had served others: they may be the reason."""


class Limits(NamedTuple):
    """Of one call."""

    seconds: float
    answer_bytes: int = MAX_ANSWER_BYTES


class Answer(NamedTuple):
    """Of a worker. `kind`: ready, returned or raised. `is_spoiled`: it cannot serve another call. `has_threads`: calls
    have left threads in it."""

    number: int  # of the call
    kind: str
    value: Any
    is_spoiled: bool = False
    has_threads: bool = False


class WorkerProcess:
    """A process that builds an object and serves it: `serve` of the module `served_by`, which also gets `files`."""

    def __init__(self, pickled_build: bytes, memory_bytes: int, served_by: str = __name__, *files: int) -> None:
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        self._first_words = tempfile.TemporaryFile()  # noqa: SIM115 (what it prints until it is ready)
        self._ready = False
        self.has_served = False
        self.is_spoiled = False  # it answered, but must not be called again
        self._has_threads = False  # of an earlier call
        arguments = (theirs.fileno(), os.getpid(), memory_bytes, *files)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from {served_by} import serve; serve{arguments}"],
                pass_fds=[theirs.fileno(), *files],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._first_words,
                # Ctrl-C is only for this process, which decides what happens to its workers.
                process_group=0,
                env=worker_environment(),
            )
        self.process_id = self._process.pid  # of its guardian, until it is ready
        with suppress(OSError):  # it died, which the waiting call will notice
            self.channel.send(pickled_build, START_LIMIT_SECONDS)

    def is_alive(self) -> bool:
        # A worker that died during startup is used, so that its call reports why.
        return not self._ready or self._process.poll() is None

    def wait_until_ready(self) -> None:
        if self._ready:
            return
        try:
            answer = self._receive(0, Limits(START_LIMIT_SECONDS))
        except TimeoutError:
            raise WorkerError(f"a worker process was not ready within {START_LIMIT_SECONDS:g} s") from None
        if answer.kind == "raised":
            raise WorkerError(f"a worker process could not start: {answer.value}")
        self.process_id = answer.value
        self._ready = True
        self._first_words.close()

    def call(self, call: bytes, limits: Limits) -> Answer:
        """`call`: the arguments, pickled. Raises WorkerError or TimeoutError, or Spoiled: an earlier call may be the
        reason."""
        self.wait_until_ready()
        had_served, self.has_served = self.has_served, True
        try:
            answer = self._answer_to(call, limits)
        except TimeoutError:
            if had_served and self._has_threads:
                raise Spoiled from None
            raise
        except WorkerError:
            if had_served:
                raise Spoiled from None
            raise
        self.is_spoiled, self._has_threads = answer.is_spoiled, answer.has_threads
        if had_served and self.is_spoiled and answer.kind == "raised":
            raise Spoiled
        return answer

    def _answer_to(self, call: bytes, limits: Limits) -> Answer:
        number = secrets.randbits(60)  # no earlier call can know it, and send an answer to this one
        seconds = limits.seconds
        try:
            self.channel.send(pickle.dumps((number, limits, call)), seconds)
        except TimeoutError:
            raise TimeoutError(f"its worker process took no call within {seconds:g} s, and was killed") from None
        except OSError:
            raise self.death() from None
        deadline = time.monotonic() + seconds
        too_late = TimeoutError(f"no result within {seconds:g} s; the worker process was killed")
        try:
            return self._receive(number, limits)
        except TimeoutError:
            raise too_late from None
        except WorkerError:
            if self.ended_by_its_timer and time.monotonic() >= deadline:
                raise too_late from None
            raise

    def _receive(self, number: int, limits: Limits) -> Answer:
        """The answer to the call of this number; 0: that the worker is ready."""
        try:
            answer = Answer(*json.loads(self.channel.receive(*limits)))
            if answer.number != number:
                raise ValueError
        except TimeoutError:
            raise
        except (EOFError, OSError):
            raise self.death() from None
        except (ValueError, TypeError):
            raise WorkerError("a worker process sent an invalid message and was killed") from None
        return answer

    def death(self) -> WorkerError:
        """Why its connection ended."""
        try:
            code = self._process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            code = LOST_CONNECTION
        if code in _ENDS:
            return WorkerError(_ENDS[code])
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
        self._process.terminate()  # its guardian ends all that it started
        try:
            self._process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
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
    modules = Modules()
    while True:
        try:
            call = channel.receive()
        except BaseException:  # the parent closed the connection
            end_group()
        answer = _answer(function, call, modules)
        try:
            channel.send(answer)
            os.chdir(home)
        except BaseException:
            os._exit(LOST_CONNECTION)


class Modules:
    """Those that are loaded now. Code that loses one of them fails in ways that its author cannot understand."""

    def __init__(self) -> None:
        self._loaded = dict(sys.modules)

    def are_intact(self) -> bool:
        return sys.modules.keys() >= self._loaded.keys()


def built(descriptor: int, parent: int, memory_bytes: int) -> tuple[Channel, Any]:
    """The connection to the parent, and what this process serves. Ends the process if that cannot be built."""
    guard(parent)
    _limit_resources(memory_bytes)
    os.set_inheritable(descriptor, False)
    channel = Channel(socket.socket(fileno=descriptor))
    os.register_at_fork(after_in_child=channel.close)  # otherwise a child process of the reward would keep it open
    try:
        served = pickle.loads(channel.receive())()
    except BaseException as error:
        channel.send(message_of(Answer(0, "raised", reason_of(error))))
        end_group()
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    channel.send(message_of(Answer(0, "ready", os.getpid())))
    return channel, served


def _answer(function: Callable[..., Any], call: bytes, modules: Modules) -> bytes:
    kind, is_out_of_memory = "returned", False
    number, limits, arguments = pickle.loads(call)
    try:
        # On systems where a process does not end with its parent, nothing else would end an endless call.
        signal.setitimer(signal.ITIMER_REAL, limits.seconds + 1)
        value = function(*pickle.loads(arguments))
    except BaseException as error:  # including SystemExit and KeyboardInterrupt from the function
        kind, value, is_out_of_memory = "raised", reason_of(error), isinstance(error, MemoryError)
    signal.setitimer(signal.ITIMER_REAL, 0)
    is_spoiled = is_out_of_memory or not modules.are_intact()
    answer = Answer(number, kind, value, is_spoiled, has_threads=threading.active_count() > 1)
    return message_of(answer, limits.answer_bytes)


def message_of(answer: Answer, most: int = MAX_ANSWER_BYTES) -> bytes:
    try:
        message = json.dumps(answer).encode()
    except (TypeError, ValueError, RecursionError) as error:
        reason = f"its result, {shown(answer.value)}, is not plain data: {reason_of(error)}"
        return message_of(answer._replace(kind="raised", value=reason))
    if len(message) > most:
        reason = f"its result has {len(message)} bytes; the maximum is {most}"
        return message_of(answer._replace(kind="raised", value=reason))
    return message


def _limit_resources(memory_bytes: int) -> None:
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


def pickled(value: Any) -> bytes:
    """Of a function, or of arguments. Raises ValueError."""
    try:
        return pickle.dumps(value)
    except Exception as error:  # __reduce__ and __getstate__ may raise anything
        raise ValueError(
            f"cannot be sent to a worker process: {reason_of(error)}; define it at the top level of a module that can "
            "be imported"
        ) from error


def worker_environment() -> dict[str, str]:
    """The variables of a process that runs foreign code: it finds the same modules, and not the key of a server."""
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return {name: value for name, value in os.environ.items() if name != API_KEY} | {"PYTHONPATH": paths}


def checked_limit(seconds: float) -> float:
    """The time limit of a call. Raises ConfigurationError."""
    limits = f"above 0 and at most {MAX_LIMIT_SECONDS:,.0f} (11 days)"
    return checked_float("limit_seconds", seconds, lambda x: 0 < x <= MAX_LIMIT_SECONDS, limits)


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
