"""Expected length: what is sensed, in the order of trust that the rules state."""

import json
from statistics import median_high
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from scenarios import run
from sortedrl.core import Prompt, Rollout, Segment, SensedLengths, events, expectation
from sortedrl.core.buffer import Buffer
from sortedrl.core.expectation import expected_length


def rollout(prompt: str, length: int = 0, *, group: int = 0, reached: int = 0) -> Rollout:
    segments = [Segment(range(length), range(length), 0)] if length else []
    return Rollout(group, Prompt(prompt, ()), 0, 0, 0, 0, segments=segments, reached=reached)


def test_a_prompt_of_which_nothing_is_known_is_expected_at_the_median_so_far() -> None:
    sensed = SensedLengths(first_guess=500)
    assert sensed.estimate(rollout("new")) == 500
    for length in (10, 1000, 30):
        sensed.observe(rollout("other", length))
    assert sensed.estimate(rollout("new")) == 30


def test_a_finished_sibling_is_a_better_guess_than_the_median() -> None:
    sensed = SensedLengths()
    for length in (1, 1, 1, 1):
        sensed.observe(rollout("other", length))
    sensed.observe(rollout("p", 100))
    sensed.observe(rollout("p", 200))
    assert sensed.estimate(rollout("p")) == 150


def test_the_last_epoch_is_a_better_guess_than_siblings() -> None:
    sensed = SensedLengths({"p": 70.0})
    sensed.observe(rollout("p", 100))
    assert sensed.estimate(rollout("p")) == 70


def test_this_epochs_siblings_are_the_next_ones_last_epoch() -> None:
    """All of them in one cohort: without a gate, two epochs can meet there."""
    sensed = SensedLengths({"p": 70.0})
    sensed.observe(rollout("p", 100, group=0))
    sensed.observe(rollout("p", 300, group=0))
    assert sensed.estimate(rollout("p", group=4)) == 200
    sensed.observe(rollout("p", 900, group=4))
    assert sensed.estimate(rollout("p", group=4)) == 200
    assert sensed.estimate(rollout("p", group=9)) == 900


def test_a_rollout_that_was_stopped_is_expected_to_go_beyond_what_it_reached() -> None:
    sensed = SensedLengths({"p": 70.0})
    assert expected_length(rollout("p", reached=50), sensed) == 70
    assert expected_length(rollout("p", reached=100), sensed) == 130
    assert expected_length(rollout("p", 100), sensed) == 130


def test_a_shorter_attempt_does_not_lower_what_a_rollout_has_reached() -> None:
    buffer, regenerated = Buffer(), rollout("p")
    buffer.load([regenerated], 0, whole_groups=False, key=lambda one: (one.id,))
    for length in (100, 40):
        buffer.start()
        regenerated.append(Segment(range(length), range(length), 0))
        buffer.put_back(regenerated, keep=False, key=lambda one: (one.id,))
    assert expected_length(regenerated, SensedLengths(first_guess=70)) == 130


def test_a_forgotten_prompt_is_unknown_again() -> None:
    sensed = SensedLengths({"p": 70.0}, first_guess=5)
    sensed.forget("p")
    sensed.forget("never seen")
    assert sensed.estimate(rollout("p")) == 5


def test_a_sibling_set_is_expected_at_its_longest_member() -> None:
    """Sets of two; one member of the second set is stopped at 9 tokens, its sibling has none yet."""
    result = run("partial+planned", [9, 30], slots=3, rollouts_per_update=2, rollouts_per_prompt=2, whole_groups=True)
    resumed = next(request for request in result.engine.requests if request.id == 2 and request.prefix)
    assert resumed.prefix_length == 9
    last = next(rollout for rollout in result.batches[-1] if rollout.id == 3)
    assert last.expected >= 1.3 * 9


def test_lengths_are_learned_from_epoch_to_epoch() -> None:
    lengths = [40, 1, 35, 2, 30, 3, 25, 4]
    knobs = {"slots": 4, "rollouts_per_update": 4, "prompts_per_cohort": 8}
    first = run("partial+planned", lengths, **knobs)
    third = run("partial+planned", lengths, epochs=3, **knobs)
    assert third.lengths[-2:] == [[1, 2, 3, 4], [25, 30, 35, 40]]
    assert third.run_metrics.sortedness > first.run_metrics.sortedness


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(0, 30))
def test_the_median_looks_back_on_the_recent_past_and_survives_a_checkpoint(lengths: list[int], cut: int) -> None:
    sensed, restored = SensedLengths(), SensedLengths()
    with patch.object(expectation, "RECENT", 8):
        for length in lengths[:cut]:
            sensed.observe(rollout("p", length))
        restored.restore(json.loads(json.dumps(sensed.state())))
        for length in lengths[cut:]:
            sensed.observe(rollout("p", length))
            restored.observe(rollout("p", length))
    assert sensed.median == restored.median == median_high(lengths[-8:])
    assert sensed.state() == restored.state()


def test_what_an_epoch_taught_is_known_when_the_last_epoch_begins_before_its_end() -> None:
    """Without a cohort gate the last epoch is loaded while rollouts of the one before it are still to be trained on."""
    lengths = [5, 1, 4, 2, 3, 9, 6, 8, 7, 10]
    result = run("partial+elevator", lengths, slots=1, rollouts_per_update=4, prompts_per_cohort=5, epochs=2)
    finished: set[int] = set()
    known = 0
    for event in result.events:
        if isinstance(event, events.Finished):
            finished.add(event.rollout)
        elif isinstance(event, events.Submitted) and event.rollout - len(lengths) in finished and not event.prefix:
            assert event.expected == lengths[event.rollout - len(lengths)]
            known += 1
    assert known == len(lengths)
