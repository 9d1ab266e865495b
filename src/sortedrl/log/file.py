"""The event log on disk: appended to, and rolled back to a checkpoint."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TextIO

from sortedrl.core.events import Event, Phase, RolledBack, Sink
from sortedrl.log.lines import JsonLines
from sortedrl.log.process_lock import HeldByAnother, ProcessLock, lock_of_log
from sortedrl.log.recovery import RecoveredLog

FLUSH_SECONDS = 1.0


class EventFile:
    """A sink that appends events to a file. Readers see all events up to the last phase change, or a second ago.

    `lock`, if any, shows them until `close` that this process is there, however long it is busy without an event.
    """

    def __init__(self, file: TextIO, lock: ProcessLock | None = None) -> None:
        self._file = file
        self._lock = lock
        self._write = JsonLines(file)
        self._flush_at = 0.0

    @classmethod
    def open(cls, path: Path, *, must_be_new: bool = False) -> EventFile:
        """Creates the folder if necessary. `must_be_new`: raise a FileExistsError instead of appending."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if not must_be_new:
            cut_torn_line(path)
        try:
            return cls(path.open("x" if must_be_new else "a", encoding="utf-8"), _writer_lock(path))
        except FileExistsError:
            why = "is the log of an earlier run, and a log has one run. Use another folder, or resume that run"
            raise FileExistsError(f"{path} {why}.") from None

    def __call__(self, event: Event) -> None:
        self._write(event)
        if event.at >= self._flush_at or type(event) is Phase:
            self.flush()
            self._flush_at = event.at + FLUSH_SECONDS

    def roll_back(self, recovered: RecoveredLog) -> None:
        """Mark the events after `recovered` as void: they stay in the file, but no metric counts them."""
        self._write(RolledBack(recovered.last_time, recovered.void))
        for event in recovered.padding:
            self._write(event)

    def flush(self) -> None:
        """Readers see all events when this returns."""
        self._file.flush()

    def sync(self) -> None:
        """All events are on the disk when this returns."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._lock is not None:
            self._lock.release()
        self._file.close()


def _writer_lock(path: Path) -> ProcessLock | None:
    """Shared: a process may have opened its log twice. A log without a lock is as good, except for those who watch."""
    try:
        return ProcessLock(lock_of_log(path), shared=True)
    except (OSError, HeldByAnother):
        return None


def free_name(path: Path, word: str) -> Path:
    """Beside the file, such as `events.earlier-1.jsonl`."""
    number = 1
    while (free := path.with_name(f"{path.stem}.{word}-{number}{path.suffix}")).exists():
        number += 1
    return free


def cut_torn_line(path: Path) -> None:
    """Remove a last line without a line feed, as a killed run may leave it."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        content = file.read()
        if content and not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)


class Batched:
    """A sink that passes events on in batches: at each phase change, after `seconds`, or when `most` are waiting.
    Between the steps of a model, handling events one by one costs several times as much because of cold caches."""

    def __init__(self, *sinks: Sink, most: int = 1024, seconds: float = 0.5) -> None:
        self.sinks = list(sinks)
        self._most = most
        self._seconds = seconds
        self._due = -math.inf
        self._waiting: list[Event] = []

    def __call__(self, event: Event) -> None:
        self._waiting.append(event)
        if type(event) is Phase or event.at >= self._due or len(self._waiting) >= self._most:
            self._due = event.at + self._seconds
            self.flush()

    def flush(self) -> None:
        """Pass on all waiting events."""
        waiting, self._waiting = self._waiting, []
        for sink in self.sinks:
            for event in waiting:
                sink(event)
