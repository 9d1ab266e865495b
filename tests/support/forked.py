"""Commands as processes of their own that share one import: a server imports the package once and forks for each.

A command may be given a `Fault`, so that it is killed between two named operations on its files. Nothing in the
package knows about it: the child watches itself by Python's audit events.
"""

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

_OPERATIONS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree")
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Fault:
    """SIGKILL just before operation number `operation` (from 1) on a file below `folder`.

    With `replaced_save` operations count from the first within a replacement of that checkpoint (from 1): every
    checkpoint is then saved a second time.
    """

    folder: Path
    operation: int
    replaced_save: int | None = None


@dataclass(frozen=True)
class _Place:
    """Where a command runs."""

    cwd: Path
    environment: dict[str, str]
    terminal: str | None


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


class Command:
    """`sortedrl WORDS`, running. What it prints goes to files in the folder `output`, or to a terminal.

    `environment` replaces that of the tests, as with `subprocess`; `PYTHONPATH` and `OMP_NUM_THREADS` are the server's.
    """

    def __init__(
        self,
        words: Sequence[str],
        output: Path | None = None,
        *,
        fault: Fault | None = None,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        terminal: str | None = None,
    ) -> None:
        self._temporary = tempfile.TemporaryDirectory() if output is None else None
        self._output = output or Path(self._temporary.name if self._temporary else "")
        self._output.mkdir(parents=True, exist_ok=True)
        place = _Place(cwd or Path.cwd(), dict(os.environ if environment is None else environment), terminal)
        self.process: ForkServerProcess = _context().Process(target=_run, args=([*words], self._output, fault, place))
        self.process.start()

    @property
    def stdout(self) -> str:
        return _text(self._output / "stdout")

    @property
    def stderr(self) -> str:
        return _text(self._output / "stderr")

    def wait_for_output(self, text: str, timeout: float = 300.0) -> None:
        """Until it has printed `text`."""
        until = time.monotonic() + timeout
        while True:
            is_alive = self.process.is_alive()  # before reading: it may print and end in between
            if text in self.stdout or text in self.stderr:
                return
            assert is_alive and time.monotonic() < until, self.stdout + self.stderr
            time.sleep(0.02)

    def send(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def wait(self, timeout: float = 600.0) -> Done:
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            raise TimeoutError(self.stdout + self.stderr)
        return Done(self.process.exitcode, self.stdout, self.stderr)


def run(
    words: Sequence[str],
    output: Path | None = None,
    *,
    fault: Fault | None = None,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Done:
    return Command(words, output, fault=fault, cwd=cwd, environment=environment).wait()


def _context() -> multiprocessing.context.ForkServerContext:
    """PYTHONPATH, because the server of some versions of Python does not take over `sys.path`."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[1] / "src"), str(HERE)])
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["uncollected", "preloaded"])
    return context


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _run(words: list[str], output: Path, fault: Fault | None, place: _Place) -> None:
    os.chdir(place.cwd)
    servers = {name: os.environ[name] for name in ("PYTHONPATH", "OMP_NUM_THREADS")}
    os.environ.clear()
    os.environ.update(place.environment | servers)
    if place.terminal is None:
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(output / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    else:
        os.setsid()  # the terminal that it opens next is its own
        descriptor = os.open(place.terminal, os.O_RDWR)
        for number in range(3):
            os.dup2(descriptor, number)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # A command that a user starts has the platform's way to start processes. The server's would import all again.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if fault is not None:
        _arm(fault)
    from sortedrl.cli import main

    code = main(words)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _arm(fault: Fault) -> None:
    counts = fault.replaced_save is None
    seen = 0
    folder = str(fault.folder)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        if counts and event in _OPERATIONS and str(args[0]).startswith(folder):
            seen += 1
            if seen == fault.operation:
                os.kill(os.getpid(), signal.SIGKILL)

    if fault.replaced_save is not None:
        from sortedrl.learner import checkpoint

        save, saves = checkpoint.save, 0

        def save_twice(*args: Any) -> Path:
            nonlocal saves, counts
            save(*args)
            saves += 1
            counts = saves == fault.replaced_save
            path = save(*args)
            counts = False
            return path

        checkpoint.save = save_twice
    sys.addaudithook(hook)
