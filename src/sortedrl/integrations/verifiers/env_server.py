"""A process in which verifiers runs episodes: its environment server, with one worker.

The process ends with this one, and takes the programs that its harnesses started with it. `python -m` this module is
the process itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from sortedrl.core.user_values import one_line
from sortedrl.tasks.worker_process import WorkerError, worker_environment

START_SECONDS = 300.0  # imports can be slow on a busy machine
EXIT_SECONDS = 10.0  # for episodes to end their programs, before all are killed
_MARK = "SORTEDRL_ENV_SERVER"  # in the environment of all programs that a server starts


class EnvServerProcess:
    """Start it with `start`. `ended` is done as soon as the process is gone, however it ended."""

    def __init__(self, process: asyncio.subprocess.Process, mark: str, output: BinaryIO) -> None:
        self.address = ""
        self._process = process
        self._mark = mark
        self._output = output
        self.ended = asyncio.create_task(self._wait())

    @classmethod
    async def start(cls, config: Mapping[str, Any]) -> EnvServerProcess:
        """`config` is the environment's, as plain data. Raises WorkerError if the process does not come up."""
        mark = uuid.uuid4().hex
        output = tempfile.TemporaryFile()  # noqa: SIM115 (closed when the process ends)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", __name__,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=output,
            process_group=0, env=server_environment(mark),
        )  # fmt: skip
        server = cls(process, mark, output)
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(config).encode() + b"\n")
            await process.stdin.drain()
            line = await asyncio.wait_for(process.stdout.readline(), START_SECONDS)
        except TimeoutError:
            await server.kill()
            raise WorkerError(f"verifiers' environment server was not ready within {START_SECONDS:g} s") from None
        except ConnectionError:
            line = b""
        server.address = line.decode().strip()
        if not server.address:
            raise WorkerError(await server.ended)
        return server

    @property
    def process_id(self) -> int:
        return self._process.pid

    async def stop(self) -> None:
        """End it and wait; a process that does not end is killed."""
        if not self.ended.done():
            with suppress(ProcessLookupError):
                self._process.terminate()
            await asyncio.wait([self.ended], timeout=EXIT_SECONDS)
        await self.kill()

    async def kill(self) -> None:
        if not self.ended.done():
            with suppress(ProcessLookupError):
                self._process.kill()
        await self.ended

    async def _wait(self) -> str:
        """Returns why the process ended."""
        code = await self._process.wait()
        _kill_marked(self._mark)
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        self._output.close()
        last = f": {one_line(lines[-1])}" if lines and code > 0 else ""
        return f"verifiers' environment server died with {how}{last}"


def server_environment(mark: str) -> dict[str, str]:
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])  # for `uv`
    return worker_environment() | {_MARK: mark, "PATH": programs}


def _kill_marked(mark: str) -> None:
    """Kill a server and the programs that it left behind, which have sessions of their own; this process last."""
    wanted = f"{_MARK}={mark}".encode()
    for process in sorted((int(one.name) for one in Path("/proc").glob("[0-9]*")), key=lambda one: one == os.getpid()):
        with suppress(OSError):
            if wanted in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
                os.kill(process, signal.SIGKILL)


# In the process


class _Address:
    """Where the server puts its address: the parent's pipe. Other output goes elsewhere."""

    def __init__(self) -> None:
        self._pipe = os.dup(1)
        os.dup2(2, 1)

    def put(self, address: str) -> None:
        os.write(self._pipe, address.encode() + b"\n")
        os.close(self._pipe)


class _Parent:
    """`recv` returns when the parent is gone. The process then has EXIT_SECONDS to end its episodes.

    Verifiers waits for them without a limit, and ignores SIGTERM meanwhile: an episode that cannot be canceled would
    keep the process forever.
    """

    def recv(self) -> None:
        sys.stdin.buffer.read()
        threading.Thread(target=_end_by_force, daemon=True).start()


def _end_by_force() -> None:
    time.sleep(EXIT_SECONDS)
    _kill_marked(os.environ[_MARK])


def main() -> None:
    from verifiers.v1.serve.pool import serve_env

    address = _Address()
    config = json.loads(sys.stdin.buffer.readline())
    serve_env(
        max_workers=1,
        address="tcp://127.0.0.1:0",
        address_queue=address,
        death_pipe=_Parent(),
        config_data=config,
    )


if __name__ == "__main__":
    main()
