"""An exclusive lock on a folder, held for the life of the process that writes there.

The kernel releases the lock when the process ends, however it ends: a SIGKILL leaves nothing to clean up. The file
that carries the lock stays; its content is read only while another process holds it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sortedrl.core.errors import UserError
from sortedrl.core.schedule import ConfigurationError

LOCK_FILE = ".lock"
_HELD_BY_ANOTHER = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
_open_locks: set[int] = set()


class FolderInUse(UserError, RuntimeError):
    """Another process holds the lock; the text names it."""


class FolderLock:
    """Holds the lock from construction to `release`.

    `warning` is set where the file system has no locks: the run continues, and nothing keeps a second process out.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK_FILE
        self.warning: str | None = None
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        _open_locks.add(self._file)
        try:
            self._take(folder)
        except BaseException:
            self.release()
            raise

    def _take(self, folder: Path) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD_BY_ANOTHER:
                raise _in_use(folder, self._file) from None
            self.warning = (
                f"{folder} cannot be locked on this file system ({error.strerror}): "
                "make sure that no second process writes to it"
            )
            return
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, json.dumps(_self_description()).encode(), 0)

    def is_in_place(self) -> bool:
        """Whether the folder is still there, and still the one that was locked."""
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


@contextmanager
def locked(folder: Path, log: Callable[[str], None]) -> Iterator[None]:
    """Make a folder that holds several runs, and keep other processes out of it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(folder)
    except OSError as error:
        reason = f"the folder cannot be written to ({error.strerror})"
        raise ConfigurationError("out", str(folder), reason, "Name a folder that you may write to.") from None
    if lock.warning:
        log(lock.warning)
    try:
        yield
    finally:
        lock.release()


def refuse_if_in_use(folder: Path) -> None:
    """Raise `FolderInUse` where another process holds the lock; takes nothing and writes nothing."""
    try:
        file = os.open(folder / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD_BY_ANOTHER:
            raise _in_use(folder, file) from None
    finally:
        os.close(file)


def _in_use(folder: Path, file: int) -> FolderInUse:
    return FolderInUse(f"{folder} is in use by {_holder(file)}. Wait for it, or stop it")


def _self_description() -> dict[str, str | int]:
    return {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}


def _holder(file: int) -> str:
    try:
        found = json.loads(os.pread(file, 4096, 0))
        return f"process {found['pid']} on {found['host']}, since {found['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def _forget_in_child() -> None:
    """A forked child shares its parent's lock and could outlive it: then the folder would stay locked."""
    for file in _open_locks:
        os.close(file)
    _open_locks.clear()


os.register_at_fork(after_in_child=_forget_in_child)
