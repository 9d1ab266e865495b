"""Output that cannot be written: a character is not in the encoding, the reader is gone, or the disk is full."""

from __future__ import annotations

import io
import os
from contextlib import suppress
from typing import TextIO


def replace_what_cannot_be_encoded(*streams: TextIO) -> None:
    """A terminal that is not UTF-8, or a file name that is not, costs some characters and not the command."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def discard(*streams: TextIO) -> None:
    """Let the rest of the output go nowhere. Else Python tries to write it when it exits, and fails."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        with suppress(OSError, ValueError):
            os.dup2(nowhere, stream.fileno())
