"""Dynamic sampling in SortedGRPOTrainer: groups are scored when they are complete, with real TRL on the CPU."""

import json
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

pytest.importorskip("trl")

import torch
from datasets import Dataset
from trl.trainer.grpo_trainer import GRPOTrainer

from small_trl_runs import (
    GROUP,
    check_resumed,
    config,
    events_in,
    losing,
    losses_in,
    on_own_engine,
    questions,
    trainer_for,
    updates_in,
    weights_of,
)
from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.events import Filtered, Regenerated, Rejected, Scored
from sortedrl.core.rollout import Rollout
from sortedrl.core.schedule import Schedule
from sortedrl.integrations.trl import SortedGRPOTrainer

MODES = (
    *("partial+elevator", "on-policy"),
    *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("baseline", "partial", "partial+lookahead")),
)
pytestmark = pytest.mark.usefixtures("quiet")


def filtered(mode: str = "partial+elevator", **fields: Any) -> Schedule:
    return Schedule(mode=mode, **{"filter_groups": "equal_rewards", "max_filtered_fraction": 1.0} | fields)


class EvenOnly:
    """A reward function that tells responses apart for even prompts only, and counts what it is asked."""

    __name__ = "even_only"

    def __init__(self) -> None:
        self.asked: Counter[tuple[int, tuple[int, ...]]] = Counter()
        self.calls: list[list[int]] = []

    def __call__(
        self, completions: Any, completion_ids: Any, number: list[int], log_extra: Any, log_metric: Any, **columns: Any
    ) -> list[float]:
        self.calls.append(number)
        self.asked.update((n, tuple(ids)) for n, ids in zip(number, completion_ids, strict=True))
        log_extra("seen", [f"{n}: {completion}" for n, completion in zip(number, completions, strict=True)])
        varied = [float(sum(map(ord, str(completion))) % 5) for completion in completions]
        rewards = [1.0 if n % 2 else value for n, value in zip(number, varied, strict=True)]
        log_metric("mean_of_all", fmean(rewards))
        return rewards


def watched(kind: type = SortedGRPOTrainer) -> tuple[type, list[Rollout]]:
    """The trainer, and the rollouts of its updates in the order of their rows, without padding."""
    rows: list[Rollout] = []

    class Watched(kind):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            scored = super()._generate_and_score_completions(inputs)
            rows.extend(row.rollout for row in self._rows if row.trains)
            return scored

    return Watched, rows


@pytest.mark.parametrize("mode", ["unfiltered", *MODES])
def test_an_update_is_that_of_grpo_trainer_on_the_kept_groups(mode: str, tokenizer: Any, tmp_path: Path) -> None:
    """Same groups given to both: the same rewards, losses, means over tokens, and weights after two passes.

    GRPOTrainer makes one micro-batch of them. Ours makes two, of short and of long responses.
    """
    watching, rows = watched()

    class Replayed(GRPOTrainer):
        def _generate_single_turn(self, *arguments: Any) -> Any:
            return [rollout.tokens for rollout in rows], None

    fields = {
        "max_steps": 2, "num_iterations": 2, "max_grad_norm": 0.0, "optim": "sgd", "learning_rate": 0.1,
        "lr_scheduler_type": "constant", "shuffle_dataset": False, "beta": 0.01,
    }  # fmt: skip
    args = config(tmp_path / "ours", **fields)
    schedule = "partial+elevator" if mode == "unfiltered" else filtered(mode)
    ours = trainer_for(tmp_path / "ours", tokenizer, watching, args=args, schedule=schedule, reward_funcs=EvenOnly())
    ours.train()
    numbers = [rollout.prompt.payload for rollout in rows]
    assert len(numbers) >= 8 and any(number % 2 for number in numbers) == (mode == "unfiltered")
    lengths = [len(rollout) for rollout in rows]
    assert max(lengths) > 1.5 * min(lengths)
    whole = {"per_device_train_batch_size": len(rows), "gradient_accumulation_steps": 1}
    theirs = trainer_for(
        tmp_path / "theirs", tokenizer, Replayed, args=config(tmp_path / "theirs", **fields, **whole),
        train_dataset=questions().select(numbers[::GROUP]), reward_funcs=EvenOnly(),
    )  # fmt: skip
    start = weights_of(theirs)
    theirs.train()
    expected = weights_of(theirs)
    assert max(float((expected[name] - start[name]).abs().max()) for name in start) > 1e-3
    for name, value in weights_of(ours).items():
        torch.testing.assert_close(value, expected[name], atol=1e-5, rtol=1e-4)
    logs = [losses_in(ours), losses_in(theirs)]
    for mine, plain in zip(*logs, strict=True):
        assert mine["loss"] == pytest.approx(plain["loss"], abs=1e-5)
    for name in ("entropy", "kl", "clip_ratio/region_mean"):
        assert logs[1][1][name] > 0 and logs[0][1][name] == pytest.approx(logs[1][1][name], rel=1e-3), name
    for name in ("reward", "reward_std", "rewards/even_only/mean", "rewards/even_only/std", "frac_reward_zero_std"):
        assert logs[0][0][name] == pytest.approx(logs[1][0][name]), name
    assert logs[0][0]["frac_reward_zero_std"] == 0 or mode == "unfiltered"
    assert list(ours._logs["extra"]["seen"]) == list(theirs._logs["extra"]["seen"])
    assert list(ours._logs["advantages"]) == pytest.approx(list(theirs._logs["advantages"]), abs=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_every_rollout_is_scored_once_and_no_filtered_one_is_trained_on(
    mode: str, tokenizer: Any, tmp_path: Path
) -> None:
    tokens_in_loss: list[int] = []
    watching, rows = watched()

    class Counting(watching):  # type: ignore[misc, valid-type]
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            tokens_in_loss.append(int(inputs["completion_mask"].sum()))
            return super()._compute_loss(model, inputs)

    reward = EvenOnly()
    trainer = trainer_for(tmp_path, tokenizer, Counting, schedule=filtered(mode), reward_funcs=reward)
    trainer.train()
    log, updates = events_in(tmp_path), updates_in(tmp_path)
    trained = [id for update in updates for id in update.rollouts]
    left_out = [id for event in log if isinstance(event, Filtered) for id in event.rollouts]
    assert left_out and not set(trained) & set(left_out)
    assert len(trained) == len(set(trained)) and len(left_out) == len(set(left_out))
    assert sum(tokens_in_loss) == sum(sum(update.lengths) for update in updates)
    assert all(len(update.rollouts) == 8 for update in updates) or mode == "baseline"
    scored = {event.rollout: event.reward for event in log if isinstance(event, Scored)}
    assert sum(isinstance(event, Scored) for event in log) == len(scored) == reward.asked.total()
    assert all(numbers == numbers[:1] * GROUP for numbers in reward.calls)  # whole groups, one by one
    assert {rollout.id: rollout.reward for rollout in rows} == {id: scored[id] for id in trained}
    assert all(update.rewards == tuple(scored[id] for id in update.rollouts) for update in updates)
    assert {event.reward for event in log if isinstance(event, Filtered)} >= {1.0}
    first = losses_in(trainer)[0]
    until = next(place for place, event in enumerate(log) if event == updates[0])
    seen = [event.reward for event in log[:until] if isinstance(event, Scored)]
    assert first["mean_of_all"] == pytest.approx(fmean(seen))  # log_metric counts filtered groups, too
    assert first["sortedrl/filtered_fraction"] > 0
    assert first["sortedrl/reward_mean"] < first["reward"] or first["sortedrl/reward_mean"] == pytest.approx(
        fmean(seen)
    )


def test_conversations_columns_weights_missing_and_async_rewards_work_as_in_trl(tokenizer: Any, tmp_path: Path) -> None:
    asked: list[Any] = []

    def some_missing(completions: Any, number: list[int], trainer_state: Any, **columns: Any) -> list[float | None]:
        asked.append((completions[0], trainer_state.global_step))
        lengths = [len(completion[0]["content"]) for completion in completions]
        return [None if number[0] % 3 == 0 else float(length) for length in lengths]

    async def later(completion_ids: Any, number: list[int], log_extra: Any, **columns: Any) -> list[float]:
        log_extra("first", [torch.tensor(ids[0]) for ids in completion_ids])
        if number[0] % 2:
            log_extra("odd", number)
        return [float(sum(ids) % 4) if n % 2 else 0.0 for n, ids in zip(number, completion_ids, strict=True)]

    chats = [{"prompt": [{"role": "user", "content": row["prompt"]}], "number": row["number"]} for row in questions()]
    watching, rows = watched()
    trainer = trainer_for(
        tmp_path, tokenizer, watching, args=config(tmp_path, reward_weights=[1.0, 1000.0]), schedule=filtered(),
        reward_funcs=[some_missing, later], train_dataset=Dataset.from_list(chats),
    )  # fmt: skip
    trainer.train()
    assert asked[0][0][0]["role"] == "assistant" and {step for _, step in asked} == {0, 1, 2}
    numbers = {rollout.prompt.payload for rollout in rows}
    assert any(number % 3 == 0 for number in numbers) and not any(number % 6 == 0 for number in numbers)
    for rollout in rows:
        length, parity = rollout.detail["rewards"]
        assert (length is None) == (rollout.prompt.payload % 3 == 0)
        assert parity == (sum(rollout.tokens) % 4 if rollout.prompt.payload % 2 else 0.0)
        assert rollout.reward == (length or 0.0) + 1000.0 * parity
    last = rows[-len(trainer._logs["prompt"]) :]
    assert [int(first) for first in trainer._logs["extra"]["first"]] == [rollout.tokens[0] for rollout in last]
    odd = [number if number % 2 else None for number in (rollout.prompt.payload for rollout in last)]
    assert list(trainer._logs["extra"]["odd"]) == odd
    assert list(trainer._logs["rewards"]["later"]) == [rollout.detail["rewards"][1] for rollout in last]


def test_a_rollout_without_any_reward_does_not_count_in_its_group(tokenizer: Any, tmp_path: Path) -> None:
    """TRL leaves it out of the group's mean. So a group is equal if the others are."""

    def first_missing(completions: Any, number: list[int], **columns: Any) -> list[float | None]:
        differs = number[0] % 3 == 0
        return [None, *(float(differs and place == 2) for place in range(1, len(completions)))]

    watching, rows = watched()
    trainer_for(tmp_path, tokenizer, watching, schedule=filtered(), reward_funcs=first_missing).train()
    assert {rollout.prompt.payload % 3 for rollout in rows} == {0} and len(rows) == 24
    assert Counter(rollout.detail["rewards"][0] for rollout in rows) == {None: 6, 0.0: 12, 1.0: 6}
    assert all(rollout.reward == 0.0 for rollout in rows if rollout.detail["rewards"] == [None])  # in the log


def test_a_group_with_a_lost_member_is_scored_with_as_many_rows_as_any_other(tokenizer: Any, tmp_path: Path) -> None:
    calls: list[int] = []

    def by_place(completions: Any, log_extra: Any, **columns: Any) -> list[float]:
        calls.append(len(completions))
        log_extra("text", list(completions))
        return [float(place) for place in range(len(completions))]

    given = on_own_engine(tokenizer, losing(1))
    trainer = trainer_for(tmp_path, tokenizer, schedule=filtered("baseline"), reward_funcs=by_place, **given)
    trainer.train()
    assert [len(update.rollouts) for update in updates_in(tmp_path)] == [11, 8, 8]  # one group more
    assert [event.rollout for event in events_in(tmp_path) if isinstance(event, Rejected)] == [1]
    assert set(calls) == {GROUP}
    assert list(trainer._logs["extra"]["text"]) == list(trainer._logs["completion"])


def every_tenth(rollouts: Sequence[Rollout]) -> bool:
    assert all("rewards" in rollout.detail for rollout in rollouts)  # for filters by one of the reward functions
    return rollouts[0].id // GROUP % 10 == 9


@pytest.mark.parametrize("mode", ["partial+elevator", pytest.param("baseline", marks=pytest.mark.slow)])
def test_many_filtered_groups_do_not_use_up_the_data(mode: str, tokenizer: Any, tmp_path: Path) -> None:
    """An update of two groups needs about twenty, ten epochs of this dataset."""
    schedule = filtered(mode, filter_groups=f"{__name__}:every_tenth", prompts_per_cohort=4)
    args = config(tmp_path, max_steps=1, max_completion_length=8)
    trainer_for(tmp_path, tokenizer, args=args, schedule=schedule, train_dataset=questions(2)).train()
    log = events_in(tmp_path)
    assert [len(update.rollouts) for update in updates_in(tmp_path)] == [8]
    assert {event.reason for event in log if isinstance(event, Filtered)} == {f"{__name__}:every_tenth"}
    assert sum(isinstance(event, Filtered) for event in log) > 12


@pytest.mark.parametrize("kind", ["reward", "log_extra"])
def test_an_error_in_a_reward_function_ends_the_run_with_it(kind: str, tokenizer: Any, tmp_path: Path) -> None:
    def broken(completions: Any, log_extra: Any, **columns: Any) -> list[float]:
        if kind == "reward":
            raise KeyError("solution")
        log_extra("half", completions[:2])
        return [0.0] * len(completions)

    trainer = trainer_for(tmp_path, tokenizer, schedule=filtered(), reward_funcs=broken)
    found = {"reward": (KeyError, "solution"), "log_extra": (ValueError, "2 values for 4 completions")}[kind]
    with pytest.raises(found[0], match=found[1]):
        trainer.train()


def sharded_reward_model() -> Any:
    made = torch.nn.Linear(1, 1)
    made.weight.ds_id = 0  # type: ignore[assignment]  # as DeepSpeed marks a parameter that ZeRO-3 has sharded
    made.config = type("Config", (), {"_name_or_path": "judge"})()  # type: ignore[assignment]
    return made


@pytest.mark.parametrize(
    ("schedule", "arguments", "key"),
    [
        (filtered("tail-batching"), {}, "filter_groups"),
        (filtered(filter_groups="equal_reward"), {}, "filter_groups"),
        (Schedule(revisit_filtered=0.5), {}, "revisit_filtered"),
        (filtered(), {"multi_objective_aggregation": "normalize_then_sum"}, "multi_objective_aggregation"),
        (filtered(), {"reward_funcs": sharded_reward_model}, "reward_funcs"),
    ],
)
def test_what_a_filter_cannot_work_with_is_refused_by_name(
    schedule: Schedule, arguments: dict[str, Any], key: str, tokenizer: Any, tmp_path: Path
) -> None:
    fields = dict(arguments)
    rewards = fields.pop("reward_funcs", lambda: None)()
    given = {"reward_funcs": rewards, "reward_processing_classes": tokenizer} if rewards is not None else {}
    with pytest.raises(ConfigurationError) as refused:
        trainer_for(tmp_path, tokenizer, args=config(tmp_path, **fields), schedule=schedule, **given)
    assert refused.value.key == key


@pytest.mark.parametrize("mode", MODES[:2])
def test_a_resumed_run_is_the_run_that_was_not_interrupted(
    mode: str, tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saving = {"save_strategy": "steps", "save_steps": 1}
    args = config(tmp_path, max_steps=4, learning_rate=1e-4, max_completion_length=4, **saving)
    make = partial(trainer_for, tmp_path, tokenizer, args=args, slots=32)
    whole = make(schedule=filtered(mode), reward_funcs=EvenOnly())
    whole.train()
    assert "32 slots are 4.0 times an update of 8 rollouts" in caplog.text
    saved = json.loads((tmp_path / "checkpoint-1" / "sortedrl-0.json").read_text())["controller"]
    assert ('"seen"' in json.dumps(saved)) == (mode != "on-policy")  # scored rollouts that wait for their update
    make_again = partial(make, schedule=filtered(mode), reward_funcs=EvenOnly())
    again = check_resumed(make_again, tmp_path, "checkpoint-1", whole)
    log = events_in(tmp_path)
    assert list(again._logs["extra"]["seen"]) == list(whole._logs["extra"]["seen"])
    scored = Counter(event.rollout for event in log if isinstance(event, Scored))
    regenerated = Counter(event.rollout for event in log if isinstance(event, Regenerated))
    assert all(count <= 1 + regenerated[id] for id, count in scored.items())
    with pytest.raises(ConfigurationError, match="filter_groups: 'equal_rewards' -> None"):
        make(schedule=mode).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
