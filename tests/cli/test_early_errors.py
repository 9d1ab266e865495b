"""What is missing is refused before PyTorch is imported, which takes seconds. Faults while a command starts or prints:
each ends it with one line."""

import errno
import importlib.util
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from sortedrl.cli import train

# It imports what commands share, without PyTorch, and forks for each command.
SERVER_OF_COMMANDS = """
import json, os, sys
import sortedrl.cli.parse, sortedrl.cli.train, sortedrl.cli.eval
from sortedrl.cli import main
for line in sys.stdin:
    words, folder = json.loads(line)
    if os.fork() == 0:
        os.chdir(folder)
        os.dup2(os.open("stderr", os.O_WRONLY | os.O_CREAT), 2)
        code = main(words)
        sys.stderr.flush()
        print("torch" in sys.modules, code, flush=True)
        os._exit(0)
    os.wait()
    print("ended", flush=True)
"""
Refused = Callable[[list[str], Path], tuple[str, str]]


@pytest.fixture(scope="module")
def run_early() -> Iterator[Refused]:
    """Runs a command in a folder: what it prints to stderr, and whether PyTorch was imported, with the exit code."""
    start = [sys.executable, "-c", SERVER_OF_COMMANDS]
    with subprocess.Popen(start, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None and server.stdout is not None
        commands, output = server.stdin, server.stdout

        def run(words: list[str], folder: Path) -> tuple[str, str]:
            commands.write(json.dumps([words, str(folder)]) + "\n")
            commands.flush()
            printed = "".join(takewhile("ended\n".__ne__, output))
            return (folder / "stderr").read_text(), printed

        yield run
        commands.close()


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


SERVER = f"http://127.0.0.1:{free_port()}"
REFUSED = {
    "model": (["train", "--model", "./nowhere"], "model = './nowhere' (set by flag --model): there is no such folder"),
    "a model to evaluate": (["eval", "--model", "./nowhere"], "there is no such folder"),
    "a server": (
        ["train", "--engine", "vllm-server", "--engine-urls", SERVER],
        f"engine_urls = '{SERVER}' (set by flag --engine-urls): no server answers there. Start the server first",
    ),
    "a task": (["train", "--task", "knihgts"], "task = 'knihgts' (set by flag --task): no task 'knihgts'; use knights"),
    "a variant of a task": (["eval", "--task", "math:gsmk"], "no preset 'gsmk' for math; use one of dapo, gsm8k"),
    "a task of a dry run": (["train", "--dry-run", "--task", "knihgts"], "no task 'knihgts'; use knights"),
    "a task of your own": (["train", "--dry-run", "--task", "no_such:thing"], "no module 'no_such'"),
    "a dry run's tool": (["eval", "--dry-run", "--tools", "calculater"], "tools = 'calculater' (set by flag --tools)"),
    "a model of a dry run": (["eval", "--dry-run", "--model", "./nowhere"], "there is no such folder"),
    "the settings of a run": (["train", "--resume", "run", "--seed", "3"], "with other settings (seed: 0 -> 3)"),
    "vLLM": (["train", "--engine", "vllm"], "vLLM is not installed: pip install '.[vllm]'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_missing_is_refused_before_pytorch_is_imported(what: str, tmp_path: Path, run_early: Refused) -> None:
    if what == "vLLM" and importlib.util.find_spec("vllm") is not None:
        pytest.skip("vLLM is installed")
    words, expected = REFUSED[what]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text('{"seed": 0}')
    told, printed = run_early(words, tmp_path)
    assert expected in told
    assert printed.split() == ["False", "2"]


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_full_disk_is_one_line(flags: list[str], unbuffered: str, tmp_path: Path) -> None:
    words = ["simulate", "--dry-run", *flags]
    with (tmp_path / "out").open("w") as file:
        done = subprocess.run(
            [sys.executable, "-m", "sortedrl", *words],
            stdout=file,
            stderr=subprocess.PIPE,
            text=True,
            timeout=300,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10)),
        )
    assert done.stderr == "sortedrl: cannot write the output: File too large\n"
    assert done.returncode == 2


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
