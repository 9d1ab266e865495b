"""Passes weights to a server: a file in memory that both sides can read, for the duration of a weight update.

The writing process locks the folder before it gets its final name. A killed process leaves its folder behind without
the lock: the same user's next weight update in the same place removes all unlocked folders.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sortedrl.core.configuration import ConfigurationError
from sortedrl.engines.output_layer import with_output_layer

_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "sortedrl-weights-"
_UNNAMED_PREFIX = ".sortedrl-new-"  # of folders that are not locked yet, and empty
_MOST_FILES = 8
_FILE_BYTES = 2**28  # larger weights are written as several files
_BUFFER_BYTES = 2**26
_FLOATS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64", "float8_e4m3fn": "F8_E4M3"}
_OTHERS = {"int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL"}
_DTYPES = {f"torch.{dtype}": name for dtype, name in (_FLOATS | _OTHERS).items()}  # as safetensors spells them
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
                write_weights(weights, folder)
                for file in folder.iterdir():
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


def write_weights(weights: Weights, folder: Path) -> None:
    """Write the weights, with a tied output layer, as safetensors files. Raises OSError.

    Writes to one file wait for each other, so large weights go to several at the same time.
    """
    named = {name: tensor.detach().contiguous() for name, tensor in with_output_layer(weights)}
    count = min(_MOST_FILES, 1 + sum(tensor.nbytes for tensor in named.values()) // _FILE_BYTES)
    files: list[dict[str, Any]] = [{} for _ in range(count)]
    for name in sorted(named, key=lambda name: -named[name].itemsize):  # an offset is a multiple of the item's size
        min(files, key=lambda file: sum(tensor.nbytes for tensor in file.values()))[name] = named[name]
    parts = [f"-{i:05}-of-{count:05}" for i in range(1, count + 1)] if count > 1 else [""]
    with ThreadPoolExecutor(count) as threads:
        list(threads.map(_write_file, (folder / f"model{part}.safetensors" for part in parts), files))


def _write_file(file: Path, weights: Mapping[str, Any]) -> None:
    header, end = {}, 0
    for name, tensor in weights.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[str(tensor.dtype)], "shape": list(tensor.shape), "data_offsets": [start, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with file.open("wb") as out:
        out.write(len(head).to_bytes(8, "little") + head)
        for part in _in_host_memory(weights.values()):
            out.write(part)


def _in_host_memory(tensors: Collection[Any]) -> Iterator[Any]:
    """The bytes of the weights in turn. Those on a GPU pass through one pinned buffer, valid until the next part."""
    import torch

    if is_on_gpu := any(tensor.is_cuda for tensor in tensors):
        torch.cuda.synchronize()  # another thread may have just computed them
    buffer = torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=is_on_gpu)
    for tensor in tensors:
        for part in tensor.reshape(-1).view(torch.uint8).split(_BUFFER_BYTES):
            yield (buffer[: len(part)].copy_(part) if part.is_cuda else part).numpy()
