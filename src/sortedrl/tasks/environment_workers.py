"""Environment instances in worker processes (workers.py), so that they can neither crash nor block this process.

A call that awaits too long is canceled in its process; a process whose event loop is blocked beyond the limit is
killed. Instances that were lost are brought back with their next call (environment_host.py).
"""

from __future__ import annotations

import pickle
import weakref
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from sortedrl.core.user_values import reason_of
from sortedrl.tasks import environment_server
from sortedrl.tasks.environment import Environment, EnvironmentTask
from sortedrl.tasks.environment_calls import Inbox
from sortedrl.tasks.environment_host import Call, Instances, Result
from sortedrl.tasks.worker_process import Service, WorkerError
from sortedrl.tasks.workers import Workers

MAX_ANSWER_BYTES = 4 * 1024 * 1024
AWAITS = "an environment blocks it: use `await` for calls that take long"


class WorkerHosts:
    """A host (environment_host.py) in `workers` processes; an instance stays in its process. Raises ValueError if the
    task cannot be pickled."""

    def __init__(
        self, task: EnvironmentTask, *, workers: int, limit_seconds: float, memory_bytes: int | None = None
    ) -> None:
        build, server = partial(_instances_of, task), environment_server.__name__
        service = Service.of(build, limit_seconds, memory_bytes, MAX_ANSWER_BYTES, server=server, notes_calls=True)
        self._workers = Workers(service, workers)
        self._done: Inbox[Result] = Inbox()
        self._calls: dict[int, Future[None]] = {}  # by instance: its last call
        self.collect, self.wait = self._done.collect, self._done.wait
        weakref.finalize(self, self._workers.close)

    def submit(self, call: Call) -> None:
        try:
            content = pickle.dumps(call)
        except Exception as error:  # __reduce__ and __getstate__ may raise anything
            reason = f"the problem cannot be sent to a worker process: {reason_of(error)}"
            self._done.add([Result(call.number, error=reason)])
            return
        self._calls[call.instance] = self._workers.run(_answer(self._workers, self._done, call, content))

    def drop(self, instance: int) -> None:
        call = self._calls.pop(instance, None)
        if call is not None:
            call.cancel()
            self._workers.run(_leave(self._workers, instance))

    def wait_until_ready(self) -> None:
        """Start a process and wait until the task is there. Raises WorkerError if that fails."""
        self._workers.wait_until_ready()

    def process_ids(self) -> list[int]:
        return self._workers.process_ids()

    def close(self) -> None:
        """Kill all processes; calls that are pending stay without a result."""
        self._workers.close()


async def _answer(workers: Workers, done: Inbox[Result], call: Call, content: bytes) -> None:
    try:
        result = Result(*await workers.answer(call.instance, _owner_of(call), content))
    except TimeoutError as error:
        result = Result(call.number, error=f"{error}; {AWAITS}")
    except (WorkerError, TypeError) as error:  # TypeError: not a result
        result = Result(call.number, error=str(error))
    done.add([result._replace(call=call.number, counts=call.instance not in workers.lost)])
    workers.lost.discard(call.instance)


async def _leave(workers: Workers, instance: int) -> None:
    workers.leave(instance, pickle.dumps(instance))


def _owner_of(call: Call) -> int:
    """A short name of its problem, and not 0."""
    return zlib.crc32(str(getattr(call.problem, "id", call.instance)).encode()) + 1


def _instances_of(task: EnvironmentTask) -> Instances:
    build: Callable[[], Environment] = task.environment
    return Instances(build, ends_process=True)
