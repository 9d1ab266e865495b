"""The estimated uncut mean length against the simulator, which knows it."""

import math
import random
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import pytest

from sortedrl.core.events import Event
from sortedrl.core.rollout import Prompt
from sortedrl.core.schedule import Schedule
from sortedrl.core.seeds import derive_seed
from sortedrl.engines.lengths import LengthOf, LognormalLengths, normal
from sortedrl.observe.metrics import Metrics
from sortedrl.observe.uncut_length import Attempts
from sortedrl.studies.workload import Workload, run

POINTS = 0.05  # docs/metrics.md states this accuracy
ROLLOUTS = 2048


@dataclass(frozen=True)
class BimodalLengths:
    """About 300 or about 4,000 tokens: a prompt sets the chance of a long response, from 0 to 0.6."""

    def __call__(self, prompt: Prompt, seed: int) -> int:
        number = int(prompt.payload)
        is_long = _uniform(derive_seed(number, 2, seed)) < 0.6 * _uniform(derive_seed(number, 1))
        return min(8192, round((4000 if is_long else 300) * math.exp(0.3 * normal(derive_seed(number, 3, seed)))))


def _uniform(bits: int) -> float:
    return (bits >> 11) / (1 << 53)


LENGTHS: dict[str, LengthOf] = {"lognormal": LognormalLengths(), "bimodal": BimodalLengths()}


def check(mode: str, lengths: str, group: int, seed: int, *, whole: bool) -> float:
    """The error of the estimate."""
    log: list[Event] = []
    groups: dict[str, Any] = {"rollouts_per_prompt": group, "whole_groups": whole, "prompts_per_cohort": 512 // group}
    schedule = Schedule(mode=mode, rollouts_per_update=128, seed=seed, **groups)
    known = run(Workload(lengths=LENGTHS[lengths], prompts=ROLLOUTS // group), schedule, log.append).length_bias
    estimated = Metrics().fold(log).run_metrics().length_bias
    assert known is not None and estimated is not None
    assert known < -0.005, "something to estimate"
    assert estimated == pytest.approx(known, abs=POINTS)
    return estimated - known


@pytest.mark.parametrize(
    ("mode", "lengths", "group"),
    [("on-policy", "lognormal", 8), ("on-policy", "bimodal", 4), ("on-policy+ungated", "bimodal", 8)],
)
def test_the_estimate_is_right_with_whole_groups(mode: str, lengths: str, group: int) -> None:
    check(mode, lengths, group, 0, whole=True)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["on-policy", "on-policy+ungated", "tail-batching"])
@pytest.mark.parametrize("lengths", list(LENGTHS))
@pytest.mark.parametrize(("group", "whole"), [(1, False), (8, False), (4, True), (8, True)])
def test_the_estimate_is_right_for_any_mode_lengths_and_groups(
    mode: str, lengths: str, group: int, whole: bool
) -> None:
    errors = [check(mode, lengths, group, seed, whole=whole) for seed in (0, 1, 2)]
    assert abs(fmean(errors)) < POINTS


def attempts(*ended: tuple[int, int, bool]) -> Attempts:
    """Groups of one: (rollout, length, was it finished)."""
    found = Attempts()
    for rollout, length, finished in ended:
        found.ended(rollout, length, finished=finished)
    return found


def test_first_attempts_that_finished_count_as_they_are_even_if_another_was_trained_on() -> None:
    found = attempts((0, 30, True), (0, 10, True), (1, 20, True))
    found.trained(0, 10)
    found.trained(1, 20)
    assert not found.was_any_cut
    assert found.mean_if_uncut() == 25


def test_a_cut_attempt_counts_with_the_mean_of_what_went_beyond() -> None:
    found = attempts(*((i, 10, True) for i in range(50)), *((i, 100, True) for i in range(50, 100)), (100, 10, False))
    found.ended(100, 10, finished=True)
    found.trained(100, 10)
    assert found.was_any_cut
    assert found.mean_if_uncut() == pytest.approx(100)


def test_a_cut_beyond_all_that_finished_counts_with_a_token_more() -> None:
    found = attempts((0, 5, True), (1, 50, False), (1, 4, True))
    found.trained(1, 4)
    assert found.mean_if_uncut() == 51


def test_nothing_trained_and_rejected_rollouts() -> None:
    found = attempts((0, 5, False))
    assert found.mean_if_uncut() == 0
    found.forget(0)
    found.trained(0, 7)
    assert found.mean_if_uncut() == 7


def test_cuts_at_random_lengths_leave_a_known_mean() -> None:
    """Kaplan and Meier's own case: all prompts alike, cuts that know nothing of the lengths."""
    chance = random.Random(1)
    found, lengths = Attempts(), [chance.randint(1, 100) for _ in range(2000)]
    for rollout, length in enumerate(lengths):
        cut = chance.randint(1, 150)
        found.ended(rollout, min(length, cut), finished=length <= cut)
        found.trained(rollout, length)
    assert found.mean_if_uncut() == pytest.approx(fmean(lengths), rel=0.02)
