"""Limits that a schedule meets only with engines, expectations and datasets of others: empty turns, no slots, numpy."""

from typing import Any

import pytest

from instant_environments import InstantEnvironments
from paced import PacedEngine
from scenarios import Run, scenario
from sortedrl.core import (
    ConfigurationError,
    Controller,
    Environments,
    EventLog,
    Expectation,
    Prompt,
    Prompts,
    Schedule,
    ScoreAtOnce,
    Scorer,
    SensedLengths,
    events,
)
from sortedrl.core.checkpoint import restore_cursor, saved_cursor
from sortedrl.core.engine import Change, RequestFinished, Tokens
from sortedrl.core.import_path import import_object
from sortedrl.log.lines import decode, written

ONE = Schedule(mode="baseline", rollouts_per_update=1, prompts_per_cohort=1)


class SaysNothing(PacedEngine):
    """Ends `empty` requests without a token."""

    def __init__(self, empty: int) -> None:
        super().__init__(slots=1, length_of=lambda request: request.prefix_length + 2)
        self._empty = empty

    def _report(self) -> list[Change]:
        changes = super()._report()
        if not self._empty:
            return changes
        self._empty -= sum(isinstance(change, RequestFinished) for change in changes)
        return [change for change in changes if not isinstance(change, Tokens)]


@pytest.mark.parametrize(("has_environment", "mask"), [(False, [1, 1]), (True, [1, 1, 0, 1, 1])])
@pytest.mark.parametrize("empty", [1, 3])
def test_a_turn_without_a_token_is_a_failure_of_the_engine(empty: int, has_environment: bool, mask: list[int]) -> None:
    """The learner has nothing to train on: it would end the run. An environment has nothing to answer, and two answers
    in a row would be one context."""
    log: list[Any] = []
    environments = InstantEnvironments(lambda rollout: None if rollout.observations else [5])
    parts: Any = (SaysNothing(empty), Prompts([Prompt("p", [1])]), ScoreAtOnce(lambda rollout: 1.0), ONE)
    log_of_run = EventLog(log.append)
    controller = Controller(*parts, environments=environments if has_environment else None, log=log_of_run)
    trained = [rollout for batch in controller for rollout in batch]
    failures = [event.reason for event in log if isinstance(event, events.Failed)]
    assert len(failures) == empty and all("without a token" in reason for reason in failures)
    assert [rollout.mask for rollout in trained] == ([mask] if empty <= ONE.max_retries else [])


def test_an_engine_without_slots_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="slots = 0"):
        Controller(PacedEngine(slots=0), Prompts([Prompt("p", [1])]), ScoreAtOnce(len), ONE)


@pytest.mark.parametrize(("kind", "forgotten"), [(Scorer, "pending"), (Environments, "cancel"), (Expectation, "state")])
def test_a_derived_part_that_lacks_a_method_cannot_be_made(kind: type, forgotten: str) -> None:
    """It inherited the protocol's empty method: nothing was pending, or no expected length was in the checkpoint."""
    members = {name: lambda self: None for name in vars(kind) if not name.startswith("_") and name != forgotten}
    with pytest.raises(TypeError, match=f"abstract class Mine .*{forgotten}"):
        type("Mine", (kind,), members)()


def test_two_prompts_with_one_id_are_refused() -> None:
    """A checkpoint names prompts by their ids: a resumed rollout would be scored against the other prompt's answer."""
    with pytest.raises(ValueError, match="two prompts have the id 'a'"):
        Prompts([Prompt("a", [1]), Prompt("b", [1]), Prompt("a", [2])])


def test_prompts_can_be_extended_also_after_a_checkpoint_of_more_epochs() -> None:
    def some() -> Prompts:
        return Prompts([Prompt(name, [1]) for name in "abc"])

    prompts = some()
    prompts.extend(4)
    assert prompts.remaining == 12, "the rest of this epoch, one more for the fourth prompt, and two beyond"
    prompts.take(8, within_epoch=False)
    prompts.extend(0)
    assert (prompts.epoch, prompts.epochs, prompts.remaining) == (2, 5, 7)
    prompts.extend(0)
    assert prompts.remaining == 7, "enough is left"
    again = some()
    restore_cursor(again, saved_cursor(prompts))
    again.extend(0)
    assert (again.epochs, again.remaining) == (5, 7)
    assert again.take(7, within_epoch=False) == prompts.take(7, within_epoch=False)


class Rows(list[int]):
    """What a tokenizer returns as a tensor: it has a row per text."""

    shape = (1, 2)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ([{"id": "p", "tokens": [1]}], r"dataset\[0\] is a dict: make it a Prompt\(id, token_ids, payload=answer\)"),
        ([Prompt("p", [1]), "What is 1 + 1?"], r"dataset\[1\] is a str: make it a Prompt"),
        ([Prompt(7, [1])], r"dataset\[0\] has the id 7 of type int: use text"),  # type: ignore[arg-type]
        ([Prompt("p", [[1, 2]])], r"dataset\[0\] has a batch in place of token ids: pass its row"),  # type: ignore[list-item]
        ([Prompt("p", Rows([0, 0]))], r"dataset\[0\] has a batch in place of token ids: pass its row"),
        ([Prompt("p", 3)], r"dataset\[0\] has an int as its token ids: pass a list"),  # type: ignore[arg-type]
        ([Prompt("p", "hello")], r"dataset\[0\] has text in place of token ids: encode it"),  # type: ignore[arg-type]
        ({"train": [Prompt("p", [1])]}, r"the dataset is a dict with the keys \['train'\]: pass one value"),
        ((Prompt(name, [1]) for name in "ab"), "the dataset is a generator: pass a sequence of Prompt"),
    ],
)
def test_what_is_no_prompt_is_named_by_its_place(dataset: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Prompts(dataset)


def test_sizes_may_be_numbers_of_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    sizes = {"rollouts_per_update": numpy.int64(2), "max_staleness": numpy.int32(3), "seed": numpy.int64(1)}
    schedule = Schedule(**sizes)
    assert all(type(getattr(schedule, name)) is int for name in sizes), "JSON cannot write others"
    assert schedule == Schedule(rollouts_per_update=2, max_staleness=3, seed=1)


def test_expected_lengths_may_be_numbers_of_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    lengths = {f"p{i}": numpy.float64(3.0) for i in range(4)}
    plan = scenario("partial+planned", [1, 2, 3, 4], slots=2, rollouts_per_update=2)
    run = Run(plan, expectation=SensedLengths(lengths)).to_end()
    assert [decode(line) for line in written(run.events).splitlines()] == run.events


def test_a_name_that_a_module_of_the_interpreter_does_not_have() -> None:
    with pytest.raises(ValueError, match=r"'sys' \(without a file\) has no 'nothing'"):
        import_object("sys:nothing")
