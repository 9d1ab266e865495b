"""The other parts of a training loop in virtual time, beside the simulated engine: scorer, environments, learner."""

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from sortedrl.core.rollout import Rollout
from sortedrl.core.scoring import Score
from sortedrl.core.seeds import derive_seed
from sortedrl.core.streaming import is_draining
from sortedrl.core.turns import Answer
from sortedrl.engines.episodes import EpisodeOf
from sortedrl.engines.lengths import cached
from sortedrl.engines.virtual_time import VirtualTimeEngine

Speeds = tuple[tuple[float, float], ...]  # (running requests, fraction of the speed with the device alone), ascending
# While engine and learner use one GPU. Measured on one H200: decode graphs of an 8B shape beside large GEMMs in a green
# context of 96 of 132 SMs.
SHARED_DECODING: Speeds = ((8, 0.59), (64, 0.46))
SHARED_LEARNER: Speeds = ((8, 0.60), (64, 0.66))
Result = TypeVar("Result")


class _Delayed(Generic[Result]):
    """Results that take virtual time: infinite, if they never come."""

    wakes_engine = True

    def __init__(self, engine: VirtualTimeEngine) -> None:
        self._engine = engine
        self._due: list[tuple[float, int, Result]] = []
        self._added = 0

    def _add(self, seconds: float, result: Result) -> None:
        due = self._engine.now() + seconds
        if 0 < seconds < math.inf:
            self._engine.wake_at(due)
        self._added += 1
        heapq.heappush(self._due, (due, self._added, result))

    def collect(self) -> list[Result]:
        done = []
        while self._due and self._due[0][0] <= self._engine.now():
            done.append(heapq.heappop(self._due)[2])
        return done

    def wait(self, timeout_seconds: float) -> None:
        due = self._due[0][0] if self._due else math.inf
        self._engine.pass_time(max(0.0, min(due - self._engine.now(), timeout_seconds)))


class SimulatedScorer(_Delayed[Score]):
    """If `reward_of` raises, the score is an error."""

    def __init__(
        self,
        engine: VirtualTimeEngine,
        *,
        seconds_of: Callable[[Rollout], float] = lambda rollout: 0.0,
        reward_of: Callable[[Rollout], float] = lambda rollout: 0.0,
    ) -> None:
        super().__init__(engine)
        self._seconds_of = seconds_of
        self._reward_of = reward_of

    @property
    def pending(self) -> int:
        return len(self._due)

    def submit(self, rollout: Rollout) -> None:
        try:
            scored = Score(rollout.id, self._reward_of(rollout), attempt=rollout.attempt)
        except Exception as error:
            scored = Score(rollout.id, None, error=f"{type(error).__name__}: {error}", attempt=rollout.attempt)
        self._add(self._seconds_of(rollout), scored)


class Step(NamedTuple):
    """How an environment handles one call: the answer's number of tokens (None: the episode is over), or an error."""

    seconds: float = 0.0  # infinite: it hangs
    tokens: int | None = None
    error: str | None = None
    reward: float | None = 0.0  # at the end of the episode


class SimulatedEnvironments(_Delayed[Answer]):
    """The tokens of an observation are their positions in the response."""

    def __init__(self, engine: VirtualTimeEngine, step_of: Callable[[Rollout], Step]) -> None:
        super().__init__(engine)
        self._step_of = step_of
        self._call_of: dict[int, int] = {}  # by rollout id; answers to other calls are ignored

    @property
    def pending(self) -> int:
        return len(self._call_of)

    def submit(self, rollout: Rollout, call: int) -> None:
        step = self._step_of(rollout)
        tokens = None if step.tokens is None else range(len(rollout), len(rollout) + step.tokens)
        reward = step.reward if tokens is None else None
        self._call_of[rollout.id] = call
        self._add(step.seconds, Answer(rollout.id, call, tokens, reward, error=step.error))

    def collect(self) -> list[Answer]:
        done = [answer for answer in super().collect() if self._call_of.get(answer.rollout_id) == answer.call]
        for answer in done:
            del self._call_of[answer.rollout_id]
        return done

    def cancel(self, rollout_id: int) -> None:
        self._call_of.pop(rollout_id, None)

    def state(self, rollout_id: int) -> Any: ...

    def restore(self, rollout: Rollout, state: Any) -> bool:
        """Nothing to bring back: an answer depends on the rollout only."""
        return True


def simulated_environments(
    engine: VirtualTimeEngine, episodes: EpisodeOf, seed_of: Callable[[Rollout], int]
) -> SimulatedEnvironments:
    """`seed_of`: the seed of a rollout's present attempt. After a failure the time is drawn again."""
    drawn = cached(episodes)

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


def speed_at(speeds: Speeds, running: float) -> float:
    """Linear between the measured points, constant outside of them."""
    place = bisect_right(speeds, (running, float("inf")))
    if place in (0, len(speeds)):
        return speeds[min(place, len(speeds) - 1)][1]
    (r0, s0), (r1, s1) = speeds[place - 1], speeds[place]
    return s0 + (s1 - s0) * (running - r0) / (r1 - r0)


class SimulatedLearner:
    """Takes parts of the coming update during a harvest (core/streaming.py). `seconds_of`: the duration of its work on
    some rollouts with the device alone."""

    def __init__(
        self, engine: VirtualTimeEngine, seconds_of: Callable[[Sequence[Rollout]], float], *, shares_gpu: bool = False
    ) -> None:
        self._engine = engine
        self._seconds_of = seconds_of
        self._shares_gpu = shares_gpu
        self._began = self._ends = engine.now()
        self._speed = 1.0  # in the work that it does

    def takes_part(self, running: int, slots: int) -> bool:
        replicas = self._engine.replicas
        return not self.is_working and (not self._shares_gpu or is_draining(running // replicas, slots // replicas))

    @property
    def is_working(self) -> bool:
        is_working = self._engine.now() < self._ends
        if not is_working:
            self._engine.slow_down(None)
        return is_working

    def next_check(self, now: float) -> float:
        return self._ends

    def start(self, rollouts: Sequence[Rollout], version: int) -> None:
        self._began = self._engine.now()
        if self._shares_gpu:
            self._speed = speed_at(SHARED_LEARNER, self._engine.running / self._engine.replicas)
            self._engine.slow_down(partial(speed_at, SHARED_DECODING))
        self._ends = self._began + self._seconds_of(rollouts) / self._speed

    def wait(self) -> None:
        """The engine is idle meanwhile, so the learner has the device alone."""
        self._engine.slow_down(None)
        left = max(0.0, self._ends - self._engine.now()) * self._speed
        self._engine.pass_time(left)
        self._ends = self._engine.now()

    def result(self) -> float:
        return self._ends - self._began
