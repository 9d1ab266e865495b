"""Weights on their way to a server: a file in memory that both sides see, for as long as the weight update takes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sortedrl.core.schedule import ConfigurationError

_SHARED_MEMORY = Path("/dev/shm")
Weights = Mapping[str, Any] | Iterable[tuple[str, Any]]


def default_folder() -> Path | None:
    """Shared memory where the system has it; None: the folder for temporary files."""
    return _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None


@contextmanager
def written(weights: Weights, version: int, parent: Path | None) -> Iterator[Path]:
    """A folder with these weights, for as long as they are needed."""
    folder: Path | None = None
    try:
        try:
            folder = Path(tempfile.mkdtemp(prefix=f"sortedrl-version-{version}-", dir=parent))
            folder.chmod(0o755)  # the server may be another user
            write_weights(weights, folder / "model.safetensors")
        except OSError as error:
            raise ConfigurationError(
                "weights_folder",
                str(parent or tempfile.gettempdir()),
                f"the weights of version {version} cannot be written there ({error})",
                "Name a folder with more room that the server can read, too.",
            ) from error
        yield folder
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def write_weights(weights: Weights, file: Path) -> None:
    """Write the file under another name, then rename it: it is either whole or not there.

    A tied output layer is always written: servers keep the old one if it is not named.
    """
    from safetensors.torch import save_file

    named = dict(weights)
    embedding = named.get("model.embed_tokens.weight")
    if embedding is not None:
        named.setdefault("lm_head.weight", embedding)
    seen: set[int] = set()
    for name, tensor in named.items():
        tensor = tensor.detach().contiguous()
        named[name] = tensor.clone() if tensor.data_ptr() in seen else tensor  # the format holds no shared tensors
        seen.add(tensor.data_ptr())
    partial = file.with_suffix(".partial")
    save_file(named, partial)
    partial.rename(file)
