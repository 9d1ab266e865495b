"""Rollouts of several turns in virtual time: how long each turn is, what the environment answers, and when.

Everything depends on the prompt and the seed of the attempt only, as in lengths.py.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from sortedrl.core.engine import Request
from sortedrl.core.environment import Answer
from sortedrl.core.rollout import Prompt, Rollout, Segment
from sortedrl.core.seeds import derive_seed
from sortedrl.engines.lengths import LengthOf, normal, remembered
from sortedrl.engines.simulated import SimulatedEngine


@dataclass(frozen=True, kw_only=True)
class MultiTurn:
    """Responses of `turns` turns. The environment answers all but the last one with `observation_tokens` tokens, after
    a log-normal time with this mean; `sigma` is the standard deviation of its logarithm."""

    turns: int = 5
    observation_tokens: int = 128
    seconds_mean: float = 5.0
    sigma: float = 1.0

    def turn_length(self, lengths: LengthOf, prompt: Prompt, seed: int, turn: int) -> int:
        return lengths(prompt, derive_seed(seed, turn))

    def response_length(self, lengths: LengthOf, prompt: Prompt, seed: int) -> int:
        """Policy tokens of the whole response, without a limit."""
        return sum(self.turn_length(lengths, prompt, seed, turn) for turn in range(self.turns))

    def seconds(self, seed: int, turn: int, failures: int = 0) -> float:
        """After a failure the environment is asked again, and the time is drawn again."""
        noise = normal(derive_seed(seed, turn, 5, *([failures] if failures else [])))
        return self.seconds_mean * math.exp(self.sigma * noise - self.sigma**2 / 2)

    def end_of_turn(self, lengths: LengthOf) -> Callable[[Request], int]:
        """For the simulated engine: the length of the response at the end of the turn that a request runs."""
        drawn = remembered(lengths)

        def end(request: Request) -> int:
            turn, start = place_of(request.prefix)
            return start + self.turn_length(drawn, request.prompt, request.seed, turn)

        return end


def place_of(segments: tuple[Segment, ...] | list[Segment]) -> tuple[int, int]:
    """The turn that a response is in, from 0, and the position at which it started."""
    turn = start = position = 0
    for segment in segments:
        position += len(segment)
        if segment.is_environment:
            turn, start = turn + 1, position
    return turn, start


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
    engine: SimulatedEngine, turns: MultiTurn, seed_of: Callable[[Rollout], int]
) -> SimulatedEnvironments:
    """`seed_of`: the seed of a rollout's present attempt."""

    def step(rollout: Rollout) -> Step:
        turn = rollout.observations
        if turn + 1 >= turns.turns:
            return Step()
        return Step(turns.seconds(seed_of(rollout), turn, rollout.failures), turns.observation_tokens)

    return SimulatedEnvironments(engine, step)
