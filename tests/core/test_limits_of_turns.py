"""Which tokens the limits of a schedule count in a rollout of several turns."""

from __future__ import annotations

from sortedrl.core.rollout import Prompt, Rollout, Segment
from sortedrl.core.schedule import Schedule


def two_turns() -> Rollout:
    rollout = Rollout(0, Prompt("p", [1, 2, 3]), 0, 0, 0, 0)
    rollout.append(Segment([4, 5], [-0.1] * 2, 0))
    rollout.observe([6, 7, 8, 9])
    rollout.append(Segment([10], [-0.1], 0))
    return rollout


def test_tokens_of_the_environment_count_only_if_the_schedule_says_so() -> None:
    counts, policy_only = Schedule(max_response_tokens=10, count_observations=True), Schedule(max_response_tokens=10)
    assert (counts.room_for(two_turns()), policy_only.room_for(two_turns())) == (3, 7)
    assert (counts.limit_reached(two_turns(), 2), policy_only.limit_reached(two_turns(), 2)) == ("", "")
    assert counts.limit_reached(two_turns(), 3) == "max_response_tokens"
    assert policy_only.limit_reached(two_turns(), 300) == ""


def test_the_context_bounds_both() -> None:
    schedule = Schedule(max_response_tokens=10, max_context_tokens=11, count_observations=True)
    assert schedule.room_for(two_turns()) == 1
    assert schedule.limit_reached(two_turns(), 1) == "max_context_tokens"
