import math
import random
from itertools import combinations

import pytest

from sortedrl.studies.compare.paired import sign_test
from sortedrl.tasks.evaluation import (
    Estimate,
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


def gain_of(better: int, worse: int, problems: int) -> Estimate:
    """With one sample per problem."""
    same = problems - better - worse
    return paired_difference(
        [[False]] * better + [[True]] * worse + [[True]] * same, [[True]] * better + [[False]] * worse + [[True]] * same
    )


@pytest.mark.parametrize("problems", [50, 500])
def test_a_few_problems_show_a_gain_only_where_a_sign_test_does(problems: int) -> None:
    for better in range(20):
        for worse in range(min(better, 20 - better)):
            gain = gain_of(better, worse, problems)
            assert gain.low <= gain.value <= gain.high
            p = sign_test(better, worse)
            if not 0.05 <= p < 0.08:  # the two need not agree on the brink
                assert (gain.low > 0) == (p < 0.05), (better, worse)
            mirrored = gain_of(worse, better, problems)
            assert (mirrored.low, mirrored.high) == pytest.approx((-gain.high, -gain.low))


@pytest.mark.parametrize(("differing", "better"), [(2, 0.8), (4, 0.9), (4, 1.0), (6, 0.75), (8, 0.5)])
def test_the_interval_of_a_gain_holds_its_95_percent_if_few_problems_differ(differing: float, better: float) -> None:
    """Of 100 problems, `differing` differ on average. The bootstrap alone had 0.84 to 0.96."""
    up, down = differing * better / 100, differing * (1 - better) / 100
    covered = 0.0
    for ups in range(20):
        for downs in range(20 - ups):
            probability = (
                math.comb(100, ups)
                * math.comb(100 - ups, downs)
                * up**ups
                * down**downs
                * (1 - up - down) ** (100 - ups - downs)
            )
            if probability > 1e-7:
                gain = gain_of(ups, downs, 100)
                covered += probability * (gain.low <= up - down <= gain.high)
    assert covered > 0.94


def test_a_few_scores_that_differ_are_no_reason_for_a_narrow_interval() -> None:
    """A percentile bootstrap would be [0, 0.035]: 0 is impossible, and four times the value is not."""
    correct = [[True, False]] * 3 + [[False, False]] * 97
    estimate = mean_at_k(correct)
    assert estimate.value == 0.015
    assert 0 < estimate.low < 0.01 and 0.05 < estimate.high < 0.07
    mirrored = mean_at_k([[not sample for sample in row] for row in correct])
    assert (mirrored.low, mirrored.high) == pytest.approx((1 - estimate.high, 1 - estimate.low))


@pytest.mark.parametrize("samples", [1, 2, 4])
def test_an_interval_contains_its_value_and_only_possible_ones(samples: int) -> None:
    draw = random.Random(5)
    for _ in range(100):
        problems = draw.randint(1, 19)
        chance = draw.choice([0.02, 0.3, 0.97])
        before, after = ([[draw.random() < chance for _ in range(samples)] for _ in range(problems)] for _ in "ab")
        gain, score = paired_difference(before, after), mean_at_k(after)
        assert -1 <= gain.low <= gain.value <= gain.high <= 1
        assert 0 <= score.low <= score.value <= score.high <= 1


def test_ragged_and_empty_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="between 1 and 2 samples"):
        Evaluation(("a", "b"), ((True,), (True, False)))
    with pytest.raises(ValueError, match="at least one problem"):
        Evaluation((), ())
    with pytest.raises(ValueError, match="pass@3: k must be between 1 and the number of samples per problem, 2"):
        pass_at_k([[True, False]], 3)


def test_parts_of_rewards_are_averaged_over_the_rewards_that_have_them() -> None:
    assert mean_parts([{"asked": 1.0, "turns": 3.0}, {"asked": 0.0}, {}]) == {"asked": 0.5, "turns": 3.0}
    assert mean_parts([]) == {}
