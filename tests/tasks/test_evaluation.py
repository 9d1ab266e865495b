from __future__ import annotations

import math
import random
from itertools import combinations

import pytest

from sortedrl.tasks.evaluation import (
    Evaluation,
    bootstrap,
    mean_at_k,
    mean_parts,
    paired_difference,
    pass_at_k,
    pass_probability,
    wilson,
)


@pytest.mark.parametrize("samples", [1, 2, 5, 7])
def test_pass_probability_is_the_share_of_subsets_with_a_right_sample(samples: int) -> None:
    for right in range(samples + 1):
        outcomes = [True] * right + [False] * (samples - right)
        for k in range(1, samples + 1):
            subsets = list(combinations(outcomes, k))
            assert pass_probability(samples, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_wilson_gives_the_textbook_interval() -> None:
    estimate = wilson(8, 10)
    assert estimate.value == 0.8
    assert estimate.low == pytest.approx(0.4902, abs=1e-4)
    assert estimate.high == pytest.approx(0.9433, abs=1e-4)


def test_one_sample_per_problem_gives_wilsons_interval() -> None:
    correct = [[True]] * 30 + [[False]] * 10
    assert mean_at_k(correct) == wilson(30, 40) == pass_at_k(correct, 1)


def test_bootstrap_interval_is_that_of_the_mean() -> None:
    draw = random.Random(3)
    scores = [draw.random() for _ in range(400)]
    estimate = bootstrap(scores)
    standard_error = math.sqrt(1 / 12 / 400)
    assert estimate.value == pytest.approx(sum(scores) / 400)
    assert estimate.high - estimate.low == pytest.approx(2 * 1.96 * standard_error, rel=0.1)
    assert estimate == bootstrap(scores)  # the same data, the same interval


def test_bootstrap_resamples_problems_not_samples() -> None:
    alike = [[True] * 8] * 20 + [[False] * 8] * 20  # 320 samples that carry the news of 40
    estimate = mean_at_k(alike)
    assert estimate.high - estimate.low > 0.25


def test_all_right_is_not_certainty() -> None:
    estimate = mean_at_k([[True, True]] * 20)
    assert estimate.value == estimate.high == 1.0
    assert 0.8 < estimate.low < 0.9


def test_pass_at_k_grows_with_k_and_starts_at_the_mean() -> None:
    draw = random.Random(0)
    correct = [[draw.random() < 0.3 for _ in range(8)] for _ in range(50)]
    values = [pass_at_k(correct, k).value for k in (1, 2, 4, 8)]
    assert values[0] == pytest.approx(mean_at_k(correct).value)
    assert values == sorted(values)
    assert values[-1] == pytest.approx(sum(map(any, correct)) / 50)


def test_pairing_finds_a_gain_that_unpaired_intervals_miss() -> None:
    draw = random.Random(1)
    before = [[draw.random() < 0.5] for _ in range(200)]
    after = [[row[0] or index % 10 == 0] for index, row in enumerate(before)]
    gain = paired_difference(before, after)
    assert gain.low > 0
    assert mean_at_k(after).low < mean_at_k(before).high


@pytest.mark.parametrize(("before", "after"), [(False, False), (True, True), (False, True), (True, False)])
def test_the_same_change_of_every_problem_is_not_certainty(before: bool, after: bool) -> None:
    """With 20 problems, up to 16 % of all problems may change in another way (Wilson)."""
    gain = paired_difference([[before]] * 20, [[after]] * 20)
    assert gain.value == int(after) - int(before)
    assert -1 <= gain.low <= gain.value <= gain.high <= 1
    assert gain.high - gain.low == pytest.approx(2 * 0.161, abs=1e-3)
    assert paired_difference([[before]] * 2000, [[after]] * 2000).low == pytest.approx(gain.value, abs=5e-3)


def test_gain_pairs_problems_by_id() -> None:
    before = Evaluation.of({"a": [True, True], "b": [False, False]})
    after = Evaluation.of({"b": [False, True], "a": [True, True]})
    assert after.gain_over(before).value == 0.25
    with pytest.raises(ValueError, match="1 are in only one, for example 'c'"):
        after.gain_over(Evaluation.of({"a": [True, True], "b": [True, True], "c": [True, True]}))


def test_ragged_and_empty_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="between 1 and 2 samples"):
        Evaluation.of({"a": [True], "b": [True, False]})
    with pytest.raises(ValueError, match="at least one problem"):
        Evaluation.of({})
    with pytest.raises(ValueError, match="pass@3: k must be between 1 and the number of samples per problem, 2"):
        Evaluation.of({"a": [True, False]}).pass_at(3)


def test_parts_of_rewards_are_averaged_over_the_rewards_that_have_them() -> None:
    assert mean_parts([{"asked": 1.0, "turns": 3.0}, {"asked": 0.0}, {}]) == {"asked": 0.5, "turns": 3.0}
    assert mean_parts([]) == {}
