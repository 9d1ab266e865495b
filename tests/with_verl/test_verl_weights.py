"""The check that the servers have the learner's weights, without Ray. A whole job is in test_verl_job.py."""

import math

import pytest
from verl_config import compose

from sortedrl.core.rollout import Prompt, Rollout, Segment
from sortedrl.engines.checked_weights import WeightsDiffer
from sortedrl.integrations.verl import weight_check
from sortedrl.integrations.verl.settings import settings_of
from sortedrl.integrations.verl.weight_check import (
    MOST_RESPONSES,
    MOST_UNCHECKED,
    Fresh,
    OtherRollouts,
    check_weights,
    fresh_responses,
)


def rollout(*segments: tuple[int, int], logprob: float = -1.0) -> Rollout:
    """Segments as (version, tokens)."""
    made = [Segment([7] * count, [logprob] * count, version) for version, count in segments]
    return Rollout(0, Prompt("p", [1]), 0, 0, 0, 0, segments=made)


def test_only_tokens_of_the_current_version_are_compared() -> None:
    several = rollout((3, 20), (-1, 5), (4, 16))
    (fresh,) = fresh_responses([(several, ["a"]), (rollout((3, 50)), ["b"])], version=4)
    assert fresh.key == "a" and fresh.places == list(range(25, 41))
    logprobs = [-9.0] * 25 + [-1.01] * 16  # stale tokens and those of the environment may differ
    assert check_weights([fresh], [several.tokens], [logprobs]) == pytest.approx(0.01)
    with pytest.raises(WeightsDiffer, match=r"0\.3 nats per token .* in 1 of 1 samples"):
        check_weights([fresh], [several.tokens], [[-1.0] * 25 + [-1.3] * 16])


def test_responses_that_a_loop_edited_or_split_are_not_compared() -> None:
    one = rollout((0, 20))
    assert not fresh_responses([(one, ["a", "b"])], version=0)
    assert check_weights(fresh_responses([(one, ["a"])], 0), [[8] * 20], [[-5.0] * 20]) is None


def test_certain_tokens_hide_nothing_and_short_responses_are_taken_together() -> None:
    certain = rollout((0, 90), logprob=-0.001)
    fresh = fresh_responses([(certain, [str(i)]) for i in range(4)], version=0)
    tokens = [certain.tokens] * 4
    assert check_weights(fresh, tokens, [[-0.002] * 90] * 4) is None, "nothing to tell weights apart by"
    with pytest.raises(WeightsDiffer, match="in 1 of 1 samples"):
        check_weights(fresh, tokens, [[-0.002] * 85 + [-2.0] * 5] * 4)


@pytest.mark.parametrize("wrong", [-1.3, math.nan])
def test_one_server_of_several_is_found_and_a_few_tokens_are_not_enough(wrong: float) -> None:
    fresh = fresh_responses([(rollout((0, 20)), [str(i)]) for i in range(16)], version=0)
    tokens, right = [[7] * 20] * 16, [-1.0] * 20
    assert check_weights(fresh, tokens, [[-8.0] * 9 + right[9:]] * 16) == 0.0
    assert check_weights(fresh, tokens, [[wrong] * 20, *[right] * 15]) == 0.0
    with pytest.raises(WeightsDiffer, match="in 2 of 16 samples"):
        check_weights(fresh, tokens, [[wrong] * 20, [wrong] * 20, *[right] * 14])


class Finished:
    """Rollouts that have tokens of the current version from the n-th look on."""

    def __init__(self, looks: int, difference: float | None = 0.01) -> None:
        self.looks, self.difference = looks, difference
        self.looked = 0

    def find(self) -> list[Fresh]:
        self.looked += 1
        return [Fresh("a", [7], [-1.0], [0])] if self.looked >= self.looks else []

    def compare(self, fresh: list[Fresh]) -> float | None:
        assert fresh
        return self.difference


def test_with_overlap_other_rollouts_are_checked_if_the_batch_has_nothing_to_compare() -> None:
    finished = Finished(looks=1)
    others = OtherRollouts(finished.find, finished.compare)
    assert others.check(0.02) == 0.02 and not finished.looked
    assert others.check(None) == 0.01


@pytest.mark.parametrize("difference", [0.01, None])
def test_a_check_is_waited_for_only_after_updates_without_one(
    difference: float | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(weight_check, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(weight_check, "MOST_SECONDS", 0.2)
    finished = Finished(looks=20, difference=difference)
    others = OtherRollouts(finished.find, finished.compare)
    for looked in range(1, 1 + MOST_UNCHECKED):
        assert others.check(None) is None and finished.looked == looked
    assert others.check(None) == difference, "too few tokens to compare do not hold up the run for longer"
    assert finished.looked >= 20
    assert ("not checked in the last 4 updates" in caplog.text) == (difference is None)


def test_a_large_update_is_checked_in_part() -> None:
    fresh = fresh_responses([(rollout((0, length)), [str(length)]) for length in range(1, 200)], version=0)
    lengths = [len(response.tokens) for response in fresh]
    assert len(fresh) <= MOST_RESPONSES and lengths[0] < 10 and lengths[-1] > 190


@pytest.mark.parametrize(
    "cut", ["algorithm.rollout_correction.bypass_mode=True", "actor_rollout_ref.rollout.top_p=0.9",
            "actor_rollout_ref.rollout.top_k=20"],
)  # fmt: skip
def test_log_probabilities_that_cannot_be_compared_are_not(cut: str) -> None:
    assert settings_of(compose("partial")).checks_weights
    assert not settings_of(compose("partial", cut)).checks_weights
