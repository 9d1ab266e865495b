"""The folder that a run leaves behind.

runs/NAME/
  config.json       the resolved settings
  events.jsonl      the event log: all metrics can be rebuilt from it
  metrics.jsonl     one line per update and per evaluation
  rollouts.jsonl    a sample of each update's responses, to read
  checkpoints/      update-000040/ ... each one complete
  model/            the trained model in Hugging Face format
  adapter/          with LoRA: the adapter in peft format; it is merged into the model above
  summary.json      written at the end
  .lock             locked while a process writes here (log/process_lock.py)

A checkpoint is all that a resumed run needs. Damaged parts of the other files are skipped and reported.
"""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from safetensors import SafetensorError

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.errors import UserError
from sortedrl.core.wording import counted
from sortedrl.learner import checkpoint
from sortedrl.log.atomic_write import write_atomically
from sortedrl.log.file import cut_torn_line
from sortedrl.log.process_lock import FolderLock, refuse_if_in_use
from sortedrl.observe.console import Log
from sortedrl.observe.run_state import from_json, text_lines
from sortedrl.settings.base import as_json
from sortedrl.training.settings import TrainSettings, changed_on_resume, saved_settings


class RunFolderError(UserError, RuntimeError):
    """The run folder is gone or cannot be written to; the text has the fix."""


class RunFolder:
    """Owns the files of a run. A folder that exists is never overwritten: it is resumed or refused.

    Only the process that holds the lock writes: `create` and `open_to_resume` take it, `close` releases it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, TextIO] = {}
        self._lock: FolderLock | None = None

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @classmethod
    def unused(cls, settings: TrainSettings) -> RunFolder:
        """The folder that the settings name, not made yet."""
        path = settings.out or _next_free(_default_path(settings))
        if path.exists():
            raise _exists_already(path)
        return cls(path)

    def create(self, settings: TrainSettings, log: Log) -> None:
        """Make the folder. A default name that another run took in the meantime gets a number."""
        while True:
            try:
                self.path.mkdir(parents=True)
                break
            except FileExistsError:  # made by another process since `unused`
                if settings.out is not None:
                    raise _exists_already(self.path) from None
                self.path = _next_free(self.path)
            except OSError as error:
                fix = "Name a folder that you may write to."
                reason = f"the run folder cannot be made ({error.strerror})"
                raise ConfigurationError("out", str(self.path), reason, fix) from None
        self._take_lock(log)
        self.write("config.json", as_json(settings))

    def open_to_resume(self, settings: TrainSettings, log: Log) -> None:
        """Take the lock, remove what a killed run left half-written, and compare the settings with those of the run."""
        self._take_lock(log)
        for leftover in self.path.glob(".*.json*"):
            leftover.unlink()
        if changed := changed_on_resume(settings, saved_settings(self.path)):
            log(f"changed settings: {changed}")

    def _take_lock(self, log: Log) -> None:
        try:
            self._lock = FolderLock(self.path, log)
        except OSError as error:
            raise RunFolderError(f"run folder {self.path} cannot be written to: {error.strerror}") from error

    def require_in_place(self) -> None:
        """Writes to a removed folder are lost, so the run stops."""
        if self._lock is None or self._lock.is_in_place():
            return
        raise RunFolderError(
            f"run folder {self.path} or its lock was removed or replaced while the run was writing there: the run has "
            f"stopped. With its checkpoints, sortedrl train --resume {self.path} continues it; else start it again"
        )

    @contextmanager
    def removal_explained(self) -> Iterator[None]:
        """Once the folder is gone, that is the cause of any failure."""
        try:
            yield
        except (RuntimeError, OSError):
            self.require_in_place()
            raise

    def write(self, name: str, value: Any) -> None:
        self._replace(name, json.dumps(value, indent=1))

    def append(self, name: str, line: dict[str, Any]) -> None:
        self.stream(name).write(json.dumps(line) + "\n")

    def stream(self, name: str) -> TextIO:
        if name not in self._files:
            cut_torn_line(self.path / name)
            # `watch` sees whole lines at once. There are few of them, except for events, which have their own flushing.
            raw = io.BufferedWriter(_LogBytes(self.path / name))
            self._files[name] = io.TextIOWrapper(raw, encoding="utf-8", line_buffering=name != "events.jsonl")
        return self._files[name]

    def flush(self) -> None:
        """All lines are on the disk when this returns."""
        self.require_in_place()
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        """Close all files and release the lock. Lines that cannot be written are dropped: `flush` raises."""
        for file in self._files.values():
            with suppress(RunFolderError):
                file.close()
        self._files.clear()
        if self._lock is not None:
            self._lock.release()

    def keep_lines(self, name: str, wanted: Callable[[dict[str, Any]], bool], log: Log) -> list[dict[str, Any]]:
        """Drop the lines that are not wanted, and lines that cannot be read. Returns the others."""
        if file := self._files.pop(name, None):
            file.close()
        path = self.path / name
        cut_torn_line(path)
        found = [(text, _line_or_none(text)) for text in text_lines(path)]
        if unreadable := sum(line is None for _, line in found):
            log(f"{path}: left out {counted(unreadable, 'unreadable line')}")
        kept = [(text, line) for text, line in found if line and wanted(line)]
        if len(kept) < len(found):
            self._replace(name, "".join(f"{text}\n" for text, _ in kept))
        return [line for _, line in kept]

    def _replace(self, name: str, text: str) -> None:
        """Replaces the file in one step: a crash leaves the old or the new file."""
        self.require_in_place()
        try:
            write_atomically(self.path / name, text)
        except OSError as error:
            raise cannot_write(self.path / name, error) from error


class _LogBytes(io.FileIO):
    """A file that grows. A write that fails raises `RunFolderError`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            super().__init__(path, "ab")
        except OSError as error:
            raise cannot_write(path, error) from error

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise cannot_write(self._path, error) from error


def replace_folder(target: Path, save: Callable[[Path], None]) -> None:
    """Replace a folder in one step by what `save` writes."""
    try:
        checkpoint.replace_folder(target, save)
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise cannot_write(target, error) from error


def cannot_write(path: Path, error: Exception) -> RunFolderError:
    reason = getattr(error, "strerror", None) or str(error).strip().split("\n")[0]
    return RunFolderError(
        f"{path} cannot be written: {reason}. The checkpoints are intact: fix that, then continue with "
        f"sortedrl train --resume {path.parent}"
    )


def _default_path(settings: TrainSettings) -> Path:
    mode = settings.mode.replace(":", ".")  # of a mode of your own; a colon is no part of a name on every file system
    return Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{mode}-seed{settings.seed}"


def _next_free(path: Path) -> Path:
    """`path`, or with a number behind it: two runs may start in the same second."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def _exists_already(path: Path) -> ConfigurationError:
    refuse_if_in_use(path)
    reason, fix = "something has this name, and a run makes its own folder", "Name a folder that does not exist yet."
    if (path / "checkpoints").is_dir():
        reason = "this run folder already exists, and runs are never overwritten"
        fix = f"Name another folder, or continue it with --resume {path}."
    return ConfigurationError("out", str(path), reason, fix)


def _line_or_none(text: str) -> dict[str, Any] | None:
    """A line that belongs to an update, or None if it cannot be read."""
    line = from_json(text)
    return line if isinstance(line, dict) and type(line.get("update")) is int else None
