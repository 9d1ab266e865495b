"""SortedGRPOTrainer in the place of GRPOTrainer: real TRL, the built-in model, a few updates on the CPU."""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl.trainer.grpo_trainer import GRPOTrainer

from small_trl_runs import (
    GROUP,
    Recorder,
    check_resumed,
    config,
    engine_for,
    events_in,
    losing,
    losses_in,
    model,
    on_own_engine,
    questions,
    trainer_for,
    updates_in,
    weights_of,
)
from sortedrl.core import Request, TooManyRejected, strategy_named
from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.engine import EngineDied, EngineSpec
from sortedrl.core.events import Event, Failed, Rejected, Scored, Updated
from sortedrl.core.rollout import Prompt, Rollout, Segment
from sortedrl.core.schedule import Schedule
from sortedrl.engines.embedded.engine import EmbeddedEngine
from sortedrl.engines.registry import SERVERS
from sortedrl.integrations.trl import EngineMismatch, HookNeverFired, SortedGRPOTrainer
from sortedrl.integrations.trl.fields import HOOKS, REFUSED, check_fields, check_version, schedule_for
from sortedrl.integrations.trl.rows import filled_up, micro_batches, rows_in_groups, rows_needed
from sortedrl.integrations.trl.run import LateRewards, read_state, write_state
from sortedrl.log.reading import read_intact
from sortedrl.models import BUILT_IN_MODEL
from sortedrl.models.merged_weights import merged_weights
from sortedrl.observe.metrics import Metrics

QUICK_MODES = ("on-policy", "partial+elevator")
OTHER_MODES = ("baseline", "cohort-at-once", "on-policy+planned", "partial", "partial+planned", "partial+lookahead")
MODES = (*QUICK_MODES, *(pytest.param(mode, marks=pytest.mark.slow) for mode in OTHER_MODES))
pytestmark = pytest.mark.usefixtures("quiet")


# Rows


def rollout(number: int, tokens: int = 3) -> Rollout:
    made = Rollout(number, Prompt(str(number // GROUP), (1, 2), number // GROUP), number % GROUP, 0, 0, 0)
    made.append(Segment(list(range(tokens)), [0.0] * tokens, 0))
    return made


def test_sets_stand_together_and_a_missing_member_is_filled_up_without_training() -> None:
    rows = rows_in_groups([rollout(n) for n in (5, 0, 4, 1, 2, 7, 3)], GROUP)  # 6 was rejected
    assert [row.rollout.id for row in rows] == [5, 4, 7, 5, 0, 1, 2, 3]
    assert [row.trains for row in rows] == [True] * 3 + [False] + [True] * 4
    padded = filled_up(rows, rows_needed(len(rows), GROUP, 3))
    assert len(padded) == 12 and not any(row.trains for row in padded[8:])


def test_micro_batches_hold_every_row_once_shortest_first_and_without_needless_padding() -> None:
    lengths = [5, 2, 7, 3]
    completion_mask = torch.tensor([[1] * n + [0] * (7 - n) for n in lengths])
    prompt_mask = torch.tensor([[0] * n + [1] * (4 - n) for n in (0, 2, 1, 3)])
    scored = {
        "prompt_ids": torch.arange(16).view(4, 4) * prompt_mask,
        "prompt_mask": prompt_mask,
        "completion_ids": torch.arange(28).view(4, 7) * completion_mask,
        "completion_mask": completion_mask,
        "advantages": torch.tensor([0.0, 1.0, 2.0, 3.0]),
        "importance_sampling_ratio": torch.ones(4, 1),
        "num_items_in_batch": torch.tensor(17),
    }
    first, second = micro_batches(scored, 2, trim=True)
    assert first["advantages"].tolist() == [1.0, 3.0] and second["advantages"].tolist() == [0.0, 2.0]
    assert first["completion_ids"].shape == (2, 3) and second["completion_ids"].shape == (2, 7)
    assert first["prompt_mask"].tolist() == [[1, 1], [0, 1]]
    assert first["completion_ids"].tolist() == [[7, 8, 0], [21, 22, 23]]
    assert first["num_items_in_batch"] == 17 and first["importance_sampling_ratio"].shape == (2, 1)


def test_every_optimizer_step_of_an_update_sees_the_same_mix_of_lengths() -> None:
    lengths = torch.arange(1, 25)
    scored = {
        "prompt_mask": torch.ones(24, 1, dtype=torch.long),
        "completion_mask": (torch.arange(24) < lengths[:, None]).long(),
        "advantages": lengths.float(),
    }
    parts = [part["advantages"].tolist() for part in micro_batches(scored, 6, optimizer_steps=3, trim=True)]
    assert parts == [  # two micro-batches for each of three steps
        [1, 4, 7, 10], [13, 16, 19, 22],
        [2, 5, 8, 11], [14, 17, 20, 23],
        [3, 6, 9, 12], [15, 18, 21, 24],
    ]  # fmt: skip


def test_the_log_waits_for_rewards() -> None:
    seen: list[Event] = []
    log = LateRewards(seen.append)
    log(Scored(0.5, 7, 0.0))
    update = Updated(1.0, 0, 0, 0, (7, 8), (1, 2), (0.0, 0.0), (((0, 1),), ((0, 2),)), (0, 0))
    log(update)
    assert seen == []
    log.release({7: 0.25, 8: 0.75})
    assert seen == [Scored(1.0, 7, 0.25), Scored(1.0, 8, 0.75), update._replace(rewards=(0.25, 0.75))]


# What is refused


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_nothing_would_honour_is_refused_by_name(name: str, tmp_path: Path) -> None:
    args = config(tmp_path)
    check_fields(args, off_policy_correction="ppo_clip", engine="embedded")
    setattr(args, name, "away from the default")
    with pytest.raises(ConfigurationError) as refused:
        check_fields(args, off_policy_correction="ppo_clip", engine="vllm")
    assert refused.value.key == name


def test_all_refused_fields_are_named_at_once(tmp_path: Path) -> None:
    """As in a script that has used TRL's own vLLM."""
    args = config(tmp_path, use_vllm=True, vllm_mode="server", vllm_server_port=8001, top_p=0.9)
    also = "Also refused: use_vllm, vllm_mode, vllm_server_port"
    with pytest.raises(ConfigurationError, match=rf"top_p = 0\.9: .* {also}"):
        check_fields(args, off_policy_correction="ppo_clip", engine="vllm")


@pytest.mark.parametrize("fields", [{"vllm_max_model_length": 64}, {"vllm_enable_sleep_mode": True}])
def test_fields_of_vllm_need_vllm(fields: dict[str, Any], tmp_path: Path) -> None:
    args = config(tmp_path, **fields)
    check_fields(args, off_policy_correction="ppo_clip", engine="vllm")
    with pytest.raises(ConfigurationError, match=next(iter(fields))):
        check_fields(args, off_policy_correction="ppo_clip", engine="embedded")


@pytest.mark.parametrize(
    ("fields", "off_policy_correction", "key"),
    [
        ({"vllm_importance_sampling_mode": "token_truncate"}, "ppo_clip", "vllm_importance_sampling_mode"),
        ({"vllm_importance_sampling_correction": False}, "decoupled", "vllm_importance_sampling_correction"),
        ({}, "squared", "off_policy_correction"),
        ({"temperature": 0.0}, "ppo_clip", "temperature"),
        ({"max_completion_length": None}, "ppo_clip", "max_completion_length"),
        ({"steps_per_generation": 3}, "ppo_clip", "steps_per_generation"),
        ({"num_iterations": 2, "save_strategy": "steps", "save_steps": 3}, "ppo_clip", "save_steps"),
        ({"num_iterations": 2, "save_strategy": "steps", "save_steps": 0.5}, "ppo_clip", "save_steps"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_by_name(
    fields: dict[str, Any], off_policy_correction: str, key: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        args = config(tmp_path, **{"per_device_train_batch_size": 8} | fields)
        check_fields(args, off_policy_correction=off_policy_correction, engine="embedded")
    assert refused.value.key == key


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"rollout_func": print}, "rollout_func"),
        ({"quantization_config": object()}, "quantization_config"),
        ({"train_dataset": questions().to_iterable_dataset()}, "train_dataset"),
        ({"train_dataset": questions().to_list()}, "train_dataset"),
        ({"train_dataset": questions().rename_column("prompt", "question")}, "train_dataset"),
        ({"train_dataset": questions().rename_column("number", "image")}, "train_dataset"),
        ({"engine": "ouija"}, "engine"),
        ({"engine": None}, "engine"),
        ({"engine": EmbeddedEngine}, "engine"),
        ({"slots": 0}, "slots"),
        ({"slots": 2.5}, "slots"),
        ({"slots": True, "engine": "vllm"}, "slots"),
        ({"slots": 4, "engine": lambda: None}, "slots"),
        ({"max_rejected_fraction": 50}, "max_rejected_fraction"),
        ({"reuse_kv_cache": True}, "reuse_kv_cache"),  # without vLLM
        ({"schedule": {"mode": "partial"}}, "schedule"),
        ({"schedule": None}, "schedule"),
        ({"schedule": "partly"}, "mode"),
        ({"schedule": Schedule(mode="partial", rollouts_per_prompt=2)}, "rollouts_per_prompt"),
        ({"schedule": Schedule(mode="partial", prompts_per_cohort=1)}, "prompts_per_cohort"),
        ({"schedule": Schedule(mode="partial", overlap=True)}, "overlap"),
        ({"schedule": Schedule(mode="on-policy", max_staleness=2)}, "max_staleness"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(
    arguments: dict[str, Any], key: str, tokenizer: Any, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        trainer_for(tmp_path, tokenizer, **arguments).train()
    assert refused.value.key == key


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("partial", 16),
        (Schedule(mode="partial", max_staleness=4), 16),
        (Schedule(mode="partial", prompts_per_cohort=8), 8),
        (Schedule(mode="partial", prompts_per_cohort=600), 600),
        (Schedule(mode="partial", prompts_per_cohort=None), None),
    ],
)
def test_a_cohort_is_four_updates_unless_the_schedule_sets_it(
    given: Schedule | str, prompts: int | None, tmp_path: Path
) -> None:
    """Its other sizes are those of GRPOConfig, so the default size of an update does not count."""
    args = config(tmp_path, per_device_train_batch_size=32, num_generations=8, gradient_accumulation_steps=1)
    schedule = schedule_for(args, given, 0)
    assert (schedule.rollouts_per_update, schedule.prompts_per_cohort) == (32, prompts)


def test_a_function_makes_the_engine(tokenizer: Any, tmp_path: Path) -> None:
    made = partial(engine_for, model(), tokenizer)
    trainer_for(tmp_path, tokenizer, args=config(tmp_path, max_steps=2), engine=made).train()
    assert len(updates_in(tmp_path)) == 2
    with pytest.raises(ConfigurationError, match="engine = '<lambda>': it returned a str without now, submit"):
        trainer_for(tmp_path, tokenizer, engine=lambda: "embedded").train()


@pytest.mark.parametrize("name", SERVERS)
def test_the_name_of_a_server_is_refused_before_the_model_is_loaded(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=rf"engine = '{name}'.*engine=VllmServerEngine\(URL"):
        SortedGRPOTrainer(str(tmp_path / "no model"), [], config(tmp_path), train_dataset=questions(), engine=name)


def test_a_trl_without_the_hooks_is_refused_with_the_versions_that_work() -> None:
    check_version()
    with pytest.raises(ConfigurationError, match=r"older than.*1\.16\.0"):
        check_version("1.8.0")
    for name in HOOKS:
        with pytest.raises(ConfigurationError, match=rf"{name} does not exist.*1\.16\.0"):
            check_version("9.0.0", type("Other", (), {n: getattr(GRPOTrainer, n) for n in HOOKS if n != name}))
    with pytest.raises(ConfigurationError, match=r"_compute_loss takes \(batch\)"):
        check_version("9.0.0", type("Other", (GRPOTrainer,), {"_compute_loss": lambda self, batch: None}))


@pytest.mark.parametrize("silent", ["_prepare_inputs", "_generate_single_turn", "_calculate_rewards", "_compute_loss"])
def test_a_hook_that_never_fires_ends_the_run_at_the_first_step(silent: str, tokenizer: Any, tmp_path: Path) -> None:
    """A TRL that goes round one of the hooks: here GRPOTrainer's own method is put back."""
    around = type("Around", (SortedGRPOTrainer,), {silent: getattr(GRPOTrainer, silent)})
    trainer = trainer_for(tmp_path, tokenizer, around)
    with pytest.raises(HookNeverFired, match=silent):
        trainer.train()
    assert trainer.state.global_step <= 1


def test_an_update_that_is_never_published_ends_the_run(tokenizer: Any, tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, tokenizer)
    watcher = next(c for c in trainer.callback_handler.callbacks if type(c).__name__ == "_StepWatcher")
    watcher.on_step_end = lambda *arguments, **named: None
    with pytest.raises(HookNeverFired, match="on_step_end"):
        trainer.train()


# Training


def trained(folder: Path, tokenizer: Any, mode: str, **arguments: Any) -> tuple[Any, Recorder]:
    recorder = Recorder()
    trainer = trainer_for(folder, tokenizer, schedule=mode, reward_funcs=recorder, **arguments)
    trainer.train()
    return trainer, recorder


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_and_its_log_tells_what_the_rewards_were(mode: str, tokenizer: Any, tmp_path: Path) -> None:
    before = weights_of(trainer_for(tmp_path / "unused", tokenizer))
    trainer, recorder = trained(tmp_path, tokenizer, mode)
    assert trainer.state.global_step == 3
    assert any(not torch.equal(before[name], value) for name, value in weights_of(trainer).items())
    updates = updates_in(tmp_path)
    assert [event.update for event in updates] == [0, 1, 2]
    handed_out = [rollout for event in updates for rollout in event.rollouts]
    assert len(set(handed_out)) == len(handed_out)  # each is trained on once
    for event, rewards in zip(updates, recorder.rewards, strict=True):
        assert sorted(event.rewards) == sorted(rewards)
        assert list(event.lengths) == sorted(event.lengths)
    run_metrics = Metrics().fold(events_in(tmp_path)).run_metrics()
    assert (run_metrics.mode, run_metrics.slots, run_metrics.trained) == (mode, 8, len(handed_out))
    assert 0 <= run_metrics.bubble <= run_metrics.idle <= 1
    if strategy_named(mode).on_policy:
        assert run_metrics.staleness_max == 0
    history = losses_in(trainer)
    assert history[0]["sortedrl/mismatch"] < 1e-4
    assert all(entry.get("sortedrl/mismatch", 0.0) < 1e-4 for entry in history)  # none where all tokens are stale
    assert history[-1]["sortedrl/bubble"] == pytest.approx(run_metrics.bubble, abs=1e-3)


@pytest.mark.slow
def test_a_staleness_bound_with_its_larger_updates_does_not_end_the_run_early(tokenizer: Any, tmp_path: Path) -> None:
    """The number of steps is its length: updates that take more than their size must not use up the prompts."""
    schedule = Schedule(mode="partial+elevator", max_staleness=1, prompts_per_cohort=4)
    args = config(tmp_path, max_steps=12, gradient_accumulation_steps=1)
    trainer_for(tmp_path, tokenizer, args=args, schedule=schedule, slots=24, train_dataset=questions(2)).train()
    sizes = [len(update.rollouts) for update in updates_in(tmp_path)]
    assert len(sizes) == 12
    assert sum(sizes) > 24 * 8, "more than twice what 12 updates need, and two epochs"


def test_the_loss_compares_with_what_the_engine_sampled_with(tokenizer: Any, tmp_path: Path) -> None:
    compared: list[bool] = []

    class Watched(SortedGRPOTrainer):
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            by_tokens = {tuple(row.rollout.tokens): row.rollout for row in self._rows}
            for ids, mask, old in zip(
                inputs["completion_ids"], inputs["completion_mask"], inputs["old_per_token_logps"], strict=True
            ):
                length = int(mask.sum())
                rollout = by_tokens[tuple(ids[:length].tolist())]
                compared.append(torch.allclose(old[:length], torch.tensor(rollout.logprobs)))
            return super()._compute_loss(model, inputs)

    trainer_for(tmp_path, tokenizer, Watched, schedule="partial").train()
    assert len(compared) == 24 and all(compared)
    assert Metrics().fold(events_in(tmp_path)).run_metrics().staleness_max > 0  # else nothing was at stake


def test_stale_tokens_can_be_treated_as_decoupled_ppo_by_trl_itself(tokenizer: Any, tmp_path: Path) -> None:
    args = config(tmp_path, vllm_importance_sampling_mode="token_truncate", max_steps=4)
    trainer, _ = trained(tmp_path, tokenizer, "partial+elevator", args=args, off_policy_correction="decoupled")
    history = losses_in(trainer)
    ratios = [entry["sampling/importance_sampling_ratio/max"] for entry in history]
    assert ratios[0] == pytest.approx(1.0, abs=1e-3)  # nothing is stale yet
    assert max(ratios) > 1.001


def test_an_engine_that_does_not_follow_the_weights_ends_the_run(tokenizer: Any, tmp_path: Path) -> None:
    class Deaf(EmbeddedEngine):
        def update_weights(self, weights: Any, version: int) -> None:
            super().update_weights(None, version)

    other = model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    with pytest.raises(EngineMismatch, match="nats"):
        trainer_for(tmp_path, tokenizer, engine=engine_for(other, tokenizer, Deaf)).train()


def test_a_rollout_that_the_engine_loses_is_missing_and_nothing_else(tokenizer: Any, tmp_path: Path) -> None:
    trained_tokens: list[int] = []

    class Watched(SortedGRPOTrainer):
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            trained_tokens.append(int(inputs["completion_mask"].sum()))
            return super()._compute_loss(model, inputs)

    trainer_for(tmp_path, tokenizer, Watched, schedule="baseline", **on_own_engine(tokenizer, losing(5))).train()
    updates = updates_in(tmp_path)
    assert [len(event.rollouts) for event in updates] == [7, 8, 8]
    assert sum(trained_tokens) == sum(sum(event.lengths) for event in updates)  # rows that fill up train nothing
    assert [event.rollout for event in events_in(tmp_path) if isinstance(event, Rejected)] == [5]


def test_an_engine_that_loses_every_rollout_ends_the_run_with_the_reason(tokenizer: Any, tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, tokenizer, train_dataset=questions(200), **on_own_engine(tokenizer, losing(None)))
    with pytest.raises(TooManyRejected, match=r"first 8 rollouts were all rejected; 8 times: .*last: out of memory"):
        trainer.train()
    assert sum(isinstance(event, Rejected) for event in events_in(tmp_path)) == 8


def test_a_prompt_without_room_for_a_response_is_not_generated_and_one_with_little_room_is_named(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lengths = (1030, 1010, 3, 3)  # "Ann says" is one token
    rows = Dataset.from_list([{"prompt": "Ann says " * length, "number": 0} for length in lengths])
    trainer = trainer_for(tmp_path, tokenizer, train_dataset=rows, max_rejected_fraction=0.0)
    trainer.train()
    events = events_in(tmp_path)
    reasons = {event.reason for event in events if isinstance(event, Rejected)}
    assert reasons == {"prompt of 1030 tokens, max_context_tokens is 1024, for prompt and response together"}
    assert not any(isinstance(event, Failed) for event in events)
    assert caplog.text.count("are cut at 14 tokens, not at max_completion_length = 24") == 1
    with pytest.raises(ConfigurationError, match=r"a prompt of 1030 tokens.*leaves no room for a response"):
        trainer.evaluate(rows)


@pytest.mark.slow
def test_an_infinite_reward_leaves_a_log_that_can_be_read(tokenizer: Any, tmp_path: Path) -> None:
    """TRL goes on: its group has no advantages. JSON has no infinity, and as a mean it would say nothing."""

    def logarithm(completions: Any, **columns: Any) -> list[float]:
        return [-math.inf if place % 3 == 0 else 1.0 for place in range(len(completions))]

    trainer_for(tmp_path, tokenizer, reward_funcs=logarithm, args=config(tmp_path, max_steps=2)).train()
    rewards = [reward for update in updates_in(tmp_path) for reward in update.rewards]
    assert sorted(set(rewards)) == [0.0, 1.0]
    assert not read_intact(tmp_path / "events.jsonl").damage


@pytest.mark.slow
@pytest.mark.parametrize("filter_groups", [None, "equal_rewards"])
def test_a_reward_model_may_be_named_by_its_folder(filter_groups: str | None, tokenizer: Any, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    shape = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_labels=1, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    LlamaForSequenceClassification(shape).save_pretrained(tmp_path / "judge")
    tokenizer.save_pretrained(tmp_path / "judge")
    run = tmp_path / "run"
    schedule = Schedule(filter_groups=filter_groups)
    trainer_for(run, tokenizer, reward_funcs=str(tmp_path / "judge"), schedule=schedule).train()
    assert len({reward for event in updates_in(run) for reward in event.rewards}) > 3


def test_several_steps_and_passes_over_an_update_are_one_version(tokenizer: Any, tmp_path: Path) -> None:
    """And each of the steps trains on short and long responses alike."""
    lengths: dict[int, list[int]] = {}  # by optimizer step

    class Watched(SortedGRPOTrainer):
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            lengths.setdefault(self.state.global_step, []).extend(inputs["completion_mask"].sum(dim=1).tolist())
            return super()._compute_loss(model, inputs)

    args = config(tmp_path, steps_per_generation=4, num_iterations=2, max_steps=8, per_device_train_batch_size=4)
    trainer_for(tmp_path, tokenizer, Watched, args=args, schedule="partial").train()
    updates = updates_in(tmp_path)
    assert [(event.update, event.version, len(event.rollouts)) for event in updates] == [(0, 0, 16), (1, 1, 16)]
    for first in range(0, 8, 4):  # two steps, then a second pass over them
        order = sorted(updates[first // 4].lengths)
        dealt = [order[0::2], order[1::2]] * 2
        assert [sorted(lengths[step]) for step in range(first, first + 4)] == dealt


@pytest.mark.slow
def test_an_output_layer_that_trl_casts_to_float32_is_the_engine_s_too(tokenizer: Any, tmp_path: Path) -> None:
    half = AutoModelForCausalLM.from_pretrained(BUILT_IN_MODEL, dtype=torch.bfloat16)
    args = config(tmp_path, max_steps=1, cast_lm_head_to_fp32=True)
    trainer = trainer_for(tmp_path, tokenizer, model=half, args=args)
    trainer.train()
    assert trainer.state.log_history[0]["sortedrl/mismatch"] < 0.05


def test_evaluation_samples_with_the_engine_under_the_weights_of_the_moment(tokenizer: Any, tmp_path: Path) -> None:
    args = config(tmp_path, eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=8)
    trainer = trainer_for(tmp_path, tokenizer, args=args, eval_dataset=questions(4))
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "eval_reward" in entry]
    assert entries[0]["step"] == 2 and entries[0]["eval_completions/mean_length"] > 1
    assert Metrics().fold(events_in(tmp_path)).run_metrics().idle_parts["evaluation"] > 0
    assert "eval_reward" in trainer.evaluate()  # after the run, too


@pytest.mark.slow
def test_the_engine_sleeps_in_every_step_also_after_an_evaluation_within_an_update(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Sleeper(EmbeddedEngine):
        is_awake = True

        def sleep_until_update(self) -> None:
            self.is_awake = False

        def update_weights(self, weights: Any, version: int) -> None:
            assert weights is not None
            self.is_awake = True
            super().update_weights(weights, version)

        def submit(self, requests: Sequence[Request]) -> None:
            assert self.is_awake, "its weights are gone until the next update"
            super().submit(requests)

    engine = engine_for(model(), tokenizer, Sleeper)
    awake: list[bool] = []
    compute_loss = GRPOTrainer._compute_loss

    def noted(self: Any, network: Any, inputs: Any) -> Any:
        if network.training:
            awake.append(engine.is_awake)
        return compute_loss(self, network, inputs)

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", noted)
    args = config(tmp_path, max_steps=2, num_iterations=2, eval_strategy="steps", eval_steps=1)
    trainer_for(tmp_path, tokenizer, args=args, engine=engine, eval_dataset=questions(4)).train()
    assert awake == [False] * 4


def test_lora_is_merged_for_the_engine(tokenizer: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "up_proj"])
    trainer, _ = trained(tmp_path, tokenizer, "on-policy", args=config(tmp_path, learning_rate=2e-2), peft_config=lora)
    history = losses_in(trainer)
    assert all(entry["sortedrl/mismatch"] < 1e-4 for entry in history)  # also after updates of the adapters
    merged = dict(merged_weights(trainer.model.get_base_model()))
    untouched = dict(model().state_dict())
    assert merged.keys() == untouched.keys()
    changed = {name for name, value in merged.items() if not torch.equal(value, untouched[name])}
    assert changed and all("q_proj" in name or "v_proj" in name or "up_proj" in name for name in changed)
    base = {name: value for name, value in trainer.model.state_dict().items() if "base_layer" in name}
    for name, value in base.items():  # the frozen weights are what they were, to the last bit
        plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
        assert torch.equal(value, untouched[plain])


# Stop and go on


@pytest.mark.parametrize("mode", ["partial+elevator", pytest.param("on-policy", marks=pytest.mark.slow)])
def test_a_resumed_run_is_the_run_that_was_not_interrupted(mode: str, tokenizer: Any, tmp_path: Path) -> None:
    args = config(tmp_path, max_steps=5, save_strategy="steps", save_steps=2)
    make = partial(trainer_for, tmp_path, tokenizer, args=args, schedule=mode)
    whole = make()
    whole.train()
    if mode == "partial+elevator":  # a checkpoint as of sortedrl 0.2
        state = read_state(tmp_path / "checkpoint-2", 0, 1)
        del state["rows"]
        state["events"], state["controller"]["events"] = state["controller"]["events"], 0
        write_state(tmp_path / "checkpoint-2" / "sortedrl-0.json", state)
    check_resumed(make, tmp_path, "checkpoint-2", whole)
    assert Metrics().fold(events_in(tmp_path)).run_metrics().updates == 5


@pytest.mark.slow
def test_ctrl_c_in_a_harvest_leaves_a_trainer_that_can_go_on(tokenizer: Any, tmp_path: Path) -> None:
    class Interrupted(EmbeddedEngine):
        polls = 0

        def poll(self, until: float | None = None) -> Any:
            self.polls += 1
            if self.polls == 60:
                raise KeyboardInterrupt
            return super().poll(until)

    args = config(tmp_path, max_steps=8, save_strategy="steps", save_steps=1)
    trainer = trainer_for(tmp_path, tokenizer, args=args, **on_own_engine(tokenizer, Interrupted))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert 1 <= trainer.state.global_step < 8
    trainer.train(resume_from_checkpoint=True)
    assert [event.update for event in updates_in(tmp_path)] == list(range(8))


def test_an_engine_that_dies_ends_the_run_with_its_reason_and_another_run_may_follow(
    tokenizer: Any, tmp_path: Path
) -> None:
    class Dying(EmbeddedEngine):
        def poll(self, until: float | None = None) -> Any:
            raise EngineDied("out of memory")

        def abort(self, ids: Any) -> Any:
            raise EngineDied("no answer")

    trainer = trainer_for(tmp_path, tokenizer, **on_own_engine(tokenizer, Dying))
    with pytest.raises(EngineDied, match="out of memory") as seen:
        trainer.train()
    assert seen.value.__notes__ == ["The end of the run failed, too: EngineDied: no answer"]
    with pytest.raises(HookNeverFired, match="on_train_begin"):
        _ = trainer.run
    trainer_for(tmp_path, tokenizer, args=config(tmp_path, max_steps=1)).train()
    assert [event.update for event in updates_in(tmp_path)] == [0]


def test_a_strange_checkpoint_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    args = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    trainer_for(tmp_path, tokenizer, args=config(tmp_path, **args)).train()
    with pytest.raises(ConfigurationError, match="another schedule"):
        changed = trainer_for(tmp_path, tokenizer, args=config(tmp_path, **args), schedule="partial")
        changed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    state = tmp_path / "checkpoint-1" / "sortedrl-0.json"
    for damaged in (state.read_text()[:-9], "", "7", None):
        state.unlink() if damaged is None else state.write_text(damaged)
        reason = "another trainer" if damaged is None else r"its sortedrl-0.json is damaged \(.*\)\. Choose an earlier"
        with pytest.raises(ConfigurationError, match=reason):
            read_state(tmp_path / "checkpoint-1", 0, 1)


def test_rows_that_do_not_fill_an_update_are_refused(tokenizer: Any, tmp_path: Path) -> None:
    for steps in (3, -1):
        trainer = trainer_for(tmp_path, tokenizer, args=config(tmp_path, max_steps=steps), train_dataset=questions(1))
        with pytest.raises(ConfigurationError, match="dataset = '1 row': an update has 8 rollouts, 4 for each of 2"):
            trainer.train()


def test_a_run_without_an_update_leaves_no_log(tokenizer: Any, tmp_path: Path) -> None:
    def train(reward: Any) -> None:
        trainer_for(tmp_path, tokenizer, args=config(tmp_path, max_steps=1), reward_funcs=reward).train()

    def broken(completions: Any, **columns: Any) -> list[float]:
        raise KeyError("solution")

    for _ in range(2):
        with pytest.raises(KeyError, match="solution"):
            train(broken)
    train(Recorder())
    assert len(updates_in(tmp_path)) == 1
    assert [path.name for path in tmp_path.glob("events*")] == ["events.jsonl"]


def test_a_run_is_not_resumed_with_rows_that_changed(tokenizer: Any, tmp_path: Path) -> None:
    def resume(rows: Dataset) -> None:
        trainer = trainer_for(tmp_path, tokenizer, args=config(tmp_path, **args), train_dataset=rows)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))

    args = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    rows = questions().to_list()
    trainer_for(tmp_path, tokenizer, args=config(tmp_path, **args)).train()
    edited = [row | {"number": 99} if place == 5 else row for place, row in enumerate(rows)]
    with pytest.raises(ConfigurationError, match="1 of 24 rows changed since the run started, the first is '5'"):
        resume(Dataset.from_list(edited))
    with pytest.raises(ConfigurationError, match="the rows are in another order"):
        resume(Dataset.from_list(rows[::-1]))
    with pytest.raises(ConfigurationError, match="there are 23 rows, but there were 24"):
        resume(Dataset.from_list(rows[:-1]))
    resume(Dataset.from_list(rows))
    assert [event.update for event in updates_in(tmp_path)] == [0, 1]


def test_what_a_transform_adds_to_a_row_when_it_is_read_may_change(tokenizer: Any, tmp_path: Path) -> None:
    """Such as the date of today. Columns that are not used may change, too."""

    def digests(rows: Any, **fields: Any) -> str:
        trainer = trainer_for(tmp_path, tokenizer, args=config(tmp_path, **fields), train_dataset=rows)
        return trainer.prompts().row_digests

    def dated(date: str) -> Dataset:
        return questions().with_transform(lambda columns: columns | {"prompt": [date] * len(columns["prompt"])})

    assert digests(dated("Monday")) == digests(dated("Tuesday")) == digests(questions())
    renumbered = [row | {"number": 0} for row in questions().to_list()]
    assert digests(Dataset.from_list(renumbered)) != digests(questions())
    unused = {"remove_unused_columns": True}
    assert digests(Dataset.from_list(renumbered), **unused) == digests(questions(), **unused)


def refuse(spec: EngineSpec) -> Any:
    raise RuntimeError(f"asked for seed {spec.seed}")


def test_an_engine_with_noise_of_its_own_gets_the_seed_of_the_run(tokenizer: Any, tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, tokenizer, args=config(tmp_path, seed=7), engine=f"{__name__}:refuse")
    with pytest.raises(ConfigurationError, match="asked for seed 7"):
        trainer.train()


@pytest.mark.slow
@pytest.mark.parametrize("reuse", [False, True])
def test_vllm_generates_under_the_trainer_s_weights(reuse: bool, tokenizer: Any, tmp_path: Path) -> None:
    if not hasattr(pytest.importorskip("vllm"), "SamplingParams"):
        pytest.skip("vLLM is not installed")
    vllm = {"args": config(tmp_path, vllm_max_model_length=128, max_steps=4), "engine": "vllm", "reuse_kv_cache": reuse}
    trainer = trainer_for(tmp_path, tokenizer, model=str(BUILT_IN_MODEL), schedule="partial", **vllm)
    trainer.train()
    history = losses_in(trainer)
    assert max(entry["sortedrl/mismatch"] for entry in history) < (1e-1 if reuse else 1e-4), "stale KV differs"
    assert history[-1]["sortedrl/staleness_max"] > 0
    assert trainer._engine.ready().kv_cache_reuse.survives_update_to(99) == reuse
