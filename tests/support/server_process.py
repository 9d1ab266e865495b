"""A real inference server as a process of its own, for tests that talk to it and kill it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

START_SECONDS = 600


class ServerProcess:
    """`{port}` in the command becomes a free port. What it prints is in `log`."""

    def __init__(self, command: Sequence[str], log: Path, **environment: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [part.replace("{port}", str(port)) for part in command],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | environment,
                start_new_session=True,
            )

    def wait(self) -> ServerProcess:
        """Until it answers."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=2):
                    return self
            except OSError:
                time.sleep(0.3)
        self.kill()
        raise RuntimeError(f"the server did not start:\n{self.log.read_text()[-3000:]}")

    def kill(self) -> None:
        """With all processes that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def serving(command: Sequence[str], log: Path, **environment: str) -> Iterator[ServerProcess]:
    server = ServerProcess(command, log, **environment)
    try:
        yield server.wait()
    finally:
        server.kill()
