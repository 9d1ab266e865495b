"""Rollouts of several turns: what each mode does with them at a harvest, and what failing environments cost."""

import json
from dataclasses import replace
from typing import Any

import pytest

from invariants import checked_run
from random_runs import case_of
from scenarios import NEVER, EnvironmentCall, Run, scenario
from sortedrl.core import Answer, ConfigurationError, Schedule, events
from sortedrl.core.rollout import ENVIRONMENT
from sortedrl.core.scoring import Score


def turning(mode: str, lengths: list[int], *, seconds: float = 5.0, **knobs: Any) -> Run:
    """Two turns per prompt; every answer takes `seconds`."""
    defaults: dict[str, Any] = {"turns": (2,), "observations": (3,), "calls": (EnvironmentCall(seconds=seconds),)}
    return Run(scenario(mode, lengths, **(defaults | knobs)))


def test_a_slot_is_refilled_while_an_environment_works() -> None:
    """One slot, two prompts: the second runs while the first is in its environment, and the first returns before a
    third is started."""
    run = turning("partial", [2, 4, 2], slots=1, rollouts_per_update=3).to_end()
    starts = [(event.rollout, event.at) for event in run.all(events.Started)]
    ended = {event.rollout: event.at for event in reversed(run.all(events.TurnEnded))}
    assert starts[:2] == [(0, 0.0), (1, ended[0])]
    assert [rollout for rollout, _ in starts] == [0, 1, 2, 0, 1, 2]
    observed = {event.rollout: event.at for event in run.all(events.Observed)}
    assert observed == {id: ended[id] + 5.0 for id in range(3)}


def test_tokens_of_policy_and_environment() -> None:
    run = turning("partial", [2, 4], slots=2, rollouts_per_update=2).to_end()
    (batch,) = run.batches
    first = batch.rollouts[0]
    assert [(segment.version, len(segment)) for segment in first.segments] == [(0, 2), (ENVIRONMENT, 3), (0, 2)]
    assert first.mask == [1, 1, 0, 0, 0, 1, 1]
    metrics = run.run_metrics
    assert (metrics.trained_tokens, metrics.environment_tokens) == (12, 6)
    assert (metrics.turns_mean, metrics.environment_seconds) == (2.0, 2 * 2 * 5.0)  # the last turn is a call, too
    assert (metrics.prefill_tokens, metrics.re_prefill_tokens) == (2 + 6, 2 + 2 + 4)
    assert run.all(events.Updated)[0].segments[0] == ((0, 2), (ENVIRONMENT, 3), (0, 2))


def test_slots_that_are_empty_because_of_environments_are_a_part_of_the_bubble() -> None:
    run = turning("baseline", [2, 2], slots=2, rollouts_per_update=2).to_end()
    metrics = run.run_metrics
    assert metrics.seconds == 2 + 5 + 2 + 5
    assert metrics.bubble_parts["environment"] == metrics.bubble == pytest.approx(10 / 14)


def test_partial_keeps_a_rollout_in_its_environment_across_updates() -> None:
    run = turning("partial+elevator", [2, 2, 2, 2, 2, 2], slots=2, turns=(2, 1, 1), rollouts_per_update=2)
    run.environments._scenario = replace(run.scenario, calls=(EnvironmentCall(seconds=7.0),))
    kept = []
    for batch in run.batches_in_turn():
        kept += [(batch.update, id) for id in run.controller.buffer.in_environment]
    assert kept, "no harvest found a rollout in its environment"
    assert not run.all(events.Regenerated)
    crossed = [r for b in run.batches for r in b if len({s.version for s in r.segments} - {ENVIRONMENT}) > 1]
    assert crossed, "no rollout has turns of two versions"


def test_on_policy_drops_rollouts_in_their_environments_and_cancels_them() -> None:
    run = turning("on-policy", [2, 2, 9, 9], slots=4, turns=(1, 1, 2, 2), seconds=10.0, rollouts_per_update=2)
    batches = run.batches_in_turn()
    assert [rollout.id for rollout in next(batches)] == [0, 1]
    assert [(event.rollout, event.dropped) for event in run.all(events.Regenerated)] == [(2, 9), (3, 9)]
    assert run.environments is not None and run.environments.pending == 0 and not run.environments.instances
    assert [(rollout.attempt, set(rollout.versions)) for rollout in next(batches)] == [(1, {1})] * 2


def test_an_environment_is_canceled_after_the_log_says_why() -> None:
    sizes = {"slots": 6, "rollouts_per_update": 2}
    run = turning("on-policy", [2, 2, 9, 9, 2, 30], turns=(1, 1, 2, 3, 1, 3), seconds=10.0, **sizes)
    environments: Any = run.environments
    cancel, reasons = environments.cancel, set()

    def noted(rollout_id: int) -> None:
        last: Any = run.events[-1]
        assert last.rollout == rollout_id
        reasons.add(type(last))
        cancel(rollout_id)

    run.controller._ledger.release = noted
    run.to_end()
    assert reasons == {events.Scored, events.Aborted, events.Regenerated}


def test_planned_on_policy_waits_for_environments() -> None:
    run = turning("on-policy+planned", [2, 2, 2, 2], slots=2, rollouts_per_update=2).to_end()
    assert run.sizes == [2, 2] and not run.all(events.Regenerated)
    assert run.run_metrics.waste == 0


def test_a_returning_rollout_is_exempt_from_oversubscribe() -> None:
    run = turning("partial", [2] * 8, slots=4, rollouts_per_update=2, oversubscribe=1.0).to_end()
    first_batch = {rollout.id for rollout in run.batches[0]}
    started = [event.rollout for event in run.all(events.Submitted)]
    assert started[:4] == [0, 1, 0, 1] and first_batch == {0, 1}


def test_a_hung_environment_is_asked_again_and_then_rejected() -> None:
    run = turning("partial", [2], seconds=NEVER, max_environment_seconds=10.0, max_retries=2, rollouts_per_update=1)
    run.to_end()
    failed = run.all(events.EnvironmentFailed)
    assert [(event.rollout, event.at) for event in failed] == [(0, 12.0), (0, 22.0), (0, 32.0)]
    (rejected,) = run.all(events.Rejected)
    assert rejected.rollout == 0 and "no answer within max_environment_seconds = 10" in rejected.reason
    assert rejected.dropped == 2 and not run.batches
    assert run.environments is not None and not run.environments.instances


def test_a_late_answer_is_void() -> None:
    """Each call is answered after its deadline: none of the answers counts."""
    run = turning("partial", [2], seconds=15.0, max_environment_seconds=10.0, max_retries=1, rollouts_per_update=1)
    run.to_end()
    assert not run.batches and len(run.all(events.EnvironmentFailed)) == 2


@pytest.mark.parametrize(
    ("limits", "ended_by", "shape"),
    [
        ({"max_turns": 2}, "max_turns", [4, 3, 4]),
        ({"max_response_tokens": 6}, "max_response_tokens", [4, 3, 2]),
        ({"max_context_tokens": 10}, "max_context_tokens", [4, 3, 2]),
        ({"max_context_tokens": 7}, "max_context_tokens", [4]),
    ],
)
def test_limits_end_a_rollout_and_leave_the_reward_to_the_scorer(
    limits: dict[str, int], ended_by: str, shape: list[int]
) -> None:
    run = turning("partial", [4], turns=(5,), rollouts_per_update=1, **limits).to_end()
    (rollout,) = run.batches[0]
    assert (rollout.ended_by, rollout.truncated, rollout.has_environment) == (ended_by, True, True)
    assert [len(segment) for segment in rollout.segments] == shape
    assert rollout.reward == len(rollout)


@pytest.mark.parametrize(("bring_back", "attempt"), [("replay", 0), ("state", 0), ("never", 1)])
def test_a_resumed_run_brings_environments_back(bring_back: str, attempt: int) -> None:
    """Rollout 0 is in its second call when the run is saved."""
    sizes: dict[str, Any] = {"slots": 2, "rollouts_per_update": 2, "turns": (3, 1, 1, 1, 1, 1)}
    first = turning("partial+elevator", [2] * 6, seconds=4.0, bring_back=bring_back, **sizes)
    for _ in first.batches_in_turn():
        rollout = first.controller.live.get(0)
        if rollout is not None and rollout.id in first.controller.buffer.in_environment and rollout.observations:
            break
    state = first.checkpoint()
    assert (state["environments"] == {"0": {"id": 0, "turns": 1}}) == (bring_back == "state")
    second = Run(first.scenario, state=state, last_time=first.engine.now()).to_end()
    rollout = next(r for b in second.batches for r in b if r.id == 0)
    assert rollout.attempt == attempt
    assert len(second.all(events.Regenerated)) == attempt


def test_a_rollout_that_a_checkpoint_lost_the_tokens_of_gets_a_new_instance() -> None:
    """The state of its old instance belongs to turns that the rollout no longer has."""
    plan = turning("partial+elevator", [2, 2, 2, 2, 2, 2], slots=2, turns=(3, 1, 1), rollouts_per_update=2).scenario
    first = Run(replace(plan, bring_back="state")).updates(1)
    state = json.loads(json.dumps(first.checkpoint()))
    members = [member for _, _, group in state["buffer"]["groups"] for member in group]
    damaged = [member for member in members if len(member["segments"]) > 1]
    assert damaged and state["environments"]
    for member in damaged:
        member["segments"][0][1][0] = None  # a log-probability
    second = Run(first.scenario, state=state, last_time=first.engine.now()).to_end()
    assert sorted(r.id for batch in first.batches + second.batches for r in batch) == list(range(6))


def test_a_broken_observation_is_a_failure_of_the_environment() -> None:
    for observation in ([], [1.5], [-1], "text", 7):
        run = turning("partial", [2], seconds=1.0, max_retries=0, rollouts_per_update=1)
        environments: Any = run.environments
        collect = environments.collect
        environments.collect = lambda collect=collect, bad=observation: [
            Answer(a.rollout_id, a.call, observation=bad) for a in collect()
        ]
        run.to_end()
        (rejected,) = run.all(events.Rejected)
        assert "an observation" in rejected.reason


def test_turns_that_a_failed_environment_cannot_bring_back_cost_one_failure() -> None:
    """The failure of the instance, not also the loss of its turns: the rollout is regenerated, not rejected."""
    run = turning("partial", [2], max_retries=1, rollouts_per_update=1, bring_back="never")
    environments: Any = run.environments
    collect = environments.collect

    def broken_in_its_second_turn(answer: Answer) -> Answer:
        rollout = run.controller.live[0]
        breaks = rollout.observations == 1 and not rollout.failures
        return Answer(0, answer.call, error="broke") if breaks else answer

    environments.collect = lambda: [broken_in_its_second_turn(answer) for answer in collect()]
    run.to_end()
    assert run.all(events.EnvironmentFailed)[0].reason == "its environment: broke"
    assert [event.dropped for event in run.all(events.Regenerated)] == [4]
    assert not run.all(events.Rejected) and [rollout.attempt for rollout in run.batches[0]] == [1]


@pytest.mark.parametrize("counts", [True, False])
def test_turns_that_were_lost_after_a_limit_cost_a_failure_only_if_it_is_their_own(counts: bool) -> None:
    """Rollout 0 ends by a limit, and its environment has lost its turns three times when it is to give a reward."""
    run = turning("partial", [2], turns=(5,), max_turns=1, max_retries=2, rollouts_per_update=1)
    scorer: Any = run.controller.scorer
    collect, lost = scorer.collect, 3

    def lose(scored: Score) -> Score:
        nonlocal lost
        lost -= 1
        return scored._replace(error="gone", is_lost=True, counts=counts) if lost >= 0 else scored

    scorer.collect = lambda: [lose(scored) for scored in collect()]
    run.to_end()
    assert [event.reason for event in run.all(events.Rejected)] == ["no reward: gone"] * counts
    assert len(run.all(events.Regenerated)) == (2 if counts else 3)
    assert [rollout.attempt for batch in run.batches for rollout in batch] == [3] * (not counts)


def test_a_prompt_that_fills_the_context_is_rejected_at_load() -> None:
    run = turning("partial", [2], prompt_tokens=(5,), max_context_tokens=5, rollouts_per_update=1).to_end()
    (rejected,) = run.all(events.Rejected)
    assert "max_context_tokens is 5" in rejected.reason


@pytest.mark.parametrize("block", range(3))
def test_all_invariants_hold_with_turns(block: int) -> None:
    for seed in range(5000 + block * 50, 5000 + (block + 1) * 50):
        checked_run(replace(case_of(seed, with_turns=True).scenario))


@pytest.mark.parametrize("setting", ["max_turns", "max_context_tokens", "max_environment_seconds"])
def test_limits_below_one_are_refused(setting: str) -> None:
    with pytest.raises(ConfigurationError, match=setting):
        Schedule(**{setting: 0})  # type: ignore[arg-type]


def test_environments_that_cannot_wake_the_engine_are_checked_briefly() -> None:
    """Rollout 1 decodes for a long time while rollout 0 is in its environment: its answer is not left waiting."""
    run = turning("partial", [2, 40], slots=2, rollouts_per_update=2, turns=(2, 1), seconds=5.0)
    environments: Any = run.environments
    environments.wakes_engine = False
    waits: list[float | None] = []
    poll = run.engine.poll

    def watched(until: float | None = None) -> Any:
        if run.controller.buffer.in_environment:
            waits.append(None if until is None else until - run.engine.now())
        return poll(until)

    run.engine.poll = watched
    run.to_end()
    assert waits and all(wait is not None and wait <= 0.05 + 1e-9 for wait in waits)
    (ended, *_), (observed,) = run.all(events.TurnEnded), run.all(events.Observed)
    assert 5.0 <= observed.at - ended.at <= 5.0 + 1.0  # one decode step
