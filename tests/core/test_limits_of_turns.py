"""Which tokens the limits of a schedule count in a rollout of several turns."""

from collections.abc import Sequence
from typing import Any

import pytest

from instant_environments import InstantEnvironments
from paced import PacedEngine
from sortedrl.core import Controller, EventLog, Prompts, ScoreAtOnce, events
from sortedrl.core.engine import Request
from sortedrl.core.rollout import Prompt, Rollout, Segment
from sortedrl.core.schedule import Schedule
from sortedrl.core.turns import limit_reached


def two_turns() -> Rollout:
    rollout = Rollout(0, Prompt("p", [1, 2, 3]), 0, 0, 0, 0)
    rollout.append(Segment([4, 5], [-0.1] * 2, 0))
    rollout.observe([6, 7, 8, 9])
    rollout.append(Segment([10], [-0.1], 0))
    return rollout


def test_tokens_of_the_environment_count_only_if_the_schedule_says_so() -> None:
    counts, policy_only = Schedule(max_response_tokens=10, count_observations=True), Schedule(max_response_tokens=10)
    assert (counts.room_for(two_turns()), policy_only.room_for(two_turns())) == (3, 7)
    assert (limit_reached(counts, two_turns(), 2), limit_reached(policy_only, two_turns(), 2)) == ("", "")
    assert limit_reached(counts, two_turns(), 3) == "max_response_tokens"
    assert limit_reached(policy_only, two_turns(), 300) == ""


def test_the_context_bounds_both() -> None:
    schedule = Schedule(max_response_tokens=10, max_context_tokens=11, count_observations=True)
    assert schedule.room_for(two_turns()) == 1
    assert limit_reached(schedule, two_turns(), 1) == "max_context_tokens"


class IgnoresTheLimit(PacedEngine):
    """Samples 15 tokens per turn, whatever is left of the limit."""

    def submit(self, requests: Sequence[Request]) -> None:
        super().submit([request._replace(max_new_tokens=99) for request in requests])


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_response_tokens": 40, "count_observations": True}, "max_new_tokens was 5"),
        ({"max_response_tokens": 99, "max_context_tokens": 40}, "max_new_tokens was 2"),
    ],
)
def test_an_engine_that_ignores_max_new_tokens_costs_its_rollouts(limits: dict[str, Any], message: str) -> None:
    """Two turns of 15 tokens and an observation of 20 in a context of 3 are 50 and 53 tokens. Even prompts have a
    shorter observation of 5, which leaves room."""
    log: list[Any] = []
    environments = InstantEnvironments(
        lambda rollout: None if rollout.observations else [9] * (20 if int(rollout.prompt.id) % 2 else 5)
    )
    engine = IgnoresTheLimit(slots=2, length_of=lambda request: request.prefix_length + 15)
    prompts = Prompts([Prompt(str(i), [1, 2, 3]) for i in range(4)])
    schedule = Schedule(mode="baseline", rollouts_per_update=2, prompts_per_cohort=4, max_retries=0, **limits)
    parts = engine, prompts, ScoreAtOnce(len), schedule
    controller = Controller(*parts, environments=environments, log=EventLog(log.append))
    trained = []
    for batch in controller:
        trained += batch
        controller.publish()
    assert sorted(rollout.prompt.id for rollout in trained) == ["0", "2"]
    rejected = [event.reason for event in log if isinstance(event, events.Rejected)]
    assert len(rejected) == 2 and all(message in reason for reason in rejected)
