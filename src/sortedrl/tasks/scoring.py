"""Scoring in parallel with generation: in threads, or in killable processes, with a time limit per score.

A reward that raises or hangs does not stop the engine or the run: it yields `Score(reward=None, error=...)`. `detail`
is plain data for logs, `{"correct": bool, "parts": {...}}`.

    reward_function(task, ...)  rollout -> Reward: decode the tokens, call the task
    BackgroundScorer            scores in threads while the engine generates
    DirectScorer                scores inside `submit`: deterministic order, for reproducible runs
    reward_workers(task)        the task's score in processes that are killed when they exceed their time limit

A thread cannot be killed. A reward that may hang or takes long should run in processes
(`reward_function(..., processes=2)`); a thread that hangs is abandoned.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from sortedrl.core.configuration import checked_float, checked_int
from sortedrl.core.import_path import fault_in_your_code
from sortedrl.core.rollout import Rollout
from sortedrl.core.scoring import Score, ScoreAtOnce
from sortedrl.tasks.task import Problem, Reward, Task, checked_reward
from sortedrl.tasks.worker_process import WorkerError
from sortedrl.tasks.workers import WorkerPool


class Decoder(Protocol):
    def decode(self, token_ids: Any, *, skip_special_tokens: bool = ...) -> Any: ...


def reward_function(
    task: Task, tokenizer: Decoder, *, processes: int = 0, limit_seconds: float = 30.0, pool: WorkerPool | None = None
) -> Callable[[Rollout], Reward]:
    """Score a rollout by its text, without special tokens.

    With `processes`, the task scores in that many killable processes with `limit_seconds` per score; it must then be
    picklable. `pool` is a pool from `reward_workers` that the caller closes. Otherwise the task scores in the calling
    thread.
    """
    if pool is None and processes:
        pool = reward_workers(task, workers=processes, limit_seconds=limit_seconds)
    score: Callable[[Problem, str], Any] = pool or task.score

    def reward(rollout: Rollout) -> Reward:
        found = score(rollout.prompt.payload, tokenizer.decode(rollout.tokens, skip_special_tokens=True))
        return Reward(*found) if pool is not None else checked_reward(found)

    return reward


def reward_workers(task: Task, *, workers: int, limit_seconds: float) -> WorkerPool:
    """The task's score as (reward, correct, parts), in worker processes. Raises ValueError if it cannot be pickled."""
    return WorkerPool(partial(_score_of, task), workers=workers, limit_seconds=limit_seconds)


class DirectScorer(ScoreAtOnce):
    """Calls `score` inside `submit`, so that nothing depends on timing."""

    def __init__(self, score: Callable[[Rollout], Reward]) -> None:
        super().__init__(lambda rollout: score(rollout).value)
        self._score = score

    def submit(self, rollout: Rollout) -> None:
        self._done.append(_attempt(self._score, rollout))


@dataclass(eq=False, slots=True)
class _Job:
    rollout: Rollout
    started_at: float = math.inf


class BackgroundScorer:
    """Scores in threads. With `limit_seconds=None`, `score` must have its own limit, like a `WorkerPool`.

    Invariant: a rollout gets one score, for its latest submission. If it is submitted again while it is being scored
    (it was regenerated meanwhile), the earlier score is dropped.
    """

    def __init__(
        self, score: Callable[[Rollout], Reward], *, threads: int = 4, limit_seconds: float | None = 30.0
    ) -> None:
        self._score = score
        self._limit_seconds = math.inf
        if limit_seconds is not None:
            self._limit_seconds = checked_float("limit_seconds", limit_seconds, lambda x: x > 0, "above 0")
        self._threads = checked_int("threads", threads, 1)
        self._changed = threading.Condition()
        self._jobs: dict[int, _Job] = {}  # by rollout id: submitted and not yet collected
        self._waiting: deque[_Job] = deque()
        self._running: set[_Job] = set()  # each in a thread of its own
        self._done: dict[int, Score] = {}

    @property
    def pending(self) -> int:
        return len(self._jobs)

    def submit(self, rollout: Rollout) -> None:
        # A copy of the segments: the buffer may drop the rollout's tokens while a thread reads them.
        job = _Job(replace(rollout, segments=list(rollout.segments)))
        with self._changed:
            self._jobs[rollout.id] = job
            self._done.pop(rollout.id, None)
            self._waiting.append(job)
            self._start_threads()

    def collect(self) -> list[Score]:
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
        """Start no more scores; pending rollouts stay unscored."""
        with self._changed:
            self._waiting.clear()

    def _start_threads(self) -> None:
        while self._waiting and len(self._running) < self._threads:
            job = self._waiting.popleft()
            if self._jobs.get(job.rollout.id) is job:
                job.started_at = time.monotonic()
                self._running.add(job)
                threading.Thread(target=self._work, args=[job], name="scorer", daemon=True).start()

    def _work(self, job: _Job) -> None:
        scored = _attempt(self._score, job.rollout)
        with self._changed:
            self._finish(job, scored)

    def _finish(self, job: _Job, scored: Score) -> None:
        if job in self._running:  # otherwise it was abandoned
            self._running.remove(job)
            if self._jobs.get(job.rollout.id) is job:
                self._done[job.rollout.id] = scored
            self._start_threads()
            self._changed.notify_all()

    def _until_overdue(self) -> float:
        first = min((job.started_at for job in self._running), default=math.inf)
        return max(first + self._limit_seconds - time.monotonic(), 0.0)

    def _give_up_overdue(self) -> None:
        now = time.monotonic()
        for job in [job for job in self._running if now - job.started_at >= self._limit_seconds]:
            error = f"no score within {self._limit_seconds:g} s; its thread was abandoned, not stopped"
            self._finish(job, Score(job.rollout.id, None, error=error, attempt=job.rollout.attempt))


def _attempt(score: Callable[[Rollout], Reward], rollout: Rollout) -> Score:
    """The score, or the error."""
    try:
        reward = checked_reward(score(rollout))
        detail = {"correct": reward.correct, "parts": reward.parts}
        return Score(rollout.id, reward.value, detail, attempt=rollout.attempt)
    except BaseException as error:  # SystemExit, too: a reward must not end the run
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        reason = str(error) if isinstance(error, WorkerError) else fault_in_your_code(error)
        return Score(rollout.id, None, error=reason, attempt=rollout.attempt)


def _score_of(task: Task) -> Callable[[Problem, str], tuple[float, bool, dict[str, float]]]:
    def score(problem: Problem, response: str) -> tuple[float, bool, dict[str, float]]:
        reward = checked_reward(task.score(problem, response))
        return reward.value, reward.correct, dict(reward.parts)

    return score
