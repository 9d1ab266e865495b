"""Output that cannot be written (a character is not in the encoding, the reader is gone, the disk is full), and output
of others that would spoil ours."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
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


@contextmanager
def stdout_goes_to_stderr() -> Iterator[None]:
    """For code of others in a command whose stdout is JSON: vLLM prints its log there, and so may a task of the user.

    The descriptor is redirected, too, for C code and child processes.
    """
    ours = sys.stdout
    ours.flush()
    try:
        kept = os.dup(1)
        os.dup2(2, 1)
    except OSError:  # the command runs without one of the two
        with redirect_stdout(sys.stderr):
            yield
        return
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        with suppress(OSError, ValueError):
            ours.flush()  # code that kept the stream may have written to it
        os.dup2(kept, 1)
        os.close(kept)
