"""Output that can no longer be written: the reader of a pipe is gone, or the disk is full."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TextIO


def discard(*streams: TextIO) -> None:
    """Let the rest of the output go nowhere. Else Python tries to write it when it exits, and fails."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        with suppress(OSError, ValueError):
            os.dup2(nowhere, stream.fileno())
