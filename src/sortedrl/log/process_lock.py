"""A lock on a file, held for the life of a process: it keeps others out, or shows them that the process is there.

The kernel releases the lock when the process ends, however it ends: a SIGKILL leaves nothing to clean up. The file that
carries the lock stays, with a description of the process that held it last.
"""

import errno
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.errors import UserError

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows: there, no process is known to be there or gone
    fcntl = None

RUN_LOCK = ".lock"  # of a run folder
_HELD_BY_ANOTHER = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
_TRIES, _PAUSE_SECONDS = 5, 0.01  # `process_is_there` takes a free lock for an instant
_open_locks: set[int] = set()


class HeldByAnother(RuntimeError):
    """Another process holds the lock; the text describes it."""


class ProcessLock:
    """Holds the lock from construction to `release`.

    Several processes may hold a `shared` one. Otherwise raises `HeldByAnother` if one does.
    `why_not`: the reason, if the file system has no locks.
    """

    def __init__(self, path: Path, *, shared: bool = False) -> None:
        self._path = path
        self.why_not: str | None = None
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        _open_locks.add(self._file)
        try:
            self._take(shared=shared)
        except BaseException:
            self.release()
            raise

    def _take(self, *, shared: bool) -> None:
        try:
            for tries_left in reversed(range(_TRIES)):
                if _take(self._file, shared=shared):
                    break
                if not tries_left:
                    raise HeldByAnother(holder_of(self._path))
                time.sleep(_PAUSE_SECONDS)
        except OSError as error:
            self.why_not = error.strerror
            return
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, json.dumps(_self_description()).encode(), 0)

    def is_in_place(self) -> bool:
        """Whether the file is still there, and still the one that was locked."""
        try:
            there, held = self._path.stat(), os.fstat(self._file)
        except OSError:
            return False
        return (there.st_dev, there.st_ino) == (held.st_dev, held.st_ino)

    def release(self) -> None:
        if self._file in _open_locks:
            _open_locks.remove(self._file)
            os.close(self._file)
        self._file = -1  # its number may be another file's by now


def lock_of_log(log: Path) -> Path:
    """The lock of a process that writes an event log outside of `sortedrl train`."""
    return log.with_name(f".{log.stem}.lock")


def process_is_there(path: Path) -> bool | None:
    """Whether a process holds the lock of this file, shared or not.

    None if that is unknown: the file is missing, its file system has no locks, or the lock was held on another machine,
    whose locks may not reach this one.
    """
    file = _opened(path)
    if file is None:
        return None
    try:
        if not _take(file, shared=False):
            return True
        return False if json.loads(os.pread(file, 4096, 0))["machine"] == _machine() else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    finally:
        os.close(file)


def _opened(path: Path) -> int | None:
    for access in (os.O_RDWR, os.O_RDONLY):  # NFS needs the first one for LOCK_EX; another user has the second
        with suppress(OSError):
            return os.open(path, access)
    return None


def _take(file: int, *, shared: bool) -> bool:
    """False if another process holds the lock. Raises OSError where there are no locks."""
    if fcntl is None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD_BY_ANOTHER:
            return False
        raise
    return True


def _self_description() -> dict[str, str | int]:
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "machine": _machine(),
    }


def _machine() -> str:
    """Of the running kernel, where it has an id: host names need not be unique."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return socket.gethostname()


def holder_of(path: Path) -> str:
    """The process that holds the lock of this file, or held it last, in words."""
    try:
        found = json.loads(path.read_bytes())
        return f"process {found['pid']} on {found['host']}, since {found['since']}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "another process"


# Of a folder


class FolderInUse(UserError, RuntimeError):
    """Another process holds the lock; the text names it."""


class FolderLock(ProcessLock):
    """Holds the lock of a folder from construction to `release`.

    Where the file system has no locks, a warning is logged and nothing keeps a second process out.
    """

    def __init__(self, folder: Path, log: Callable[[str], None]) -> None:
        try:
            super().__init__(folder / RUN_LOCK)
        except HeldByAnother:
            raise _in_use(folder) from None
        if self.why_not:
            why = f"cannot be locked on this file system ({self.why_not})"
            log(f"{folder} {why}: make sure that no second process writes to it")


@contextmanager
def locked(folder: Path, log: Callable[[str], None]) -> Iterator[None]:
    """Make a folder that holds several runs, and keep other processes out of it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(folder, log)
    except OSError as error:
        reason = f"the folder cannot be written to ({error.strerror})"
        raise ConfigurationError("out", str(folder), reason, "Name a folder that you may write to.") from None
    try:
        yield
    finally:
        lock.release()


def refuse_if_in_use(folder: Path) -> None:
    """Raise `FolderInUse` where another process holds the lock; takes nothing and writes nothing."""
    if process_is_there(folder / RUN_LOCK):
        raise _in_use(folder)


def _in_use(folder: Path) -> FolderInUse:
    return FolderInUse(f"{folder} is in use by {holder_of(folder / RUN_LOCK)}. Wait for it, or stop it")


def _forget_in_child() -> None:
    """A forked child shares its parent's lock and could outlive it: then the lock would stay."""
    for file in _open_locks:
        os.close(file)
    _open_locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
