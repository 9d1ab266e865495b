"""Normalizing over length-sorted batches rewards length; the default does not.

The toy: a prompt has a difficulty, and hard prompts are long and rarely solved. A response's log-length is
its prompt's difficulty plus a choice of the policy's own, which has no effect on the reward: the true
gradient along that choice is 0. What an estimator finds there, as the slope of the advantage on the chosen
log-length, is its bias, in reward deviations per e-fold of length. Cohorts of 512 rollouts are cut into 4
batches by length.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from sortedrl.learner.advantages import CohortStatistics, reward_advantages
from sortedrl.learner.settings import AdvantageBaseline, Algorithm

PROMPTS, SIBLINGS, BATCHES, COHORTS = 64, 8, 4, 100
DIFFICULTY_SPREAD = CHOICE_SPREAD = 0.5**0.5  # log-length has deviation 1; half its variance is the policy's
REWARD_CORRELATION = -0.5  # of reward and difficulty
SET_B = torch.arange(PROMPTS).repeat_interleave(SIBLINGS)


def toy_cohort(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards, log-lengths and the part of the log-length that the policy chose, one for each rollout."""
    difficulty_b = torch.randn(PROMPTS, generator=generator)[SET_B]
    noise_b, choice_b = torch.randn(2, len(SET_B), generator=generator)
    reward_b = REWARD_CORRELATION * difficulty_b + (1 - REWARD_CORRELATION**2) ** 0.5 * noise_b
    return reward_b, DIFFICULTY_SPREAD * difficulty_b + CHOICE_SPREAD * choice_b, CHOICE_SPREAD * choice_b


def sorted_batches(log_length_b: Tensor, whole_sets: bool) -> Iterator[Tensor]:
    """The rows of each batch, shortest first; a group is as long as its longest member."""
    if whole_sets:
        log_length_b = log_length_b.view(PROMPTS, SIBLINGS).max(1).values[SET_B]
    yield from log_length_b.argsort(stable=True).chunk(BATCHES)


def length_bias(
    algorithm: Algorithm, advantage_baseline: AdvantageBaseline, only_first_cohorts: bool = False, alone: bool = False
) -> float:
    """`alone`: every rollout is its own group, as if each had a prompt of its own."""
    group_b = torch.arange(len(SET_B)) if alone else SET_B
    generator = torch.Generator().manual_seed(0)
    statistics = CohortStatistics()
    choices, advantages = [], []
    for cohort in range(COHORTS):
        if only_first_cohorts:
            statistics = CohortStatistics()
        reward_b, log_length_b, choice_b = toy_cohort(generator)
        for rows in sorted_batches(log_length_b, whole_sets=advantage_baseline == "group"):
            cohort_b = torch.full((len(rows),), cohort)
            found_b, statistics = reward_advantages(
                reward_b[rows], group_b[rows], cohort_b, algorithm, advantage_baseline, statistics
            )
            choices.append(choice_b[rows])
            advantages.append(found_b)
    x, y = torch.cat(choices), torch.cat(advantages)
    return float(((x - x.mean()) * (y - y.mean())).mean() / x.var())


@pytest.mark.parametrize(
    ("algorithm", "advantage_baseline", "expected"),
    [
        ("reinforce++", "batch", 0.32),
        ("reinforce++", "cohort_so_far", 0.16),
        ("reinforce++", "previous_cohorts", 0.0),
        ("reinforce++", "group", 0.0),
        ("grpo", "group", 0.0),
        ("rloo", "group", 0.0),
    ],
)
def test_slope_of_advantage_on_chosen_length(
    algorithm: Algorithm, advantage_baseline: AdvantageBaseline, expected: float
) -> None:
    """About 50,000 rollouts: the slope is known to 0.006."""
    assert length_bias(algorithm, advantage_baseline) == pytest.approx(expected, abs=0.02)


def test_the_first_cohort_has_no_bias_either() -> None:
    """Neither against the initial reference (a constant) nor against the group. One cohort tells little, so many
    are pooled."""
    for siblings in (False, True):
        bias = length_bias("reinforce++", "previous_cohorts", only_first_cohorts=True, alone=not siblings)
        assert bias == pytest.approx(0.0, abs=0.02)
