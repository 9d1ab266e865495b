"""A learner in virtual time that works beside the simulated engine, on its own device or on the engine's."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sortedrl.core.rollout import Rollout
from sortedrl.core.streaming import is_draining
from sortedrl.engines.simulated import SimulatedEngine

Speeds = tuple[tuple[float, float], ...]  # (running requests, fraction of the speed with the device alone), ascending


@dataclass(frozen=True)
class SharedDevice:
    """How fast decoding and the learner are while both use one GPU.

    Measured on one H200: decode graphs of an 8B shape beside large GEMMs in a green context of 96 of 132 SMs.
    """

    decoding: Speeds = ((8, 0.59), (64, 0.46))
    learner: Speeds = ((8, 0.60), (64, 0.66))


def speed_at(speeds: Speeds, running: int) -> float:
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
        self,
        engine: SimulatedEngine,
        seconds_of: Callable[[Sequence[Rollout]], float],
        shared: SharedDevice | None = None,
    ) -> None:
        self._engine = engine
        self._seconds_of = seconds_of
        self._shared = shared
        self._began = self._ends = engine.now()
        self._speed = 1.0  # in the work that it does

    def takes_part(self, running: int, slots: int) -> bool:
        return not self.is_working and (self._shared is None or is_draining(running, slots))

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
        if self._shared is not None:
            decoding = self._shared.decoding
            self._speed = speed_at(self._shared.learner, self._engine.running)
            self._engine.slow_down(lambda running: speed_at(decoding, running))
        self._ends = self._began + self._seconds_of(rollouts) / self._speed

    def wait(self) -> None:
        """The engine is idle meanwhile, so the learner has the device alone."""
        self._engine.slow_down(None)
        left = max(0.0, self._ends - self._engine.now()) * self._speed
        self._engine.pass_time(left)
        self._ends = self._engine.now()

    def result(self) -> float:
        return self._ends - self._began
