"""What a run reads: limits that no prompt or task can meet are errors before the run starts."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import toy
from sortedrl.cli import main
from sortedrl.core.configuration import ConfigurationError
from sortedrl.tasks.task import Problem
from sortedrl.training.resources import read_resources
from sortedrl.training.settings import EvalSettings, TrainSettings


class Growing(toy.SayA):
    """Prompts of one to eight words."""

    def train(self) -> list[Problem]:
        return [Problem(f"train-{words}", " ".join(["q1"] * words), "a") for words in range(1, 9)]

    held_out = train


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(toy.make_model(tmp_path_factory.mktemp("model") / "toy"))


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1, error
    return error


@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_context_below_every_prompt_is_refused_at_once(
    command: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before, a run rejected every rollout of every epoch, for half a minute."""
    monkeypatch.chdir(tmp_path)
    error = refusal([command, "--model", model, "--task", "toy:SayA", "--max-context-tokens", "2"], capsys)
    assert "max_context_tokens = 2 (set by flag --max-context-tokens): no prompt leaves room" in error
    assert "the shortest has 2 tokens" in error
    assert list(tmp_path.iterdir()) == []


def test_prompts_that_fill_the_context_are_left_out_and_counted(model: str) -> None:
    lines: list[str] = []
    read = read_resources(TrainSettings(model=model, task="test_resources:Growing", max_context_tokens=6), lines.append)
    lines.pop(0)  # about problems that are in both parts
    assert [len(prompt.tokens) for prompt in read.train] == [1, 2, 3, 4, 5]
    assert read.held_out == read.train
    ends = "fill max_context_tokens = 6 and are left out"
    assert lines == [f"3 of 8 training prompts {ends}", f"3 of 8 held-out prompts {ends}"]


class LongHeldOut(Growing):
    def held_out(self) -> list[Problem]:
        return [Problem("held-out", " ".join(["q1"] * 20), "a")]


def test_held_out_prompts_that_are_all_too_long_are_named(model: str) -> None:
    """In place of "no prompts left: 1 of 1 prompts", of a task with eight that fit."""
    settings = TrainSettings(model=model, task="test_resources:LongHeldOut", max_prompt_tokens=12)
    with pytest.raises(ConfigurationError, match="no held-out prompts left: 1 of 1 held-out prompts have more than 12"):
        read_resources(settings, print)


class LongTraining(Growing):
    def train(self) -> list[Problem]:
        return [Problem("train", " ".join(["q1"] * 20), "a")]

    def held_out(self) -> list[Problem]:
        return super().train()


class NoTraining(LongTraining):
    def train(self) -> list[Problem]:
        raise FileNotFoundError("train.jsonl")


@pytest.mark.parametrize("limit", ["max_prompt_tokens", "max_context_tokens"])
@pytest.mark.parametrize("task", ["LongTraining", "NoTraining"])
def test_an_evaluation_does_not_need_training_prompts(limit: str, task: str, model: str) -> None:
    """Before, `eval` was refused if all of them were too long, and mentioned those that were."""
    lines: list[str] = []
    settings = {"model": model, "task": f"test_resources:{task}", limit: 12}
    read = read_resources(EvalSettings.model_validate(settings), lines.append)
    assert len(read.held_out) == 8 and not read.train and not lines
    with pytest.raises(ConfigurationError, match=r"training prompts|no prompt leaves room|train\.jsonl"):
        read_resources(TrainSettings.model_validate(settings), print)


@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_limit_of_turns_is_refused_if_responses_have_one(
    command: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [command, "--model", model, "--max-turns", "3", "--task"]
    error = refusal([*words, "toy:SayA"], capsys)
    assert "max_turns = 3 (set by flag --max-turns): task toy:SayA has neither an environment nor tools" in error
    assert list(tmp_path.iterdir()) == []


def test_a_limit_of_turns_is_taken_if_responses_have_several(model: str) -> None:
    assert read_resources(EvalSettings(model=model, task="toy:Talk", max_turns=3), print).held_out


class Leaking(toy.SayA):
    """The first two held-out problems are trained on: one under its id, one under another id."""

    def held_out(self) -> list[Problem]:
        first, second = self.train()[:2]
        copied = Problem("other-id", second.question, second.answer)
        return [first, copied, *super().held_out()]


class SameQuestion(toy.SayA):
    """As in a game of guessing: the question is the same, and the answer differs."""

    def train(self) -> list[Problem]:
        return [Problem(f"train-{i}", "q1", i) for i in range(8)]

    def held_out(self) -> list[Problem]:
        return [Problem(f"held-out-{i}", "q1", 8 + i) for i in range(8)]


class SameTalk(toy.Talk):
    """An environment may draw its data by the id of a problem."""

    def held_out(self) -> list[Problem]:
        return [Problem(f"held-out/{problem.id}", problem.question, problem.answer) for problem in self.train()]


def test_held_out_problems_that_are_trained_on_are_pointed_out(model: str) -> None:
    lines: list[str] = []
    read_resources(TrainSettings(model=model, task="test_resources:Leaking"), lines.append)
    [line] = lines
    assert line.startswith("2 of 42 held-out problems are also problems to train on, such as 'train-0'")
    for task in ("test_resources:SameQuestion", "test_resources:SameTalk", "toy:SayA"):
        read_resources(TrainSettings(model=model, task=task), lines.append)
    read_resources(EvalSettings(model=model, task="test_resources:Leaking"), lines.append)
    assert lines == [line]
