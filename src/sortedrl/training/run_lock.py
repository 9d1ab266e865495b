"""An exclusive lock on a folder, held for the life of the process that writes there (log/process_lock.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.errors import UserError
from sortedrl.log.process_lock import RUN_LOCK, HeldByAnother, ProcessLock, holder_of


class FolderInUse(UserError, RuntimeError):
    """Another process holds the lock; the text names it."""


class FolderLock(ProcessLock):
    """Holds the lock of a folder from construction to `release`.

    `warning` is set where the file system has no locks: the run continues, and nothing keeps a second process out.
    """

    def __init__(self, folder: Path) -> None:
        try:
            super().__init__(folder / RUN_LOCK)
        except HeldByAnother as error:
            raise _in_use(folder, str(error)) from None
        self.warning = self.why_not and (
            f"{folder} cannot be locked on this file system ({self.why_not}): "
            "make sure that no second process writes to it"
        )


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
    holder = holder_of(folder / RUN_LOCK)
    if holder is not None:
        raise _in_use(folder, holder)


def _in_use(folder: Path, holder: str) -> FolderInUse:
    return FolderInUse(f"{folder} is in use by {holder}. Wait for it, or stop it")
