"""A process that serves calls from this one (worker_server.py), and ends with it."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from sortedrl.core.configuration import checked_float
from sortedrl.core.user_values import one_line, reason_of
from sortedrl.settings.api_key import VARIABLE as API_KEY
from sortedrl.tasks.worker_server import ENDS, LOST_CONNECTION, SIZE, Answer, Page, Request

START_LIMIT_SECONDS = 300.0  # imports can be slow on a busy machine
EXIT_SECONDS = 2.0  # for a process that closed its connection to exit
MAX_LIMIT_SECONDS = 1e6  # 11 days: the waits of an operating system end at 24
MAX_FRACTION_OF_MEMORY = 0.5  # of the machine or container, per worker
ENDS_A_PROCESS = "ends a process"  # the name of a task


class WorkerError(RuntimeError):
    """The function raised in its worker process, or the process died."""


@dataclass(frozen=True)
class Service:
    """What the processes do: `build` returns what answers calls there (worker_server.py)."""

    build: bytes
    limit_seconds: float
    memory_bytes: int
    answer_bytes: int

    @staticmethod
    def of(build: Callable[[], Any], limit_seconds: float, answer_bytes: int) -> Service:
        """Raises ValueError if `build` cannot be pickled, and ConfigurationError for the limit."""
        limits = f"above 0 and at most {MAX_LIMIT_SECONDS:,.0f} (11 days)"
        seconds = checked_float("limit_seconds", limit_seconds, lambda x: 0 < x <= MAX_LIMIT_SECONDS, limits)
        return Service(pickled(build), seconds, memory_per_worker(), answer_bytes)


class WorkerProcess:
    """A process that runs, and the connection to it."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._first_words = tempfile.TemporaryFile()  # noqa: SIM115 (what it prints until it is ready)
        ours, theirs = socket.socketpair()
        with theirs, _shared_file() as notes:
            self.page = Page(notes.fileno())
            files = (theirs.fileno(), notes.fileno())
            arguments = (*files, os.getpid(), service.memory_bytes, service.answer_bytes)
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from sortedrl.tasks.worker_server import serve; serve{arguments}"],
                pass_fds=files,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._first_words,
                # Ctrl-C is only for this process, which decides what happens to its workers.
                process_group=0,
                env=worker_environment(),
            )
        self.process_id = self._process.pid  # of its guardian, until it is ready
        self._ours = ours

    @staticmethod
    async def started(service: Service) -> WorkerProcess:
        """One that has built what it serves. Raises WorkerError or OSError."""
        worker = WorkerProcess(service)
        worker._reader, worker._writer = await asyncio.open_connection(sock=worker._ours)
        try:
            await worker._until_ready()
        except BaseException:
            worker.end()
            raise
        return worker

    async def _until_ready(self) -> None:
        self.send(0, 0, self._service.build)
        try:
            async with asyncio.timeout(START_LIMIT_SECONDS):
                answer = await self.receive()
        except TimeoutError:
            raise WorkerError(f"a worker process was not ready within {START_LIMIT_SECONDS:g} s") from None
        except (EOFError, OSError):
            raise await self.death() from None
        if answer.kind == "raised":
            raise WorkerError(f"a worker process could not start: {answer.value}")
        self.process_id = answer.value
        self._first_words.close()

    def send(self, number: int, owner: int, content: bytes) -> None:
        message = pickle.dumps(tuple(Request(number, owner, content)))
        self._writer.write(SIZE.pack(len(message)) + message)

    async def receive(self) -> Answer:
        """Raises EOFError or OSError if the connection ended, and WorkerError for an invalid message."""
        (size,) = SIZE.unpack(await self._reader.readexactly(SIZE.size))
        try:
            if size > self._service.answer_bytes:
                raise ValueError
            answer = Answer(*json.loads(await self._reader.readexactly(size)))
            return answer._replace(number=int(answer.number))
        except (ValueError, TypeError, RecursionError):
            raise WorkerError("a worker process sent an invalid message and was killed") from None

    async def death(self) -> WorkerError:
        """Why its connection ended."""
        code = await self._exit_code()
        if code is None:
            code = LOST_CONNECTION
        if code in ENDS:
            return WorkerError(ENDS[code])
        how = f"exit code {code}" if code >= 0 else f"signal {_signal_name(-code)}"
        return WorkerError(f"a worker process died with {how}{self._last_words()}")

    def _last_words(self) -> str:
        if self._first_words.closed:
            return ""
        self._first_words.seek(0)
        lines = self._first_words.read().decode(errors="replace").strip().splitlines()
        return f" before it was ready: {one_line(lines[-1])}" if lines else " before it was ready"

    async def _exit_code(self) -> int | None:
        """None if it does not exit."""
        until = time.monotonic() + EXIT_SECONDS
        while self._process.poll() is None and time.monotonic() < until:
            await asyncio.sleep(0.01)
        return self._process.returncode

    def end(self) -> None:
        """Kill it, without waiting."""
        self._writer.close()
        self._first_words.close()
        self.page.close()
        self._process.terminate()  # its guardian ends all that it started
        asyncio.create_task(self._reaped(), name=ENDS_A_PROCESS)  # noqa: RUF006 (its timer refers to it)

    async def _reaped(self) -> None:
        if await self._exit_code() is None:
            self._process.kill()
            self._process.wait()


def _shared_file() -> BinaryIO:
    """In memory where there are such files: on a full disk, writing to a mapped one ends the process."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("notes"), "r+b")
    return cast("BinaryIO", tempfile.TemporaryFile())


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


def memory_per_worker() -> int:
    """The memory limit of a worker process."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):
        memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return int(MAX_FRACTION_OF_MEMORY * memory)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
