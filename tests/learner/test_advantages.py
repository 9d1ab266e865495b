"""Advantages against direct formulas, written out as loops."""

import random
import statistics as stats
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scenarios import run
from sortedrl.learner.advantages import (
    CohortStatistics,
    Moments,
    explained_variance,
    generalized_advantages,
    group_indices,
    grpo_advantages,
    normalized,
    reward_advantages,
    rloo_advantages,
    zero_variance,
)
from sortedrl.learner.settings import AdvantageBaseline

numbers = st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=20)


def random_sets(seed: int) -> tuple[list[float], list[str]]:
    generator = torch.Generator().manual_seed(seed)
    keys = [f"p{index}" for index in torch.randint(0, 5, (24,), generator=generator).tolist()]
    return torch.randn(24, generator=generator).tolist(), keys


@pytest.mark.parametrize("seed", range(3))
def test_grpo_and_rloo_are_their_formulas(seed: int) -> None:
    rewards, keys = random_sets(seed)
    grpo = grpo_advantages(torch.tensor(rewards), group_indices(keys))
    rloo = rloo_advantages(torch.tensor(rewards), group_indices(keys))
    for index, key in enumerate(keys):
        siblings = [r for r, k in zip(rewards, keys, strict=True) if k == key]
        others = [r for i, (r, k) in enumerate(zip(rewards, keys, strict=True)) if k == key and i != index]
        if others:
            expected = (rewards[index] - stats.mean(siblings)) / (stats.stdev(siblings) + 1e-4)
            assert grpo[index].item() == pytest.approx(expected, abs=1e-5)
            assert rloo[index].item() == pytest.approx(rewards[index] - stats.mean(others), abs=1e-5)
        else:
            assert grpo[index] == rloo[index] == 0


def test_zero_variance_needs_siblings_with_equal_rewards() -> None:
    group_b = group_indices(["a", "a", "b", "b", "alone"])
    assert zero_variance(torch.tensor([0.1, 0.1, 1.0, 0.0, 3.0]), group_b).tolist() == [True, True] + [False] * 3


@given(numbers, numbers)
@settings(max_examples=50, deadline=None)
def test_moments_of_parts_add_up_to_those_of_the_whole(first: list[float], second: list[float]) -> None:
    pooled = Moments.of(torch.tensor(first)) + Moments.of(torch.tensor(second))
    whole = Moments.of(torch.tensor(first + second))
    assert pooled.count == whole.count
    assert pooled.mean == pytest.approx(whole.mean, abs=1e-6)
    assert pooled.squares == pytest.approx(whole.squares, rel=1e-6, abs=1e-6)


def batches_of(cohort_sizes: list[int], seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, generator=generator) * 2 + 1, torch.full((size,), cohort))
        for cohort, size in enumerate(cohort_sizes)
        for _ in range(2)
    ]


def test_batch_and_cohort_so_far_are_their_formulas() -> None:
    seen: dict[int, list[float]] = {}
    so_far, batch_only = CohortStatistics(), CohortStatistics()
    for rewards, cohorts in batches_of([8, 5, 9]):
        by_batch, batch_only = normalized(rewards, cohorts, "batch", batch_only)
        by_cohort, so_far = normalized(rewards, cohorts, "cohort_so_far", so_far)
        cohort = int(cohorts[0])
        seen.setdefault(cohort, []).extend(rewards.tolist())
        for index, reward in enumerate(rewards.tolist()):
            of_batch = (reward - stats.mean(rewards.tolist())) / stats.stdev(rewards.tolist())
            of_cohort = (reward - stats.mean(seen[cohort])) / stats.stdev(seen[cohort])
            assert by_batch[index].item() == pytest.approx(of_batch, abs=1e-5)
            assert by_cohort[index].item() == pytest.approx(of_cohort, abs=1e-5)


def test_previous_cohorts_pool_the_newest_and_are_constant_within_a_cohort() -> None:
    """Cohorts 0 to 3 of 600, 2 x 20, 2 x 300 and 2 x 10 values; 512 values are enough for a reference."""
    initial = [0.0, 1.0, 5.0]
    statistics = CohortStatistics(initial=Moments.of(torch.tensor(initial)))
    seen: dict[int, list[float]] = {}
    for rewards, cohorts in batches_of([300, 20, 300, 10]):
        cohort = int(cohorts[0])
        statistics = replace(statistics, complete=cohort)
        advantages, statistics = normalized(rewards, cohorts, "previous_cohorts", statistics)
        pool = {0: initial, 1: seen.get(0), 2: seen.get(1, []) + seen.get(0, []), 3: seen.get(2)}[cohort] or []
        expected = [(reward - stats.mean(pool)) / stats.stdev(pool) for reward in rewards.tolist()]
        assert advantages.tolist() == pytest.approx(expected, abs=1e-4)
        seen.setdefault(cohort, []).extend(rewards.tolist())


def test_a_cohort_that_arrives_while_its_predecessor_is_open_keeps_its_first_reference() -> None:
    statistics = CohortStatistics()
    cohort_b = torch.tensor([0, 0, 1, 1])
    first, statistics = normalized(torch.tensor([0.0, 1.0, 0.0, 1.0]), cohort_b, "previous_cohorts", statistics)
    second, statistics = normalized(torch.tensor([9.0, 9.0, 0.0, 1.0]), cohort_b, "previous_cohorts", statistics)
    assert torch.equal(first[2:], second[2:])


@pytest.mark.parametrize(
    ("mode", "with_reference"),
    [("on-policy", 11), ("on-policy+ungated", 0), ("partial+elevator", 9), ("april", 9), ("tail-batching", 10)],
)
def test_a_reference_is_made_of_complete_cohorts(mode: str, with_reference: int) -> None:
    """12 cohorts. The reward is the length: a cohort whose long rollouts are still to come has a lower mean. Without a
    gate, the first cohorts overlap, and `on-policy+ungated` puts its longest rollouts off to the end of the run."""
    rng = random.Random(0)
    lengths = [min(99, int(rng.lognormvariate(2.5, 0.9)) + 1) for _ in range(12 * 32)]
    statistics = CohortStatistics()
    sizes = {"rollouts_per_update": 16, "prompts_per_cohort": 32}
    for batch in run(mode, lengths, slots=16, redraws=True, **sizes).batches:
        rewards_b = torch.tensor([float(len(rollout)) for rollout in batch])
        cohort_b = torch.tensor([rollout.cohort for rollout in batch])
        _, statistics = normalized(rewards_b, cohort_b, "previous_cohorts", statistics)
        statistics = replace(statistics, complete=batch.complete_cohorts)
    final = {cohort: replace(statistics, complete=cohort).before() for cohort in range(13)}  # now all are complete
    found = {cohort: reference for cohort, reference in statistics.references.items() if reference.count}
    assert all(reference in list(final.values())[1 : cohort + 1] for cohort, reference in found.items())
    assert len(found) >= with_reference


def test_without_initial_rewards_the_first_cohort_is_used_as_it_was_scored() -> None:
    rewards = torch.tensor([0.0, 2.0, 1.0, -1.0])
    advantages, _ = normalized(rewards, torch.zeros(4).long(), "previous_cohorts", CohortStatistics())
    assert torch.equal(advantages, rewards)


def test_a_success_after_cohorts_of_equal_failure_does_not_explode() -> None:
    statistics = CohortStatistics()
    _, statistics = normalized(torch.zeros(64), torch.zeros(64).long(), "previous_cohorts", statistics)
    statistics = replace(statistics, complete=1)
    advantages, statistics = normalized(torch.tensor([0.0, 1.0]), torch.ones(2).long(), "previous_cohorts", statistics)
    assert advantages.tolist() == [0.0, 1.0]
    almost_equal = torch.zeros(64)
    almost_equal[0] = 0.01
    _, statistics = normalized(almost_equal, torch.full((64,), 2), "previous_cohorts", CohortStatistics())
    statistics = replace(statistics, complete=3)
    advantages, _ = normalized(torch.tensor([1.0]), torch.tensor([3]), "previous_cohorts", statistics)
    assert advantages.tolist() == [10.0]


def test_reinforce_with_siblings_divides_all_sets_by_one_scale() -> None:
    rewards, group_b = torch.tensor([0.0, 2.0, 1.0, 5.0]), group_indices(["a", "a", "b", "b"])
    first, statistics = reward_advantages(
        rewards, group_b, torch.zeros(4).long(), "reinforce++", "group", CohortStatistics()
    )
    assert torch.equal(first, grpo_advantages(rewards, group_b)), "nothing else is known in the first cohort"
    statistics = replace(statistics, complete=1)
    advantages, _ = reward_advantages(rewards, group_b, torch.ones(4).long(), "reinforce++", "group", statistics)
    scale = stats.stdev([-1.0, 1.0, -2.0, 2.0])
    assert advantages.tolist() == pytest.approx([-1 / scale, 1 / scale, -2 / scale, 2 / scale], abs=1e-5)


def test_reinforce_in_the_first_cohort() -> None:
    """`group` compares groups, and so does `previous_cohorts` where no initial rewards are known."""
    initial = CohortStatistics(initial=Moments.of(torch.tensor([0.0, 1.0, 2.0])))  # mean 1, deviation 1
    rewards, group_b, cohort_b = torch.tensor([0.0, 2.0, 3.0]), group_indices(["a", "a", "b"]), torch.zeros(3).long()

    def advantages(baseline: AdvantageBaseline, statistics: CohortStatistics, group_b: torch.Tensor) -> list[float]:
        return reward_advantages(rewards, group_b, cohort_b, "reinforce++", baseline, statistics)[0].tolist()

    in_groups = pytest.approx([-(0.5**0.5), 0.5**0.5, 0.0], abs=1e-3)
    assert advantages("group", initial, group_b) == in_groups
    assert advantages("previous_cohorts", CohortStatistics(), group_b) == in_groups
    assert advantages("previous_cohorts", initial, group_b) == [-1.0, 1.0, 2.0]
    assert advantages("previous_cohorts", initial, torch.arange(3)) == [-1.0, 1.0, 2.0]


def test_statistics_survive_their_state_dict() -> None:
    statistics = CohortStatistics(initial=Moments(3, 0.5, 2.0))
    for rewards, cohorts in batches_of([8, 5]):
        _, statistics = normalized(rewards, cohorts, "previous_cohorts", statistics)
        statistics = replace(statistics, complete=int(cohorts[0]))
    assert CohortStatistics.from_state_dict(statistics.state_dict()) == statistics


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0)])
def test_gae_is_its_definition_over_the_sampled_tokens(gamma: float, gae_lambda: float) -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(4, 9, generator=generator), torch.randn(4, 9, generator=generator)
    mask = torch.rand(4, 9, generator=generator) < 0.7
    mask[0, 5:] = False
    advantages, returns = generalized_advantages(rewards, values, mask, gamma, gae_lambda)
    for row in range(4):
        places = [t for t in range(9) if mask[row, t]]
        for order, t in enumerate(places):
            expected = 0.0
            for steps, later in enumerate(places[order:]):
                following = places[order + steps + 1 : order + steps + 2]
                next_value = values[row, following[0]].item() if following else 0.0
                surprise = rewards[row, later].item() + gamma * next_value - values[row, later].item()
                expected += (gamma * gae_lambda) ** steps * surprise
            assert advantages[row, t].item() == pytest.approx(expected, abs=1e-5)
            assert returns[row, t].item() == pytest.approx(expected + values[row, t].item(), abs=1e-5)
    assert not advantages[~mask].any() and not returns[~mask].any()


def test_explained_variance_ends() -> None:
    returns = torch.randn(100, generator=torch.Generator().manual_seed(0))
    assert explained_variance(returns, returns) == pytest.approx(1.0)
    assert explained_variance(torch.full_like(returns, 3.0), returns) == pytest.approx(0.0, abs=1e-6)
    assert explained_variance(-returns, returns) == pytest.approx(-3.0, abs=1e-5)
    assert explained_variance(returns, torch.ones(100)) == 0.0
