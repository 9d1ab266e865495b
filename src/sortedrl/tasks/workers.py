"""Runs a function in worker processes, so that it cannot crash or block this process.

A call that exceeds its time limit is killed, with every process that it started (guardian.py). Workers are fresh
interpreters without the threads, the GPU or the API key of this process. Their output is discarded, so that it cannot
mix with the output of a run. They end with this process, even if it is killed. One spare worker is kept ready, so that
after a kill the next call does not wait for imports.

A worker serves one call after the other, so an earlier call may have spoiled it: by a thread that ends the process, by
using up its memory, by messages of its own. A call that fails in this way is made again in a new worker, and only that
counts.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from sortedrl.tasks.worker_process import (
    MAX_ANSWER_BYTES,
    Limits,
    Spoiled,
    WorkerError,
    WorkerProcess,
    checked_limit,
    memory_per_worker,
    pickled,
)


class _FairSemaphore:
    """Serves waiting threads in order. Python's semaphore may give a thread that has just released it the next turn,
    again and again: an evaluation would wait for the whole scoring backlog of training."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._changed = threading.Condition()
        self._line: deque[object] = deque()

    def __enter__(self) -> None:
        place = object()
        with self._changed:
            self._line.append(place)
            try:
                self._changed.wait_for(lambda: self._free and self._line[0] is place)
                self._free -= 1
            finally:
                self._line.remove(place)
                self._changed.notify_all()

    def __exit__(self, *exc: object) -> None:
        with self._changed:
            self._free += 1
            self._changed.notify_all()


class WorkerPool:
    """Calls a function in worker processes. Callable from any thread.

    `build` is pickled and runs once in each worker; it returns the function, so that imports do not count toward the
    time limit. The function must return JSON-compatible data of at most `max_answer_bytes`. The first worker starts
    with the first call, or with `start`. `memory_bytes` limits the memory of one worker; the default is half of the
    total.
    """

    def __init__(
        self,
        build: Callable[[], Callable[..., Any]],
        *,
        workers: int,
        limit_seconds: float,
        memory_bytes: int | None = None,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        self._build = pickled(build)
        self._limits = Limits(checked_limit(limit_seconds), max_answer_bytes)
        self._memory_bytes = memory_bytes or memory_per_worker()
        self._free = _FairSemaphore(workers)
        self._most = workers + 1  # including the spare one
        self._lock = threading.Lock()
        self._idle: list[WorkerProcess] = []  # the last one is used first, since it is warm
        self._all: set[WorkerProcess] = set()
        self._starting = 0
        self._closed = False
        # Linux kills a child with the *thread* that started it, so one thread of the pool starts all of them.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="worker-starter")
        weakref.finalize(self, _kill_all, self._all)

    def __call__(self, *arguments: Any) -> Any:
        """Call the function. Raises TimeoutError after the time limit, and WorkerError if the function raised."""
        call = pickled(arguments)
        try:
            return self._called(call)
        except Spoiled:
            return self._called(call, in_new_worker=True)

    def _called(self, call: bytes, *, in_new_worker: bool = False) -> Any:
        with self._borrowed(in_new_worker) as worker:
            answer = worker.call(call, self._limits)
        if answer.kind == "raised":
            raise WorkerError(answer.value)
        return answer.value

    def start(self) -> None:
        """Start a worker, without waiting for it."""
        self._keep_spare()

    def wait_until_ready(self) -> None:
        """Start a worker and wait until its function is built. Raises WorkerError if that fails."""
        with self._borrowed() as worker:
            worker.wait_until_ready()

    def close(self) -> None:
        """Kill all workers, busy ones too: their calls raise WorkerError."""
        with self._lock:
            self._closed = True
            self._idle.clear()
            workers = set(self._all)
            self._all.clear()
        _kill_all(workers)

    def process_ids(self) -> list[int]:
        with self._lock:
            return [worker.process_id for worker in self._all]

    @contextmanager
    def _borrowed(self, is_new: bool = False) -> Iterator[WorkerProcess]:
        """A worker for one call. It is killed if it did not answer, or cannot go on."""
        with self._free:
            worker = self._take(is_new)
            try:
                yield worker
            except BaseException:
                self._drop(worker)
                raise
            if worker.is_spoiled:
                self._drop(worker)
                return
            with self._lock:
                self._idle.append(worker)

    def _take(self, is_new: bool) -> WorkerProcess:
        """A live idle worker, or a new one. Starts another spare worker if this was the last."""
        while True:
            with self._lock:
                fitting = [worker for worker in self._idle if not (is_new and worker.has_served)]
                worker = fitting[-1] if fitting else None
                if worker is not None:
                    self._idle.remove(worker)
            if worker is None:
                worker = self._starter.submit(self._started).result()
            if worker.is_alive():
                break
            self._drop(worker)  # it died after its last call, unrelated to this one
        self._keep_spare()
        return worker

    def _keep_spare(self) -> None:
        with self._lock:
            if self._closed or self._idle or len(self._all) + self._starting >= self._most:
                return
            self._starting += 1
        self._starter.submit(self._add_spare)

    def _add_spare(self) -> None:
        try:
            worker = self._started()
            with self._lock:
                if worker in self._all:
                    self._idle.insert(0, worker)
        finally:
            with self._lock:
                self._starting -= 1

    def _started(self) -> WorkerProcess:
        if self._closed:
            raise WorkerError("the worker processes were closed")
        worker = WorkerProcess(self._build, self._memory_bytes)
        with self._lock:
            self._all.add(worker)
            closed_meanwhile = self._closed
        if closed_meanwhile:
            self.close()
        return worker

    def _drop(self, worker: WorkerProcess) -> None:
        with self._lock:
            self._all.discard(worker)
        worker.kill()
        self._keep_spare()


def _kill_all(workers: set[WorkerProcess]) -> None:
    while workers:
        workers.pop().kill()
