"""Engines that report nothing for long: an interrupt is noticed, the user is told, and no core is busy with waiting."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from paced import PacedEngine
from sortedrl.core import Controller, Prompt, Prompts, Schedule, ScoreAtOnce, waiting
from sortedrl.core.engine import Change, ForwardingEngine, Request
from sortedrl.engines.generate import NotInTime, generate
from sortedrl.engines.lengths import ForcedLengths
from sortedrl.engines.simulated import SimulatedEngine
from sortedrl.engines.step_time import linear

PROMPTS = [Prompt(f"p{i}", [1]) for i in range(4)]


class Forgets(PacedEngine):
    """Never reports request 2, and returns at once if it has nothing else. `interrupt` comes after 100 such polls."""

    empty_polls = 0
    interrupt: Callable[[], None]

    def poll(self, until: float | None = None) -> list[Change]:
        assert until is not None and until - self.now() <= waiting.POLL_SECONDS
        self._running.pop(2, None)
        is_idle = not self._running and not self._queue
        self.empty_polls += is_idle
        if self.empty_polls == 100:
            self.interrupt()
        return super().poll(self.now() if is_idle else until)


def controller_on(engine: Any) -> Controller:
    schedule = Schedule(mode="baseline", rollouts_per_update=4, prompts_per_cohort=4, max_response_tokens=5)
    return Controller(engine, Prompts(PROMPTS), ScoreAtOnce(lambda rollout: 1.0), schedule)


@pytest.mark.parametrize(("seconds", "warnings"), [(0.02, range(2, 9)), (300.0, range(1))])
def test_a_request_that_the_engine_forgets_is_reported_and_the_run_can_be_interrupted(
    seconds: float, warnings: range, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "SILENCE_SECONDS", seconds)
    engine = Forgets(slots=4, length_of=lambda request: 3)
    controller = controller_on(engine)
    engine.interrupt = controller.interrupt
    began, used = time.monotonic(), time.process_time()
    assert not list(controller)
    assert time.process_time() - used < (time.monotonic() - began) / 2, "it waits at full speed"
    assert len(caplog.messages) in warnings, "at doubling intervals"
    assert all(", with 1 request in it, number 2 for longest. " in line for line in caplog.messages)


def test_an_evaluation_says_so_too(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(waiting, "SILENCE_SECONDS", 0.02)
    requests = [Request(i, prompt, (), 5, i) for i, prompt in enumerate(PROMPTS)]
    with pytest.raises(NotInTime):
        generate(Forgets(slots=4, length_of=lambda request: 3), requests, limit_seconds=0.1)
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
