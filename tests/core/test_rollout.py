"""Segments of the policy and of the environment in one rollout."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sortedrl.core import Prompt, Rollout, Segment
from sortedrl.core.rollout import ENVIRONMENT


def rollout() -> Rollout:
    return Rollout(id=0, prompt=Prompt("p", [1]), index_in_group=0, cohort=0, seed=0, loaded_at_update=0)


def policy(count: int, version: int) -> Segment:
    return Segment([7] * count, [-0.5] * count, version)


def test_an_observation_is_a_segment_of_its_own_with_mask_0_and_no_version() -> None:
    response = rollout()
    response.append(policy(2, version=3))
    answer = [8, 9]
    response.observe(answer)
    answer.append(0)  # it stays the environment's
    response.append(policy(1, version=3))
    assert [(segment.version, len(segment)) for segment in response.segments] == [(3, 2), (ENVIRONMENT, 2), (3, 1)]
    assert response.tokens == [7, 7, 8, 9, 7]
    assert response.logprobs == [-0.5, -0.5, 0.0, 0.0, -0.5]
    assert response.mask == [1, 1, 0, 0, 1]
    assert response.versions == [3] * 5
    assert (len(response), response.policy_length, response.observations) == (5, 3, 1)
    assert (response.oldest_version, response.newest_version) == (3, 3)


@pytest.mark.parametrize("tokens", [[], [5]])
def test_an_observation_needs_tokens_and_a_turn_before_it(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="a turn of the policy comes before it"):
        rollout().observe(tokens)
    response = rollout()
    response.append(policy(1, version=0))
    response.observe([5])
    with pytest.raises(ValueError, match="a turn of the policy comes before it"):
        response.observe(tokens)


def test_versions_never_go_back_even_after_an_observation() -> None:
    response = rollout()
    response.append(policy(1, version=2))
    response.observe([5])
    with pytest.raises(ValueError, match="version 1 after version 2"):
        response.append(policy(1, version=1))
    with pytest.raises(ValueError, match="observe"):
        response.append(Segment([5], [0.0], ENVIRONMENT))


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3), st.integers(0, 2)), max_size=12))
def test_all_columns_stay_equally_long(steps: list[tuple[bool, int, int]]) -> None:
    response = rollout()
    version = sampled = observed = 0
    for is_observation, count, newer in steps:
        if is_observation and response.segments and not response.segments[-1].is_environment:
            response.observe(range(count))
            observed += count
        elif not is_observation:
            version += newer
            response.append(policy(count, version))
            sampled += count
    columns: list[Sequence[float]] = [response.tokens, response.logprobs, response.mask, response.versions]
    assert {len(column) for column in columns} == {len(response)} == {sampled + observed}
    assert sum(response.mask) == response.policy_length == sampled
    assert response.versions == sorted(response.versions)
    assert response.drop_tokens() == sampled
    assert (len(response), response.policy_length, response.segments) == (0, 0, [])


@pytest.mark.parametrize(
    ("logprobs", "mask", "expected"),
    [
        ([-0.5], None, "2 tokens but 1 log-probabilities: a Segment has one per token"),
        ([-0.5, -0.5], [1], "2 tokens but a mask of 1: a Segment has one value per token"),
    ],
)
def test_a_segment_of_unequal_parts_cannot_be_constructed(
    logprobs: list[float], mask: list[int] | None, expected: str
) -> None:
    with pytest.raises(ValueError, match=f"^{expected}$"):
        Segment([5, 6], logprobs, 0, mask)
