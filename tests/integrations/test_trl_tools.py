"""Tools and environments in SortedGRPOTrainer, against GRPOTrainer: real TRL, a scripted model, on the CPU."""

import asyncio
import functools
import re
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("trl")

import torch
from datasets import Dataset
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from scripted_model import EOS, TEMPLATE, Table, call, scripted_model, scripted_tokenizer
from small_trl_runs import check_resumed, events_in, losses_in, small_config, trainer_for
from sortedrl.core import strategy_named
from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.events import Event, Filtered, Observed, Rejected, Started, Submitted, TurnEnded, Updated
from sortedrl.core.rollout import Prompt, Rollout
from sortedrl.core.schedule import Schedule
from sortedrl.integrations.trl import SortedGRPOTrainer
from sortedrl.integrations.trl.rows import Row
from sortedrl.integrations.trl.tools import Episode, ToolUse
from sortedrl.observe.metrics import Metrics

GROUP = 2


pytestmark = pytest.mark.usefixtures("quiet")


# The tools: the last character of a result decides what the model says next


def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return f"{a + b}D"


def again() -> str:
    """Leads to the same call again."""
    return "H"


def fails() -> str:
    """Always raises an error."""
    raise RuntimeError("broken")


async def slowly(text: str) -> str:
    """Return the text.

    Args:
        text: Any text.
    """
    await asyncio.sleep(0.001)
    return f"{text}D"


TOOLS = [add, again, fails, slowly]
BOTH = call("slowly", text="late") + call("add", a=1, b=1)
SCRIPT: Table = {
    "A": call("add", a=1, b=2),
    "D": "done",  # after a result that ends with D
    "E": "<tool_call>{oops</tool_call>",  # not JSON
    "F": call("nothing"),  # no such tool
    "G": call("fails"),
    "H": call("again"),  # for ever
    "I": "xx",
    "xx": "yy",
    "yy": "xx",  # without end
    "J": call("slowly", text="late"),
    "K": BOTH,
    "L": call("add", a=5, b=5),
    call("add", a=5, b=5): "xx",  # a call, and then more text without end
    "M": call("add", a=1),  # an argument is missing
    "}": "sorry",  # after an error
    **dict.fromkeys(("done", "sorry", BOTH, "<tool_call>{oops</tool_call>", call("nothing"), call("fails")), EOS),
    **dict.fromkeys((call("add", a=1, b=2), call("again"), call("slowly", text="late"), call("add", a=1)), EOS),
}
CASES = "ABEFGHIJKLM"  # B: a response without a call


def config(folder: Path, **fields: Any) -> GRPOConfig:
    defaults: dict[str, Any] = {
        "max_steps": 1,
        "num_generations": GROUP,
        "max_completion_length": 80,
        "learning_rate": 0.0,
        "shuffle_dataset": False,
        "gradient_checkpointing": False,
    }
    return small_config(folder, **defaults | fields)


def questions(cases: str, **columns: list[Any]) -> Dataset:
    prompts = [[{"role": "user", "content": f"go {case}"}] for case in cases]
    return Dataset.from_dict({"prompt": prompts, "case": list(cases), **columns})


def trainer_of(kind: type, folder: Path, table: Table, **arguments: Any) -> Any:
    tokenizer = scripted_tokenizer(table, arguments.pop("template", TEMPLATE))
    defaults = {"reward_funcs": by_place, "args": config(folder), "train_dataset": None}
    model = scripted_model(tokenizer, table)
    return trainer_for(folder, tokenizer, kind, model=model, **defaults | arguments)


def by_place(completions: list[Any], **columns: Any) -> list[float]:
    return [float(place % GROUP) for place in range(len(completions))]


def watched(kind: type) -> tuple[type, list[dict[str, Any]]]:
    """The trainer, and all rows that it generated: prompt, tokens, mask, messages."""
    seen: list[dict[str, Any]] = []

    class Watched(kind):  # type: ignore[misc]
        def _generate(self, prompts: Any) -> Any:
            generated = super()._generate(prompts)
            prompt_ids, completion_ids, tool_mask, completions, *_ = generated
            if self.model.training and isinstance(self.model, torch.nn.Module):  # not a group that is scored alone
                tool_mask = tool_mask or [[1] * len(ids) for ids in completion_ids]
                for row in zip(prompt_ids, completion_ids, tool_mask, completions, strict=True):
                    seen.append(dict(zip(("prompt", "tokens", "mask", "messages"), row, strict=True)))
            return generated

    return Watched, seen


def both_trainers(
    folder: Path, table: Table, cases: str, fields: dict[str, Any], **arguments: Any
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, float]]]:
    """The rows of one update of all cases under GRPOTrainer and under ours, in the same order, and what was logged."""
    fields = {"per_device_train_batch_size": GROUP * len(cases)} | fields
    found, logs = [], []
    for name, kind, more in (("plain", GRPOTrainer, {}), ("sorted", SortedGRPOTrainer, {"schedule": "baseline"})):
        watching, seen = watched(kind)
        given = arguments | {"train_dataset": arguments.get("train_dataset") or questions(cases)}
        made = trainer_of(watching, folder / name, table, args=config(folder / name, **fields), **more | given)
        made.train()
        found.append(sorted(seen, key=lambda row: row["prompt"]))
        logs.append(losses_in(made)[0])
    return found[0], found[1], logs


def assert_same_metrics(logs: list[dict[str, float]]) -> None:
    for name in logs[0]:
        if name.startswith(("tools/", "completions/", "rewards/", "num_tokens")):
            assert logs[1][name] == pytest.approx(logs[0][name]), name


@pytest.mark.parametrize(
    "fields",
    [
        {"max_completion_length": 120},
        pytest.param({"max_tool_calling_iterations": 1}, marks=pytest.mark.slow),
        pytest.param({"max_tool_calling_iterations": 0}, marks=pytest.mark.slow),
    ],
)
def test_tokens_masks_and_messages_are_those_of_grpo_trainer(fields: dict[str, Any], tmp_path: Path) -> None:
    plain, ours, logs = both_trainers(tmp_path, SCRIPT, CASES, fields, tools=TOOLS)
    assert len(plain) == GROUP * len(CASES)
    assert ours == plain
    assert_same_metrics(logs)
    assert (logs[1]["tools/call_frequency"] > 0) == (fields.get("max_tool_calling_iterations") != 0)
    assert (logs[1]["tools/failure_frequency"] > 0) == (fields.get("max_tool_calling_iterations") != 0)


@pytest.mark.parametrize("limit", [24, *(pytest.param(limit, marks=pytest.mark.slow) for limit in (2, 25, 26))])
def test_limits_end_a_rollout_as_in_grpo_trainer(limit: int, tmp_path: Path) -> None:
    """Around the length at which the first results fit, among them the one at which nothing can follow them."""
    calls: list[int] = []

    @functools.wraps(add)
    def counted(a: int, b: int) -> str:
        calls.append(a)
        return add(a, b)

    fields = {"max_completion_length": limit, "mask_truncated_completions": True}
    plain, ours, logs = both_trainers(tmp_path, SCRIPT, CASES, fields, tools=[counted, again, fails, slowly])
    assert ours == plain
    assert_same_metrics(logs)
    assert max(len(row["tokens"]) for row in ours) == limit
    assert any(row["mask"][-1] == 0 for row in ours) == (limit in (24, 25))
    made = Counter(calls)  # a call is made even if a limit cuts the turn or leaves no room for its result
    assert all(count % 2 == 0 for count in made.values()) and made[5] == 2 * GROUP


# Environments


class Counter24:
    """Counts to 24 from where its row says. It logs what happens to it."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.log: list[str] = []

    def reset(self, start: int, **row: Any) -> str:
        assert "environment" not in row
        self.log = [f"start {start}"]
        self.number = start
        return f"from {start}N"

    def count(self, step: int) -> str:
        """Count on.

        Args:
            step: How far.
        """
        self.log.append(f"step {step}")
        self.number += step
        return f"{self.number}{'D' if self.number >= 24 else 'N'}"

    def get_reward(self) -> float:
        return float(self.number)


class Echo:
    """Another kind, with an async tool."""

    def reset(self, **row: Any) -> None:
        self.said: list[str] = []

    async def echo(self, text: str) -> str:
        """Say it.

        Args:
            text: Any text.
        """
        await asyncio.sleep(0.001)
        self.said.append(text)
        return f"{text}D"


COUNT = {name: call("count", step=int(name)) for name in ("1", "5", "9")}
SAY = call("echo", text="hi")
COUNTING: Table = {
    "N": {COUNT["1"]: 0.1, COUNT["5"]: 0.4, COUNT["9"]: 0.4, "stop": 0.1},
    "D": "done",
    "S": SAY,
    "}": "sorry",
    **dict.fromkeys((*COUNT.values(), SAY, "done", "stop", "sorry"), EOS),
}
SURE = dict(COUNTING) | {"N": COUNT["9"]}


def logs_of(completion: list[dict[str, Any]]) -> list[list[str]]:
    """What its instance may have seen: the calls with results, or all calls if those of the last turn did not fit."""
    calls = [call["function"] for message in completion for call in message.get("tool_calls", ())]
    steps = [f"step {call['arguments']['step']}" for call in calls if call["name"] == "count"]
    results = [message for message in completion if message["role"] == "tool" and message["name"] == "count"]
    return [steps[: len(results)], steps]


def own_instance(completions: list[Any], environments: list[Any], start: list[int], **columns: Any) -> list[float]:
    """Every completion comes with the instance that saw its calls, and no others."""
    shown: dict[int, str] = {}
    for completion, environment, first in zip(completions, environments, start, strict=True):
        assert environment.log[0] == f"start {first}" and environment.log[1:] in logs_of(completion)
        assert shown.setdefault(id(environment), str(completion)) == str(completion)
    return [float(len(environment.log)) for environment in environments]


def starts(count: int = 8) -> Dataset:
    return questions("N" * count, start=list(range(count)))


def test_an_environment_serves_its_rollout_alone_as_in_grpo_trainer(tmp_path: Path) -> None:
    fields = {"max_completion_length": 300}
    given: dict[str, Any] = {"environment_factory": Counter24, "reward_funcs": own_instance, "train_dataset": starts(4)}
    plain, ours, logs = both_trainers(tmp_path, SURE, "NNNN", fields, **given)
    assert ours == plain and all(0 in row["mask"] for row in ours)
    assert_same_metrics(logs)
    assert logs[1]["rewards/Counter24/mean"] > 24  # `get_reward`


@pytest.mark.slow
def test_each_row_may_name_its_environment(tmp_path: Path) -> None:
    names, first = ["count", "echo", "count", "echo"], [0, 0, 20, 0]
    data = questions("NSNS", environment=names, start=first)
    kinds: list[list[str]] = []

    def remember(environments: list[Any], environment: list[str], **columns: Any) -> list[float]:
        kinds.append([type(one).__name__ for one in environments])
        expected = ["Counter24" if name == "count" else "Echo" for name in environment]
        assert kinds[-1] == expected
        return [float(place % 2) for place in range(len(environments))]

    given: dict[str, Any] = {"environment_factory": {"count": Counter24, "echo": Echo}, "reward_funcs": remember}
    plain, ours, logs = both_trainers(tmp_path, SURE, "NSNS", {}, train_dataset=data, tools=[add], **given)
    assert ours == plain
    assert_same_metrics(logs)
    assert sorted(Counter(kinds[-1]).values()) == [4, 4]


@pytest.mark.slow
def test_environments_may_own_the_prompts(tmp_path: Path) -> None:
    """No dataset: the prompt is what `reset` returns."""

    class Fixed(Counter24):
        def reset(self, prompt: Any, **row: Any) -> str:
            return super().reset(start=7)

    for name, kind in (("plain", GRPOTrainer), ("sorted", SortedGRPOTrainer)):
        watching, seen = watched(kind)
        made = trainer_of(watching, tmp_path / name, SURE, environment_factory=Fixed, reward_funcs=None)
        made.train()
        assert seen and all(row["messages"][1]["content"] == "16N" for row in seen)


def most_open(log: list[Event]) -> int:
    """Rollouts between their first start and their update."""
    still, most = set[int](), 0
    for event in log:
        if isinstance(event, Started):
            still.add(event.rollout)
            most = max(most, len(still))
        elif isinstance(event, Updated | Filtered):
            still.difference_update(event.rollouts)
    return most


@pytest.mark.parametrize(
    ("mode", "filter_groups"),
    [
        *(("on-policy", None), ("partial+elevator", None), ("partial+elevator", "equal_rewards")),
        *(pytest.param("cohort-at-once", None, marks=pytest.mark.slow),),
        *(pytest.param("on-policy", "equal_rewards", marks=pytest.mark.slow),),
    ],
)
def test_every_mode_trains_on_turns_of_its_own_instances(mode: str, filter_groups: str | None, tmp_path: Path) -> None:
    """Responses of random length, some stopped in mid-episode; each instance must have seen its rollout's calls."""
    args = config(tmp_path, max_steps=6, max_completion_length=200, learning_rate=1e-3)
    given: dict[str, Any] = {"environment_factory": Counter24, "reward_funcs": own_instance}
    schedule = Schedule(mode=mode, filter_groups=filter_groups)
    trainer = trainer_of(
        SortedGRPOTrainer, tmp_path, COUNTING, args=args, schedule=schedule, slots=3, train_dataset=starts(24), **given
    )
    Counter24.made = 0
    trainer.train()
    history = losses_in(trainer)
    assert len(history) == 6
    assert all(entry.get("sortedrl/mismatch", 0.0) < 1e-4 for entry in history)
    assert any(entry["tools/call_frequency"] > 1 for entry in history)
    log = events_in(tmp_path)
    trained = [rollout for event in log if isinstance(event, Updated) for rollout in event.rollouts]
    assert len(trained) == len(set(trained)) >= 24 and not [event for event in log if isinstance(event, Rejected)]
    assert any(isinstance(event, Filtered) for event in log) == (filter_groups is not None)
    assert Counter24.made <= most_open(log)  # instances are used again after their rewards
    staleness = Metrics().fold(log).run_metrics().staleness_max
    assert (staleness == 0) == strategy_named(mode).on_policy


# Training


@pytest.mark.parametrize("mode", ["partial+elevator", pytest.param("on-policy", marks=pytest.mark.slow)])
@pytest.mark.parametrize("filter_groups", [None, "equal_rewards"])
def test_a_step_is_that_of_grpo_trainer_on_the_same_rollouts(
    mode: str, filter_groups: str | None, tmp_path: Path
) -> None:
    """GRPOTrainer samples what our rollouts sampled, runs the tools itself, and takes the same step."""
    fields = {"learning_rate": 0.1, "optim": "sgd", "max_grad_norm": 0.0, "max_completion_length": 150}
    watching, seen = watched(SortedGRPOTrainer)
    data = starts()
    given: dict[str, Any] = {"environment_factory": Counter24, "reward_funcs": own_instance}
    args = config(tmp_path / "ours", **fields)
    schedule = Schedule(mode=mode, filter_groups=filter_groups)
    ours = trainer_of(watching, tmp_path / "ours", COUNTING, args=args, schedule=schedule, train_dataset=data, **given)
    start = {name: value.detach().clone() for name, value in ours.model.named_parameters()}
    ours.train()
    rows = [next(n for n in range(8) if f"from {n}N" in ours._tokenizer.decode(row["prompt"])) for row in seen]

    class Replayed(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids: Any, *arguments: Any, **named: Any) -> Any:
            """The contexts are those of all rows or, after a turn, of those that go on, in order."""
            left = iter(seen)
            return [next(next_turn(row, len(ids)) for row in left if extends(row, ids)) for ids in prompt_ids], None

    # Several groups may finish together and make the update larger.
    args = config(tmp_path / "theirs", **fields | {"per_device_train_batch_size": len(seen)})
    data = data.select(rows[::GROUP])
    theirs = trainer_of(Replayed, tmp_path / "theirs", COUNTING, args=args, train_dataset=data, **given)
    theirs.train()
    expected = {name: value.detach() for name, value in theirs.model.named_parameters()}
    assert max(float((expected[name] - start[name]).abs().max()) for name in start) > 1e-3
    for name, value in ours.model.named_parameters():
        torch.testing.assert_close(value, expected[name], atol=1e-5, rtol=1e-4)


def extends(row: dict[str, Any], ids: list[int]) -> bool:
    return len(ids) < len(row["prompt"]) + len(row["tokens"]) and (row["prompt"] + row["tokens"])[: len(ids)] == ids


def next_turn(row: dict[str, Any], context: int) -> list[int]:
    first = context - len(row["prompt"])
    mask = row["mask"][first:]
    return row["tokens"][first : first + (mask.index(0) if 0 in mask else len(mask))]


@pytest.mark.parametrize("mode", ["partial+elevator", pytest.param("on-policy", marks=pytest.mark.slow)])
@pytest.mark.parametrize("environments", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("filter_groups", [None, "equal_rewards"])
def test_a_resumed_run_is_the_run_that_was_not_interrupted(
    mode: str, environments: bool, filter_groups: str | None, tmp_path: Path
) -> None:
    fields = {"max_steps": 5, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-3}
    schedule = Schedule(mode=mode, filter_groups=filter_groups)
    given: dict[str, Any] = {"schedule": schedule, "slots": 3, "tool_threads": 0, "train_dataset": starts(16)}
    if environments:
        given |= {"environment_factory": Counter24, "reward_funcs": own_instance}
    else:
        given |= {"tools": [random_count]}
    args = config(tmp_path, max_completion_length=200, **fields)
    table = COUNTING if environments else {**COUNTING, "N": {call("random_count"): 0.7, "stop": 0.3}}
    table = {**table, call("random_count"): EOS}
    make = partial(trainer_of, SortedGRPOTrainer, tmp_path, table, args=args, **given)
    whole = make()
    whole.train()
    check_resumed(make, tmp_path, "checkpoint-2", whole)
    assert Metrics().fold(events_in(tmp_path)).run_metrics().staleness_max > 0 or mode == "on-policy"


def random_count() -> str:
    """Always the same, without an instance."""
    return "oneN"


def test_no_slot_is_held_while_a_tool_runs(tmp_path: Path) -> None:
    """One slot, and a tool that answers only when another rollout decodes."""
    released = threading.Event()

    def waits() -> str:
        """Waits for another rollout."""
        assert released.wait(30)
        return "D"

    def releases() -> str:
        """Lets the other go on."""
        released.set()
        return "D"

    table: Table = {
        **SCRIPT, "P": call("waits"), "Q": call("releases"), call("waits"): EOS, call("releases"): EOS,
    }  # fmt: skip
    args = config(tmp_path, per_device_train_batch_size=4)
    trainer = trainer_of(
        SortedGRPOTrainer, tmp_path, table, args=args, schedule="baseline", slots=1, tools=[waits, releases],
        train_dataset=questions("PQ"),
    )  # fmt: skip
    trainer.train()
    log = events_in(tmp_path)
    first = next(place for place, event in enumerate(log) if isinstance(event, TurnEnded))
    answered = next(place for place, event in enumerate(log) if isinstance(event, Observed))
    others = [event for event in log[first:answered] if isinstance(event, Submitted)]
    assert others and all(event.rollout != log[first].rollout for event in others)  # type: ignore[union-attr]
    assert not [event for event in log if isinstance(event, Rejected)]
    history = losses_in(trainer)[0]
    assert (history["tools/call_frequency"], history["tools/failure_frequency"]) == (1.0, 0.0)


@pytest.mark.parametrize("change", ["starts", "ends"])
def test_a_tool_that_starts_or_ends_while_an_update_is_taken_does_not_end_the_run(change: str) -> None:
    """Episodes come and go in the thread of the tools: here one whenever it is asked which rollouts are live."""
    use = ToolUse(SimpleNamespace(tools=[], environment_factories=None), Schedule(), threads=1, limit_seconds=1.0)

    def started(id: int) -> Episode:
        episode = Episode(use)
        episode.reset((id, 0, {}))
        return episode

    class Live(set[int]):
        def __contains__(self, id: object) -> bool:
            if change == "starts":
                started(4)
            else:
                asyncio.run(canceled.close())
            return super().__contains__(id)

    _, _, canceled, _ = map(started, range(4))  # 0 is in the update, 1 was rejected, 3 is in its tool
    use.take([Row(Rollout(0, Prompt("0", (1,)), 0, 0, 0, 0), True)], Live({3, 4}))
    assert sorted(use.episodes) == [3, *([4] if change == "starts" else [])]


class Stuck:
    """Its method hangs for good, in the instance of one row."""

    def reset(self, case: str, **row: Any) -> None:
        self.case, self.calls = case, 0

    def hang(self) -> str:
        """Hangs."""
        self.calls += 1
        if self.case == "P" and self.calls == 1:
            threading.Event().wait()
        return "D"

    async def hang_too(self) -> str:
        """Hangs, too."""
        await asyncio.sleep(1e9)
        return "D"


def test_a_call_that_hangs_is_an_error_and_its_thread_is_abandoned(tmp_path: Path) -> None:
    table: Table = {
        **SCRIPT, "P": call("hang"), "Q": call("hang"), "R": call("hang_too"), call("hang_too"): EOS,
        call("hang"): EOS, "}": {call("hang"): 0.5, "sorry": 0.5},
    }  # fmt: skip
    watching, seen = watched(SortedGRPOTrainer)
    used: list[Any] = []

    def remember(environments: list[Any], **columns: Any) -> list[float]:
        used.extend((environment, environment.case, environment.calls) for environment in environments)
        return by_place(environments)

    args = config(tmp_path, per_device_train_batch_size=6, max_steps=2, max_completion_length=400)
    trainer = trainer_of(
        watching, tmp_path, table, args=args, environment_factory=Stuck, reward_funcs=remember,
        train_dataset=questions("PQRPQR"), schedule="baseline", tool_limit_seconds=1.0,
    )  # fmt: skip
    trainer.train()
    assert not [event for event in events_in(tmp_path) if isinstance(event, Rejected)]
    for row, (_, case, calls) in zip(seen, used, strict=True):
        results = [message["content"] for message in row["messages"] if message["role"] == "tool"]
        if case == "Q":
            assert results == ["D"]
        else:
            assert results[0] == "{'error': 'no result within 1 s'}"
        if case == "P":
            assert calls == 1  # never called again while the thread is in it
            assert all("busy" in result for result in results[1:])
    stuck = [environment for environment, case, _ in used if case == "P"]
    assert len(set(map(id, stuck))) == len(stuck) >= GROUP  # and never used for another rollout
    assert all((environment.case, environment.calls) == ("P", 1) for environment in stuck)
    log = losses_in(trainer)[0]
    assert log["tools/failure_frequency"] > 0


def test_evaluation_uses_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = config(tmp_path, per_device_eval_batch_size=4)
    trainer = trainer_of(
        SortedGRPOTrainer, tmp_path, SCRIPT, args=args, tools=TOOLS, train_dataset=questions("AA"),
        eval_dataset=questions("AJ"), off_policy_correction="decoupled",
    )  # fmt: skip
    engine, seeds = trainer._engine.ready(), []
    submit = engine.submit
    monkeypatch.setattr(engine, "submit", lambda requests: (seeds.extend(r.seed for r in requests), submit(requests)))
    measured = trainer.evaluate()
    assert measured["eval_tools/call_frequency"] == 1.0
    assert len(seeds) > 2 * GROUP and len(set(seeds)) == len(seeds)  # a later turn has noise of its own, too


@pytest.mark.slow
def test_vllm_generates_the_turns(tmp_path: Path) -> None:
    if not hasattr(pytest.importorskip("vllm"), "SamplingParams"):
        pytest.skip("vLLM is not installed")
    tokenizer = scripted_tokenizer(COUNTING)
    scripted_model(tokenizer, COUNTING).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    args = config(tmp_path, max_steps=4, max_completion_length=200, learning_rate=1e-3, vllm_max_model_length=300)
    trainer = SortedGRPOTrainer(
        model=str(tmp_path / "model"), reward_funcs=own_instance, args=args, environment_factory=Counter24,
        train_dataset=starts(16), schedule="partial", engine="vllm", slots=3,
    )  # fmt: skip
    trainer.train()
    history = losses_in(trainer)
    assert len(history) == 4 and all(entry["tools/call_frequency"] > 0 for entry in history)
    assert max(entry.get("sortedrl/mismatch", 0.0) for entry in history) < 1e-4


# What is refused


class Random:
    number = 0

    def reset(self, **row: Any) -> str:
        Random.number += 1
        return f"{Random.number}N"

    def get_reward(self) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"tools": TOOLS, "train_dataset": Dataset.from_dict({"prompt": ["go A"]})}, "lists of chat messages"),
        ({"tools": TOOLS, "tool_threads": -1}, "tool_threads"),
        ({"tools": TOOLS, "tool_limit_seconds": 0}, "tool_limit_seconds"),
        ({"environment_factory": {"count": Counter24}, "train_dataset": questions("N", environment=["cout"])}, "cout"),
        ({"environment_factory": {"count": Counter24}}, r"'prompt', 'start'\]: it has no column named environment"),
        ({"environment_factory": Random}, "reset returned different observations for row"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(arguments: dict[str, Any], found: str, tmp_path: Path) -> None:
    given = {"train_dataset": questions("NN", start=[1, 2])} | arguments
    with pytest.raises(ConfigurationError, match=found) as refused:
        trainer_of(SortedGRPOTrainer, tmp_path, SURE, **given).train()
    assert "\n" not in str(refused.value)


# The page


@pytest.mark.slow
def test_the_example_of_the_page_runs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "trl.md").read_text(encoding="utf-8")
    (source,) = re.findall(r'```python title="trl_tools.py"\n(.*?)```', page, re.DOTALL)
    example: dict[str, Any] = {"__name__": "trl_tools"}
    exec(compile(source, "trl_tools.py", "exec"), example)
    guess = {n: call("guess", value=n) for n in (50, 25, 75)}
    table: Table = {
        ".": guess[50], "r": {guess[25]: 0.5, guess[75]: 0.5}, "t": "done",
        **dict.fromkeys((*guess.values(), "done"), EOS),
    }  # fmt: skip
    tokenizer = scripted_tokenizer(table)
    scripted_model(tokenizer, table).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    options = {
        "output_dir": str(tmp_path / "run"), "max_steps": 2, "num_generations": 4, "per_device_train_batch_size": 8,
        "bf16": False, "use_cpu": True, "report_to": "none", "save_strategy": "no", "logging_steps": 1,
        "disable_tqdm": True,
    }  # fmt: skip
    trainer = example["trainer"](str(tmp_path / "model"), **options)
    trainer.train()
    history = losses_in(trainer)
    assert len(history) == 2 and all(entry["tools/call_frequency"] >= 1 for entry in history)
    assert all("rewards/Guess/mean" in entry for entry in history)
