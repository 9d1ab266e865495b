"""The statistics of a comparison, against published and hand-computed values."""

from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sortedrl.studies.compare.paired import difference, median_time, sign_test, t_quantile, threshold_difference
from sortedrl.studies.compare.results import Point, Reached, curve_area, last_cohorts, learning_curve, reached

T_TABLE = {  # upper 2.5 % and upper 20 % points of Student's t, from standard tables
    1: (12.706, 1.376),
    2: (4.303, 1.061),
    3: (3.182, 0.978),
    4: (2.776, 0.941),
    7: (2.365, 0.896),
    15: (2.131, 0.866),
    30: (2.042, 0.854),
    120: (1.980, 0.845),
}


@pytest.mark.parametrize("degrees", T_TABLE)
def test_quantiles_of_student_s_t(degrees: int) -> None:
    assert t_quantile(0.975, degrees) == pytest.approx(T_TABLE[degrees][0], abs=6e-4)
    assert t_quantile(0.8, degrees) == pytest.approx(T_TABLE[degrees][1], abs=6e-4)
    assert t_quantile(0.5, degrees) == pytest.approx(0, abs=1e-9)


def test_a_paired_difference_by_hand() -> None:
    """Student's sleep data (1908): hours gained by ten patients with each of two drugs; mean 1.58, t = 4.0621."""
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    found = difference(second, first)
    assert found.mean == pytest.approx(1.58)
    assert found.standard_error is not None and found.t_interval is not None
    assert found.mean / found.standard_error == pytest.approx(4.0621, abs=1e-4)
    assert (found.t_interval.low, found.t_interval.high) == pytest.approx((0.7001, 2.4599), abs=1e-4)
    assert found.bootstrap_interval is not None
    assert 0.7 < found.bootstrap_interval.low < found.bootstrap_interval.high < 2.5
    assert found.smallest_visible == pytest.approx((2.2622 + 0.8834) * found.standard_error, abs=1e-3)
    assert found.relative == pytest.approx(1.58 / 0.75)


@pytest.mark.parametrize(("by", "pairs"), [(0.0, 3), (0.05, 3), (1.0, 1)])
def test_one_pair_or_the_same_difference_with_every_seed_is_no_certainty(by: float, pairs: int) -> None:
    """With 20 problems a difference of +0.05 in both of two seeds is one problem each. Rounding is no spread."""
    minus = [1.0, 2.0, 3.1][:pairs]
    found = difference([value + by for value in minus], minus)
    assert found.mean == pytest.approx(by) and found.pairs == pairs
    assert found.relative == pytest.approx(by / fmean(minus))
    assert found.standard_error is None and found.t_interval is None and found.bootstrap_interval is None
    assert found.smallest_visible is None


def test_sign_test() -> None:
    assert sign_test(8, 0) == 2 / 256
    assert sign_test(7, 1) == 2 * 9 / 256
    assert sign_test(4, 4) == sign_test(0, 0) == 1.0


# Samples to threshold

CURVE = [Point(0, 0, 0.0, 0.2), Point(5, 100, 10.0, 0.4), Point(10, 200, 30.0, 0.8)]


def test_the_threshold_is_interpolated_between_evaluations() -> None:
    assert reached(CURVE, 0.5, "rollouts") == (pytest.approx(125), False)
    assert reached(CURVE, 0.5, "seconds") == (pytest.approx(15), False)
    assert reached(CURVE, 0.4, "rollouts") == (pytest.approx(100), False)
    assert reached(CURVE, 0.1, "rollouts") == (0, False)
    assert reached(CURVE, 0.9, "rollouts") == (200, True)


def test_the_area_is_the_mean_over_rollouts() -> None:
    assert curve_area(CURVE) == pytest.approx((0.3 + 0.6) / 2)
    uneven = [Point(0, 0, 0.0, 0.0), Point(1, 10, 1.0, 1.0), Point(9, 100, 2.0, 1.0)]
    assert curve_area(uneven) == pytest.approx((5 + 90) / 100)
    assert curve_area(CURVE[:1]) == 0.2


def test_the_curve_counts_rollouts_and_leaves_out_the_time_of_evaluations() -> None:
    lines = [
        {"update": 0, "seconds": 4.0, "held_out": {"value": 0.1}},
        {"update": 1, "seconds": 5.0, "rollouts": 16},
        {"update": 2, "seconds": 6.5, "rollouts": 15},
        {"update": 2, "seconds": 9.5, "held_out": {"value": 0.3}},
        {"update": 3, "seconds": 11.0, "rollouts": 17},
        {"update": 3, "seconds": 14.0, "held_out": {"value": 0.5}},
    ]
    assert list(learning_curve(lines)) == [(0, 0, 0.0, 0.1), (2, 31, 2.5, 0.3), (3, 48, 4.0, 0.5)]


def test_uncensored_times_are_compared_as_they_are() -> None:
    arm, minus = ([Reached(at, False) for at in times] for times in ([10.0, 20.0, 60.0], [20.0, 40.0, 70.0]))
    found, censoring = threshold_difference(arm, minus)
    assert found.mean == pytest.approx(-40 / 3)
    assert censoring.horizon is None
    assert (censoring.arm_median, censoring.minus_median) == (20, 40)
    assert (censoring.arm_first, censoring.minus_first) == (3, 0)


def test_censored_runs_count_up_to_the_horizon_and_are_never_left_out() -> None:
    arm = [Reached(50.0, False), Reached(30.0, False), Reached(100.0, True), Reached(95.0, False)]
    minus = [Reached(90.0, True), Reached(90.0, True), Reached(90.0, True), Reached(60.0, False)]
    found, censoring = threshold_difference(arm, minus)
    assert censoring.horizon == 90
    assert found.pairs == 4
    assert found.mean == pytest.approx(fmean([50 - 90, 30 - 90, 90 - 90, 90 - 60]))
    assert (censoring.arm_censored, censoring.minus_censored) == (1, 3)
    assert (censoring.arm_median, censoring.minus_median) == (pytest.approx(72.5), None)
    assert (censoring.arm_first, censoring.minus_first) == (2, 1), "two censored runs decide nothing"


def test_a_run_that_was_censored_early_is_not_known_to_be_later() -> None:
    _, censoring = threshold_difference([Reached(50.0, False)], [Reached(40.0, True)])
    assert (censoring.arm_first, censoring.minus_first, censoring.sign_test_p) == (0, 0, 1.0)


TIMES = st.builds(Reached, st.floats(1, 1000), st.booleans())


@settings(deadline=None, max_examples=20)
@given(st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=8))
def test_swapping_the_arms_changes_the_sign_and_nothing_else(pairs: list[tuple[Reached, Reached]]) -> None:
    arm, minus = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    forward, there = threshold_difference(arm, minus)
    backward, back = threshold_difference(minus, arm)
    assert forward.mean == pytest.approx(-backward.mean)
    assert (there.arm_first, there.minus_first) == (back.minus_first, back.arm_first)
    assert there.horizon == back.horizon
    assert there.horizon is None or forward.arm_mean <= there.horizon + 1e-9


@given(st.lists(st.floats(1, 99), min_size=1, max_size=9), st.integers(0, 9))
def test_the_median_treats_censored_runs_as_longer_than_all_others(times: list[float], censored: int) -> None:
    runs = [Reached(at, False) for at in times] + [Reached(0.5, True)] * censored
    found = median_time(runs)
    if censored >= len(times):
        assert found is None
    else:
        assert found is not None and found >= median_time(runs[: len(times)])  # type: ignore[operator]


@pytest.mark.parametrize(
    ("rollouts", "cohort", "expected"),
    [
        ([128] * 40, 512, slice(28, 40)),  # the quarter starts at 30, in the middle of a cohort
        ([128] * 10, 512, slice(4, 8)),  # the last cohort is not complete
        ([130, 130, 130, 122] * 4, 512, slice(12, 16)),
        ([200, 200, 112] * 4, 512, slice(9, 12)),
        ([128] * 6, 2048, slice(4, 6)),  # no complete cohort: all updates of the quarter
    ],
)
def test_the_last_part_of_a_run_has_whole_cohorts(rollouts: list[int], cohort: int, expected: slice) -> None:
    assert last_cohorts(rollouts, cohort) == expected
