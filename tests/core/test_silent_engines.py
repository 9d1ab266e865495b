"""Engines that report nothing for long: an interrupt is noticed, the user is told, and no core is busy with waiting."""

import logging
import time
from typing import Any

import pytest

from paced import PacedEngine
from sortedrl.core import Controller, Prompt, Prompts, Schedule, ScoreAtOnce, waiting
from sortedrl.core.engine import Change, ForwardingEngine, Request
from sortedrl.engines.generate import NotInTime, generate
from sortedrl.engines.lengths import ForcedLengths
from sortedrl.engines.simulated import SimulatedEngine
from sortedrl.engines.step_time import linear


class Forgets(PacedEngine):
    """Reports nothing more of one of its requests, and returns at once if it has nothing else."""

    def __init__(self, forgotten: int) -> None:
        super().__init__(slots=4, length_of=lambda request: 3)
        self._forgotten = forgotten
        self.deadlines: list[float] = []  # from now

    def poll(self, until: float | None = None) -> list[Change]:
        assert until is not None, "it would block for ever"
        self.deadlines.append(until - self.now())
        self._running.pop(self._forgotten, None)
        return super().poll(until if self._running or self._queue else self.now())


def controller_on(engine: Any) -> Controller:
    schedule = Schedule(mode="baseline", rollouts_per_update=4, prompts_per_cohort=4, max_response_tokens=5)
    prompts = Prompts([Prompt(f"p{i}", [1]) for i in range(4)])
    return Controller(engine, prompts, ScoreAtOnce(lambda rollout: 1.0), schedule)


@pytest.mark.parametrize("seconds", [0.02, 300.0])
def test_a_request_that_the_engine_forgets_is_reported_and_the_run_can_be_interrupted(
    seconds: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "SILENCE_SECONDS", seconds)
    engine = Forgets(2)
    controller = controller_on(engine)
    began, used = time.monotonic(), time.process_time()
    poll = engine.poll

    def poll_and_interrupt(until: float | None = None) -> list[Change]:
        if time.monotonic() - began > 0.5:
            controller.interrupt()
        return poll(until)

    engine.poll = poll_and_interrupt  # type: ignore[method-assign]
    assert [len(batch) for batch in controller] == []
    assert time.process_time() - used < (time.monotonic() - began) / 2, "it waits at full speed"
    assert max(engine.deadlines) <= waiting.POLL_SECONDS
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert bool(said) == (seconds < 1) and len(said) <= 8, "at doubling intervals"
    assert all(", with 1 request in it, number 2 for longest. " in line for line in said)


def test_an_evaluation_says_so_too(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(waiting, "SILENCE_SECONDS", 0.02)
    with pytest.raises(NotInTime):
        generate(Forgets(2), [Request(i, Prompt(f"p{i}", [1]), (), 5, i) for i in range(4)], limit_seconds=0.1)
    assert "with 1 request in it, number 2 for longest" in caplog.text


@pytest.mark.parametrize("wrap", [lambda engine: engine, ForwardingEngine, lambda e: ForcedLengths(e, lambda r: 3)])
def test_an_engine_in_virtual_time_gets_no_deadline_of_the_clock_on_the_wall(wrap: Any) -> None:
    """It would change the events: the simulator has decoded up to a deadline."""
    engine = SimulatedEngine(slots=4, step_time=linear(10.0, 0.0), length_of=lambda request: 3)
    deadlines: list[float | None] = []
    poll = engine.poll
    engine.poll = lambda until=None: deadlines.append(until) or poll(until)  # type: ignore[assignment, func-returns-value]
    assert [len(batch) for batch in controller_on(wrap(engine))] == [4]
    assert deadlines and not any(deadlines)
