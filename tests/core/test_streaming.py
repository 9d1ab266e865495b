"""Streaming: what is certain to be in the coming update goes to the learner while the rest is generated."""

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given

from invariants import checked_run, examples
from paced import PATIENCE_SECONDS, PacedEngine
from random_runs import peaceful, troubled
from scenarios import STREAMABLE, Scenario, run
from sortedrl.core import Controller, EngineDied, EventLog, Prompts, Schedule, ScoreAtOnce, Strategy, events
from sortedrl.core.buffer import Group
from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.engine import Change, Request, RequestFinished
from sortedrl.core.rollout import Prompt, Rollout
from sortedrl.core.strategies.base import SchedulerState

PROMPTS = 24
STEP_SECONDS = 0.004


class RecordingLearner:
    """Takes `seconds` for each part, and notes what it got in which thread."""

    def __init__(self, seconds: float = 0.02) -> None:
        self.seconds = seconds
        self.parts: list[tuple[list[int], int]] = []
        self.threads: set[str] = set()
        self.is_working = False

    def accumulate(self, rollouts: Sequence[Rollout], version: int) -> None:
        self.is_working = True
        self.threads.add(threading.current_thread().name)
        self.parts.append(([rollout.id for rollout in rollouts], version))
        time.sleep(self.seconds)
        self.is_working = False

    def streamed(self) -> list[int]:
        return [id for ids, _ in self.parts for id in ids]


def controller_over(engine: PacedEngine, stream_to: Any, log: EventLog | None = None, **settings: Any) -> Controller:
    prompts = [Prompt(str(i), [1, 2, 3]) for i in range(PROMPTS)]
    settings = {"mode": "baseline", "rollouts_per_update": 6, "prompts_per_cohort": 12, **settings}
    schedule = Schedule(**settings)
    scorer = ScoreAtOnce(lambda rollout: 1.0)
    return Controller(engine, Prompts(prompts), scorer, schedule, log=log, stream_to=stream_to)


def paced() -> PacedEngine:
    return PacedEngine(slots=6, length_of=lambda request: 3 + 5 * (request.id % 6), step_seconds=STEP_SECONDS)


# --- which groups are certain ---------------------------------------------------------------------------------


@examples(60)
@given(peaceful(STREAMABLE))
def test_what_is_streamed_is_in_the_next_batch(scenario: Scenario) -> None:
    """And every other invariant holds. `scenarios.WatchedLearner` checks each part."""
    checked_run(scenario_with_streaming(scenario))


@examples(60)
@given(troubled(STREAMABLE))
def test_what_is_streamed_is_in_the_next_batch_under_any_fault(scenario: Scenario) -> None:
    checked_run(scenario_with_streaming(scenario))


def scenario_with_streaming(scenario: Scenario) -> Scenario:
    return replace(scenario, streams=True)


def parts_of(streamed: Any) -> list[tuple[int, tuple[int, ...]]]:
    return [(event.update, event.rollouts) for event in streamed.all(events.Streamed)]


def test_the_baseline_streams_every_rollout_but_the_last() -> None:
    done = run("baseline", [2, 3, 5, 9], rollouts_per_update=4, streams=True)
    assert parts_of(done) == [(0, (0,)), (0, (1,)), (0, (2,))]


def test_while_the_learner_works_ready_rollouts_add_up_to_its_next_part() -> None:
    done = run("baseline", [1, 2, 3, 4, 30], slots=5, rollouts_per_update=5, streams=True, learner_seconds=12.0)
    assert parts_of(done) == [(0, (0,)), (0, (1, 2, 3))]
    assert [event.seconds for event in done.all(events.Streamed)] == [3.0, 9.0]


def test_groups_are_streamed_whole() -> None:
    sizes = {"slots": 6, "rollouts_per_update": 4, "rollouts_per_prompt": 2, "prompts_per_cohort": 3}
    done = run("on-policy", [2, 3, 9], whole_groups=True, streams=True, **sizes)
    assert parts_of(done)[0] == (0, (0, 1))


def test_a_partial_mode_streams_no_more_than_the_update_needs() -> None:
    """Six rollouts end at the same time, the update needs four, and the harvest waits for an overdue one."""
    done = run("partial", [3] * 6 + [9, 9], slots=8, rollouts_per_update=4, streams=True, learner_seconds=1.0)
    for update, rollouts in parts_of(done):
        assert set(rollouts) <= set(done.ids[update])
    assert done.sizes == [4, 4]


@pytest.mark.parametrize("mode", ["cohort-at-once", "cohort-at-once+sorted"])
def test_several_batches_per_harvest_are_refused(mode: str) -> None:
    with pytest.raises(ConfigurationError, match=f"stream = True: mode {mode}".replace("+", r"\+")):
        controller_over(paced(), RecordingLearner().accumulate, mode=mode)


@dataclass(frozen=True)
class LongestOnly(Strategy):
    def take(self, s: SchedulerState) -> list[list[Group]]:
        assert s.buffer.gate is not None
        return [[max(s.buffer.ready_groups(s.buffer.gate), key=lambda group: len(group.members[0]))]]


def test_a_strategy_with_its_own_batch_must_name_what_is_certain() -> None:
    parts = Prompts([Prompt("p", [1])]), ScoreAtOnce(len), Schedule(rollouts_per_update=1)
    with pytest.raises(ConfigurationError, match="mode mine decides at the end of a harvest"):
        Controller(paced(), *parts, strategy=LongestOnly("mine"), stream_to=RecordingLearner().accumulate)


# --- in real time ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["baseline", "on-policy", "partial", "partial+elevator"])
def test_the_learner_works_in_its_own_thread_and_rests_while_a_batch_is_out(mode: str) -> None:
    learner, log = RecordingLearner(), []
    controller = controller_over(paced(), learner.accumulate, EventLog(log.append), mode=mode)
    trained: list[int] = []
    for batch in controller:
        assert not learner.is_working
        streamed = [(ids, version) for ids, version in learner.parts if set(ids) <= {r.id for r in batch}]
        assert all(version == batch.version for _, version in streamed)
        trained += [rollout.id for rollout in batch]
        controller.publish()
    assert sorted(trained) == list(range(PROMPTS))
    assert len(learner.streamed()) == len(set(learner.streamed())) > PROMPTS / 3
    assert threading.current_thread().name not in learner.threads
    logged = [event for event in log if isinstance(event, events.Streamed)]
    assert [list(event.rollouts) for event in logged] == [ids for ids, _ in learner.parts]
    assert all(event.seconds >= learner.seconds / 2 for event in logged)


class QuietEngine(PacedEngine):
    """Reports only ends, as an engine that delivers tokens at the end does."""

    def poll(self, until: float | None = None) -> list[Change]:
        changes = super().poll(until)
        while not any(isinstance(change, RequestFinished) for change in changes) and (
            until is None or self.now() < until
        ):
            changes += super().poll(until)
        return changes


def test_a_free_learner_gets_its_next_part_before_the_engine_reports() -> None:
    """One rollout ends, then three together, then a very long one: the learner must not wait for that."""
    learner, log = RecordingLearner(0.05), []

    def length_of(request: Request) -> int:
        """The long ones end after the second part, or after 20 s."""
        return (2, 4, 4, 4)[request.id % 6] if request.id % 6 < 4 else 50 if len(learner.parts) > 1 else 5_000

    engine = QuietEngine(slots=6, length_of=length_of, step_seconds=STEP_SECONDS)
    controller = controller_over(engine, learner.accumulate, EventLog(log.append), max_response_tokens=6_000)
    next(iter(controller))
    assert learner.parts[1] == ([1, 2, 3], 0)
    longest = max(event.length for event in log if isinstance(event, events.Finished))
    assert 50 <= longest < 5_000, "it went on until the learner had its part"


def test_with_overlap_the_engine_goes_on_while_the_learner_ends_its_part() -> None:
    engine, learner = paced(), RecordingLearner(0.1)

    def accumulate(rollouts: Sequence[Rollout], version: int) -> None:
        until = time.monotonic() + PATIENCE_SECONDS
        while len(engine.submitted) <= 10 and time.monotonic() < until:  # at its first part
            time.sleep(0.001)
        learner.accumulate(rollouts, version)

    settings: dict[str, Any] = {"overlap": True, "max_staleness": 4, "rollouts_per_update": 4}
    controller = controller_over(engine, accumulate, mode="partial+elevator", **settings)
    submitted_when_free: list[int] = []
    trained: list[int] = []
    for batch in controller:
        assert not learner.is_working
        submitted_when_free.append(len(engine.submitted))
        trained += [rollout.id for rollout in batch]
        controller.carry_on_during(lambda: time.sleep(0.01))
        controller.publish()
    assert sorted(trained) == list(range(PROMPTS))
    assert submitted_when_free[0] > 10  # the first update needs 4, and 6 slots were refilled meanwhile


# --- interrupts, deaths and errors ----------------------------------------------------------------------------


def trained_by(controller: Controller) -> list[int]:
    trained = []
    for batch in controller:
        trained += [rollout.id for rollout in batch]
        controller.publish()
    return trained


def test_an_error_of_the_learner_ends_the_harvest_and_loses_no_rollout() -> None:
    failed = threading.Event()

    def fails_once(rollouts: Sequence[Rollout], version: int) -> None:
        if not failed.is_set():
            failed.set()
            raise MemoryError("too large")

    controller = controller_over(paced(), fails_once, mode="partial")
    with pytest.raises(MemoryError, match="too large"):
        next(iter(controller))
    assert len(controller.live) == 12
    assert sorted(trained_by(controller)) == list(range(PROMPTS))


class FailsJustBeforeItsNextPart:
    """A learner that works on its first part, and has failed when it is asked whether it takes the second."""

    def __init__(self) -> None:
        self.parts: list[list[int]] = []
        self.is_working = False

    def takes_part(self, running: int, slots: int) -> bool:
        if running <= 2:
            self.is_working = False
        return not self.is_working

    def next_check(self, now: float) -> float:
        return now + STEP_SECONDS

    def start(self, rollouts: Sequence[Rollout], version: int) -> None:
        self.parts.append([rollout.id for rollout in rollouts])
        self.is_working = True

    def wait(self) -> None:
        self.is_working = False

    def result(self) -> float:
        raise MemoryError(f"part {len(self.parts)} is too large")


def test_an_error_of_the_learner_is_raised_whenever_it_ends() -> None:
    """The next part must not hide it: the gradient would lack rollouts that the update counts."""
    controller = controller_over(paced(), FailsJustBeforeItsNextPart())
    with pytest.raises(MemoryError, match="part 1 is too large"):
        next(iter(controller))


@pytest.mark.parametrize("mode", ["baseline", "on-policy", "partial+elevator"])
def test_an_interrupt_in_mid_harvest_drops_the_gradient_and_no_rollout(mode: str) -> None:
    learner = RecordingLearner()
    first = controller_over(paced(), None, mode=mode)

    def interrupting(rollouts: Sequence[Rollout], version: int) -> None:
        learner.accumulate(rollouts, version)
        if len(learner.parts) == 3:
            first.interrupt()

    first = controller_over(paced(), interrupting, mode=mode)
    trained = trained_by(first)
    assert len(trained) < PROMPTS and not learner.is_working
    dropped = [id for ids, _ in learner.parts[-1:] for id in ids if id not in trained]
    again = RecordingLearner()
    second = controller_over(paced(), again.accumulate, mode=mode)
    second.engine.update_weights(None, first.version)  # of the update of the third part, which the clock decides
    second.restore(json.loads(json.dumps(first.state())))
    assert set(dropped) <= set(second.live)
    trained += trained_by(second)
    assert sorted(trained) == list(range(PROMPTS))
    assert set(dropped) <= set(again.streamed()) | set(trained)


def test_after_an_interrupt_the_learner_does_not_work_beside_the_caller() -> None:
    """The caller saves a checkpoint next."""
    learner = RecordingLearner(0.1)
    first = controller_over(paced(), None)

    def interrupting(rollouts: Sequence[Rollout], version: int) -> None:
        learner.is_working = True  # before the controller can react
        first.interrupt()
        learner.accumulate(rollouts, version)

    first = controller_over(paced(), interrupting)
    assert trained_by(first) == [] and len(learner.parts) == 1 and not learner.is_working


def test_an_engine_that_dies_in_mid_harvest_lets_the_learner_end_and_keeps_its_rollouts() -> None:
    engine = paced()
    learner = RecordingLearner(0.1)

    def killing(rollouts: Sequence[Rollout], version: int) -> None:
        engine.die()
        learner.accumulate(rollouts, version)

    controller = controller_over(engine, killing)
    with pytest.raises(EngineDied):
        next(iter(controller))
    assert learner.parts and not learner.is_working
    assert set(learner.streamed()) <= set(controller.live)


def test_both_failures_are_in_the_error() -> None:
    engine = paced()

    def failing(rollouts: Sequence[Rollout], version: int) -> None:
        engine.die_noticed()
        raise MemoryError("too large")

    with pytest.raises(EngineDied) as caught:
        next(iter(controller_over(engine, failing)))
    assert "too large" in caught.value.__notes__[0]
