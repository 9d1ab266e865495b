"""Faults while a command starts: each ends it with one line."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sortedrl.cli import main, train
from sortedrl.core.configuration import ConfigurationError
from sortedrl.training.settings import TrainSettings

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


def test_too_few_open_files(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(settings: Any) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/dev/null")

    monkeypatch.setattr(train, "run", run)
    assert main(["train"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "sortedrl: train needs more open files than are allowed. Raise the limit: ulimit -n 1024"
    ]


def test_a_folder_whose_name_is_not_utf8_is_refused() -> None:
    settings = TrainSettings(out=Path(os.fsdecode(b"run-\xff")))
    with pytest.raises(ConfigurationError, match="this is not UTF-8 text"):
        settings.check()
