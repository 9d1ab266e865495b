"""The rules of a harvest, one small run for each edge. A step takes a second unless a test says otherwise."""

import pickle
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

import scenarios
from scenarios import NEVER, Run, run, scenario
from sortedrl.core import (
    STRATEGIES,
    Change,
    ConfigurationError,
    Rollout,
    Schedule,
    SensedLengths,
    Tokens,
    events,
    strategy_named,
)
from sortedrl.core.loading import updates_in_all
from sortedrl.engines.step_time import linear

MODES = sorted(set(scenarios.MODES) - {"async-pool"})
GATED = [mode for mode in MODES if STRATEGIES[mode].gated]


def known_lengths(lengths: list[int]) -> SensedLengths:
    """An expectation that is right about every prompt."""
    return SensedLengths({f"p{i}": float(length) for i, length in enumerate(lengths)})


def run_knowing(mode: str, lengths: list[int], **settings: Any) -> Run:
    return Run(scenario(mode, lengths, **settings), expectation=known_lengths(lengths)).to_end()


@pytest.mark.parametrize("mode", ["baseline", "cohort-at-once", "partial", "partial+lookahead", "partial+elevator"])
@pytest.mark.parametrize(
    ("prompts", "cohort", "per_prompt", "whole_groups", "per_update"),
    [(20, None, 1, False, 8), (20, 9, 1, False, 4), (17, 5, 2, False, 4), (21, 6, 3, True, 7), (11, 11, 2, True, 22)],
)
def test_the_number_of_updates_is_known_before_the_run(
    mode: str, prompts: int, cohort: int | None, per_prompt: int, whole_groups: bool, per_update: int
) -> None:
    """Cohorts and epochs end with updates of other sizes, and whole groups make updates larger."""
    lengths = [1 + i * 5 % 7 for i in range(prompts)]
    sizes = {"slots": 4, "rollouts_per_update": per_update, "rollouts_per_prompt": per_prompt, "epochs": 2}
    plan = scenario(mode, lengths, prompts_per_cohort=cohort, whole_groups=whole_groups, **sizes)
    assert updates_in_all(STRATEGIES[mode], plan.schedule, prompts, 2) == len(Run(plan).to_end().batches)


def start_order(run: Run) -> list[int]:
    return [event.rollout for event in run.all(events.Submitted)]


def started_in(run: Run, harvest: int) -> list[int]:
    """Rollouts that were started in this harvest, in order."""
    begins = [i for i, event in enumerate(run.events) if isinstance(event, events.HarvestBegan)]
    end = begins[harvest + 1] if harvest + 1 < len(begins) else len(run.events)
    return [e.rollout for e in run.events[begins[harvest] : end] if isinstance(e, events.Submitted)]


# Loading


@pytest.mark.parametrize("mode", GATED)
def test_a_cohort_is_loaded_when_nothing_of_the_last_is_untrained(mode: str) -> None:
    lengths = [7, 1, 2, 9, 3, 3, 1, 8, 2, 5, 4, 1]
    result = run(mode, lengths, slots=3, rollouts_per_update=2, prompts_per_cohort=4)
    untrained, loaded_early = 0, False
    for event in result.events:
        if isinstance(event, events.Loaded):
            loaded_early |= untrained > 0
            untrained += event.rollouts
        elif isinstance(event, events.Updated):
            untrained -= len(event.rollouts)
    assert untrained == 0
    assert loaded_early == STRATEGIES[mode].works_ahead


def test_the_datasets_end_closes_a_cohort_early() -> None:
    result = run("partial", [1] * 10, rollouts_per_update=2, prompts_per_cohort=4)
    assert [event.rollouts for event in result.all(events.Loaded)] == [4, 4, 2]
    assert result.sizes == [2, 2, 2, 2, 2]


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("mode", GATED)
def test_a_rest_of_less_than_half_an_update_joins_the_epochs_last_cohort(mode: str, epochs: int) -> None:
    result = run(mode, [2, 1, 3, 1, 2, 1, 1, 4, 1], rollouts_per_update=4, prompts_per_cohort=8, epochs=epochs)
    assert min(result.sizes) >= 2
    if "baseline" in mode:
        assert result.sizes == [4, 5] * epochs
    else:
        assert [event.rollouts for event in result.all(events.Loaded)] == [9] * epochs


def test_a_cohort_never_spans_two_epochs() -> None:
    result = run("partial", [1, 2, 3, 4, 5, 6, 7], rollouts_per_update=2, prompts_per_cohort=5, epochs=2)
    assert [event.prompts for event in result.all(events.Loaded)] == [("p0", "p1", "p2", "p3", "p4"), ("p5", "p6")] * 2


@pytest.mark.parametrize("mode", ["on-policy", "partial", "cohort-at-once"])
def test_an_unbounded_cohort_is_an_epoch(mode: str) -> None:
    result = run(mode, [3, 1, 4, 1, 5, 9, 2], rollouts_per_update=2, prompts_per_cohort=None, epochs=2)
    assert [event.rollouts for event in result.all(events.Loaded)] == [7, 7]


def waiting_after_loads(run: Run) -> list[int]:
    """How many rollouts have never been started, after each load."""
    waiting, found = 0, []
    for event in run.events:
        if isinstance(event, events.Loaded):
            waiting += event.rollouts
            found.append(waiting)
        elif isinstance(event, events.Submitted) and not event.prefix:
            waiting -= 1
    return found


def test_an_elevator_with_an_unbounded_window_never_holds_more_than_an_epoch() -> None:
    result = run("partial+elevator", [3, 1, 4, 1, 5, 9, 2], rollouts_per_update=2, epochs=3)
    assert max(waiting_after_loads(result)) == 7


def test_each_epoch_is_another_seeded_permutation() -> None:
    def orders(seed: int) -> list[tuple[str, ...]]:
        result = run("baseline", [1] * 20, rollouts_per_update=20, epochs=2, shuffle=True, seed=seed)
        return [event.prompts for event in result.all(events.Loaded)]

    first, second = orders(seed=0)
    assert sorted(first) == sorted(second)
    assert first != second
    assert orders(seed=0) == [first, second]
    assert orders(seed=1) != [first, second]


@pytest.mark.parametrize("whole_groups", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_prompt_too_long_is_rejected_at_load_with_all_its_siblings(mode: str, whole_groups: bool) -> None:
    sizes = {"rollouts_per_update": 4, "rollouts_per_prompt": 3, "max_prompt_tokens": 8}
    result = run(mode, [2, 1, 3, 1, 2, 2], whole_groups=whole_groups, prompt_tokens=(1, 9), **sizes)
    reasons = [event.reason for event in result.all(events.Rejected)]
    assert reasons == ["prompt of 9 tokens, max_prompt_tokens is 8"] * 9
    assert {rollout.prompt.id for batch in result.batches for rollout in batch} == {"p0", "p2", "p4"}
    assert all(request.prompt.id in {"p0", "p2", "p4"} for request in result.engine.requests)


@pytest.mark.parametrize("mode", MODES)
def test_a_run_whose_prompts_are_all_too_long_ends_without_an_update(mode: str) -> None:
    result = run(mode, [2] * 7, rollouts_per_update=2, prompts_per_cohort=3, prompt_tokens=(9,), max_prompt_tokens=8)
    assert result.batches == []
    assert result.run_metrics.rejected == 7


# The size of a batch


def test_what_is_ready_beyond_the_batch_is_trained_on_at_once_on_policy() -> None:
    result = run("on-policy", [2, 2, 2, 2, 2, 5, 5], slots=5, rollouts_per_update=3)
    assert result.sizes == [5, 2]


def test_what_is_ready_beyond_the_batch_is_kept_in_partial_mode() -> None:
    result = run("partial", [2, 2, 2, 2, 2, 5, 5], slots=5, rollouts_per_update=3)
    assert result.ids == [[0, 1, 2], [3, 4, 5, 6]]
    assert result.batches[1].version - result.batches[1].rollouts[0].versions[0] == 1


@pytest.mark.parametrize(
    ("prompts", "sizes"), [(8, [4, 4]), (9, [4, 5]), (10, [4, 4, 2]), (5, [5]), (6, [4, 2]), (3, [3]), (1, [1])]
)
@pytest.mark.parametrize("mode", ["partial", "partial+elevator", "april", "cohort-at-once", "partial+planned"])
def test_a_last_batch_of_less_than_half_an_update_is_joined(mode: str, prompts: int, sizes: list[int]) -> None:
    lengths = [1 + 2 * i for i in range(prompts)]  # no two end together
    assert run(mode, lengths, rollouts_per_update=4).sizes == sizes


def test_a_batch_is_sorted_by_length() -> None:
    result = run("cohort-at-once", [5, 3, 9, 1, 4, 8], rollouts_per_update=6)
    assert result.lengths == [[1, 3, 4, 5, 8, 9]]


def test_a_response_that_hits_the_token_limit_is_cut_there_and_marked() -> None:
    result = run("partial", [3, 12, 5], slots=1, rollouts_per_update=1, max_response_tokens=5)
    by_prompt = {r.prompt.id: r for batch in result.batches for r in batch}
    assert {name: (len(r), r.truncated) for name, r in by_prompt.items()} == {
        "p0": (3, False),
        "p1": (5, True),
        "p2": (5, True),  # nothing says that it would have ended here
    }
    assert result.run_metrics.truncated == 2


@pytest.mark.parametrize("mode", MODES)
def test_whole_sibling_sets_are_trained_on_together(mode: str) -> None:
    sizes = {"slots": 5, "rollouts_per_update": 4, "rollouts_per_prompt": 3}
    result = run(mode, [4, 9, 2, 7, 1], redraws=True, whole_groups=True, **sizes)
    for batch in result.batches:
        prompts = [rollout.prompt.id for rollout in batch]
        assert all(prompts.count(prompt) == 3 for prompt in prompts)
    assert sum(result.sizes) == 15


def test_the_need_is_rounded_up_to_whole_sibling_sets() -> None:
    """Updates of 7 in sets of 3 are updates of 9, and a rest of 3 is less than half of that."""
    result = run("april", [1] * 4, slots=1, rollouts_per_update=7, rollouts_per_prompt=3, whole_groups=True)
    assert result.sizes == [12]


@pytest.mark.parametrize(
    ("mode", "regenerated", "versions"),
    [
        ("on-policy", [(2, 2, "unfinished members of its group")], [[1] * 2, [1] * 9]),
        ("partial", [], [[0] * 2, [0] * 3 + [1] * 6]),
    ],
)
def test_on_policy_drops_finished_members_of_unfinished_sets_and_partial_keeps_them(
    mode: str, regenerated: list[Any], versions: list[list[int]]
) -> None:
    """Slots for two sets of two. The first set is ready after 3 s; a member of the second is ready too."""
    result = Run(scenario(mode, [0, 0], slots=4, rollouts_per_update=2, rollouts_per_prompt=2, whole_groups=True))
    result.engine._length_of = lambda request: [1, 3, 2, 9][request.id]
    result.to_end()
    assert result.ids == [[0, 1], [2, 3]]
    assert [(e.rollout, e.dropped, e.reason) for e in result.all(events.Regenerated)] == regenerated
    assert result.run_metrics.dropped_tokens == (2 + 3 if regenerated else 0)
    assert [rollout.versions for rollout in result.batches[1]] == versions


def test_without_comparison_siblings_are_trained_on_apart() -> None:
    result = run("partial", [1, 5], slots=4, rollouts_per_update=1, rollouts_per_prompt=2, redraws=True, seed=3)
    assert result.sizes == [1, 1, 1, 1]


# Submitting, stopping, resuming


def test_the_papers_modes_start_in_load_order() -> None:
    for mode in ("on-policy", "partial"):
        assert started_in(run(mode, [9, 1, 8, 2, 7, 3], slots=2, rollouts_per_update=6), 0) == [0, 1, 2, 3, 4, 5]


def test_on_policy_starts_never_started_before_stopped() -> None:
    result = run("on-policy", [9, 9, 1, 1, 2, 2], slots=4, rollouts_per_update=2)
    assert result.ids[0] == [2, 3]
    assert started_in(result, 1)[:2] == [4, 5]
    assert started_in(result, 1)[2:4] == [0, 1]


def test_partial_resumes_first_and_most_cached_tokens_first() -> None:
    result = run("partial", [1, 20, 2, 20, 20, 9, 9], slots=3, rollouts_per_update=2)
    assert result.ids[0] == [0, 2]  # 1 was running for 2 s, 3 for one, 4 had no time
    assert started_in(result, 1)[:3] == [1, 3, 4]
    kept = {event.rollout: event.prefix for event in result.all(events.Submitted)}
    assert kept[1] > kept[3] > 0


def test_a_stopped_rollout_loses_its_tokens_on_policy_and_keeps_its_length_reached() -> None:
    result = run("on-policy", [1, 1, 10, 10], slots=4, rollouts_per_update=2)
    assert [(e.rollout, e.dropped) for e in result.all(events.Aborted)] == [(2, 1), (3, 1)]
    assert [rollout.versions for rollout in result.batches[1]] == [[1] * 10] * 2
    assert all(rollout.reached == 1 and rollout.attempt == 1 for rollout in result.batches[1])


def test_a_redo_draws_anew_unless_the_seed_is_kept() -> None:
    for keep_seed in (False, True):
        result = run("on-policy", [1, 1, 10], slots=3, rollouts_per_update=2, keep_seed=keep_seed)
        first, regenerate = (request.seed for request in result.engine.requests if request.id == 2)
        assert (first == regenerate) == keep_seed


@pytest.mark.parametrize("mode", MODES)
def test_a_resume_keeps_its_seed(mode: str) -> None:
    result = run(mode, [1, 9, 2, 8, 3, 7], slots=3, rollouts_per_update=2)
    seeds: dict[tuple[int, int], set[int]] = {}
    for submitted, request in zip(result.all(events.Submitted), result.engine.requests, strict=True):
        seeds.setdefault((submitted.rollout, submitted.attempt), set()).add(request.seed)
    assert all(len(of_attempt) == 1 for of_attempt in seeds.values())


def test_a_resume_under_the_same_weights_continues_the_segment() -> None:
    result = run("partial", [1, 1, 9, 9], rollouts_per_update=2, silent_updates=frozenset({0}))
    assert [len(rollout.segments) for rollout in result.batches[1]] == [1, 1]
    assert result.run_metrics.segments_histogram == {1: 4}


def test_a_request_keeps_what_it_was_given_while_its_rollout_grows() -> None:
    """An engine that hands over lists: the rollout's own segments grow in place."""
    result = Run(scenario("partial", [1, 1, 9, 9, 3, 3], rollouts_per_update=2, silent_updates=frozenset({0, 1})))
    stop, poll = result.engine.abort, result.engine.poll

    def as_lists(changes: list[Change]) -> list[Change]:
        for change in changes:
            if isinstance(change, Tokens):
                change.segment.tokens, change.segment.logprobs = [*change.segment.tokens], [*change.segment.logprobs]
        return changes

    result.engine.abort = lambda ids: as_lists(stop(ids))  # type: ignore[method-assign]
    result.engine.poll = lambda until=None: as_lists(poll(until))  # type: ignore[method-assign]
    result.to_end()
    kept = [event.prefix for event in result.all(events.Submitted)]
    assert sum(kept) > 0
    assert [request.prefix_length for request in result.engine.requests] == kept


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_that_uses_no_expectation_runs_the_same_with_any(mode: str) -> None:
    lengths = [7, 1, 2, 9, 3, 3, 1, 8, 2, 5, 4, 6]
    plan = scenario(mode, lengths, slots=3, rollouts_per_update=4, prompts_per_cohort=8)
    orders = [start_order(Run(plan, expectation=known_lengths(known)).to_end()) for known in (lengths, lengths[::-1])]
    assert (orders[0] != orders[1]) == STRATEGIES[mode].uses_expectation


def test_planned_starts_the_shortest_expected_first() -> None:
    lengths = [9, 1, 8, 2, 7, 3, 6, 4]
    result = run_knowing("on-policy+planned", lengths, rollouts_per_update=4)
    assert result.lengths == [[1, 2, 3, 4], [6, 7, 8, 9]]
    assert result.run_metrics.waste == 0.0
    assert not result.all(events.Aborted)


def test_partial_planned_resumes_first_and_then_starts_the_shortest_expected() -> None:
    lengths = [2, 9, 8, 7, 6, 5]
    result = run_knowing("partial+planned", lengths, slots=2, rollouts_per_update=2)
    assert start_order(result)[:3] == [0, 5, 4]
    assert started_in(result, 1)[0] == 4


def test_the_oversubscribe_cap_limits_what_a_harvest_starts() -> None:
    result = run("on-policy", [5, 6, 7, 8, 9, 10, 11, 12], slots=8, rollouts_per_update=4, oversubscribe=1.5)
    assert len(started_in(result, 0)) == 6
    assert result.run_metrics.bubble_parts["held_back"] > 0


def test_the_cap_is_off_when_what_is_left_is_no_more_than_the_need() -> None:
    result = run("on-policy", [5, 6, 7, 8, 9], slots=8, rollouts_per_update=4, oversubscribe=1.0)
    assert sorted(started_in(result, 0)) == [0, 1, 2, 3, 4]
    assert result.run_metrics.bubble_parts["held_back"] == 0


def test_the_cap_lets_a_sibling_set_that_was_begun_be_completed() -> None:
    result = run("on-policy+planned", [3] * 4, slots=8, rollouts_per_update=4, rollouts_per_prompt=3, whole_groups=True)
    assert len(started_in(result, 0)) == 6
    assert result.sizes == [6, 6]


def test_a_freed_slot_is_refilled_at_once() -> None:
    result = run("partial", [1, 2, 3, 4, 5, 6], slots=2, rollouts_per_update=6)
    started = [(event.at, event.slot) for event in result.all(events.Started)]
    assert started == [(0, 0), (0, 1), (1, 0), (2, 1), (4, 0), (6, 1)]
    assert result.run_metrics.bubble_parts["refill"] == 0


def test_nothing_is_started_for_a_harvest_that_has_enough() -> None:
    """Six end together and the first two are trained on; the next two harvests need no engine."""
    step_time = linear(1.0, 0.0, per_prefill_token=1.0)
    result = run("partial", [4] * 6 + [9] * 2, slots=6, rollouts_per_update=2, prompt_tokens=(5,), step_time=step_time)
    assert [started_in(result, harvest) for harvest in range(4)] == [[0, 1, 2, 3, 4, 5], [], [], [6, 7]]
    assert result.run_metrics.seconds == (6 * 5 + 4) + (2 * 5 + 9)


# Scoring


def test_partial_leaves_a_late_score_for_a_later_batch() -> None:
    result = run("partial", [1, 2, 2, 5, 9, 9], slots=6, rollouts_per_update=2, score_seconds=(3.5, 0, 0, 0, 0, 0))
    assert result.ids[0] == [1, 2]
    assert 0 in result.ids[1]
    assert result.batches[1].rollouts[0].versions == [0]


ONE_LATE_SCORE: dict[str, Any] = {"slots": 4, "rollouts_per_update": 2, "score_wait_seconds": 10}


def test_on_policy_waits_for_a_late_score_up_to_the_limit() -> None:
    result = run("on-policy", [1, 2, 2, 9], score_seconds=(4, 0, 0, 0), **ONE_LATE_SCORE)
    assert result.ids[0] == [0, 1, 2]
    assert result.run_metrics.idle_parts["scores"] > 0
    assert result.run_metrics.regenerated == 0


def test_on_policy_redoes_what_has_no_score_in_time() -> None:
    result = run("on-policy", [1, 2, 2, 9], score_seconds=(30, 0, 0, 0), **ONE_LATE_SCORE)
    assert result.ids[0] == [1, 2]
    regenerated = result.all(events.Regenerated)[0]
    assert (regenerated.rollout, regenerated.dropped, regenerated.reason) == (0, 1, "no score in time")
    assert result.run_metrics.waste > 0


def test_the_score_of_an_attempt_that_was_redone_is_void() -> None:
    """The first attempt's score comes at 31 s, long after the second one finished, which waits for its own."""
    result = run("on-policy", [1, 2, 2, 40], score_seconds=(30, 0, 0, 0), **ONE_LATE_SCORE)
    finished = [event.at for event in result.all(events.Finished) if event.rollout == 0]
    scored = [event.at for event in result.all(events.Scored) if event.rollout == 0]
    assert len(finished) == 2
    assert scored == [finished[1] + 30]


@pytest.mark.parametrize("mode", MODES)
def test_a_slow_judge_that_goes_on_answering_is_waited_for(mode: str) -> None:
    """Each score is within the limit of the one before it, the last comes much later than the limit."""
    seconds = (4, 8, 12, 16, 20, 24)
    result = run(mode, [1] * 6, slots=6, rollouts_per_update=6, score_seconds=seconds, score_wait_seconds=5)
    assert result.sizes == [6]
    assert result.run_metrics.regenerated == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_raising_reward_rejects_its_rollout_and_the_update_goes_on(mode: str) -> None:
    result = run(mode, [1, 2, 3, 4, 5, 6], slots=3, rollouts_per_update=3, unscorable=frozenset({1}))
    assert [(event.rollout, event.reason) for event in result.all(events.Rejected)] == [
        (1, "no reward: ValueError: the judge cannot read this")
    ]
    assert sum(result.sizes) == 5


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_rejects_its_rollout(reward: float) -> None:
    result = Run(scenario("partial", [1, 2, 3], rollouts_per_update=3))
    result.scorer._reward_of = lambda rollout: reward if rollout.id == 1 else 1.0
    result.to_end()
    reason = f"no reward: the reward is {reward} of type float, not a finite number"
    assert [event.reason for event in result.all(events.Rejected)] == [reason]
    assert result.ids == [[0, 2]]


# Failure


@pytest.mark.parametrize("mode", MODES)
def test_a_rollout_that_is_lost_once_is_trained_on_in_the_end(mode: str) -> None:
    result = Run(scenario(mode, [4, 4, 4, 4], slots=2, rollouts_per_update=2))
    result.engine._lost_after = lambda request: 2 if request.id == 1 and not result.all(events.Failed) else None
    result.to_end()
    assert sorted(id for batch in result.ids for id in batch) == [0, 1, 2, 3]
    assert result.run_metrics.failures == 1
    assert (result.run_metrics.waste == 0) == STRATEGIES[mode].keeps_tokens


def test_the_set_goes_on_without_a_rejected_member() -> None:
    sizes = {"rollouts_per_update": 3, "rollouts_per_prompt": 3}
    result = run("on-policy", [2, 3], **sizes, whole_groups=True, unscorable=frozenset({1}))
    assert sorted(id for batch in result.ids for id in batch) == [0, 2, 3, 4, 5]
    assert [0, 2] in result.ids or [0, 2, 3, 4, 5] in result.ids


@pytest.mark.parametrize("mode", MODES)
def test_a_round_that_loses_members_is_filled_up(mode: str) -> None:
    """More rollouts are rejected than any surplus covers; whatever cap there is must not hold back what is left."""
    unscorable = frozenset({0, 1, 2, 5, 6, 9, 10, 11, 14})
    sizes = {"slots": 4, "rollouts_per_update": 4, "prompts_per_cohort": 12}
    result = run(mode, [3] * 24, oversubscribe=1.0, unscorable=unscorable, **sizes)
    assert sum(result.sizes) == 15


def test_members_that_fail_do_not_use_up_the_cap_of_their_sets() -> None:
    """Two sets of two fill the cap and lose a member each: what is left of them completes nothing, so a third and a
    fourth set are started for this harvest."""
    sizes = {"rollouts_per_update": 4, "rollouts_per_prompt": 2}
    result = Run(scenario("on-policy", [2] * 6, whole_groups=True, oversubscribe=1.0, **sizes))
    result.engine._lost_after = lambda request: 1 if request.id in (1, 3) else None
    result.to_end()
    assert result.ids[0] == [4, 5, 6, 7]
    assert {event.rollout for event in result.all(events.Rejected)} == {1, 3}
    assert sorted(id for batch in result.ids for id in batch) == [0, 2, 4, 5, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("mode", MODES)
def test_loading_goes_on_when_all_that_was_loaded_is_rejected(mode: str) -> None:
    sizes = {"slots": 1, "rollouts_per_update": 2, "prompts_per_cohort": 2, "max_prompt_tokens": 8}
    result = run(mode, [2] * 8, prompt_tokens=(1, 9, 9, 9, 9, 1, 9, 9), **sizes)
    assert sorted(id for batch in result.ids for id in batch) == [0, 5]


# The staleness bound


@pytest.mark.parametrize("bound", [1, 2, 3])
@pytest.mark.parametrize("mode", ["partial", "partial+planned", "partial+elevator", "partial+lookahead", "april"])
def test_the_harvest_waits_for_what_would_exceed_the_bound(mode: str, bound: int) -> None:
    lengths = [30, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    free = run(mode, lengths, slots=4, rollouts_per_update=2)
    bounded = run(mode, lengths, slots=4, rollouts_per_update=2, max_staleness=bound)
    assert free.run_metrics.staleness_max > bound
    assert bounded.run_metrics.staleness_max == bound
    assert 0 in bounded.ids[bound]
    assert bounded.run_metrics.waste == 0


def test_the_bound_holds_for_the_oldest_member_of_a_sibling_set() -> None:
    sizes = {"slots": 4, "rollouts_per_update": 3, "rollouts_per_prompt": 3, "max_staleness": 1, "epochs": 3}
    result = run("april", [1, 9, 3, 12, 2], redraws=True, whole_groups=True, **sizes)
    ages = [batch.version - version for batch in result.batches for r in batch for version in r.versions]
    assert max(ages) == 1


def test_what_is_ready_and_overdue_is_in_the_batch_beyond_its_size() -> None:
    """Six end together, the first two are taken; with a bound of 1 all the others must be in the next batch."""
    result = run("partial", [2] * 6 + [9] * 6, slots=6, rollouts_per_update=2, max_staleness=1)
    assert result.sizes[:2] == [2, 4]


def test_an_overdue_rollout_is_started_whatever_the_cap_says() -> None:
    """For the last batch of a cohort the cap is off, so all of the next cohort is started ahead. Three of it are ready
    when its turn comes: more than the cap allows, but the fourth must be in the coming update, too."""
    sizes = {"slots": 8, "rollouts_per_update": 2, "prompts_per_cohort": 4, "max_staleness": 1}
    result = run("partial+lookahead", [1, 1, 5, 5, 1, 1, 1, 30], oversubscribe=1.0, **sizes)
    assert result.ids == [[0, 1], [2, 3], [4, 5, 6, 7]]
    assert result.run_metrics.staleness_max == 1


OVERDUE: dict[str, Any] = {"slots": 4, "rollouts_per_update": 2, "max_staleness": 1, "score_wait_seconds": 5}


def run_without_a_score_of_the_overdue_one() -> Run:
    return run("april", [3, *[1] * 11], score_seconds=(NEVER, *[0] * 11), **OVERDUE)


def test_an_overdue_rollout_whose_score_never_comes_is_restarted_once_and_then_rejected() -> None:
    result = run_without_a_score_of_the_overdue_one()
    assert [event.rollout for event in result.all(events.Regenerated)] == [0]
    assert [(event.rollout, event.reason) for event in result.all(events.Rejected)] == [(0, "no score in time, twice")]
    assert result.run_metrics.staleness_max <= 1
    assert result.run_metrics.waste > 0


def test_a_harvest_does_not_wait_for_an_overdue_rollout_that_it_gave_up() -> None:
    """It has no old tokens any more, so no bound asks for it."""
    result = run_without_a_score_of_the_overdue_one()
    (regenerated,) = result.all(events.Regenerated)
    update = next(event for event in result.all(events.Updated) if event.at >= regenerated.at)
    assert update.at == regenerated.at and 0 not in update.rollouts


def test_only_overdue_rollouts_are_restarted_when_a_harvest_waits_for_their_scores() -> None:
    """Rollout 0 is overdue and its score never comes; that of 4 is late, and no bound asks for it."""
    result = run("april", [3, 1, 1, 4, 1, 1, 1], score_seconds=(NEVER, 0, 0, 0, 500, 0, 0), max_updates=2, **OVERDUE)
    assert [event.rollout for event in result.all(events.Regenerated)] == [0]


# Lookahead


LOOKAHEAD = [2, 2, 2, 30, 9, 9, 9, 9, 9, 9, 9, 9]  # the first cohort of four drains for 28 s


def test_lookahead_starts_the_next_cohort_in_slots_that_a_drain_leaves_empty() -> None:
    drained = run("partial", LOOKAHEAD, rollouts_per_update=4, prompts_per_cohort=4)
    ahead = run("partial+lookahead", LOOKAHEAD, rollouts_per_update=4, prompts_per_cohort=4)
    assert (ahead.engine.now(), drained.engine.now()) == (30 + 9, 30 + 9 + 9)
    assert ahead.ids[0] == drained.ids[0] == [0, 1, 2, 3]


def test_lookahead_is_never_in_the_current_cohorts_batch() -> None:
    result = run("partial+lookahead", LOOKAHEAD, rollouts_per_update=2, prompts_per_cohort=4)
    assert [{rollout.cohort for rollout in batch} for batch in result.batches] == [{0}, {0}, {1}, {1}, {2}, {2}]


def test_lookahead_is_one_cohort_deep() -> None:
    result = run("partial+lookahead", LOOKAHEAD, slots=12, rollouts_per_update=4, prompts_per_cohort=4)
    before_first_update = result.events[: result.events.index(result.all(events.Updated)[0])]
    assert [event.cohort for event in before_first_update if isinstance(event, events.Loaded)] == [0, 1]


def test_lookahead_starts_only_when_all_of_the_current_cohort_are_begun() -> None:
    result = run("partial+lookahead", [9] * 4 + [1] * 4, slots=3, rollouts_per_update=2, prompts_per_cohort=4)
    first_ahead = start_order(result).index(4)
    assert set(start_order(result)[:first_ahead]) == {0, 1, 2, 3}


@pytest.mark.parametrize("bound", [1, 2])
def test_lookahead_starts_only_where_the_staleness_bound_can_hold(bound: int) -> None:
    """Cohorts of eight in updates of two: with two or more updates to go, a bound of 1 keeps the slots empty."""
    lengths = [1, 1, 12, 12, 12, 12, 12, 12] * 3
    knobs: dict[str, Any] = {"slots": 8, "rollouts_per_update": 2, "prompts_per_cohort": 8}
    free = run("partial+lookahead", lengths, **knobs)
    bounded = run("partial+lookahead", lengths, max_staleness=bound, **knobs)
    assert free.run_metrics.staleness_max > bound
    assert bounded.run_metrics.staleness_max == bound
    assert bounded.run_metrics.waste == 0


def test_with_overlap_lookahead_counts_the_update_that_is_under_way() -> None:
    """What is started while the learner steps is one version older than what is started in the next harvest."""
    sizes = {"slots": 1, "rollouts_per_update": 1, "prompts_per_cohort": 4, "max_staleness": 1}
    result = run("partial+lookahead", [2] * 12, overlap=True, learner_seconds=5.0, **sizes)
    assert result.run_metrics.staleness_max == 1


@pytest.mark.parametrize("mode", ["on-policy+lookahead", "on-policy+elevator"])
def test_lookahead_in_on_policy_mode_is_a_configuration_error(mode: str) -> None:
    with pytest.raises(ConfigurationError, match="no such mode"):
        strategy_named(mode)


# The elevator


def test_the_elevator_sweeps_from_short_to_long_and_back() -> None:
    """A window of five of ten prompts, read four times: the lower half comes in while the sweep is in the upper."""
    lengths = [5, 1, 4, 2, 3, 9, 6, 8, 7, 10]
    result = run_knowing("partial+elevator", lengths, slots=1, rollouts_per_update=4, prompts_per_cohort=5, epochs=4)
    order = [lengths[event.rollout % 10] for event in result.all(events.Submitted) if not event.prefix]
    up, down = [6, 7, 8, 9, 10], [5, 4, 3, 2, 1]
    assert order == [1, 2, 3, 4, 5, *up, *down, *up, *down, *up, *down, *up]


def test_the_elevators_window_is_topped_up_as_prompts_are_started() -> None:
    result = run("partial+elevator", [3] * 20, slots=4, rollouts_per_update=4, prompts_per_cohort=6)
    assert waiting_after_loads(result) == [6] * 15


@pytest.mark.parametrize("max_wait", [1, 3])
def test_what_has_waited_too_long_for_the_elevator_starts_next(max_wait: int) -> None:
    """One very long prompt, and always shorter ones to be preferred: it starts when its wait is over."""
    lengths = [50] + [2] * 60
    sizes = {"slots": 2, "rollouts_per_update": 2, "prompts_per_cohort": 6}
    result = run_knowing("partial+elevator", lengths, max_wait_updates=max_wait, **sizes)
    before = result.events[: result.events.index(next(e for e in result.all(events.Submitted) if e.rollout == 0))]
    assert sum(isinstance(event, events.Updated) for event in before) == max_wait


@pytest.mark.parametrize("window", [10, None])
def test_the_elevators_own_bound_on_waiting_is_two_full_sweeps_of_its_window(window: int | None) -> None:
    """The longest first in load order: a bound that came too early would start it before shorter ones."""
    lengths = [20, 19, 18, 17, 16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1][: window or 20]
    result = run_knowing("partial+elevator", lengths, slots=1, rollouts_per_update=1, prompts_per_cohort=window)
    assert [length for batch in result.lengths for length in batch] == sorted(lengths)


# The baselines


def test_the_baseline_waits_for_all_of_its_update() -> None:
    result = run("baseline", [9, 1, 2, 3, 1, 1, 1, 8], slots=4, rollouts_per_update=4)
    assert result.ids == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert result.engine.now() == 9 + 8
    assert not result.all(events.Aborted)


def test_longest_first_starts_what_is_expected_to_be_long() -> None:
    lengths = [1, 1, 1, 1, 4]
    plain = run("baseline", lengths, slots=2, rollouts_per_update=5)
    best = run_knowing("baseline+longest-first", lengths, slots=2, rollouts_per_update=5)
    assert (plain.engine.now(), best.engine.now()) == (6, 4)


def test_a_cohort_at_once_gives_several_batches_and_loads_weights_once() -> None:
    sizes = {"slots": 4, "rollouts_per_update": 2, "prompts_per_cohort": 8}
    result = run("cohort-at-once", [3] * 16, weight_update_seconds=10.0, **sizes)
    assert [batch.harvest for batch in result.batches] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [batch.version for batch in result.batches] == list(range(8))
    assert result.run_metrics.staleness_histogram == dict.fromkeys(range(4), 12)
    assert sum(event.phase == "weights" for event in result.all(events.Phase)) == 1


def test_sorting_after_the_fact_splits_a_cohort_by_length() -> None:
    lengths = [9, 1, 8, 2, 7, 3]
    assert run("cohort-at-once", lengths, rollouts_per_update=2).lengths == [[1, 9], [2, 8], [3, 7]]
    assert run("cohort-at-once+sorted", lengths, rollouts_per_update=2).lengths == [[1, 2], [3, 7], [8, 9]]
    assert run("cohort-at-once+sorted-descending", lengths, rollouts_per_update=2).lengths == [[8, 9], [3, 7], [1, 2]]


def test_without_a_cohort_gate_long_prompts_come_last() -> None:
    lengths = [30, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    gated = run("on-policy", lengths, slots=2, rollouts_per_update=2, prompts_per_cohort=4)
    ungated = run("on-policy+ungated", lengths, slots=2, rollouts_per_update=2, prompts_per_cohort=4)
    assert 0 in gated.ids[1]
    assert 0 in ungated.ids[-1]


# Peers' schedules


def test_april_keeps_slots_full_and_resumes_first() -> None:
    result = run("april", [20, 1, 1, 1, 1, 1, 1, 20, 1, 1], slots=3, rollouts_per_update=2)
    for harvest in range(1, len(result.batches)):
        kept = [event.rollout for event in result.all(events.Aborted)]
        resumed = [id for id in started_in(result, harvest) if id in kept]
        assert started_in(result, harvest)[: len(resumed)] == resumed
    assert result.run_metrics.waste == 0


def test_tail_batching_sets_long_prompts_aside_for_a_round_of_their_own() -> None:
    """Rounds of 4 start 5. Every fifth prompt is long: after four short rounds four are set aside, and a long round
    runs exactly those, and loads none."""
    lengths = [1, 1, 1, 1, 9] * 6
    result = run("tail-batching", lengths, slots=8, rollouts_per_update=4)
    steps = [type(event) for event in result.events if isinstance(event, events.Loaded | events.Updated)]
    assert steps[:11] == [events.Loaded, events.Updated] * 4 + [events.Updated, events.Loaded, events.Updated]
    assert [len(started_in(result, harvest)) for harvest in range(5)] == [5, 5, 5, 5, 4]
    assert result.lengths[:5] == [[1] * 4] * 4 + [[9] * 4]
    assert all(rollout.versions == [4] * 9 for rollout in result.batches[4])


@pytest.mark.parametrize("bound", [1, 2, 4])
def test_the_asynchronous_pool_holds_its_bound(bound: int) -> None:
    sizes = {"slots": 6, "rollouts_per_update": 3, "max_staleness": bound}
    result = run("async-pool", [40] + [1, 2, 3] * 20, overlap=True, learner_seconds=2.0, **sizes)
    assert result.run_metrics.staleness_max <= bound
    have_started: set[int] = set()
    trained: set[int] = set()
    for event in result.events:
        if isinstance(event, events.Submitted):
            have_started.add(event.rollout)
        elif isinstance(event, events.Updated):
            trained.update(event.rollouts)
        assert len(have_started - trained) <= (bound + 1) * 3


def test_the_asynchronous_pool_needs_overlap_and_a_bound() -> None:
    with pytest.raises(ConfigurationError, match=r"overlap = False, max_staleness = None"):
        run("async-pool", [1])


def test_with_overlap_the_engine_goes_on_while_the_learner_steps() -> None:
    knobs: dict[str, Any] = {"slots": 4, "rollouts_per_update": 4, "learner_seconds": 6.0, "max_staleness": 2}
    resting = run("april", [3] * 40, **knobs)
    going_on = run("april", [3] * 40, overlap=True, **knobs)
    assert going_on.run_metrics.wall_seconds <= 10 * 6.0 + 3.0, "ten steps of the learner, behind the first responses"
    assert resting.run_metrics.wall_seconds >= 10 * (6.0 + 3.0)
    assert going_on.run_metrics.idle_parts.get("learner", 0.0) == 0.0


# Errors


def test_an_error_of_a_setting_survives_the_way_to_another_process() -> None:
    error = ConfigurationError("slots", 0, "nothing could run", "Use 1.")
    copied = pickle.loads(pickle.dumps(error))
    assert (str(copied), copied.key, copied.fix) == (str(error), "slots", "Use 1.")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"rollouts_per_update": 128, "prompts_per_cohort": 8, "rollouts_per_prompt": 8},
            ["prompts_per_cohort = 8", "8 prompts x 8 rollouts = 64 rollouts", "update of 128", "16 or more"],
        ),
        ({"oversubscribe": 0.9}, ["oversubscribe = 0.9", "1.0"]),
        ({"max_staleness": 0}, ["max_staleness = 0: no token at all may be stale. For 0 use mode = on-policy+planned"]),
        ({"max_staleness": -1}, ["max_staleness = -1", "at least 1"]),
        ({"rollouts_per_update": 0}, ["rollouts_per_update = 0", "at least 1"]),
        ({"max_wait_updates": 0}, ["max_wait_updates = 0"]),
        ({"score_wait_seconds": -1.0}, ["score_wait_seconds = -1.0"]),
        ({"max_retries": -1}, ["max_retries = -1"]),
    ],
)
def test_a_setting_that_cannot_work_is_an_error_with_its_value_and_a_fix(
    settings: dict[str, int | float], words: list[str]
) -> None:
    with pytest.raises(ConfigurationError) as error:
        Schedule(**settings).check_cohort()  # type: ignore[arg-type]
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("mode", "settings", "key"),
    [
        ("on-policy", {"max_staleness": 2}, "max_staleness"),
        ("baseline", {"overlap": True}, "overlap"),
        ("async-pool", {"overlap": True}, "mode"),
    ],
)
def test_a_setting_that_a_mode_cannot_honour_is_an_error(mode: str, settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        run(mode, [1], rollouts_per_update=1, **settings)
    assert error.value.key == key


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("onpolicy", "on-policy"), ("partial-elevator", "partial+elevator"), ("Baseline", "baseline"), ("arpil", "april")],
)
def test_an_unknown_mode_says_which_one_was_meant(typed: str, meant: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"Did you mean {meant.replace('+', '[+]')}\?"):
        strategy_named(typed)


def test_max_updates_ends_the_run_within_a_harvest() -> None:
    result = run("cohort-at-once", [2] * 8, rollouts_per_update=2, max_updates=3)
    assert result.sizes == [2, 2, 2]
    assert result.controller.buffer.ready == 2
    assert result.all(events.Phase)[-1].phase == "end"


def test_a_learner_that_does_not_publish_trains_on_under_the_same_version() -> None:
    result = run("on-policy", [2] * 8, rollouts_per_update=2, slots=2, silent_updates=frozenset({0, 2}))
    assert [batch.version for batch in result.batches] == [0, 0, 1, 1]


def test_times_in_the_log_never_go_back() -> None:
    result = run("partial", [5, 1, 3, 2, 4], slots=2, rollouts_per_update=2, score_seconds=(0.3, 1.7))
    assert all(first.at <= second.at for first, second in pairwise(result.events))


@pytest.mark.parametrize("mode", sorted(set(scenarios.MODES) - set(GATED)))
def test_two_epochs_of_a_prompt_are_two_groups(mode: str) -> None:
    """40 prompts in cohorts of 64: without a gate, the second epoch begins in the first cohort."""
    done = run(
        mode, [3 + 7 * i % 23 for i in range(40)], slots=32, epochs=2, shuffle=True, prompts_per_cohort=64,
        rollouts_per_update=32, rollouts_per_prompt=2, whole_groups=True,
        max_staleness=2 if mode == "async-pool" else None, overlap=mode == "async-pool",
    )  # fmt: skip
    groups: dict[int, list[Rollout]] = {}
    for batch in done.batches:
        assert set(Counter(rollout.group for rollout in batch).values()) == {2}, "a batch holds whole groups"
        for rollout in batch:
            groups.setdefault(rollout.group, []).append(rollout)
    assert len(groups) == 2 * 40 and all(len({r.prompt.id for r in members}) == 1 for members in groups.values())
    shared = Counter((members[0].prompt.id, members[0].cohort) for members in groups.values())
    assert max(shared.values()) == 2, "prompt and cohort do not tell the epochs apart"
