"""A process in which verifiers runs episodes: its environment server, with one worker.

The process ends with this one, and takes the programs that its harnesses started with it (tasks/guardian.py).
`python -m` this module is the process itself.
"""

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

from sortedrl.core.user_values import one_line
from sortedrl.tasks.guardian import guard
from sortedrl.tasks.worker_process import WorkerError, worker_environment

START_SECONDS = 300.0  # imports can be slow on a busy machine
EXIT_SECONDS = 10  # for episodes to end their programs, before all are killed


class EnvServerProcess:
    """Start it with `start`. `ended` is done as soon as the process is gone, however it ended."""

    def __init__(self, process: asyncio.subprocess.Process, output: BinaryIO) -> None:
        self.address = ""
        self.process_id = process.pid  # of its guardian, until it is ready
        self._process = process
        self._output = output
        self.ended = asyncio.create_task(self._wait())

    @classmethod
    async def start(cls, config: Mapping[str, Any]) -> Self:
        """`config` is the environment's, as plain data. Raises WorkerError if the process does not come up. No process
        is left after an error, nor if the caller is canceled."""
        output = tempfile.TemporaryFile()  # noqa: SIM115 (closed when the process ends)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", __name__, str(os.getpid()),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=output,
            process_group=0, env=server_environment(),
        )  # fmt: skip
        server = cls(process, output)
        assert process.stdin is not None and process.stdout is not None
        line = b""
        try:
            with suppress(ConnectionError):  # it has ended
                process.stdin.write(json.dumps(config).encode() + b"\n")
                await process.stdin.drain()
                line = await asyncio.wait_for(process.stdout.readline(), START_SECONDS)
            if not line:
                raise WorkerError(await server.ended)
            process_id, server.address = line.decode().split()
            server.process_id = int(process_id)
        except BaseException as error:
            await server.kill()
            if isinstance(error, TimeoutError):
                raise WorkerError(f"verifiers' environment server was not ready within {START_SECONDS:g} s") from None
            raise
        return server

    async def stop(self) -> None:
        """End it and wait; a process that does not end is killed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await asyncio.wait([self.ended], timeout=EXIT_SECONDS)
        await self.kill()

    async def kill(self) -> None:
        with suppress(ProcessLookupError):  # it has ended
            self._process.terminate()
        await self.ended

    async def _wait(self) -> str:
        """Returns why the process ended."""
        code = await self._process.wait()
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        self._output.close()
        last = f": {one_line(lines[-1])}" if lines and code > 0 else ""
        return f"verifiers' environment server died with {how}{last}"


def server_environment() -> dict[str, str]:
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])  # for `uv`
    return worker_environment() | {"PATH": programs}


# In the process


class _Parent:
    """Where the server puts its address: the parent's pipe. Other output goes elsewhere. `recv` returns when the parent
    closes the other pipe, or is gone."""

    def __init__(self) -> None:
        self._pipe = os.dup(1)
        os.dup2(2, 1)

    def put(self, address: str) -> None:
        os.write(self._pipe, f"{os.getpid()} {address}\n".encode())
        os.close(self._pipe)

    def recv(self) -> None:
        sys.stdin.buffer.read()


def main(parent: int) -> None:
    guard(parent, EXIT_SECONDS)
    from verifiers.v1.serve.pool import serve_env

    pipes = _Parent()
    config = json.loads(sys.stdin.buffer.readline())
    serve_env(max_workers=1, address="tcp://127.0.0.1:0", address_queue=pipes, death_pipe=pipes, config_data=config)


if __name__ == "__main__":
    main(int(sys.argv[1]))
