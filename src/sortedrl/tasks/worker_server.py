"""What runs in a worker process (workers.py): it builds what it serves, then answers calls."""

from __future__ import annotations

import json
import mmap
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from sortedrl.core.user_values import reason_of, shown
from sortedrl.tasks.guardian import guard

# Exit codes of a worker that cannot go on.
LOST_CONNECTION = 76
LOST_MODULES = 77
OUT_OF_MEMORY = 78
CANCELED = 79
ENDS = {
    LOST_CONNECTION: "a worker process lost its connection: its file descriptor was closed",
    LOST_MODULES: "a worker process lost modules: they were removed from sys.modules",
    OUT_OF_MEMORY: "MemoryError: a worker process has no memory left",
    CANCELED: "a worker process lost a call: a task that is not its own was canceled",
}
SIZE = struct.Struct("!Q")  # before each message


class Request(NamedTuple):
    """`owner`: what pays if the call ends the process. `content`: pickled."""

    number: int
    owner: int
    content: bytes


class Answer(NamedTuple):
    """`kind`: ready, returned or raised. `has_threads`: calls have left threads in the process."""

    number: int  # of the request
    kind: str
    value: Any
    has_threads: bool = False


class Note(NamedTuple):
    """What a process works for, and since when; 0: for no owner, or no call."""

    owner: int
    call: int
    since: float  # by time.monotonic, which all processes of a machine share


class Page:
    """Shared memory for a note, which outlives the process that writes it."""

    _FORMAT = struct.Struct("=QQd")

    def __init__(self, descriptor: int) -> None:
        os.truncate(descriptor, mmap.PAGESIZE)
        self._memory = mmap.mmap(descriptor, self._FORMAT.size)

    def write(self, owner: int = 0, call: int = 0) -> float:
        """Returns the time."""
        now = time.monotonic()
        self._FORMAT.pack_into(self._memory, 0, owner, call, now)
        return now

    def read(self) -> Note:
        return Note(*self._FORMAT.unpack_from(self._memory))

    def close(self) -> None:
        self._memory.close()


def serve(descriptor: int, notes: int, parent: int, memory_bytes: int, answer_bytes: int) -> None:
    """The process, from its start: `parent` sends first what to build, which then answers calls."""
    guard(parent)
    _limit_resources(memory_bytes)
    connection, page = Connection(descriptor, answer_bytes), Page(notes)
    try:
        answer_calls = pickle.loads(connection.receive().content)()
    except BaseException as error:
        connection.send(Answer(0, "raised", reason_of(error)))
        end_group()
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    connection.require_modules()
    connection.send(Answer(0, "ready", os.getpid()))
    answer_calls(connection, page)


def server_of(build: Callable[[], Callable[..., Any]]) -> Callable[[Connection, Page], NoReturn]:
    """Answers calls of the function that `build` returns, one after the other."""
    return partial(_answer_calls, build())


def _answer_calls(function: Callable[..., Any], connection: Connection, page: Page) -> NoReturn:
    home = os.getcwd()
    while True:
        request = connection.receive()
        page.write(request.owner, request.number)
        connection.send(_answer(function, request, connection))
        page.write()
        with suppress(OSError):
            os.chdir(home)


def _answer(function: Callable[..., Any], request: Request, connection: Connection) -> Answer:
    kind = "returned"
    try:
        value = function(*pickle.loads(request.content))
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except BaseException as error:  # including SystemExit and KeyboardInterrupt from the function
        from sortedrl.core.import_path import fault_in_your_code  # slow to import

        kind, value = "raised", fault_in_your_code(error)
    connection.require_modules()
    return Answer(request.number, kind, value, has_threads=threading.active_count() > 1)


class Connection:
    """To the parent. Ends the process if it is lost, or if the process cannot go on."""

    def __init__(self, descriptor: int, answer_bytes: int) -> None:
        os.set_inheritable(descriptor, False)
        self._answer_bytes = answer_bytes
        self._socket = socket.socket(fileno=descriptor)
        self._modules: set[str] = set()
        os.register_at_fork(after_in_child=self._socket.close)  # otherwise a child of the reward would keep it open

    def receive(self) -> Request:
        """Ends the process if the parent closed the connection."""
        try:
            (size,) = SIZE.unpack(self._exactly(SIZE.size))
            return Request(*pickle.loads(self._exactly(size)))
        except BaseException:
            end_group()

    def send(self, answer: Answer) -> None:
        try:
            message = _message(answer, self._answer_bytes)
            self._socket.sendall(SIZE.pack(len(message)) + message)
        except BaseException:
            os._exit(LOST_CONNECTION)

    def require_modules(self) -> None:
        """Those that were loaded first. Code that loses one of them fails in ways that its author cannot understand."""
        if not sys.modules.keys() >= self._modules:
            os._exit(LOST_MODULES)
        self._modules = self._modules or set(sys.modules)

    def _exactly(self, size: int) -> bytes:
        parts = []
        while size:
            part = self._socket.recv(min(size, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def _message(answer: Answer, most: int) -> bytes:
    try:
        message = json.dumps(answer).encode()
    except (TypeError, ValueError, RecursionError) as error:
        reason = f"its result, {shown(answer.value)}, is not plain data: {reason_of(error)}"
        return _message(answer._replace(kind="raised", value=reason), most)
    if len(message) > most:
        reason = f"its result has {len(message)} bytes; the maximum is {most}"
        return _message(answer._replace(kind="raised", value=reason), most)
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
