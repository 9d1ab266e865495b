"""Faults while a command starts: each ends it with one line."""

import errno
import os
import subprocess
import sys
from typing import Any

import pytest

from sortedrl.cli import train

AGAIN_AT_EXIT = """
import atexit, os, signal, sys
from sortedrl.cli import main, train

def interrupted(settings):
    os.kill(os.getpid(), signal.SIGINT)

train.run = interrupted
atexit.register(interrupted, None)
sys.exit(main(["train"]))
"""


def test_an_interrupt_while_an_interrupted_command_ends_leaves_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", AGAIN_AT_EXIT], capture_output=True, text=True, check=False)
    assert done.stderr == "interrupted\n" and done.returncode != 0


def test_too_few_open_files(monkeypatch: pytest.MonkeyPatch, refused: Any) -> None:
    def run(settings: Any) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/dev/null")

    monkeypatch.setattr(train, "run", run)
    expected = "sortedrl: train needs more open files than are allowed. Raise the limit: ulimit -n 1024\n"
    assert refused("train") == expected


def test_a_reader_that_leaves_ends_the_command_without_a_word() -> None:
    """As `| head -1` does."""
    words = [sys.executable, "-m", "sortedrl", "simulate", "--cohorts", "1", "--modes", "baseline", "partial"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None and command.stderr is not None
        command.stdout.close()
        assert command.stderr.read() == ""
    assert command.returncode == 0
