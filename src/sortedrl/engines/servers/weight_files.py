"""Passes weights to a server: a file in memory that both sides can read, for the duration of a weight update.

The writing process locks the folder before it gets its final name. A killed process leaves its folder behind without
the lock: the same user's next weight update in the same place removes all unlocked folders.
"""

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sortedrl.core.configuration import ConfigurationError
from sortedrl.engines.shared import with_output_layer

_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "sortedrl-weights-"
_UNNAMED_PREFIX = ".sortedrl-new-"  # of folders that are not locked yet, and empty
_THREADS = 16  # one writes less than 2 GB per second to shared memory
_FILE_BYTES = 2**28  # until the next file
_BUFFER_BYTES = 2**24  # per file that is written
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_TYPES = {"bfloat16": "BF16", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64"}
_TYPES |= {f"{kind}{bits}": f"{kind[0].upper()}{bits}" for kind in ("float", "int", "uint") for bits in (8, 16, 32, 64)}
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
        with ExitStack() as left:
            try:
                new = Path(tempfile.mkdtemp(prefix=_UNNAMED_PREFIX, dir=self.parent))
                left.callback(shutil.rmtree, new, ignore_errors=True)
                lock = os.open(new, _FOLDER)
                left.callback(os.close, lock)
                _take(lock)
                folder = new.rename(new.with_name(f"{_PREFIX}{version}-{new.name[len(_UNNAMED_PREFIX) :]}"))
                left.callback(_remove, folder)
                write_weights(weights, folder)
                for file in folder.iterdir():
                    file.chmod(0o644 if self.readable_by_all else 0o600)
                folder.chmod(0o755 if self.readable_by_all else 0o700)
            except OSError as error:
                why = f"cannot write the weights of version {version} ({error})"
                fix = "Use a folder with more space that the server can also read."
                raise ConfigurationError("weights_folder", str(self.parent), why, fix) from error
            yield folder


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
    """Write the weights, with a tied output layer, as safetensors files. Raises OSError."""
    import torch

    files: list[dict[str, Any]] = [{}]
    for name, tensor in with_output_layer(weights):
        if sum(other.nbytes for other in files[-1].values()) >= _FILE_BYTES:
            files.append({})
        files[-1][name] = tensor.detach().contiguous()
    for gpu in {tensor.device for tensors in files for tensor in tensors.values() if tensor.is_cuda}:
        torch.cuda.synchronize(gpu)  # threads read them in another stream
    parts = [f"-{i:05}-of-{len(files):05}" for i in range(1, len(files) + 1)] if len(files) > 1 else [""]
    with ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(_write_file, files, (folder / f"model{part}.safetensors" for part in parts)))


def _write_file(tensors: Mapping[str, Any], path: Path) -> None:
    """In the format of safetensors. Its own `save_file` copies each tensor from the GPU to new memory, which takes nine
    times as long in a virtual machine.
    """
    import torch

    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)  # so that all are aligned
    header, end = {}, 0
    for name, tensor in ordered:
        kind, offsets = _TYPES[str(tensor.dtype).removeprefix("torch.")], [end, end := end + tensor.nbytes]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": offsets}
    described = json.dumps(header).encode()
    described += b" " * (-len(described) % 8)
    buffer = torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=any(tensor.is_cuda for _, tensor in ordered))
    with path.open("wb") as file:
        file.write(len(described).to_bytes(8, "little") + described)
        for _, tensor in ordered:
            for part in tensor.reshape(-1).view(torch.uint8).split(_BUFFER_BYTES):
                file.write((part if part.is_cpu else buffer[: part.numel()].copy_(part)).numpy().data)


def _remove(folder: Path) -> None:
    """One thread frees only 15 GB of shared memory per second."""
    with suppress(OSError, RuntimeError), ThreadPoolExecutor(_THREADS) as threads:  # no new thread at Python's exit
        list(threads.map(os.unlink, folder.iterdir()))
    shutil.rmtree(folder, ignore_errors=True)
