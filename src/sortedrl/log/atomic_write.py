"""Writes a file as a whole: a reader, or a run after a kill, sees the new file or the old one, never a part."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO


@contextmanager
def atomic_writer(path: Path) -> Iterator[TextIO]:
    """A text file that replaces `path` when the block ends. After an error `path` is as before.

    The content is on the disk before it replaces the old file. The temporary file is `.NAME` in the same folder; a
    killed process may leave it behind.
    """
    temporary = path.with_name(f".{path.name}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def write_atomically(path: Path, text: str) -> None:
    with atomic_writer(path) as file:
        file.write(text)
