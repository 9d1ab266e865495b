"""Environments in virtual time: they answer the turns of a rollout as its episode has it (episodes.py)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from sortedrl.core.environment import Answer
from sortedrl.core.rollout import Rollout
from sortedrl.core.seeds import derive_seed
from sortedrl.engines.episodes import EpisodeOf, remembered_episodes
from sortedrl.engines.simulated import SimulatedEngine


class Step(NamedTuple):
    """How an environment handles one call: the answer's number of tokens (None: the episode is over), or an error."""

    seconds: float = 0.0  # infinite: it hangs
    tokens: int | None = None
    error: str | None = None
    reward: float | None = 0.0  # at the end of the episode


class SimulatedEnvironments:
    """Answers that take virtual time. The tokens of an observation are their positions in the response."""

    wakes_engine = True

    def __init__(self, engine: SimulatedEngine, step_of: Callable[[Rollout], Step]) -> None:
        self._engine = engine
        self._step_of = step_of
        self._due: list[tuple[float, int, Answer]] = []  # answers to canceled calls among them
        self._call_of: dict[int, int] = {}  # by rollout id

    @property
    def pending(self) -> int:
        return len(self._call_of)

    def submit(self, rollout: Rollout, call: int) -> None:
        step = self._step_of(rollout)
        tokens = None if step.tokens is None else range(len(rollout), len(rollout) + step.tokens)
        reward = step.reward if tokens is None else None
        due = self._engine.now() + step.seconds
        if 0 < step.seconds < math.inf:
            self._engine.wake_at(due)
        self._call_of[rollout.id] = call
        heapq.heappush(self._due, (due, call, Answer(rollout.id, call, tokens, reward, error=step.error)))

    def collect(self) -> list[Answer]:
        done = []
        while self._due and self._due[0][0] <= self._engine.now():
            answer = heapq.heappop(self._due)[2]
            if self._call_of.get(answer.rollout_id) == answer.call:
                del self._call_of[answer.rollout_id]
                done.append(answer)
        return done

    def wait(self, timeout_seconds: float) -> None:
        due = self._due[0][0] if self._due else math.inf
        self._engine.pass_time(max(0.0, min(due - self._engine.now(), timeout_seconds)))

    def cancel(self, rollout_id: int) -> None:
        self._call_of.pop(rollout_id, None)

    def state(self, rollout_id: int) -> Any:
        del rollout_id

    def restore(self, rollout: Rollout, state: Any) -> bool:
        """Nothing to bring back: an answer depends on the rollout only."""
        return True


def simulated_environments(
    engine: SimulatedEngine, episodes: EpisodeOf, seed_of: Callable[[Rollout], int]
) -> SimulatedEnvironments:
    """`seed_of`: the seed of a rollout's present attempt. After a failure the time is drawn again."""
    drawn = remembered_episodes(episodes)

    def step(rollout: Rollout) -> Step:
        turn, seed = rollout.observations, seed_of(rollout)
        episode = drawn(rollout.prompt, seed)
        times = episode.seconds
        if rollout.failures:
            times = drawn(rollout.prompt, derive_seed(seed, rollout.failures)).seconds
        seconds = times[min(turn, len(times) - 1)]
        is_over = turn + 1 >= len(episode.turns)
        return Step(seconds) if is_over else Step(seconds, episode.observations[turn])

    return SimulatedEnvironments(engine, step)
