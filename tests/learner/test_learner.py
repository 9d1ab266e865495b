"""The learner on tiny real models: gradients, invariances, state, and TRL's trainer on the same batch."""

import io
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import OPTConfig, OPTForCausalLM, PreTrainedModel, Qwen2ForCausalLM

from as_batch import as_batch
from sortedrl.core.batch import Batch
from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.rollout import Prompt, Rollout, Segment
from sortedrl.learner.batching import micro_batches, padded_tokens, sorted_micro_batches, update_batch
from sortedrl.learner.learner import Learner
from sortedrl.learner.losses import effective_sample_fraction
from sortedrl.learner.models import TokenScorer, response_logprobs
from sortedrl.learner.optimizer import AdamW, join_bf16, split_bf16
from sortedrl.learner.settings import LearnerFlags, LearnerSettings, off_policy_correction_for
from sortedrl.training.build import learner_settings_of
from sortedrl.training.settings import TrainSettings
from tiny_learners import (
    NO_CLIPPING,
    TWO_LAYERS,
    VOCABULARY,
    assert_close,
    full_logprobs,
    gradients,
    learner_with,
    random_rollouts,
    same,
    sampled_with,
    tiny_model,
    tokens_of,
    weights_of,
)

pytestmark = pytest.mark.usefixtures("one_thread")


# --- the gradient -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_an_update_in_which_every_group_has_lost_its_other_members_does_not_end_the_run(algorithm: str) -> None:
    """Their rewards failed, for example. A first update of single rollouts is a wrong setting."""
    learner = learner_with(algorithm=algorithm, learning_rate=1e-3)
    rollouts = random_rollouts(prompts=2, siblings=2)
    alone = [rollouts[0], rollouts[3]]
    with pytest.raises(ValueError, match="each of the 2 in this update is alone"):
        learner.step(as_batch(alone, 0))
    learner.step(as_batch(rollouts, 0))
    metrics = learner.step(as_batch(alone, 0))
    assert metrics["grad_norm"] == 0.0 and metrics["rollouts_trained"] == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"aggregation": "constant", "off_policy_correction": "ppo_clip"},
        {"aggregation": "token_mean", "off_policy_correction": "cispo", "ratio_level": "sequence"},
        {"aggregation": "sequence_mean", "off_policy_correction": "mask"},
        {"algorithm": "ppo", "off_policy_correction": "decoupled", "entropy_coefficient": 0.1},
    ],
)
def test_neither_padding_nor_micro_batches_change_the_gradient(changes: dict[str, Any]) -> None:
    """A budget of 1 puts every rollout alone and unpadded; 10^6 pads all of them to the longest."""

    def of_budget(tokens: int) -> dict[str, Tensor]:
        settings = LearnerSettings(tokens_per_micro_batch=tokens, max_grad_norm=NO_CLIPPING, **changes)
        return gradients(Learner(tiny_model(), settings), random_rollouts())

    alone = of_budget(1)
    assert_close(of_budget(60), alone)
    assert_close(of_budget(10**6), alone)


def opt_model(dropout: float = 0.5) -> PreTrainedModel:
    """Its layers, as those of a few others, drop out in their own forward pass, not in a submodule."""
    torch.manual_seed(0)
    shape = {"vocab_size": VOCABULARY, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48}
    config = OPTConfig(**shape, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64, dropout=dropout)
    return OPTForCausalLM(config)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("make", [lambda: tiny_model(attention_dropout=0.5, **TWO_LAYERS), opt_model])
def test_gradient_checkpointing_changes_nothing_and_dropout_stays_off(make: Callable[[], PreTrainedModel]) -> None:
    plain = gradients(learner_with(model=make()), random_rollouts())
    learner = learner_with(model=make(), gradient_checkpointing=True)
    assert_close(gradients(learner, random_rollouts()), plain)
    assert any(layer.training for layer in learner.model.modules())


@pytest.mark.parametrize("above_tokens", [0, 30, 10**6])
def test_which_micro_batches_are_recomputed_changes_no_bit(above_tokens: int) -> None:
    """Rollouts of different lengths, a few per micro-batch: with 30 some are recomputed and some are not."""
    model, same_model = tiny_model(**TWO_LAYERS), tiny_model(**TWO_LAYERS)
    plain = gradients(learner_with(model=model, tokens_per_micro_batch=40), random_rollouts())
    limits: dict[str, Any] = {"tokens_per_micro_batch": 40, "recompute_above_tokens": above_tokens}
    learner = learner_with(same_model, gradient_checkpointing=True, **limits)
    sizes, layer_passes = [], []
    trunk = learner.model.model
    trunk.embed_tokens.register_forward_pre_hook(lambda _, inputs: sizes.append(inputs[0].numel()))
    trunk.layers[0].input_layernorm.register_forward_pre_hook(lambda _, inputs: layer_passes.append(inputs[0].shape))
    partly = gradients(learner, random_rollouts())
    assert same(partly, plain)
    assert len(layer_passes) == len(sizes) + sum(size > above_tokens for size in sizes)
    assert len(sizes) > 2 and (above_tokens != 30 or min(sizes) <= 30 < max(sizes))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"gradient_checkpointing": True, "temperature": 0.7}, {"entropy_coefficient": 0.1, "kl_coefficient": 0.1}],
    ids=["recomputed", "entropy and KL"],
)
def test_compiled_updates_equal_plain_ones_and_compile_once(options: dict[str, Any]) -> None:
    options = options | {"algorithm": "grpo", "normalizer_tokens": 100, "tokens_per_micro_batch": 60}
    options |= {"learning_rate": 1e-3, "warmup_updates": 10, "weight_decay": 0.1}
    torch._dynamo.reset()
    counters.clear()
    plain, compiled = (learner_with(tiny_model(**TWO_LAYERS), compile_layers=on, **options) for on in (False, True))
    widths = set()
    compiled.model.base_model.register_forward_pre_hook(
        lambda _, __, inputs: widths.add(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    graphs = []
    for update in range(5):
        rollouts = random_rollouts(prompts=3 + update, seed=update)
        expected, found = plain.step(as_batch(rollouts, update)), compiled.step(as_batch(rollouts, update))
        graphs.append(counters["stats"]["unique_graphs"])
        padded = {"padding_fraction", "padding_saved"}
        assert {name: found[name] for name in found.keys() - padded} == pytest.approx(
            {name: expected[name] for name in expected.keys() - padded}, rel=1e-3, abs=1e-5
        )
    assert 3 <= graphs[1] == graphs[-1]  # a layer, the log-probabilities, the optimizer step
    assert len(widths) > 1 and all(width % 8 == 0 for width in widths), "compiled again for others on a GPU"
    for (name, one), (_, other) in zip(plain.weights(), compiled.weights(), strict=True):
        # Where a gradient is close to 0, Adam's step depends on its rounding.
        assert torch.isclose(one, other, atol=2e-5).float().mean() > 0.99, name
        assert (one - other).abs().max() < 1e-3, name


# --- ratios, staleness, mismatch ----------------------------------------------------------------------------


@pytest.mark.parametrize("off_policy_correction", ["ppo_clip", "cispo", "mask", "decoupled"])
def test_on_policy_the_ratio_is_exactly_1(off_policy_correction: Any) -> None:
    """The learner's own log-probabilities, handed in as what the engine sampled with."""
    learner = learner_with(off_policy_correction=off_policy_correction)
    rollouts = sorted(random_rollouts(), key=lambda r: -len(r) - len(r.prompt.tokens))
    with torch.no_grad():
        logprobs, _ = TokenScorer(learner.model, 1.0)(update_batch(rollouts, 0))
    for row, rollout in enumerate(rollouts):
        rollout.segments[0].logprobs = logprobs[row, : len(rollout)].tolist()
    metrics = learner.step(as_batch(rollouts))
    assert metrics["mismatch_max_abs"] == metrics["mismatch_kl"] == metrics["clipped_fraction"] == 0.0
    assert metrics["importance_weight_mean"] == 1.0
    for name in ("ess_token_fraction", "ess_rollout_fraction"):
        assert metrics[name] == pytest.approx(1.0)
    assert metrics["mismatch_tokens"] == metrics["tokens_trained"]


def test_decoupled_is_plain_when_the_proximal_policy_is_the_behaviour() -> None:
    """Over three optimizer steps, in which the new policy leaves both."""
    after = []
    for off_policy_correction in ("ppo_clip", "decoupled"):
        learner = learner_with(
            off_policy_correction=off_policy_correction, steps_per_update=3, learning_rate=3e-3, warmup_updates=0
        )
        metrics = learner.step(as_batch(sampled_with(learner.model, random_rollouts())))
        assert metrics["clipped_fraction"] > 0.05
        after.append(weights_of(learner.model))
    for name, weight in after[0].items():
        assert torch.allclose(weight, after[1][name], atol=1e-5), name


def test_decoupled_keeps_the_policy_of_before_the_update_over_several_steps() -> None:
    """Stale behavior: with several steps decoupled is neither plain nor truncated; with one it is
    truncated."""

    def weights_after(off_policy_correction: Any, steps: int) -> Tensor:
        learner = learner_with(
            off_policy_correction=off_policy_correction, steps_per_update=steps, learning_rate=3e-3, warmup_updates=0
        )
        learner.step(as_batch(random_rollouts(), version=1))
        return weights_of(learner.model)["model.layers.0.mlp.up_proj.weight"]

    assert torch.equal(weights_after("decoupled", 1), weights_after("cispo", 1))
    several = weights_after("decoupled", 3)
    for other in ("cispo", "ppo_clip"):
        assert (several - weights_after(other, 3)).abs().max() > 1e-5


def test_mismatch_is_of_fresh_tokens_and_ratios_are_of_stale_ones() -> None:
    rollouts = random_rollouts(versions=(3, 5))
    learner = learner_with()
    fresh: list[float] = []
    stale: list[float] = []
    for rollout in rollouts:
        gaps = (full_logprobs(learner.model, rollout) - torch.tensor(rollout.logprobs)).tolist()
        for gap, version in zip(gaps, rollout.versions, strict=True):
            (fresh if version == 5 else stale).append(gap)
    metrics = learner.step(as_batch(rollouts, version=5))
    assert metrics["mismatch_tokens"] == len(fresh)
    assert metrics["mismatch_mean_abs"] == pytest.approx(sum(map(abs, fresh)) / len(fresh), rel=1e-4)
    assert metrics["mismatch_max_abs"] == pytest.approx(max(map(abs, fresh)), rel=1e-4)
    assert metrics["mismatch_kl"] == pytest.approx(sum(math.exp(g) - g - 1 for g in fresh) / len(fresh), rel=1e-4)
    assert metrics["stale_fraction"] == pytest.approx(len(stale) / (len(stale) + len(fresh)))
    assert metrics["stale_ratio_mean"] == pytest.approx(sum(map(math.exp, stale)) / len(stale), rel=1e-4)
    assert metrics["stale_ratio_max"] == pytest.approx(math.exp(max(stale)), rel=1e-4)
    assert metrics["staleness_max"] == 2 and metrics["staleness_mean"] == pytest.approx(2 * metrics["stale_fraction"])


def test_the_mismatch_is_measured_before_the_first_step() -> None:
    """Later steps of the update see weights that the engine never had."""
    learner = learner_with(steps_per_update=2, learning_rate=0.1, warmup_updates=0)
    metrics = learner.step(as_batch(sampled_with(learner.model, random_rollouts())))
    assert 0 < metrics["mismatch_tokens"] < metrics["tokens_trained"]
    assert metrics["mismatch_max_abs"] < 1e-3


def test_mismatch_by_age_is_of_fresh_tokens_by_the_oldest_token_of_their_rollout() -> None:
    """Ages 0, 1, 2 and 3 (one bin), and 9 (the open bin), in one update; the bin of ages 4 to 7 has no tokens."""
    rollouts: list[Rollout] = []
    for age in (0, 1, 2, 3, 9):
        rollouts += random_rollouts(versions=(9 - age, 9))
    learner = learner_with()
    gaps: dict[int, list[float]] = {}
    for rollout, row in zip(rollouts, log_weights(learner, rollouts), strict=True):
        age = 9 - min(rollout.versions)
        fresh = [gap for gap, version in zip(row, rollout.versions, strict=True) if version == 9]
        gaps.setdefault({3: 2, 9: 8}.get(age, age), []).extend(fresh)
    metrics = learner.step(as_batch(rollouts, version=9))
    found = {name for name in metrics if "_age_" in name}
    assert found == {f"mismatch_{kind}_age_{age}" for kind in ("kl", "mean_abs") for age in (0, 1, 2, 8)}
    for age, of_age in gaps.items():
        assert metrics[f"mismatch_mean_abs_age_{age}"] == pytest.approx(sum(map(abs, of_age)) / len(of_age), rel=1e-4)
        expected = sum(math.exp(gap) - gap - 1 for gap in of_age) / len(of_age)
        assert metrics[f"mismatch_kl_age_{age}"] == pytest.approx(expected, rel=1e-4)


def test_an_update_without_stale_tokens_has_no_mismatch_by_age() -> None:
    metrics = learner_with().step(as_batch(random_rollouts(versions=(5, 5)), version=5))
    assert metrics["mismatch_tokens"] > 0 and not [name for name in metrics if "_age_" in name]


def log_weights(learner: Learner, rollouts: list[Rollout]) -> list[list[float]]:
    """Per rollout and token: log-probability under the learner minus that under the sampling policy."""
    with torch.no_grad():
        return [(full_logprobs(learner.model, r) - torch.tensor(r.logprobs)).tolist() for r in rollouts]


def test_effective_sample_size_is_of_untruncated_weights_by_token_and_by_rollout() -> None:
    rollouts = random_rollouts(versions=(3, 5))
    learner = learner_with(off_policy_correction="cispo", importance_cap=1.0)
    gaps = log_weights(learner, rollouts)
    metrics = learner.step(as_batch(rollouts, version=5))
    by_token = effective_sample_fraction(torch.tensor([gap for row in gaps for gap in row]))
    by_rollout = effective_sample_fraction(torch.tensor([sum(row) for row in gaps]))
    assert metrics["ess_token_fraction"] == pytest.approx(by_token, rel=1e-4)
    assert metrics["ess_rollout_fraction"] == pytest.approx(by_rollout, rel=1e-4)
    assert by_rollout < by_token < 1


def test_the_learning_rate_rises_over_the_first_updates() -> None:
    """Also after a restore: the count of updates is part of the state."""
    settings = LearnerSettings(learning_rate=4e-3, warmup_updates=4)
    learner = Learner(tiny_model(), settings)
    rates = [learner.step(as_batch(random_rollouts()))["learning_rate"] for _ in range(2)]
    resumed = Learner(tiny_model(), settings)
    resumed.load_state_dict(learner.state_dict())
    rates += [resumed.step(as_batch(random_rollouts()))["learning_rate"] for _ in range(3)]
    assert rates == pytest.approx([1e-3, 2e-3, 3e-3, 4e-3, 4e-3])


@pytest.mark.parametrize("steps", [1, 2])
def test_the_learning_rate_is_scaled_by_the_effective_sample_size(steps: int) -> None:
    """VCPO: one step equals one with the learning rate times the root of the fraction; each step has its own."""
    rate = 3e-3
    common: dict[str, Any] = {"warmup_updates": 0, "steps_per_update": steps, "off_policy_correction": "cispo"}
    learner = learner_with(learning_rate=rate, scale_learning_rate_by_ess=True, **common)
    metrics = learner.step(as_batch(random_rollouts(), version=1))
    assert metrics["learning_rate"] <= rate * math.sqrt(metrics["ess_rollout_fraction"]) * (1 + 1e-9)
    if steps > 1:
        return
    assert metrics["learning_rate"] == pytest.approx(rate * math.sqrt(metrics["ess_rollout_fraction"]))
    plain = learner_with(learning_rate=metrics["learning_rate"], **common)
    plain.step(as_batch(random_rollouts(), version=1))
    assert_close(weights_of(learner.model), weights_of(plain.model))


def test_the_cosine_of_successive_gradients_is_reported_on_request() -> None:
    learner = learner_with(gradient_cosine=True, learning_rate=1e-9)
    first = learner.step(as_batch(random_rollouts()))
    again = learner.step(as_batch(random_rollouts()))
    other = learner.step(as_batch(random_rollouts(seed=5)))
    assert "gradient_cosine" not in first
    assert again["gradient_cosine"] == pytest.approx(1.0, abs=1e-3) and abs(other["gradient_cosine"]) < 0.9
    assert "gradient_cosine" not in learner_with().step(as_batch(random_rollouts()))


# --- what trains --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["zero", "masked"])
def test_what_an_environment_scored_after_a_limit_keeps_its_score(rule: Any) -> None:
    rollouts = random_rollouts()
    settings = LearnerSettings(algorithm="grpo", truncated_rollouts=rule, normalizer_tokens=100)
    expected = gradients(Learner(tiny_model(), settings), rollouts)
    rollouts[1].truncated, rollouts[1].ended_by, rollouts[1].has_environment = True, "max_turns", True
    assert_close(gradients(Learner(tiny_model(), settings), rollouts), expected)


def test_masked_truncated_rollouts_have_no_gradient_but_count_in_their_set() -> None:
    rollouts = random_rollouts()
    rollouts[1].truncated = True
    found = gradients(learner_with(algorithm="grpo", truncated_rollouts="masked"), rollouts)
    rollouts[1].segments[0].mask = [0] * len(rollouts[1])
    rollouts[1].truncated = False
    assert_close(found, gradients(learner_with(algorithm="grpo"), rollouts))


def test_rewards_of_filtered_rollouts_are_part_of_the_statistics_of_previous_cohorts() -> None:
    """As if the filtered ones had been trained on: else the reference of the next cohort has the kept rewards only."""
    first, second = random_rollouts(siblings=1), random_rollouts(siblings=1)
    for rollout in second:
        rollout.cohort = 1
    half = len(first) // 2
    filtered = tuple((0, float(rollout.reward or 0.0)) for rollout in first[half:])
    advantages = []
    for batch in (
        Batch(0, 0, 0, tuple(first), complete_cohorts=1),
        Batch(0, 0, 0, tuple(first[:half]), complete_cohorts=1, filtered_rewards=filtered),
        Batch(0, 0, 0, tuple(first[:half]), complete_cohorts=1),
    ):
        learner = learner_with(algorithm="reinforce++")
        learner.step(batch)
        advantages.append(learner.step(Batch(1, 1, 1, tuple(second), complete_cohorts=1))["advantage_mean"])
    assert math.isclose(advantages[0], advantages[1], abs_tol=1e-6)
    assert not math.isclose(advantages[0], advantages[2], abs_tol=1e-3)


def test_equal_large_rewards_have_no_advantage() -> None:
    """In float32 the mean of seven times 1000.1 is not 1000.1: GRPO would scale the difference up to 0.3."""
    rollouts = random_rollouts(prompts=2, siblings=7, reward=lambda id: 1000.1)
    learner = learner_with(algorithm="grpo", normalizer_tokens=100)
    metrics = learner.step(as_batch(rollouts, 0))
    assert metrics["zero_variance_groups"] == 2
    assert abs(metrics["advantage_mean"]) < 1e-6 and metrics["grad_norm"] < 1e-6


def test_rewards_equal_to_those_of_the_initial_policy_have_no_advantage() -> None:
    learner = learner_with(algorithm="reinforce++")
    learner.set_initial_rewards([70.1] * 9)
    rollouts = random_rollouts(siblings=1, reward=lambda id: 70.1)
    metrics = learner.step(as_batch(rollouts, 0))
    assert abs(metrics["advantage_mean"]) < 1e-12 and metrics["advantage_std"] == 0


def test_an_update_with_nothing_to_train_on_leaves_the_weights() -> None:
    learner = learner_with(algorithm="grpo", truncated_rollouts="masked")
    before = weights_of(learner.model)
    rollouts = random_rollouts()
    for rollout in rollouts:
        rollout.truncated = True
    metrics = learner.step(as_batch(rollouts))
    assert metrics["rollouts_trained"] == 0 and learner.updates == 0
    assert same(weights_of(learner.model), before)


@pytest.mark.parametrize("part", ["policy", "critic"])
def test_a_gradient_that_is_not_finite_is_skipped_and_counted(part: str) -> None:
    learner = learner_with(algorithm="ppo")
    assert learner.critic is not None
    trained: nn.Module = learner.model if part == "policy" else learner.critic
    head = learner.model.lm_head if part == "policy" else learner.critic.head
    before = weights_of(trained)
    head.weight.register_hook(lambda gradient: gradient * math.inf)
    metrics = learner.step(as_batch(random_rollouts()))
    assert metrics["skipped_steps"] == 1
    assert math.isfinite(metrics["grad_norm"]) == (part == "critic") != math.isfinite(metrics["critic_grad_norm"])
    assert same(weights_of(trained), before)


def test_every_skipped_step_shows_also_behind_a_finite_one() -> None:
    """Two steps, the second without a finite gradient: the norm of the first one must not hide it."""
    learner = learner_with(steps_per_update=2)
    backward_passes = itertools.count()
    learner.model.lm_head.weight.register_hook(lambda gradient: gradient * (math.nan if next(backward_passes) else 1.0))
    metrics = learner.step(as_batch(random_rollouts()))
    assert metrics["micro_batches"] == 2  # one per step
    assert metrics["skipped_steps"] == 1
    assert math.isnan(metrics["grad_norm"])


@pytest.mark.parametrize("aggregation", ["constant", "token_mean", "sequence_mean"])
def test_the_loss_of_an_update_does_not_grow_with_its_number_of_steps(aggregation: Any) -> None:
    """Without a change of the weights, the same rollouts have the same loss, in one step or in three."""
    found = []
    for steps in (1, 3):
        settings = LearnerSettings(
            algorithm="ppo", aggregation=aggregation, steps_per_update=steps, learning_rate=1e-20,
            critic_learning_rate=1e-20, normalizer_tokens=100,
        )  # fmt: skip
        rollouts = random_rollouts()
        for rollout in rollouts:  # of one length: every step has as many tokens
            rollout.segments = [Segment(tokens_of(rollout.id, 5), [-1.0] * 5, 0)]
            rollout.__post_init__()
        metrics = Learner(tiny_model(), settings).step(as_batch(rollouts))
        found.append((metrics["policy_loss"], metrics["critic_loss"]))
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_sorting_by_length_saves_padding() -> None:
    lengths = [10, 100, 12, 90, 11, 95, 9, 99]
    arrival = micro_batches(range(8), lengths, 200)
    by_length = sorted_micro_batches(range(8), lengths, 200)
    assert all(len(group) * max(lengths[row] for row in group) <= 200 for group in arrival)
    assert (padded_tokens(arrival, lengths), padded_tokens(by_length, lengths)) == (768, 438)
    assert micro_batches([0, 1], [500, 2], 200) == [[0], [1]]

    rollouts = random_rollouts(prompts=8, siblings=1)
    for rollout, length in zip(rollouts, lengths, strict=True):
        rollout.prompt = Prompt(rollout.prompt.id, [5])
        rollout.drop_tokens()
        rollout.append(Segment([7] * (length - 1), [-1.0] * (length - 1), 0))
    learner = learner_with(tokens_per_micro_batch=200)
    metrics = learner.step(as_batch(sorted(rollouts, key=len)))
    assert metrics["padding_saved"] == pytest.approx(1 - 438 / 768)
    assert metrics["padding_fraction"] == pytest.approx(1 - sum(lengths) / 438)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=7), st.integers(1, 1200), st.sampled_from((0, 256, 4096)))
@hypothesis_settings(max_examples=60, deadline=None)
def test_micro_batches_are_the_best_cut_of_the_sorted_rollouts(lengths: list[int], budget: int, overhead: int) -> None:
    def cost(groups: Sequence[Sequence[int]]) -> int:
        return padded_tokens(groups, lengths) + overhead * len(groups)

    def allowed(group: Sequence[int]) -> bool:
        return len(group) == 1 or len(group) * max(lengths[row] for row in group) <= budget

    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    costs = []
    for cuts in itertools.product((False, True), repeat=len(order) - 1):
        groups = [[order[0]]]
        for row, cut in zip(order[1:], cuts, strict=True):
            if cut:
                groups.append([])
            groups[-1].append(row)
        if all(map(allowed, groups)):
            costs.append(cost(groups))
    found = sorted_micro_batches(range(len(lengths)), lengths, budget, overhead)
    assert sorted(row for group in found for row in group) == list(range(len(lengths)))
    assert all(map(allowed, found))
    assert cost(found) == min(costs)


# --- learning -----------------------------------------------------------------------------------------------


def rollouts_by_length(seed: int, count: int = 64) -> list[Rollout]:
    """Shortest first, each with a prompt of its own, in cohort 0. The reward falls with length: of the first quarter
    all but one are solved, then half, of the last quarter none."""
    rollouts = sorted(random_rollouts(prompts=count, siblings=1, seed=seed), key=len)
    for place, rollout in enumerate(rollouts):
        quarter = 4 * place // count
        solved = (place != 2, place % 2 == 0, place % 2 == 0, False)[quarter]
        rollout.reward = 2.0 if solved else -2.0
        rollout.prompt = Prompt(rollout.prompt.id, [5])
    return rollouts


@pytest.mark.parametrize("algorithm", ["reinforce++", "ppo"])
def test_no_batch_of_the_first_cohort_sets_the_scale_for_the_others(algorithm: Any) -> None:
    """Also through a checkpoint: the second half is trained on by a learner that was restored."""
    settings = LearnerSettings(algorithm=algorithm, learning_rate=1e-6)
    learner = Learner(tiny_model(), settings)
    learner.set_initial_rewards([float(rollout.reward or 0) for rollout in rollouts_by_length(seed=1)])
    rollouts = rollouts_by_length(seed=2)
    scales = []
    for batch in range(4):
        if batch == 2:
            restored = Learner(tiny_model(), settings)
            restored.load_state_dict(through_a_file(learner.state_dict()))
            learner = restored
        metrics = learner.step(as_batch(rollouts[16 * batch : 16 * batch + 16], batch, update=batch))
        scales.append(math.hypot(metrics["advantage_mean"], metrics["advantage_std"]))
        assert abs(metrics["advantage_mean"]) < 1.5
    assert min(scales) > 1 / 1.5 and max(scales) < 1.5, scales


def test_the_critic_is_the_baseline_of_the_first_cohort() -> None:
    """It starts at the mean of the initial rewards, so that is not subtracted a second time."""
    learner = learner_with(algorithm="ppo")
    learner.set_initial_rewards([99.0, 100.0, 101.0])
    rollouts = random_rollouts(reward=lambda id: 100.0 + id % 3 - 1)
    assert abs(learner.step(as_batch(rollouts))["advantage_mean"]) < 1


def test_initial_rewards_are_for_a_learner_without_updates() -> None:
    learner = learner_with()
    learner.step(as_batch(random_rollouts()))
    with pytest.raises(ValueError, match="1 updates were already made"):
        learner.set_initial_rewards([0.0, 1.0])


def test_a_token_weighs_the_same_whichever_batch_comes_first() -> None:
    """The gradient of a batch of long rollouts, as the first update and after one on short rollouts."""
    rollouts = sorted(random_rollouts(prompts=8), key=len)
    short, long = rollouts[:12], rollouts[12:]
    settings = LearnerSettings(learning_rate=1e-30, advantage_baseline="batch", max_grad_norm=NO_CLIPPING)
    first, second = Learner(tiny_model(), settings), Learner(tiny_model(), settings)
    second.step(as_batch(short))
    assert_close(gradients(second, long), gradients(first, long))


def test_a_resumed_run_keeps_the_constant_that_it_started_with() -> None:
    first, resumed = (learner_with(normalizer_tokens=tokens) for tokens in (1000, 9000))
    resumed.load_state_dict(first.state_dict())
    assert resumed.step(as_batch(random_rollouts())) == first.step(as_batch(random_rollouts()))


def test_the_constant_of_a_run_is_that_of_its_schedule() -> None:
    settings = TrainSettings(rollouts_per_update=32, prompts_per_cohort=8, max_response_tokens=200)
    assert learner_settings_of(settings).normalizer_tokens == 32 * 200


def test_only_what_follows_from_schedule_and_sampling_cannot_be_set_in_train() -> None:
    derived = {"normalizer_tokens", "temperature", "top_p", "bf16"}
    assert LearnerSettings.model_fields.keys() - LearnerFlags.model_fields.keys() == derived


def test_two_epochs_of_a_prompt_are_two_groups_even_in_one_cohort() -> None:
    first, second = random_rollouts(prompts=3, siblings=4, seed=0), random_rollouts(prompts=3, siblings=4, seed=1)
    for rollout in second:
        rollout.id += 12
    learner = learner_with(algorithm="grpo")
    assert learner.step(as_batch([*first, *second]))["groups"] == 6


def test_the_critic_learns_to_explain_returns() -> None:
    """The reward depends on the prompt: what the critic can know before the first token."""
    learner = learner_with(model=tiny_model(**TWO_LAYERS), algorithm="ppo", critic_learning_rate=3e-3, warmup_updates=0)
    rollouts = sampled_with(learner.model, random_rollouts(prompts=6, siblings=4))
    for rollout in rollouts:
        rollout.reward = float(int(rollout.prompt.id[1:]) % 3)
    quality = [learner.step(as_batch(rollouts))["explained_variance"] for _ in range(30)]
    assert quality[0] == pytest.approx(0.0, abs=1e-5)
    assert quality[-1] > 0.9


# --- state and weights --------------------------------------------------------------------------------------

STATEFUL: list[dict[str, Any]] = [
    {"algorithm": "reinforce++", "kl_coefficient": 0.1},
    {"algorithm": "grpo", "bf16": True, "steps_per_update": 2},
    {"algorithm": "ppo", "weight_decay": 0.01},
    {"algorithm": "ppo", "lora_rank": 4, "bf16": True, "kl_coefficient": 0.1},
]


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def cohorts_of_two(version: int) -> Batch:
    """The update of this version; every second one completes a cohort."""
    rollouts = random_rollouts(2, cohort=version // 2, seed=version)
    return as_batch(rollouts, version, complete_cohorts=(version + 1) // 2)


@pytest.mark.parametrize("changes", STATEFUL)
def test_a_restored_learner_makes_the_same_next_step_to_the_bit(changes: dict[str, Any]) -> None:
    if changes.get("lora_rank"):
        pytest.importorskip("peft", reason="LoRA needs peft: pip install peft")
    settings = LearnerSettings(learning_rate=1e-3, warmup_updates=5, **changes)
    learner = Learner(tiny_model(), settings)
    for version in range(3):
        learner.step(cohorts_of_two(version))
    state = through_a_file(learner.state_dict())
    model = tiny_model()
    torch.manual_seed(123)  # LoRA starts from random numbers; they must not matter
    restored = Learner(model, settings)
    restored.load_state_dict(state)
    for version in range(3, 5):
        assert learner.step(cohorts_of_two(version)) == restored.step(cohorts_of_two(version))
    assert same(dict(learner.weights()), dict(restored.weights()))


def test_state_of_another_model_is_refused() -> None:
    state = learner_with().state_dict()
    with pytest.raises(ValueError, match="names or shapes differ"):
        learner_with(model=tiny_model(**TWO_LAYERS)).load_state_dict(state)
    with pytest.raises(ValueError, match="2 names or shapes differ"):
        learner_with(model=tiny_model(vocab_size=VOCABULARY + 1)).load_state_dict(state)


def failing_after(calls: int) -> Callable[..., None]:
    left = iter(range(calls))

    def hook(*_: Any) -> None:
        if next(left, None) is None:
            raise MemoryError

    return hook


def test_a_step_that_failed_half_way_can_be_repeated() -> None:
    """The third of several micro-batches fails, as one that runs out of memory would."""
    after = []
    for fails in (False, True):
        learner = learner_with(tokens_per_micro_batch=40, learning_rate=1e-3)
        learner.step(as_batch(random_rollouts()))
        if fails:
            handle = learner.model.model.register_forward_pre_hook(failing_after(2))
            with pytest.raises(MemoryError):
                learner.step(as_batch(random_rollouts(seed=1), version=1))
            handle.remove()
        learner.step(as_batch(random_rollouts(seed=1), version=1))
        after.append((weights_of(learner.model), learner.state_dict()["statistics"]))
    assert after[0][1] == after[1][1] and same(after[0][0], after[1][0])


@pytest.mark.parametrize("lora_rank", [0, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_have_the_names_of_the_model_and_score_like_the_learner(lora_rank: int, tied: bool) -> None:
    if lora_rank:
        pytest.importorskip("peft", reason="LoRA needs peft: pip install peft")
    options: dict[str, Any] = {"learning_rate": 1e-2, "warmup_updates": 0, "kl_coefficient": 0.1}
    learner = learner_with(tiny_model(tie_word_embeddings=tied), lora_rank=lora_rank, **options)
    first = learner.step(as_batch(random_rollouts()))
    assert first["kl_reference"] == pytest.approx(0.0, abs=1e-6)
    assert learner.step(as_batch(random_rollouts()))["kl_reference"] > 1e-4
    weights = dict(learner.weights())
    fresh = tiny_model(seed=5, tie_word_embeddings=tied)
    assert weights.keys() == fresh.state_dict().keys()
    before = tiny_model(tie_word_embeddings=tied)
    fresh.load_state_dict(weights)
    for rollout in random_rollouts():
        trained = full_logprobs(learner.model, rollout)
        assert torch.allclose(full_logprobs(fresh, rollout), trained, atol=1e-4)
        assert (full_logprobs(before, rollout) - trained).abs().max() > 1e-3


# --- the optimizer ------------------------------------------------------------------------------------------


def test_adamw_is_pytorchs() -> None:
    torch.manual_seed(0)
    ours = nn.Parameter(torch.randn(7, 5))
    theirs = nn.Parameter(ours.detach().clone())
    own, reference = AdamW([ours], 0.1), torch.optim.AdamW([theirs], lr=0.01, weight_decay=0.1)
    for _ in range(20):
        ours.grad = torch.randn(7, 5)
        theirs.grad = ours.grad.clone()
        own.step(0.01)
        reference.step()
    assert torch.allclose(ours, theirs, atol=1e-6)


def test_bf16_weights_keep_steps_that_bf16_would_round_away() -> None:
    torch.manual_seed(0)
    exact = torch.randn(1000)
    weight, remainder = exact.bfloat16(), torch.zeros(1000, dtype=torch.int16)
    split_bf16(exact, weight, remainder)
    assert torch.equal(join_bf16(weight, remainder), exact)
    assert torch.equal(weight, exact.bfloat16())

    parameter, plain = nn.Parameter(exact.bfloat16()), nn.Parameter(exact.bfloat16().float())
    lean, full = AdamW([parameter], 0.0), AdamW([plain], 0.0)
    for _ in range(200):
        gradient = torch.randn(1000) + 1.0
        parameter.grad, plain.grad = gradient.bfloat16(), gradient.bfloat16().float()
        lean.step(1e-5)
        full.step(1e-5)
    moved = (plain.detach() - exact.bfloat16().float()).abs()
    assert moved.mean() > 1e-3  # 200 steps of about 1e-5, each far below half a bf16 step of a weight near 1
    kept = join_bf16(parameter.detach(), lean.state_dict()["remainder"][0])
    assert (kept - plain.detach()).abs().mean() < 0.02 * moved.mean()
    assert (parameter.detach().float() - plain.detach()).abs().max() < 2**-8 * 4


@pytest.mark.parametrize("loaded_as", [torch.float32, torch.bfloat16])
def test_bf16_keeps_the_positions_of_a_long_context(tmp_path: Path, loaded_as: torch.dtype) -> None:
    """Rotary frequencies must stay in fp32, as in every engine: rounded ones are off by radians after 1,000 tokens."""
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    tiny_model(**small).save_pretrained(tmp_path)  # attention in bf16 is slow on most CPUs
    engines = Qwen2ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    settings = LearnerSettings(algorithm="ppo", kl_coefficient=0.1, bf16=True)
    learner = Learner(Qwen2ForCausalLM.from_pretrained(tmp_path, dtype=loaded_as), settings)
    context, response = tokens_of(1, 1000), tokens_of(2, 50)
    assert learner.logprobs_of(context, response) == response_logprobs(engines, context, response)
    assert learner.critic is not None
    own = engines.model.rotary_emb.inv_freq
    assert torch.equal(learner.critic.trunk.rotary_emb.inv_freq, own) and own.dtype == torch.float32


# --- what users meet ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_p": 0.9}, "top_p = 0.9: .*ratio is biased.*top_p = 1.0"),
        ({"algorithm": "dpo"}, "algorithm = 'dpo': it should be .*reinforce"),
        ({"algorithm": "grpo", "advantage_baseline": "batch"}, "advantage_baseline = 'batch': grpo uses the group"),
        ({"algorithm": "ppo", "advantage_baseline": "group"}, "advantage_baseline = 'group': with ppo the critic"),
        ({"importance_cap": 0.5}, "importance_cap = 0.5: .*Use 2.0"),
        ({"temperature": 0.0}, "temperature = 0.0"),
        ({"recompute_above_tokens": 4096}, "recompute_above_tokens = 4096: .*Set gradient_checkpointing = true"),
        ({"tokens_per_micro_batch": 0}, "tokens_per_micro_batch = 0"),
    ],
)
def test_bad_settings_name_the_key_the_value_and_a_fix(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LearnerSettings(**changes)


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_a_state_of_another_dtype_is_refused(lora_rank: int) -> None:
    """With LoRA the trained weights are float32 in both, and only the base model would differ."""
    in_bf16, in_fp32 = (learner_with(bf16=bf16, lora_rank=lora_rank) for bf16 in (True, False))
    before = weights_of(in_fp32.model)
    with pytest.raises(ConfigurationError, match="dtype = 'float32': the state was saved with weights in bfloat16"):
        in_fp32.load_state_dict(in_bf16.state_dict())
    assert same(weights_of(in_fp32.model), before)
    with pytest.raises(ConfigurationError, match="dtype = 'bfloat16': the state was saved with weights in float32"):
        in_bf16.load_state_dict(in_fp32.state_dict())


@pytest.mark.parametrize("changes", [{"lora_rank": 2}, {"kl_coefficient": 0.1}, {"lora_rank": 2, "algorithm": "ppo"}])
def test_a_state_of_another_initial_model_is_refused(changes: dict[str, Any]) -> None:
    """Its LoRA adapters or its KL reference would be those of another policy."""
    settings = LearnerSettings(**changes)
    trained = Learner(tiny_model(), settings)
    trained.step(as_batch(random_rollouts(), 0))
    Learner(tiny_model(), settings).load_state_dict(trained.state_dict())
    with pytest.raises(ConfigurationError, match="its weights are not those that the run started with"):
        Learner(tiny_model(seed=1), settings).load_state_dict(trained.state_dict())


def test_without_frozen_weights_the_initial_model_does_not_matter() -> None:
    trained = learner_with()
    other = learner_with(model=tiny_model(seed=1))
    other.load_state_dict(trained.state_dict())
    assert same(dict(trained.weights()), dict(other.weights()))


def test_bad_rollouts_are_named() -> None:
    learner = learner_with()
    for spoil, message in (
        (lambda r: setattr(r, "reward", None), "rollout 2 of prompt 'p0' has reward None"),
        (lambda r: setattr(r, "reward", math.nan), "has reward nan"),
        (lambda r: r.drop_tokens(), "0 response tokens"),
    ):
        rollouts = random_rollouts()
        spoil(rollouts[2])
        with pytest.raises(ValueError, match=message):
            learner.step(as_batch(rollouts))


def test_default_treatment_of_stale_tokens_follows_the_mode() -> None:
    for mode in ("on-policy+planned", "baseline"):
        assert off_policy_correction_for(mode) == "decoupled"
    for mode in ("partial+elevator", "cohort-at-once"):
        assert off_policy_correction_for(mode) == "ppo_clip"


# --- TRL ----------------------------------------------------------------------------------------------------


PROMPTS, SIBLINGS, TEMPERATURE, MAX_TOKENS = 3, 4, 0.7, 32
CISPO_CAP = 1.01  # low enough to truncate weights here


@pytest.mark.parametrize(
    ("loss_type", "aggregation", "level"),
    [
        ("dr_grpo", "constant", "token"),
        ("dapo", "token_mean", "token"),
        ("grpo", "sequence_mean", "sequence"),
        ("cispo", "token_mean", "token"),
    ],
)
def test_grpo_loss_and_gradients_are_trls(
    loss_type: str, aggregation: Any, level: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GRPOTrainer trains on our rollouts for two optimizer steps: the first on-policy, the second with
    clipping and KL. Its advantages, losses and gradients come from its own code, through its public
    interface."""
    pytest.importorskip("trl", reason="the comparison with TRL needs it: pip install trl")
    for name in ("HF_HUB_OFFLINE", "TRL_EXPERIMENTAL_SILENCE"):
        monkeypatch.setenv(name, "1")
    rollouts = random_rollouts(PROMPTS, SIBLINGS)
    logged, snapshots = trl_two_steps(rollouts, tmp_path, loss_type, level)

    correction: Any = "cispo" if loss_type == "cispo" else "ppo_clip"
    loss: dict[str, Any] = {"aggregation": aggregation, "ratio_level": level, "importance_cap": CISPO_CAP}
    loss |= {"normalizer_tokens": PROMPTS * SIBLINGS * MAX_TOKENS, "kl_coefficient": 0.1, "temperature": TEMPERATURE}
    settings = LearnerSettings(algorithm="grpo", off_policy_correction=correction, max_grad_norm=NO_CLIPPING, **loss)
    rollouts = sampled_with(tiny_model(), rollouts, TEMPERATURE)
    for step, (weights, their_gradients) in enumerate(snapshots):
        ours, same_again = Learner(tiny_model(), settings), Learner(tiny_model(), settings)
        for learner in (ours, same_again):
            learner.load_state_dict(learner.state_dict() | {"policy": weights})
        assert_close(gradients(ours, rollouts), their_gradients, 1e-4)
        metrics = same_again.step(as_batch(rollouts))
        if loss_type == "dapo":  # there the mean KL has the weights of the loss
            loss = metrics["policy_loss"] + 0.1 * metrics["kl_reference"]
            assert loss == pytest.approx(logged[step]["loss"], rel=1e-3, abs=1e-5)
            assert metrics["kl_reference"] == pytest.approx(logged[step]["kl"], rel=1e-3, abs=1e-5)
        assert (metrics["clipped_fraction"] > 0) == (step == 1 and loss_type != "cispo")


def trl_two_steps(
    rollouts: list[Rollout], folder: Path, loss_type: str, level: str
) -> tuple[list[dict[str, float]], list[tuple[dict[str, Tensor], dict[str, Tensor]]]]:
    """What TRL logs, and weights and gradients before each of its optimizer steps."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOTrainer  # type: ignore[attr-defined]

    from small_trl_runs import small_config

    words = Tokenizer(models.WordLevel({f"t{token}": token for token in range(VOCABULARY)}, unk_token="t0"))
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=words, eos_token="t1", pad_token="t2"
    )
    tiny_model().save_pretrained(folder / "model")  # the reference is loaded from a path

    def rollout_func(texts: list[str], trainer: Any) -> dict[str, Any]:
        assert texts == [r.prompt.id for r in rollouts]
        return {
            "prompt_ids": [list(r.prompt.tokens) for r in rollouts],
            "completion_ids": [list(r.tokens) for r in rollouts],
            "logprobs": [list(r.logprobs) for r in rollouts],
        }

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        assert completion_ids == [list(r.tokens) for r in rollouts]
        return [float(r.reward or 0) for r in rollouts]

    snapshots: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []

    class Snapshot(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            weights = {name: p.detach().clone() for name, p in model.named_parameters()}
            snapshots.append((weights, {name: p.grad.clone() for name, p in model.named_parameters()}))

    trainer = GRPOTrainer(
        model=Qwen2ForCausalLM.from_pretrained(folder / "model"),
        reward_funcs=reward,
        rollout_func=rollout_func,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": [f"p{index}" for index in range(PROMPTS)]}),
        callbacks=[Snapshot()],
        args=small_config(
            folder / "out",
            per_device_train_batch_size=PROMPTS * SIBLINGS,
            num_generations=SIBLINGS,
            num_iterations=2,
            max_steps=2,
            loss_type=loss_type,
            importance_sampling_level=level,
            max_completion_length=MAX_TOKENS,
            temperature=TEMPERATURE,
            beta=0.1,
            use_bias_correction_kl=False,  # ours is the plain k3 estimate
            epsilon=0.2,
            epsilon_high=CISPO_CAP if loss_type == "cispo" else 0.28,
            learning_rate=3e-3,
            lr_scheduler_type="constant",
            max_grad_norm=1e9,
            gradient_checkpointing=False,
            shuffle_dataset=False,
        ),
    )
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry], snapshots
