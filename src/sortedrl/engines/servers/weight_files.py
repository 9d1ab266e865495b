"""Passes weights to a server: a file in memory that both sides can read, for the duration of a weight update.

The writing process locks the folder before it gets its final name. A killed process leaves its folder behind without
the lock: the same user's next weight update in the same place removes all unlocked folders.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sortedrl.core.configuration import ConfigurationError
from sortedrl.engines.output_layer import with_output_layer

_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "sortedrl-weights-"
_UNNAMED_PREFIX = ".sortedrl-new-"  # of folders that are not locked yet, and empty
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
Weights = Mapping[str, Any] | Iterable[tuple[str, Any]]


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """Where weights are written, and who may read them: this user, or all users of the machine."""

    folder: Path | None = None  # None: shared memory, or else the folder for temporary files
    readable_by_all: bool = False

    @property
    def parent(self) -> Path:
        if self.folder is not None:
            return Path(self.folder)
        return _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())

    @contextmanager
    def written(self, weights: Weights, version: int) -> Iterator[Path]:
        """A temporary folder with these weights."""
        remove_abandoned(self.parent)
        folder: Path | None = None
        lock: int | None = None
        try:
            try:
                folder = Path(tempfile.mkdtemp(prefix=_UNNAMED_PREFIX, dir=self.parent))
                lock = os.open(folder, _FOLDER)
                _take(lock)
                folder = folder.rename(folder.with_name(f"{_PREFIX}{version}-{folder.name[len(_UNNAMED_PREFIX) :]}"))
                file = folder / "model.safetensors"
                write_weights(weights, file)
                file.chmod(0o644 if self.readable_by_all else 0o600)
                folder.chmod(0o755 if self.readable_by_all else 0o700)
            except OSError as error:
                why = f"cannot write the weights of version {version} ({error})"
                fix = "Use a folder with more space that the server can also read."
                raise ConfigurationError("weights_folder", str(self.parent), why, fix) from error
            yield folder
        finally:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            if lock is not None:
                os.close(lock)


def remove_abandoned(parent: Path) -> None:
    """Remove weights left behind by killed processes of this user. Locked folders stay."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # it is gone by now, belongs to another user, or is no folder
            lock = os.open(folder, _FOLDER)
            try:
                if os.fstat(lock).st_uid == os.geteuid() and _take(lock):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _take(lock: int) -> bool:
    """Whether the lock was free and is ours now; False also if the file system does not support locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def write_weights(weights: Weights, file: Path) -> None:
    """Write the file atomically (write, then rename), with a tied output layer. Raises OSError."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    named = dict(with_output_layer(weights))
    seen: set[int] = set()
    for name, tensor in named.items():
        tensor = tensor.detach().contiguous()
        named[name] = tensor.clone() if tensor.data_ptr() in seen else tensor  # safetensors cannot store shared tensors
        seen.add(tensor.data_ptr())
    partial = file.with_suffix(".partial")
    try:
        save_file(named, partial)
    except SafetensorError as error:  # also for a full disk
        raise OSError(str(error)) from error
    partial.rename(file)
