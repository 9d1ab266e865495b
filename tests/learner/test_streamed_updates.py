"""Streaming does not change an update: rollouts accumulated early, in any parts, against the same batch in one step."""

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny_learners
from as_batch import as_batch
from sortedrl.core.rollout import Prompt, Rollout, Segment
from sortedrl.learner.learner import Learner
from tiny_learners import VOCABULARY

GROUP = 3
ROUNDING = 3e-6  # of the largest entry
LEARNERS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": "grpo", "off_policy_correction": "ppo_clip"},
    "grpo, token_mean, KL": {"algorithm": "grpo", "aggregation": "token_mean", "kl_coefficient": 0.2},
    "rloo, means, cispo": {"algorithm": "rloo", "aggregation": "sequence_mean", "off_policy_correction": "cispo"},
    "rloo, token_mean, mask": {"algorithm": "rloo", "aggregation": "token_mean", "off_policy_correction": "mask"},
    "reinforce++": {"algorithm": "reinforce++", "off_policy_correction": "decoupled"},
    "reinforce++, KL, entropy": {"aggregation": "sequence_mean", "kl_coefficient": 0.1, "entropy_coefficient": 0.1},
    "reinforce++, group": {"advantage_baseline": "group", "off_policy_correction": "cispo", "ratio_level": "sequence"},
    "ppo": {"algorithm": "ppo", "gae_lambda": 0.9, "critic_learning_rate": 1e-2},
    "ppo, token_mean, KL": {"algorithm": "ppo", "aggregation": "token_mean", "kl_coefficient": 0.1},
    "masked": {"algorithm": "grpo", "aggregation": "token_mean", "truncated_rollouts": "masked"},
    "reinforce++, ESS": {"scale_learning_rate_by_ess": True, "gradient_cosine": True},
    "lora, KL": {"algorithm": "grpo", "lora_rank": 2, "kl_coefficient": 0.1},
}


pytestmark = pytest.mark.usefixtures("one_thread")


def learner_with(**changes: Any) -> Learner:
    settings = {"normalizer_tokens": 100.0, "learning_rate": 1e-2, "warmup_updates": 0, **changes}
    return tiny_learners.learner_with(**settings)


def batch_of(update: int, groups: int = 4) -> list[Rollout]:
    """The lengths of two groups do not overlap, so "longest first" has the same order within groups and over all."""
    made = random.Random(update)
    rollouts = []
    for index in range(groups * GROUP):
        group = index // GROUP
        length = 2 + 7 * group + made.randrange(6)
        segments = []
        for version, part in ((max(0, update - 1), length // 2), (update, length - length // 2)):
            if part:
                tokens = [made.randrange(3, VOCABULARY) for _ in range(part)]
                segments.append(Segment(tokens, [-3 * made.random() for _ in range(part)], version))
        rollouts.append(
            Rollout(
                id=100 * update + index,
                prompt=Prompt(f"p{group}", [made.randrange(3, VOCABULARY) for _ in range(3)]),
                index_in_group=index % GROUP,
                cohort=update // 2,
                seed=index,
                loaded_at_update=0,
                segments=segments,
                truncated=index % 7 == 6,
                reward=1.0 if group == 1 else made.choice((0.0, 0.5, 1.0)),
            )
        )
    return sorted(rollouts, key=lambda rollout: (len(rollout), rollout.id))


def in_groups(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    by_group = sorted(rollouts, key=lambda rollout: rollout.group)
    return [list(members) for _, members in itertools.groupby(by_group, key=lambda rollout: rollout.group)]


Stream = Callable[[Learner, list[Rollout], int], None]


def longest_group_first(learner: Learner, batch: list[Rollout], version: int) -> None:
    """All but the two shortest groups."""
    for group in in_groups(batch)[:1:-1]:
        learner.accumulate(group, version)


def in_random_parts(learner: Learner, batch: list[Rollout], version: int) -> None:
    made = random.Random(version)
    groups = in_groups(batch)
    made.shuffle(groups)
    while len(groups) > 1:
        count = made.randrange(1, 3)
        part, groups = groups[:count], groups[count:]
        learner.accumulate([rollout for group in part for rollout in group], version)


def trained(learner: Learner, stream: Stream | None = None, updates: int = 3) -> list[dict[str, float]]:
    learner.set_initial_rewards([0.0, 1.0, 0.5])
    metrics = []
    for update in range(updates):
        batch = batch_of(update)
        if stream is not None:
            stream(learner, batch, update)
        metrics.append(learner.step(as_batch(batch, update, complete_cohorts=(update + 1) // 2)))
    return metrics


def tensors_of(state: Any, name: str = "") -> dict[str, Tensor]:
    """All numbers of a learner's state, by path."""
    if isinstance(state, Tensor):
        return {name: state.double()}
    if isinstance(state, dict):
        entries: Any = state.items()
    elif isinstance(state, list | tuple):
        entries = enumerate(state)
    elif isinstance(state, str):
        return {name: torch.tensor(list(state.encode()))}
    else:
        return {name: torch.tensor(float(state))}
    return {key: tensor for part, value in entries for key, tensor in tensors_of(value, f"{name}/{part}").items()}


@pytest.mark.parametrize("name", LEARNERS)
def test_the_same_micro_batches_in_the_same_order_are_equal_to_the_bit(name: str) -> None:
    plain, streamed = (learner_with(tokens_per_micro_batch=1, **LEARNERS[name]) for _ in range(2))
    expected, found = trained(plain), trained(streamed, longest_group_first)
    left, right = tensors_of(plain.state_dict()), tensors_of(streamed.state_dict())
    assert left.keys() == right.keys()
    for key, tensor in left.items():
        assert torch.equal(tensor, right[key]), key
    for one, other in zip(expected, found, strict=True):
        assert "streamed_fraction" not in one and other.pop("streamed_fraction") == 0.5
        assert one == pytest.approx(other, rel=1e-6, abs=1e-9)  # their means are over tokens in another order


@pytest.mark.parametrize("name", LEARNERS)
def test_other_parts_and_orders_are_equal_to_rounding(name: str) -> None:
    """In the third update, which has a second cohort: the statistics have to agree, too."""
    plain, streamed = (learner_with(tokens_per_micro_batch=60, **LEARNERS[name]) for _ in range(2))
    gradients = [_gradients_of(learner) for learner in (plain, streamed)]
    trained(plain)
    trained(streamed, in_random_parts)
    scale = max(float(tensor.abs().max()) for tensor in gradients[0].values())
    assert gradients[0].keys() == gradients[1].keys() and scale > 0
    for key, tensor in gradients[0].items():
        assert torch.allclose(tensor, gradients[1][key], rtol=0, atol=ROUNDING * scale), key
    statistics = [tensors_of(learner.state_dict()["statistics"]) for learner in (plain, streamed)]
    for key, tensor in statistics[0].items():
        assert torch.allclose(tensor, statistics[1][key], rtol=1e-5), key


def _gradients_of(learner: Learner) -> dict[str, Tensor]:
    """The normalized gradients of policy and critic in the latest update, instead of an optimizer step."""
    found: dict[str, Tensor] = {}
    for name, (_, optimizer) in learner._trained.items():

        def keep(learning_rate: float, scale: float = 1.0, name: str = name, optimizer: Any = optimizer) -> None:
            for place, parameter in enumerate(optimizer.parameters):
                if parameter.grad is not None:
                    found[f"{name} {place}"] = parameter.grad * scale

        optimizer.step = keep  # type: ignore[method-assign]
    return found


def test_a_rollout_that_is_accumulated_twice_counts_once() -> None:
    one, other = learner_with(algorithm="grpo"), learner_with(algorithm="grpo")
    batch = batch_of(0)
    one.step(as_batch(batch, 0))
    for group in in_groups(batch):
        other.accumulate(group, 0)
        other.accumulate(group, 0)
    assert other.step(as_batch(batch))["rollouts"] == len(batch)
    left, right = tensors_of(one.state_dict()["policy"]), tensors_of(other.state_dict()["policy"])
    assert all(torch.allclose(left[key], right[key], rtol=1e-4, atol=1e-6) for key in left)


def test_weights_and_state_do_not_change_before_the_update() -> None:
    learner = learner_with(algorithm="ppo")
    before = {key: tensor.clone() for key, tensor in tensors_of(learner.state_dict()).items()}
    learner.accumulate(batch_of(0), 0)
    after = tensors_of(learner.state_dict())
    assert all(torch.equal(before[key], after[key]) for key in before) and before.keys() == after.keys()


def _same_as_without(learner: Learner, batch: list[Rollout], version: int = 0) -> dict[str, float]:
    """The step of a learner in some state of streaming, which must be that of a new one."""
    plain = learner_with(tokens_per_micro_batch=60, algorithm=learner.settings.algorithm)
    plain.step(as_batch(batch, version))
    metrics = learner.step(as_batch(batch, version))
    left, right = tensors_of(plain.state_dict()), tensors_of(learner.state_dict())
    for key, tensor in left.items():
        assert torch.allclose(tensor, right[key], rtol=1e-3, atol=1e-6), key
    return metrics


@pytest.mark.parametrize(
    ("parts", "version", "streamed"), [([(None, 3)], 0, 0.0), ([(0, 0)], 1, 0.0), ([(0, 0), (1, 1)], 1, 0.25)]
)
def test_a_gradient_that_is_not_of_the_batch_is_dropped(parts: Any, version: int, streamed: float) -> None:
    """Parts: a group of the batch, or rollouts of another one whose harvest was interrupted; and their version."""
    learner = learner_with(tokens_per_micro_batch=60, algorithm="grpo")
    batch = batch_of(0)
    for group, its_version in parts:
        learner.accumulate(batch_of(3) if group is None else in_groups(batch)[group], its_version)
    assert _same_as_without(learner, batch, version)["streamed_fraction"] == streamed


def test_a_gradient_of_the_weights_before_a_restore_is_dropped() -> None:
    trained_before, streamed_to = learner_with(algorithm="grpo"), learner_with(algorithm="grpo")
    trained_before.step(as_batch(batch_of(0), 0))
    batch = batch_of(1)
    streamed_to.accumulate(in_groups(batch)[0], 1)
    streamed_to.load_state_dict(trained_before.state_dict())
    found = streamed_to.step(as_batch(batch, 1))
    assert found.pop("streamed_fraction") == 0.0
    assert found == trained_before.step(as_batch(batch, 1))


def test_advantages_that_later_rollouts_change_are_computed_again() -> None:
    """Without initial rewards, the first cohort compares groups. The part that is streamed has one member of each, so
    it is compared with nothing yet."""
    plain, streamed = (learner_with(algorithm="reinforce++", tokens_per_micro_batch=60) for _ in range(2))
    batch = batch_of(0)
    streamed.accumulate([rollout for rollout in batch if rollout.index_in_group == 0], 0)
    expected = plain.step(as_batch(batch))
    with pytest.warns(RuntimeWarning, match="Streaming gains nothing then: set whole_groups"):
        found = streamed.step(as_batch(batch))
    assert found.pop("streamed_fraction") == 0.0
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_an_error_drops_the_gradient_and_the_batch_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = learner_with(tokens_per_micro_batch=1, algorithm="grpo")
    batch = batch_of(0)
    groups = in_groups(batch)
    learner.accumulate(groups[0], 0)
    calls = itertools.count()
    add = learner._add_micro_batch

    def out_of_memory(*arguments: Any, **options: Any) -> None:
        if next(calls) == 1:
            raise MemoryError("out of memory")
        add(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(learner, "_add_micro_batch", out_of_memory)
        with pytest.raises(MemoryError):
            learner.accumulate(groups[1], 0)
    assert all(parameter.grad is None for parameter in learner.model.parameters())
    _same_as_without(learner, batch)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"advantage_baseline": "batch"}, "advantage_baseline = batch: an advantage depends on the other rollouts"),
        ({"advantage_baseline": "cohort_so_far"}, "advantage_baseline = cohort_so_far: an advantage depends"),
        ({"steps_per_update": 2}, "steps_per_update = 2: each step needs a mix of all rollouts"),
    ],
)
def test_what_needs_the_whole_update_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    learner = learner_with(**changes)
    with pytest.raises(ValueError, match=message):
        learner.accumulate(batch_of(0), 0)
    learner.step(as_batch(batch_of(0), 0))


def test_a_part_without_a_whole_group_is_no_error() -> None:
    """All other members of a group may have been rejected."""
    learner = learner_with(algorithm="grpo", tokens_per_micro_batch=60)
    batch = batch_of(0)[:-2]
    learner.accumulate(batch[-1:], 0)
    _same_as_without(learner, batch)


def test_bf16_gradients_add_up_over_many_parts() -> None:
    """One rollout per part against a sum in float32: the direction and the norm stay."""
    learner = learner_with(algorithm="grpo", bf16=True, max_grad_norm=1e30, tokens_per_micro_batch=1)
    exact = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in learner._optimizer.parameters]
    add = learner._add_micro_batch

    def also_in_float32(*arguments: Any, **options: Any) -> None:
        so_far = [parameter.grad for parameter in learner._optimizer.parameters]
        for parameter in learner._optimizer.parameters:
            parameter.grad = None
        add(*arguments, **options)
        for total, before, parameter in zip(exact, so_far, learner._optimizer.parameters, strict=True):
            if parameter.grad is not None:
                total += parameter.grad.float()
                parameter.grad = parameter.grad if before is None else before + parameter.grad

    learner._add_micro_batch = also_in_float32  # type: ignore[method-assign]
    for group in in_groups(batch_of(0, groups=8)):
        learner.accumulate(group, 0)
    found = torch.cat([p.grad.float().flatten() for p in learner._optimizer.parameters if p.grad is not None])
    right = torch.cat([total.flatten() for total in exact])
    assert torch.nn.functional.cosine_similarity(found, right, 0) > 0.999
    assert found.norm() / right.norm() == pytest.approx(1, abs=0.01)
