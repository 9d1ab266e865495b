"""Random runs with faults hold to the rules, and the rules notice what breaks them."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from random_runs import Case, Ending, Outcome, case_of, play, resumed_with_other_settings
from scenarios import scenario
from schedule_rules import check_outcome
from sortedrl.core import Event, Request, Rollout, events
from sortedrl.core.buffer import Buffer
from sortedrl.core.generation import Generation

SEEDS_PER_TEST = 50
DROPS = (events.Regenerated, events.Rejected)
QUICK_BLOCKS = 8  # the schedules with turns (test_turn_schedules.py) have the same faults, and more
BLOCKS = [pytest.param(n, marks=[] if n < QUICK_BLOCKS else [pytest.mark.slow]) for n in range(14)]


@pytest.mark.parametrize("block", BLOCKS)
def test_random_runs_with_deaths_and_interrupts_hold_to_the_rules(block: int) -> None:
    """The same seeds in every run; fresh ones by the thousand: benchmarks/random_schedules.py."""
    for seed in range(block * SEEDS_PER_TEST, (block + 1) * SEEDS_PER_TEST):
        try:
            check_outcome(play(case_of(seed)))
        except Exception as error:
            error.add_note(f"reproduce: python benchmarks/random_schedules.py --reproduce {seed}")
            raise


def test_random_runs_that_are_resumed_with_other_slots_hold_to_the_rules() -> None:
    changed = 0
    for seed in range(100):
        case = case_of(seed, with_turns=seed % 2 == 0)
        outcome = play(replace(case, slots_of_later_lives=(1 + seed % 5, 2 + seed % 7)))
        check_outcome(outcome)
        changed += sum(isinstance(event, events.SlotsChanged) for event in outcome.raw)
    assert changed > 20


def test_random_runs_that_are_resumed_with_other_settings_hold_to_the_rules() -> None:
    """With those that may change: what they do not allow is regenerated or rejected, and every request has room."""
    regenerated = 0
    for seed in (*range(300), 955):  # there the next cohort has rollouts that would be too old
        outcome = play(resumed_with_other_settings(case_of(seed, with_turns=seed % 3 == 0)))
        check_outcome(outcome)
        regenerated += sum("the checkpoint has" in event.reason for event in outcome.raw if isinstance(event, DROPS))
    assert regenerated > 100


def test_random_runs_with_several_tokens_per_step_hold_to_the_rules() -> None:
    """As with drafts."""
    for seed in range(200):
        case = case_of(seed, with_turns=seed % 2 == 0)
        check_outcome(play(replace(case, tokens_per_step=2 + seed % 3)))


@pytest.mark.parametrize("seed", [1344249316395445365])
def test_runs_that_once_broke_a_rule(seed: int) -> None:
    """A resumed clock that rounding took back."""
    check_outcome(play(case_of(seed)))


def test_a_seed_gives_the_same_run() -> None:
    for seed in range(10):
        assert play(case_of(seed)).raw == play(case_of(seed)).raw


def outcome_of(mode: str = "partial", *endings: Ending) -> Outcome:
    """A run of groups over two epochs, with stops, resumes and stale tokens."""
    sizes = {"slots": 3, "rollouts_per_update": 4, "rollouts_per_prompt": 2, "prompts_per_cohort": 4, "epochs": 2}
    bound = None if mode == "on-policy" else 3
    plan = scenario(mode, [7, 1, 12, 2, 5, 9], whole_groups=True, max_staleness=bound, learner_seconds=1.0, **sizes)
    return play(Case(seed=0, scenario=plan, saves=(True,), endings=endings))


def first(outcome: Outcome, kind: type[Event]) -> int:
    return next(place for place, event in enumerate(outcome.log) if isinstance(event, kind))


def put(outcome: Outcome, place: int, *new: Event) -> None:
    outcome.log[place : place + 1] = new
    outcome.raw = list(outcome.log)


def trains_twice(outcome: Outcome) -> None:
    place = first(outcome, events.Updated)
    update = outcome.log[place]
    assert isinstance(update, events.Updated)
    put(outcome, place, update, update._replace(update=update.update + 1))


def loses_a_rollout(outcome: Outcome) -> None:
    place = first(outcome, events.Updated)
    update = outcome.log[place]
    assert isinstance(update, events.Updated)
    put(outcome, place, update._replace(**{name: getattr(update, name)[1:] for name in update._fields[4:]}))


def goes_back_in_time(outcome: Outcome) -> None:
    place = first(outcome, events.Updated)
    put(outcome, place, outcome.log[place]._replace(at=-1.0))


def exceeds_the_budget(outcome: Outcome) -> None:
    place = first(outcome, events.Finished)
    finished = outcome.log[place]
    assert isinstance(finished, events.Finished)
    put(outcome, place, finished._replace(made=finished.made + 100, length=finished.length + 100))


def takes_a_taken_slot(outcome: Outcome) -> None:
    place = [i for i, event in enumerate(outcome.log) if isinstance(event, events.Started)][1]
    put(outcome, place, outcome.log[place]._replace(slot=0))  # type: ignore[call-arg]


def reads_a_prompt_twice(outcome: Outcome) -> None:
    place = first(outcome, events.Loaded)
    loaded = outcome.log[place]
    assert isinstance(loaded, events.Loaded)
    put(outcome, place, loaded._replace(prompts=(loaded.prompts[1], *loaded.prompts[1:])))


def merges_two_epochs_of_a_prompt(outcome: Outcome) -> None:
    """Rollouts of the first batch are handed out with a sibling of the same prompt's other reading."""
    batch = outcome.batches[0]
    other = next(r for b in outcome.batches[1:] for r in b if r.prompt.id == batch.rollouts[0].prompt.id)
    outcome.batches[0] = replace(batch, rollouts=(other, *batch.rollouts[1:]))


def hands_out_other_tokens(outcome: Outcome) -> None:
    outcome.batches[0].rollouts[-1].segments[0].tokens = [5] * len(outcome.batches[0].rollouts[-1].segments[0].tokens)


def hides_stale_tokens(outcome: Outcome) -> None:
    place = first(outcome, events.Published)
    published = outcome.log[place]
    assert isinstance(published, events.Published)
    put(outcome, place, published._replace(version=published.version + 1))


@pytest.mark.parametrize(
    "damage",
    [
        trains_twice,
        loses_a_rollout,
        goes_back_in_time,
        exceeds_the_budget,
        takes_a_taken_slot,
        reads_a_prompt_twice,
        merges_two_epochs_of_a_prompt,
        hands_out_other_tokens,
        hides_stale_tokens,
    ],
)
def test_the_rules_notice(damage: Callable[[Outcome], None]) -> None:
    outcome = outcome_of()
    check_outcome(outcome)
    damage(outcome)
    with pytest.raises(AssertionError):
        check_outcome(outcome)


def test_the_rules_notice_a_controller_that_gives_a_resumed_rollout_its_whole_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = Generation._request

    def generous(self: Generation, rollout: Rollout) -> Request:
        return request(self, rollout)._replace(max_new_tokens=100)

    monkeypatch.setattr(Generation, "_request", generous)
    failures = 0
    for seed in range(60):
        try:
            check_outcome(play(case_of(seed)))
        except AssertionError:
            failures += 1
    assert failures


def test_the_rules_notice_a_buffer_that_keeps_tokens_on_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    put_back = Buffer.put_back
    monkeypatch.setattr(
        Buffer, "put_back", lambda self, rollout, *, keep, key: put_back(self, rollout, keep=True, key=key)
    )
    with pytest.raises((AssertionError, RuntimeError)):
        check_outcome(outcome_of("on-policy"))


@pytest.mark.parametrize("dies", [True, False])
def test_a_run_that_ends_again_and_again_loses_nothing(dies: bool) -> None:
    outcome = outcome_of("partial", *(Ending(calls, dies) for calls in (12, 9, 8, 10)))
    check_outcome(outcome)
    assert outcome.faults["engine died" if dies else "interrupted and resumed"] == 4
    assert (outcome.faults["died and resumed from a checkpoint"] > 0) == dies
