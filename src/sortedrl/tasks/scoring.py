"""Scoring beside generation: in threads, or in processes that can be killed, with a limit on every score.

A reward that raises or hangs stops neither the engine nor the run: it gives `Scored(reward=None, error=...)`
and is counted. `detail` is plain data, `{"correct": bool, "parts": {...}}`, fit for any log.

    judge(task, tokenizer)      rollout -> Verdict: decode the tokens, ask the task
    BackgroundScorer            scores in threads while the engine generates
    DirectScorer                scores inside `submit`: the same results in the same order, for exact repeats
    WorkerPool                  a function in processes that are killed when they exceed their time limit

A thread cannot be killed. A reward that may hang or that computes for long belongs into processes
(`judge(..., processes=2)`); a thread that hangs is given up and replaced.
"""

from __future__ import annotations

import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, Pipe
from typing import Any, Protocol

from sortedrl.core.rollout import Rollout
from sortedrl.core.scoring import Scored
from sortedrl.tasks.task import Problem, Task, Verdict

START_LIMIT_SECONDS = 120.0  # a worker imports its libraries before it is ready, on a busy machine slowly


class Decoder(Protocol):
    def decode(self, token_ids: Any, *, skip_special_tokens: bool = ...) -> Any: ...


def judge(
    task: Task, tokenizer: Decoder, *, processes: int = 0, limit_seconds: float = 30.0
) -> Callable[[Rollout], Verdict]:
    """Score a rollout by the text of its tokens, special tokens removed.

    With `processes` the task scores in that many killable processes, each score within `limit_seconds`; the
    task must then be picklable. Otherwise it scores in the calling thread.
    """
    score: Callable[[Problem, str], Verdict] = task.score
    if processes:
        score = WorkerPool(partial(_score_of, task), workers=processes, limit_seconds=limit_seconds)

    def verdict(rollout: Rollout) -> Verdict:
        return score(rollout.prompt.payload, tokenizer.decode(rollout.tokens, skip_special_tokens=True))

    return verdict


class DirectScorer:
    """Calls `score` inside `submit`, so that nothing depends on timing."""

    def __init__(self, score: Callable[[Rollout], Verdict]) -> None:
        self._score = score
        self._done: list[Scored] = []
        self.errors = 0
        self.timeouts = 0

    @property
    def pending(self) -> int:
        return len(self._done)

    def submit(self, rollout: Rollout) -> None:
        scored, timed_out = _attempt(self._score, rollout)
        self._done.append(scored)
        self.timeouts += timed_out
        self.errors += scored.error is not None and not timed_out

    def collect(self) -> list[Scored]:
        done, self._done = self._done, []
        return done

    def wait(self, timeout_seconds: float) -> None:
        del timeout_seconds


@dataclass(eq=False, slots=True)
class _Job:
    rollout: Rollout
    started_at: float = math.inf


class BackgroundScorer:
    """Scores in threads. `limit_seconds=None` trusts `score` to keep its own limit, as a `WorkerPool` does.

    Invariant: a rollout is answered once for its latest submission. Submitted again while it is being scored
    (it was redone meanwhile), its earlier score is dropped.
    """

    def __init__(
        self, score: Callable[[Rollout], Verdict], *, threads: int = 4, limit_seconds: float | None = 30.0
    ) -> None:
        self._score = score
        self._limit_seconds = math.inf if limit_seconds is None else limit_seconds
        self._changed = threading.Condition()
        self._jobs: dict[int, _Job] = {}  # by rollout id: submitted and not yet collected
        self._waiting: deque[_Job] = deque()
        self._running: set[_Job] = set()
        self._done: dict[int, Scored] = {}
        self._closed = False
        self.errors = 0
        self.timeouts = 0
        for _ in range(threads):
            self._start_thread()

    @property
    def pending(self) -> int:
        return len(self._jobs)

    def submit(self, rollout: Rollout) -> None:
        # Its own list of segments: the buffer may drop the rollout's tokens while a thread reads them.
        job = _Job(replace(rollout, segments=list(rollout.segments)))
        with self._changed:
            self._jobs[rollout.id] = job
            self._done.pop(rollout.id, None)
            self._waiting.append(job)
            self._changed.notify_all()

    def collect(self) -> list[Scored]:
        with self._changed:
            self._give_up_overdue()
            done, self._done = self._done, {}
            for rollout_id in done:
                del self._jobs[rollout_id]
            return list(done.values())

    def wait(self, timeout_seconds: float) -> None:
        until = time.monotonic() + timeout_seconds
        with self._changed:
            while self._jobs and not self._done and (left := until - time.monotonic()) > 0:
                self._changed.wait(min(left, self._until_overdue()))
                self._give_up_overdue()

    def close(self) -> None:
        """Let the threads end after the score in hand; what is pending stays unscored."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _start_thread(self) -> None:
        threading.Thread(target=self._work, name="scorer", daemon=True).start()

    def _work(self) -> None:
        while (job := self._next_job()) is not None:
            scored, timed_out = _attempt(self._score, job.rollout)
            with self._changed:
                if job not in self._running:  # given up: another thread has taken this one's place
                    return
                self._running.remove(job)
                self._finish(job, scored, timed_out)

    def _next_job(self) -> _Job | None:
        with self._changed:
            while not self._closed:
                if not self._waiting:
                    self._changed.wait()
                    continue
                job = self._waiting.popleft()
                if self._jobs.get(job.rollout.id) is job:
                    job.started_at = time.monotonic()
                    self._running.add(job)
                    self._changed.notify_all()  # `wait` has a new deadline to watch
                    return job
        return None

    def _finish(self, job: _Job, scored: Scored, timed_out: bool) -> None:
        if self._jobs.get(job.rollout.id) is not job:
            return
        self._done[job.rollout.id] = scored
        self.timeouts += timed_out
        self.errors += scored.error is not None and not timed_out
        self._changed.notify_all()

    def _until_overdue(self) -> float:
        first = min((job.started_at for job in self._running), default=math.inf)
        return max(first + self._limit_seconds - time.monotonic(), 0.0)

    def _give_up_overdue(self) -> None:
        now = time.monotonic()
        for job in [job for job in self._running if now - job.started_at >= self._limit_seconds]:
            self._running.remove(job)
            error = f"no score within {self._limit_seconds:g} s; its thread was given up, not stopped"
            self._finish(job, Scored(job.rollout.id, None, error=error, attempt=job.rollout.attempt), timed_out=True)
            self._start_thread()


def _attempt(score: Callable[[Rollout], Verdict], rollout: Rollout) -> tuple[Scored, bool]:
    """The score, or why there is none, and whether the reason is time."""
    try:
        verdict = score(rollout)
        if not math.isfinite(verdict.reward):
            raise ValueError(f"the reward is {verdict.reward}, which is no finite number")
        detail = {"correct": bool(verdict.correct), "parts": dict(verdict.parts)}
        return Scored(rollout.id, float(verdict.reward), detail, attempt=rollout.attempt), False
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return Scored(rollout.id, None, error=text, attempt=rollout.attempt), isinstance(error, TimeoutError)


class WorkerError(RuntimeError):
    """What a function raised inside its worker process, or how the process died."""


class WorkerPool:
    """Calls a function in worker processes; one that exceeds `limit_seconds` is killed and replaced.

    `build` runs once in each worker and returns the function, so that imports do not count toward the limit.
    Callable from any thread. Workers start when they are first needed; they are fresh interpreters, so that
    neither threads nor a GPU of this process are carried into them, and they end when this process does.
    """

    def __init__(self, build: Callable[[], Callable[..., Any]], *, workers: int, limit_seconds: float) -> None:
        self._build = _pickled(build)
        self._limit_seconds = limit_seconds
        self._free = threading.Semaphore(workers)
        self._idle: list[_Worker] = []
        weakref.finalize(self, _kill_all, self._idle)

    def __call__(self, *arguments: Any) -> Any:
        """What the function returns. Raises TimeoutError past the limit, WorkerError for what it raised."""
        with self._free:
            try:
                worker = self._idle.pop()
            except IndexError:
                worker = _Worker(self._build)
            try:
                kind, value = worker.call(arguments, self._limit_seconds)
            except BaseException:
                worker.kill()
                raise
            self._idle.append(worker)
        if kind == "raised":
            raise WorkerError(value)
        return value

    def close(self) -> None:
        _kill_all(self._idle)


class _Worker:
    def __init__(self, pickled_build: bytes) -> None:
        self._pipe, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import serve; serve({theirs.fileno()})"],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # Ctrl-C is for this process alone: it decides what becomes of its workers.
                process_group=0,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            )
        self._pipe.send(pickled_build)
        self._ready = False

    def call(self, arguments: tuple[Any, ...], limit_seconds: float) -> tuple[str, Any]:
        if not self._ready:
            kind, value = self._receive(START_LIMIT_SECONDS)
            if kind == "raised":
                raise WorkerError(f"a worker process could not start: {value}")
            self._ready = True
        try:
            self._pipe.send((limit_seconds, arguments))
        except BrokenPipeError:
            raise self._death() from None
        return self._receive(limit_seconds)

    def _receive(self, limit_seconds: float) -> tuple[str, Any]:
        if not self._pipe.poll(limit_seconds):
            raise TimeoutError(f"no result within {limit_seconds:g} s; the worker process was killed")
        try:
            kind, value = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            raise self._death() from None
        return kind, value

    def _death(self) -> WorkerError:
        return WorkerError(f"a worker process died with exit code {self._process.wait()}")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._pipe.close()


def serve(pipe_descriptor: int) -> None:
    """The life of a worker process: build the function, then answer calls until the pipe closes."""
    pipe: Connection[Any, Any] = Connection(pipe_descriptor)
    try:
        function = pickle.loads(pipe.recv())()
    except Exception as error:
        pipe.send(("raised", f"{type(error).__name__}: {error}"))
        return
    pipe.send(("ready", None))
    while True:
        try:
            limit_seconds, arguments = pipe.recv()
        except EOFError:
            return
        # Should the parent be gone by then, nobody else would end an endless call.
        signal.setitimer(signal.ITIMER_REAL, limit_seconds + 1)
        try:
            answer = ("returned", function(*arguments))
        except Exception as error:
            answer = ("raised", f"{type(error).__name__}: {error}")
        signal.setitimer(signal.ITIMER_REAL, 0)
        pipe.send(answer)


def _pickled(build: Callable[[], Callable[..., Any]]) -> bytes:
    try:
        return pickle.dumps(build)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"cannot be sent to a worker process: {error}; define it at the top level of a module that can "
            "be imported, or score in threads (processes=0)"
        ) from error


def _score_of(task: Task) -> Callable[[Problem, str], Verdict]:
    return task.score


def _kill_all(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().kill()
