"""What must always hold, under random schedules: every mode, every edge, and everything that can go wrong at once.

The simulator's token is its position and its log-probability minus (position + 1), so that an off-by-one anywhere
between the engine and a batch is a failing test.
"""

import heapq
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from invariants import EPSILON, check_as_it_goes, check_batch_sizes, check_run, checked_run, examples
from random_runs import peaceful, troubled
from scenarios import MODES, STEP_TIMES, Run, Scenario
from sortedrl.core import events
from sortedrl.engines.step_time import StepTime


def check_peaceful(scenario: Scenario) -> None:
    run = checked_run(scenario)
    check_batch_sizes(run)
    assert run.run_metrics.rejected == run.run_metrics.failures == 0


@examples(200)
@given(peaceful())
def test_what_must_hold_when_nothing_goes_wrong(scenario: Scenario) -> None:
    check_peaceful(scenario)


@examples(300)
@given(troubled())
def test_what_must_hold_under_any_fault(scenario: Scenario) -> None:
    checked_run(scenario)


@pytest.mark.slow
@examples(1000)
@given(peaceful())
def test_what_must_hold_when_nothing_goes_wrong_in_many_runs(scenario: Scenario) -> None:
    check_peaceful(scenario)


@pytest.mark.slow
@examples(1500)
@given(troubled())
def test_what_must_hold_under_any_fault_in_many_runs(scenario: Scenario) -> None:
    checked_run(scenario)


@pytest.mark.parametrize("mode", MODES)
@examples(15)
@given(data=st.data())
def test_the_same_seed_gives_the_same_event_log(mode: str, data: st.DataObject) -> None:
    scenario = data.draw(troubled([mode]))
    assert Run(scenario).to_end().events == Run(scenario).to_end().events


def bubble_of_waiting_for_all(batches: list[list[int]], slots: int, step_time: StepTime) -> float:
    """Straight from the lengths: each freed slot takes the next response, each batch waits for its last."""
    empty = whole = 0.0
    for lengths in batches:
        busy = [0] * slots
        for length in lengths:
            heapq.heappush(busy, heapq.heappop(busy) + length)
        for step in range(max(busy)):
            running = sum(end > step for end in busy)
            seconds = step_time.at(running)
            empty += (slots - running) * seconds
            whole += slots * seconds
    return empty / whole


@examples(150)
@given(peaceful(["baseline"]), st.sampled_from(STEP_TIMES[:2]))
def test_the_baselines_bubble_is_the_one_computed_from_the_lengths(scenario: Scenario, step_time: StepTime) -> None:
    run = Run(Scenario(**{**vars(scenario), "step_time": step_time})).to_end()
    in_load_order = [[len(r) for r in sorted(batch, key=lambda r: r.id)] for batch in run.batches]
    expected = bubble_of_waiting_for_all(in_load_order, scenario.slots, step_time)
    assert math.isclose(run.run_metrics.bubble, expected, abs_tol=EPSILON)


@examples(200)
@given(troubled(), st.integers(1, 5), st.integers(0, 2))
def test_a_killed_run_goes_on_from_its_checkpoint(scenario: Scenario, updates: int, lost_updates: int) -> None:
    """After a checkpoint some more updates are made and lost. Relative to the checkpoint nothing is lost or trained
    twice, and no figure counts what was rolled back."""
    first = Run(scenario).updates(updates)
    if first.controller.running:  # with overlap and a learner that did not publish
        return
    state, batches, events_kept = first.checkpoint(), list(first.batches), len(first.events)
    first.updates(updates + lost_updates)

    second = Run(scenario, state=state, last_time=first.engine.now())
    check_as_it_goes(second, state["version"])
    void = len(first.events) - events_kept
    raw = [*first.events, events.RolledBack(first.engine.now(), void), *second.events]
    check_run(second, batches + second.batches, raw)
