"""Environment instances in this process, in an event loop on a thread of its own: calls go on while the engine runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from sortedrl.tasks.environment import Environment
from sortedrl.tasks.environment_host import Call, Instances, Result
from sortedrl.tasks.inbox import Inbox

CLOSE_SECONDS = 5.0


class LoopHost:
    """A host (tasks/environment_host.py). Instances must not block the loop."""

    def __init__(self, build: Callable[[], Environment], *, limit_seconds: float) -> None:
        self._instances = Instances(build)
        self._limit_seconds = limit_seconds
        self._done: Inbox[Result] = Inbox()
        self._calls: dict[int, Future[Result]] = {}  # by instance: its last call
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="environments", daemon=True)
        self._thread.start()

    def submit(self, call: Call) -> None:
        future = asyncio.run_coroutine_threadsafe(self._instances.answer(call, self._limit_seconds), self._loop)
        self._calls[call.instance] = future
        future.add_done_callback(self._take)

    def _take(self, future: Future[Result]) -> None:
        if not future.cancelled():
            self._done.add([future.result()])

    def collect(self) -> list[Result]:
        return self._done.collect()

    def wait(self, timeout_seconds: float) -> None:
        self._done.wait(timeout_seconds)

    def drop(self, instance: int) -> None:
        call = self._calls.pop(instance, None)
        if call is not None:
            call.cancel()
        asyncio.run_coroutine_threadsafe(self._instances.close(instance, self._limit_seconds), self._loop)

    def close(self) -> None:
        ended = asyncio.run_coroutine_threadsafe(_end_tasks(), self._loop)
        with suppress(TimeoutError):
            ended.result(CLOSE_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()


async def _end_tasks() -> None:
    """Cancel the other tasks of the loop and wait for them."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
