"""Bugs that users of other RL systems have hit, as far as the random schedules do not show their absence."""

from typing import Any

import pytest

import scenarios
from paced import PacedEngine
from scenarios import NEVER, Run, run, scenario
from sortedrl.core import (
    STRATEGIES,
    ConfigurationError,
    Controller,
    Prompt,
    Prompts,
    Sampling,
    Schedule,
    ScoreAtOnce,
    events,
)

MODES = sorted(set(scenarios.MODES) - {"async-pool"})
KEEPS_TOKENS = [mode for mode in MODES if STRATEGIES[mode].keeps_tokens]
ONE_LONG = [40, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 1, 1, 1, 1, 2, 2, 2, 2, 1, 1, 1, 1]


def trained_ids(run: Run) -> list[int]:
    return sorted(id for batch in run.ids for id in batch)


@pytest.mark.parametrize("mode", ["on-policy", "on-policy+planned"])
def test_discard_and_requeue_does_not_starve_slow_prompts(mode: str) -> None:
    """The long prompt is cut and regenerated, and is still trained on within the updates of its own cohort."""
    result = run(mode, ONE_LONG, slots=4, rollouts_per_update=4, prompts_per_cohort=8)
    with_the_long_one = next(i for i, ids in enumerate(result.ids) if 0 in ids)
    assert result.batches[with_the_long_one].rollouts[-1].cohort == 0
    assert with_the_long_one <= 1


@pytest.mark.parametrize("mode", [*KEEPS_TOKENS, "async-pool"])
def test_completed_groups_are_never_dropped_while_the_learner_steps(mode: str) -> None:
    """Asynchronous: whole groups finish during every step of the learner; each is trained on once."""
    sizes = {"slots": 8, "rollouts_per_update": 6, "rollouts_per_prompt": 3, "max_staleness": 3}
    result = run(mode, ONE_LONG, whole_groups=True, overlap=True, learner_seconds=7.0, **sizes)
    assert trained_ids(result) == list(range(3 * len(ONE_LONG)))
    assert result.run_metrics.waste == 0


@pytest.mark.parametrize("mode", ["on-policy", "partial", "partial+elevator", "april", "tail-batching"])
def test_one_straggler_does_not_hold_up_the_step(mode: str) -> None:
    result = run(mode, [1000, *ONE_LONG[1:]], slots=6, rollouts_per_update=4, max_response_tokens=1000)
    first = result.all(events.Updated)[0]
    assert first.at < 10
    assert 0 not in first.rollouts
    assert trained_ids(result) == list(range(len(ONE_LONG)))


@pytest.mark.parametrize("mode", MODES)
def test_a_straggler_that_never_answers_does_not_wedge_the_run(mode: str) -> None:
    """Neither one whose judge is silent nor one that the engine keeps losing."""
    faults: dict[str, Any] = {"score_seconds": (NEVER, *[0.0] * 23), "score_wait_seconds": 5.0, "max_retries": 2}
    result = Run(scenario(mode, ONE_LONG, rollouts_per_update=4, **faults))
    result.engine._lost_after = lambda request: 0 if request.id == 7 else None
    result.to_end()
    assert [event.rollout for event in result.all(events.Failed)] == [7, 7, 7]
    reasons = {event.rollout: event.reason for event in result.all(events.Rejected)}
    assert reasons == {0: "no score in time, twice", 7: "failed 3 times, last: lost by the engine"}
    assert trained_ids(result) == sorted(set(range(len(ONE_LONG))) - {0, 7})


@pytest.mark.parametrize("mode", KEEPS_TOKENS)
def test_staleness_is_counted_rightly_after_a_restart_and_the_bound_holds(mode: str) -> None:
    plan = scenario(mode, ONE_LONG, slots=4, rollouts_per_update=2, max_staleness=2)
    first = Run(plan).updates(2)
    second = Run(plan, state=first.checkpoint()).to_end()
    assert [batch.version for batch in second.batches] == list(range(2, 2 + len(second.batches)))
    old = [rollout for batch in second.batches for rollout in batch if rollout.versions[0] < 2]
    assert old, "nothing was carried over the restart"
    ages = [batch.version - version for batch in second.batches for r in batch for version in r.versions]
    assert max(ages) == 2
    assert second.run_metrics.staleness_max == 2


def test_every_request_is_sampled_with_the_settings_that_the_learner_knows() -> None:
    """Temperature and top-p that differ between requests, or between a start and its resume, bias the ratio."""
    plan = Run(scenario("partial", ONE_LONG, slots=4, rollouts_per_update=2))
    sampling, prompts = Sampling(temperature=0.7, top_p=0.9), Prompts(plan.scenario.dataset())
    scorer = ScoreAtOnce(lambda rollout: 0.0)
    controller = Controller(plan.engine, prompts, scorer, plan.scenario.schedule, sampling=sampling)
    for _ in controller:
        controller.publish()
    assert any(request.prefix for request in plan.engine.requests)
    assert {request.sampling for request in plan.engine.requests} == {sampling}
    assert controller.sampling == sampling


@pytest.mark.parametrize("mode", ["partial", "partial+elevator", "april", "cohort-at-once"])
def test_rollouts_per_update_counts_rollouts_not_prompts(mode: str) -> None:
    result = run(mode, [3, 1, 2, 5, 4, 9], slots=4, rollouts_per_update=8, rollouts_per_prompt=4)
    assert result.sizes == [8, 8, 8]


def test_a_cohort_given_in_rollouts_instead_of_prompts_is_explained_in_numbers() -> None:
    """By the controller, too; `check_cohort` itself: test_rules.py."""
    with pytest.raises(ConfigurationError, match="cannot fill one update of 128"):
        Controller(PacedEngine(slots=1), Prompts([Prompt("a", [1])]), ScoreAtOnce(len), Schedule(prompts_per_cohort=64))
