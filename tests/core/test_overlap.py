"""Overlap in real time: the engine goes on while the learner steps in a thread of its own."""

import json
import signal
import threading
import time
from typing import Any

import pytest

from paced import PacedEngine
from sortedrl.core import Controller, EngineDied, Prompts, Schedule, ScoreAtOnce
from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.events import EventLog
from sortedrl.core.rollout import Prompt
from sortedrl.observe.metrics import Metrics
from sortedrl.training.settings import TrainSettings

STEP_SECONDS = 0.1


def controller_over(engine: PacedEngine, log: EventLog | None = None, **settings: Any) -> Controller:
    prompts = [Prompt(str(i), [1, 2, 3]) for i in range(40)]
    schedule = Schedule(rollouts_per_update=4, prompts_per_cohort=12, overlap=True, max_staleness=2, **settings)
    return Controller(engine, Prompts(prompts), ScoreAtOnce(lambda rollout: 1.0), schedule, log=log)


def paced(**options: Any) -> PacedEngine:
    return PacedEngine(slots=4, length_of=lambda request: 3 + request.id % 9, step_seconds=0.004, **options)


@pytest.mark.parametrize("mode", ["partial+elevator", "april", "partial"])
def test_the_engine_goes_on_while_the_learner_steps(mode: str) -> None:
    engine = paced()
    controller = controller_over(engine, mode=mode)
    trained, started_meanwhile, threads = [], [], set()

    def step() -> str:
        threads.add(threading.current_thread().name)
        polls = engine.polls + 6  # on a busy machine they take longer
        time.sleep(STEP_SECONDS)
        while engine.polls < polls:
            time.sleep(0.001)
        return "stepped"

    for batch in controller:
        started = len(engine.submitted)
        assert controller.carry_on_during(step) == "stepped"
        started_meanwhile.append(len(engine.submitted) - started)
        controller.publish()
        trained += [rollout.id for rollout in batch]
        assert all(batch.version - rollout.oldest_version <= 2 for rollout in batch)
    assert sorted(trained) == list(range(40))
    assert sum(started_meanwhile) >= 10
    assert threading.current_thread().name not in threads


def test_what_the_learner_raises_is_raised_and_the_run_can_go_on() -> None:
    controller = controller_over(paced())
    batches = iter(controller)
    trained = [rollout.id for rollout in next(batches)]
    with pytest.raises(MemoryError, match="too large"):
        controller.carry_on_during(_too_large)
    controller.publish()
    for batch in batches:
        trained += [rollout.id for rollout in batch]
        controller.publish()
    assert sorted(trained) == list(range(40))


def _too_large() -> None:
    raise MemoryError("too large")


def test_an_engine_that_dies_lets_the_learner_end_its_step() -> None:
    engine = paced()
    controller = controller_over(engine)
    stepped = threading.Event()

    def step() -> None:
        engine.die_noticed()
        time.sleep(STEP_SECONDS)
        stepped.set()

    next(iter(controller))
    with pytest.raises(EngineDied):
        controller.carry_on_during(step)
    assert stepped.is_set()


def test_an_interrupt_during_a_step_leaves_a_state_to_go_on_from() -> None:
    first, second = controller_over(paced()), controller_over(paced())
    trained = []
    for batch in first:
        trained += [rollout.id for rollout in batch]
        first.carry_on_during(first.interrupt)
        first.publish()
    assert 0 < len(trained) < 40
    second.engine.update_weights(None, first.version)
    second.restore(json.loads(json.dumps(first.state())))
    for batch in second:
        trained += [rollout.id for rollout in batch]
        second.carry_on_during(lambda: time.sleep(0.01))
        second.publish()
    assert sorted(trained) == list(range(40))


def test_without_overlap_the_engine_must_rest() -> None:
    controller = Controller(paced(), Prompts([Prompt("p", [1])]), ScoreAtOnce(len), Schedule(rollouts_per_update=1))
    next(iter(controller))
    with pytest.raises(RuntimeError, match=r"Schedule\(overlap=True\)"):
        controller.carry_on_during(lambda: None)


def test_both_failures_are_told() -> None:
    engine = paced()
    controller = controller_over(engine)
    next(iter(controller))

    def step() -> None:
        engine.die_noticed()
        raise MemoryError("too large")

    with pytest.raises(EngineDied) as caught:
        controller.carry_on_during(step)
    assert "too large" in caught.value.__notes__[0]


def test_a_second_interrupt_does_not_wait_for_the_learner() -> None:
    controller = controller_over(paced())
    next(iter(controller))
    go_on, ended = threading.Event(), threading.Event()

    def step() -> None:
        signal.raise_signal(signal.SIGINT)  # to the main thread
        go_on.wait(60)
        ended.set()

    with pytest.raises(KeyboardInterrupt):
        controller.carry_on_during(step)
    assert not ended.is_set()
    go_on.set()


def test_time_after_a_load_is_not_a_drain() -> None:
    """Stopped rollouts wait for their slots while the caller writes down what it wants to."""
    metrics = Metrics()
    engine = paced()
    controller = controller_over(engine, mode="partial", log=EventLog(metrics))
    batches = iter(controller)
    next(batches)
    controller.carry_on(until=engine.now() + 0.02)
    controller.publish()
    assert controller.buffer.waiting
    engine.clock_offset += 1000.0  # seconds later
    next(batches)
    parts = metrics.run_metrics().bubble_parts
    assert parts["refill"] > parts["drain"]


SERVER = {"engine": "vllm-server", "engine_urls": ("http://127.0.0.1:1",)}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"engine": "embedded", "max_staleness": 4}, "share the device"),
        (SERVER, "--max-staleness"),
        ({**SERVER, "max_staleness": None, "mode": "on-policy"}, "would be lost"),
    ],
)
def test_overlap_that_cannot_work_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        TrainSettings(overlap=True, **settings).check()


def test_rewards_that_are_shuffled_per_update_are_not_streamed() -> None:
    with pytest.raises(ConfigurationError, match="shuffled when an update is complete"):
        TrainSettings(**SERVER, mode="baseline", stream=True, shuffle_rewards=True).check()
