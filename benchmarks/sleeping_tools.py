"""Environments of several turns that really wait, for turns.py."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from sortedrl.core.rollout import Rollout
from sortedrl.core.seeds import derive_seed
from sortedrl.core.turns import Answer
from sortedrl.engines.episodes import EpisodeOf
from sortedrl.engines.lengths import cached
from sortedrl.studies.measurements import FIRST_WORD


class SleepingTools:
    """Environments that really wait, all at once, in one event loop. Observations are random tokens."""

    def __init__(self, episodes: EpisodeOf, seed_of: Callable[[Rollout], int], vocabulary: int) -> None:
        self._episodes = cached(episodes)
        self._seed_of = seed_of
        self._words = vocabulary - FIRST_WORD
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._held: list[Answer] = []  # taken out of the queue by `wait`
        self._loop = asyncio.new_event_loop()
        self._call_of: dict[int, int] = {}  # by rollout id
        self._sleeping: dict[int, Future[None]] = {}  # by rollout id; those that have ended among them
        self.slept: list[float] = []  # how long each call took, beyond its latency
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    @property
    def pending(self) -> int:
        return len(self._call_of)

    def submit(self, rollout: Rollout, call: int) -> None:
        turn, seed = rollout.observations, self._seed_of(rollout)
        episode = self._episodes(rollout.prompt, seed)
        self._call_of[rollout.id] = call
        if turn + 1 >= len(episode.turns):
            self._answers.put(Answer(rollout.id, call, reward=0.0))
            return
        tokens = [FIRST_WORD + derive_seed(seed, turn, i) % self._words for i in range(episode.observations[turn])]
        answer = self._answer(Answer(rollout.id, call, tokens), episode.seconds[turn])
        self._sleeping[rollout.id] = asyncio.run_coroutine_threadsafe(answer, self._loop)

    async def _answer(self, answer: Answer, seconds: float) -> None:
        began = time.perf_counter()
        await asyncio.sleep(seconds)
        self.slept.append(time.perf_counter() - began - seconds)
        self._answers.put(answer)

    def collect(self) -> list[Answer]:
        answers, self._held = self._held, []
        while not self._answers.empty():
            answers.append(self._answers.get())
        current = [answer for answer in answers if self._call_of.get(answer.rollout_id) == answer.call]
        for answer in current:
            del self._call_of[answer.rollout_id]
        return current

    def wait(self, timeout_seconds: float) -> None:
        try:
            self._held.append(self._answers.get(timeout=max(1e-4, timeout_seconds)))
        except queue.Empty:
            return

    def cancel(self, rollout_id: int) -> None:
        self._call_of.pop(rollout_id, None)
        sleeping = self._sleeping.pop(rollout_id, None)
        if sleeping is not None:
            sleeping.cancel()

    def state(self, rollout_id: int) -> Any:
        del rollout_id

    def restore(self, rollout: Rollout, state: Any) -> bool:
        return True

    def close(self) -> None:
        for rollout_id in list(self._sleeping):
            self.cancel(rollout_id)
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0.01), self._loop).result()  # until all have ended
        self._loop.call_soon_threadsafe(self._loop.stop)
