"""Rollouts of several turns in timeline, trace, report and metrics: everything adds up to the event log."""

import pytest

from random_runs import case_of, play
from scenarios import EnvironmentCall, Run, scenario
from sortedrl.core.events import (
    Aborted,
    Event,
    Finished,
    HarvestBegan,
    Observed,
    Phase,
    Regenerated,
    RunBegan,
    Scored,
    Started,
    Submitted,
    TurnEnded,
    Updated,
)
from sortedrl.observe.metrics import Metrics
from sortedrl.observe.timeline import slices
from trace_rules import assert_valid_trace


@pytest.mark.parametrize("block", range(3))
def test_random_runs_add_up(block: int) -> None:
    for seed in range(block * 15, (block + 1) * 15):
        log = play(case_of(seed, with_turns=True)).log
        for part in (log, log[: max(1, len(log) // 2)]):  # the latter as a killed run leaves it
            assert_valid_trace(part)
        metrics, found = Metrics().fold(log).run_metrics(), slices(log)
        assert sum(s.made for s in found) == metrics.generated_tokens
        assert sum(s.made for s in found if s.update is not None) == metrics.trained_tokens


@pytest.mark.parametrize("at_harvest", ["in a slot", "in its environment", "waiting for a slot"])
def test_a_rollout_cut_between_two_turns_counts_in_the_length_bias(at_harvest: str) -> None:
    """Rollout 1 is cut after a turn of 3 tokens, and trained on at its second attempt, with 2 tokens."""
    log: list[Event] = [RunBegan(0.0, 2, "on-policy", {}), Phase(0.0, "harvest"), HarvestBegan(0.0, 0, 0)]
    log += [Submitted(0.0, rollout, 0, 1, 0, 1.0) for rollout in (0, 1)] + [Started(0.0, r, r) for r in (0, 1)]
    log += [TurnEnded(3.0, 1, 3, 3)]
    if at_harvest != "in its environment":
        log += [Observed(3.5, 1, 4, 7)]
    if at_harvest == "in a slot":
        log += [Submitted(3.5, 1, 0, 1, 7, 1.0), Started(3.5, 1, 1)]
    log += [Finished(9.0, 0, 10, 10, False), Scored(9.0, 0, 1.0)]
    if at_harvest == "in a slot":
        log += [Aborted(9.0, 1, 0, 7, 3)]
    else:
        log += [Regenerated(9.0, 1, 3, "between two turns at the harvest")]
    log += [Updated(9.0, 0, 0, 0, (0,), (10,), (1.0,), (((0, 10),),), (0,))]
    log += [Submitted(9.0, 1, 1, 1, 0, 1.0), Started(9.0, 1, 0), Finished(11.0, 1, 2, 2, False), Scored(11.0, 1, 1.0)]
    log += [Updated(11.0, 1, 1, 0, (1,), (2,), (1.0,), (((0, 2),),), (1,))]
    metrics = Metrics().fold(log).run_metrics()
    assert metrics.mean_length == 6
    assert metrics.uncut_mean_length == pytest.approx(10)  # the cut one would have had more than 3, so probably 10


def test_a_lost_answer_ends_with_the_next_turn() -> None:
    run = Run(
        scenario("baseline", [2], slots=1, turns=(2,), calls=(EnvironmentCall(seconds=5.0),), rollouts_per_update=1)
    ).to_end()
    damaged = [event for event in run.events if type(event).__name__ != "Observed"]
    found, whole = (Metrics().fold(log).run_metrics() for log in (damaged, run.events))
    assert (found.trained_tokens, found.environment_tokens) == (4, 2)
    assert found.environment_seconds == whole.environment_seconds > 0
