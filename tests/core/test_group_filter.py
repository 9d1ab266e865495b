"""Dynamic sampling: random runs with filters hold to the rules, and single rules by example."""

from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from random_runs import case_of, play
from scenarios import Run, run, scenario
from schedule_rules import check_outcome
from sortedrl.core import ConfigurationError, Rollout
from sortedrl.core.dynamic_sampling import DynamicSampling
from sortedrl.core.events import Aborted, Filtered, Loaded, RunBegan
from sortedrl.core.group_filter import FilterFailed, GroupFilter, TooManyFiltered
from sortedrl.core.strategies.base import Strategy, update_size_of

SEEDS_PER_TEST = 250
BLOCKS = range(8)


@pytest.mark.parametrize("block", BLOCKS)
def test_random_runs_with_filters_hold_to_the_rules(block: int) -> None:
    """Every second one with several turns. Fresh ones by the thousand: benchmarks/random_schedules.py --filter."""
    faults: Counter[str] = Counter()
    for seed in range(block * SEEDS_PER_TEST, (block + 1) * SEEDS_PER_TEST):
        try:
            outcome = play(case_of(seed, with_turns=seed % 2 == 1, with_filter=True))
            check_outcome(outcome)
        except Exception as error:
            turns = "--turns " if seed % 2 else ""
            error.add_note(f"reproduce: python benchmarks/random_schedules.py --filter {turns}--reproduce {seed}")
            raise
        faults += outcome.faults
    assert faults["died and resumed from a checkpoint"] and faults["interrupted and resumed"], faults


GROUPS = {"rollouts_per_prompt": 2, "whole_groups": True, "filter_groups": "equal_rewards", "rollouts_per_update": 4}


def test_the_baseline_starts_what_it_will_probably_need_and_waits_for_all_of_it() -> None:
    """Two of four prompts are filtered, so from the second update on a round has twice the rollouts."""
    kinds = ("mixed", "right", "mixed", "wrong")
    done = run("baseline", [3] * 40, slots=40, group_rewards=kinds, prompts_per_cohort=2, **GROUPS)
    assert all(size >= 4 for size in done.sizes[:-1])
    rounds = [
        sum(e.rollouts for e in done.all(Loaded) if e.at == at) for at in sorted({e.at for e in done.all(Loaded)})
    ]
    assert rounds[0] == 4 and 8 in rounds
    assert not done.all(Aborted)


def test_more_is_loaded_as_soon_as_the_update_cannot_be_filled_not_after_the_drain() -> None:
    done = run("baseline", [1, 9, 9, 9], group_rewards=("right", "mixed"), slots=8, prompts_per_cohort=2, **GROUPS)
    second = done.all(Loaded)[1]
    assert second.at == done.all(Filtered)[0].at == 1.0  # while the other group runs for 8 more seconds


def test_a_cohort_that_filtering_leaves_short_is_joined_by_the_next_one() -> None:
    """Cohorts of four groups, one of them filtered: the second update has the last group of the first cohort."""
    kinds = ("mixed", "mixed", "mixed", "right")
    for mode in ("on-policy", "partial", "partial+planned", "partial+lookahead"):
        done = run(mode, [2, 2, 9, 1, 2, 2, 2, 2], group_rewards=kinds, slots=8, prompts_per_cohort=4, **GROUPS)
        cohorts = [sorted({rollout.cohort for rollout in batch}) for batch in done.batches]
        assert cohorts[:2] == [[0], [0, 1]], (mode, cohorts)
        assert done.sizes[:-1] == [4] * (len(done.sizes) - 1) or mode == "on-policy"


def test_the_elevator_loses_no_slot_time_to_filtered_groups() -> None:
    lengths = [1 + i * 7 % 23 for i in range(200)]
    plain = run("partial+elevator", lengths, slots=8, prompts_per_cohort=8, **{**GROUPS, "filter_groups": None})
    kinds = ("mixed", "right")
    filtered = run("partial+elevator", lengths, slots=8, prompts_per_cohort=8, group_rewards=kinds, **GROUPS)
    assert filtered.run_metrics.filtered == 200 and filtered.run_metrics.trained == 200
    assert filtered.run_metrics.generated_tokens == plain.run_metrics.generated_tokens
    assert filtered.run_metrics.seconds <= 1.03 * plain.run_metrics.seconds


def test_reasons_tell_right_from_wrong_by_the_rewards_seen_so_far() -> None:
    kinds = ("right", "mixed", "right", "wrong", "half")
    done = run("baseline", [1] * 5, group_rewards=kinds, slots=1, **GROUPS)
    assert [(e.reason, e.reward) for e in done.all(Filtered)] == [
        ("equal", 1.0),  # the first reward of all: nothing to compare with
        ("right", 1.0),
        ("wrong", 0.0),
        ("equal", 0.5),
    ]
    assert done.run_metrics.filtered_reasons == {"equal": 4, "right": 2, "wrong": 2}


def test_a_group_of_one_is_left_by_rejections_and_teaches_nothing() -> None:
    done = run("partial", [3, 3], group_rewards=("mixed",), unscorable=frozenset({1}), **GROUPS)
    assert [(e.rollouts, e.reason) for e in done.all(Filtered)] == [((0,), "too few members")]
    assert done.ids == [[2, 3]]


@pytest.mark.parametrize("kind, words", [("right", "too easy"), ("wrong", "too hard")])
def test_a_run_that_filters_nearly_everything_ends_and_says_why(kind: str, words: str) -> None:
    with pytest.raises(TooManyFiltered, match=words):
        run("partial+elevator", [2] * 60, group_rewards=("mixed", *[kind] * 20), **GROUPS)


def test_a_filter_may_be_a_function_and_its_errors_name_it() -> None:
    def keeps_long_ones(group: Sequence[Rollout]) -> bool:
        return len(group[0]) > 2

    plan = scenario("partial", [1, 3, 2, 4], rollouts_per_update=1)
    found = Run(plan, filter_groups=keeps_long_ones).to_end()
    assert sorted(found.lengths) == [[3], [4]]
    assert {e.reason for e in found.all(Filtered)} == {found.all(RunBegan)[0].settings["filter_groups"]}
    with pytest.raises(ConfigurationError, match="it is a str, not a function"):
        Run(plan, filter_groups="equal_rewards")  # type: ignore[arg-type]
    with pytest.raises(FilterFailed, match="returned None"):
        Run(plan, filter_groups=lambda group: None).to_end()  # type: ignore[arg-type, return-value]
    with pytest.raises(FilterFailed, match="KeyError: 'reference'"):
        Run(plan, filter_groups=lambda group: {}["reference"]).to_end()


def test_filtered_rewards_go_with_the_next_batch_also_after_a_resume() -> None:
    plan = scenario("partial", [1, 2, 3, 4, 5, 6], group_rewards=("right", "mixed"), slots=2, **GROUPS)
    first = Run(plan).updates(1)
    state = first.checkpoint()
    second = Run(plan, state=state, last_time=first.engine.now()).to_end()
    whole = Run(plan).to_end()
    rewards = [batch.filtered_rewards for batch in (*first.batches, *second.batches)]
    assert rewards == [batch.filtered_rewards for batch in whole.batches]
    assert sum(map(len, rewards)) == 6 - len(whole.controller._state.filtered_rewards)
    assert all(reward == (0, 1.0) for of_batch in rewards for reward in of_batch)


def breaks_the_gate(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DynamicSampling, "note_joined", lambda self: None)


def keeps_everything(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GroupFilter, "decide", lambda self, group: "")


def hands_out_what_is_there(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Strategy, "next_update_size", lambda self, s: update_size_of(self.rollouts_left(s), s.update_size))


@pytest.mark.parametrize("breaks", [breaks_the_gate, keeps_everything, hands_out_what_is_there])
def test_the_rules_notice_a_scheduler_that_breaks_them(
    breaks: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(300):
            check_outcome(play(case_of(seed, with_filter=True)))


def test_a_prompt_whose_group_was_filtered_is_skipped_in_most_later_epochs() -> None:
    kinds = ("mixed", "right")
    done = run("partial+elevator", [3] * 40, group_rewards=kinds, epochs=6, revisit_filtered=0.25, **GROUPS)
    visits = Counter(prompt for event in done.all(Loaded) for prompt in event.prompts)
    assert all(visits[f"p{i}"] == 6 for i in range(0, 40, 2))
    mean = sum(visits[f"p{i}"] for i in range(1, 40, 2)) / 20
    assert 1.5 < mean < 3.0  # once, and then one of four times
    metrics = done.run_metrics
    assert metrics.skipped == 240 - sum(visits.values()) and metrics.skipped_age_max > 1
    assert metrics.skipped_fraction == metrics.skipped / 240
    with pytest.raises(ConfigurationError, match="no group is filtered"):
        run("partial", [1], revisit_filtered=0.5)
