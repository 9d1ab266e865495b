"""Environments that are slower than the engine: how many rollouts a partial mode opens while they work."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scenarios import MODES, EnvironmentCall, Run, scenario
from sortedrl.core import STRATEGIES, Event, events
from sortedrl.core.strategies.paper import Partial

PARTIAL_MODES = [mode for mode in MODES if isinstance(STRATEGIES[mode], Partial) and mode != "async-pool"]


def most_open(log: list[Event]) -> int:
    """The largest number of rollouts that were started and had not finished."""
    opened: set[int] = set()
    most = 0
    for event in log:
        if isinstance(event, events.Submitted):
            opened.add(event.rollout)
            most = max(most, len(opened))
        elif isinstance(event, events.Finished):
            opened.remove(event.rollout)
    return most


def slow_run(mode: str, prompts: int, seconds: float = 100.0, **knobs: Any) -> Run:
    """Two turns of two seconds each per prompt, and an answer to each turn after `seconds`."""
    calls = (EnvironmentCall(seconds=seconds),)
    return Run(scenario(mode, [2] * prompts, turns=(2,), calls=calls, **knobs)).to_end()


@pytest.mark.parametrize("mode", PARTIAL_MODES)
def test_four_updates_of_rollouts_may_be_in_their_environments(mode: str) -> None:
    run = slow_run(mode, 60, slots=2, rollouts_per_update=3)
    assert most_open(run.events) == 4 * 3
    assert run.run_metrics.bubble_parts["environment"] > 0.5


def test_or_one_per_slot_if_that_is_more() -> None:
    run = slow_run("partial+elevator", 60, slots=10, rollouts_per_update=1)
    assert most_open(run.events) == 10


def test_oversubscribe_sets_another_bound() -> None:
    more = slow_run("partial+elevator", 60, slots=2, rollouts_per_update=3, oversubscribe=8.0)
    assert 4 * 3 < most_open(more.events) <= 8 * 3
    less = slow_run("partial+elevator", 60, slots=2, rollouts_per_update=3, oversubscribe=2.0)
    assert most_open(less.events) <= 2 * 3


def test_environments_that_keep_up_are_not_bounded() -> None:
    """The elevator with and without the bound: the same events."""
    bounded = slow_run("partial+elevator", 60, seconds=3.0, slots=4, rollouts_per_update=4)
    free = slow_run("partial+elevator", 60, seconds=3.0, slots=4, rollouts_per_update=4, oversubscribe=1e6)
    assert bounded.events[1:] == free.events[1:]


@settings(deadline=None)
@given(st.data())
def test_open_rollouts_are_bounded_in_any_schedule(data: st.DataObject) -> None:
    per_prompt = data.draw(st.integers(1, 3))
    per_update = data.draw(st.integers(1, 4))
    slots = data.draw(st.integers(1, 6))
    whole_groups = data.draw(st.booleans())
    mode = data.draw(st.sampled_from(PARTIAL_MODES))
    run = Run(
        scenario(
            mode,
            data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=20)),
            slots=slots,
            epochs=data.draw(st.integers(1, 3)),
            rollouts_per_update=per_update,
            rollouts_per_prompt=per_prompt,
            whole_groups=whole_groups,
            prompts_per_cohort=data.draw(st.none() | st.integers(4, 20)),
            max_staleness=data.draw(st.none() | st.integers(1, 4)),
            overlap=data.draw(st.booleans()),
            learner_seconds=data.draw(st.sampled_from((0.0, 5.0, 50.0))),
            turns=tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))),
            calls=tuple(
                EnvironmentCall(seconds=seconds)
                for seconds in data.draw(st.lists(st.sampled_from((0.0, 3.0, 30.0, 200.0)), min_size=1, max_size=4))
            ),
        )
    ).to_end()
    started_with_it = per_prompt - 1 if whole_groups else 0  # a group is opened as a whole
    limit = max(slots, 4 * run.scenario.schedule.rollouts_needed)
    assert most_open(run.events) <= slots + limit + started_with_it
