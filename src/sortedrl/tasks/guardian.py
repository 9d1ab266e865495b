"""A process that takes all that it started with it, even processes in sessions of their own.

The process forks. The child goes on. The parent, its guardian, runs no foreign code: it waits for the end of the child,
for SIGTERM, or until the process that started it is gone, which it checks every second. Then it kills every process
that is left below it and ends as the child did. Linux makes orphans below a "subreaper" its children, so none can
leave. Elsewhere the guardian kills the child's process group.
"""

import ctypes
import os
import resource
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class _Stopped(BaseException):
    """By SIGTERM, or because the process that started it is gone."""


def guard(parent: int, grace_seconds: int = 0) -> None:
    """Return in a new process, which the calling one guards until `parent`, which started it, is gone. `grace_seconds`:
    for the process to end by itself then."""
    left = grace_seconds

    def stop(number: int, _: Any) -> None:
        nonlocal left
        if number == signal.SIGTERM or (os.getppid() != parent and left <= 0):
            raise _Stopped
        left -= os.getppid() != parent

    signal.signal(signal.SIGTERM, stop)
    if _children_file().exists():
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    guardian = os.getpid()
    worker = os.fork()
    if worker:
        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)
        _guard(worker)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setpgid(0, 0)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guardian:
        os._exit(0)


def _guard(worker: int) -> NoReturn:
    os.closerange(3, 1 << 20)  # the worker's connections must end with the worker
    status: int | None = None
    with suppress(_Stopped):
        while status is None:
            process, ended_with = os.wait()  # also reaps orphans
            status = ended_with if process == worker else None
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with suppress(OSError):
        os.killpg(worker, signal.SIGKILL)
    with suppress(ChildProcessError):  # none is left
        while True:
            for child in _children(worker):
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            process, ended_with = os.wait()
            status = ended_with if process == worker else status
    _end_as(os.waitstatus_to_exitcode(status or 0))


def _end_as(code: int) -> NoReturn:
    if code < 0:
        with suppress(OSError, ValueError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _children_file() -> Path:
    return Path(f"/proc/self/task/{os.getpid()}/children")


def _children(worker: int) -> list[int]:
    try:
        return [int(word) for word in _children_file().read_text().split()]
    except OSError:
        return [worker]


def _prctl(option: int, value: int) -> None:
    with suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
