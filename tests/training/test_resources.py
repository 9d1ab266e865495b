"""What a run reads: limits that no prompt or task can meet are errors before the run starts."""

import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import toy
from sortedrl.core.configuration import ConfigurationError
from sortedrl.tasks.task import Problem
from sortedrl.training.resources import read_resources
from sortedrl.training.settings import EvalSettings, TrainSettings


class Growing(toy.SayA):
    """Prompts of one to eight words."""

    def train(self) -> list[Problem]:
        return [Problem(f"train-{words}", " ".join(["q1"] * words), "a") for words in range(1, 9)]

    held_out = train


@pytest.mark.parametrize("command", ["train", "eval"])
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            "--max-context-tokens 2",
            ["max_context_tokens = 2 (set by flag --max-context-tokens): no prompt", "shortest has 2 tokens"],
        ),
        ("--max-turns 3", ["max_turns = 3 (set by flag --max-turns): task toy:SayA has neither an environment nor"]),
    ],
)
def test_a_limit_that_no_rollout_can_keep_or_reach_is_refused_at_once(
    flags: str, words: list[str], command: str, model: Path, tmp_path: Path, monkeypatch: Any, refused: Any
) -> None:
    """Before, a run rejected every rollout of every epoch, for half a minute."""
    monkeypatch.chdir(tmp_path)
    error = refused(command, "--model", model, "--task", "toy:SayA", *flags.split())
    assert all(word in error for word in words), error
    assert list(tmp_path.iterdir()) == []


def test_prompts_that_fill_the_context_are_left_out_and_counted(model: Path) -> None:
    lines: list[str] = []
    settings = TrainSettings(model=str(model), task="test_resources:Growing", max_context_tokens=6)
    read = read_resources(settings, lines.append)
    lines.pop(0)  # about problems that are in both parts
    assert [len(prompt.tokens) for prompt in read.train] == [1, 2, 3, 4, 5]
    assert read.held_out == read.train
    ends = "fill max_context_tokens = 6 and are left out"
    assert lines == [f"3 of 8 training prompts {ends}", f"3 of 8 held-out prompts {ends}"]


class LongHeldOut(Growing):
    def held_out(self) -> list[Problem]:
        return [Problem("held-out", " ".join(["q1"] * 20), "a")]


def test_held_out_prompts_that_are_all_too_long_are_named(model: Path) -> None:
    """In place of "no prompts left: 1 of 1 prompts", of a task with eight that fit."""
    settings = TrainSettings(model=str(model), task="test_resources:LongHeldOut", max_prompt_tokens=12)
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
def test_an_evaluation_does_not_need_training_prompts(limit: str, task: str, model: Path) -> None:
    """Before, `eval` was refused if all of them were too long, and mentioned those that were."""
    lines: list[str] = []
    settings = {"model": str(model), "task": f"test_resources:{task}", limit: 12}
    read = read_resources(EvalSettings.model_validate(settings), lines.append)
    assert len(read.held_out) == 8 and not read.train and not lines
    with pytest.raises(ConfigurationError, match=r"training prompts|no prompt leaves room|train\.jsonl"):
        read_resources(TrainSettings.model_validate(settings), print)


def test_a_limit_of_turns_is_taken_if_responses_have_several(model: Path) -> None:
    assert read_resources(EvalSettings(model=str(model), task="toy:Talk", max_turns=3), print).held_out


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


def test_held_out_problems_that_are_trained_on_are_pointed_out(model: Path) -> None:
    lines: list[str] = []
    read_resources(TrainSettings(model=str(model), task="test_resources:Leaking"), lines.append)
    [line] = lines
    assert line.startswith("2 of 42 held-out problems are also problems to train on, such as 'train-0'")
    for task in ("test_resources:SameQuestion", "test_resources:SameTalk", "toy:SayA"):
        read_resources(TrainSettings(model=str(model), task=task), lines.append)
    read_resources(EvalSettings(model=str(model), task="test_resources:Leaking"), lines.append)
    assert lines == [line]


QUITS = """
import sys
from sortedrl.tasks.task import Problem

class Base:
    name = "quits"
    def train(self): return [Problem(f"{self.name}{n}", "q1", "a") for n in range(4)]
    def held_out(self): return [Problem(f"held-out{n}", "q2", "a") for n in range(4)]
    def score(self, problem, response): return 1.0

class In_init(Base):
    def __init__(self): sys.exit(0)

class In_train(Base):
    def train(self): sys.exit(0)

class In_held_out(Base):
    def held_out(self): sys.exit(0)

class In_reset(Base):
    def environment(self): return Quits()

class Quits:
    def reset(self, problem): sys.exit(0)
    async def step(self, response): return 1.0
    async def finish(self, reason): return 0.0

def engine(spec): sys.exit(0)
"""


@pytest.mark.parametrize(
    ("words", "where"),
    [
        ("--task quits:In_init", "task = 'quits:In_init' .*SystemExit: 0 .*quits.py:12"),
        ("--task quits:In_train", "task = 'quits:In_train' .*SystemExit: 0 .*quits.py:15"),
        ("--task quits:In_held_out --reward-workers 0", "SystemExit: 0 .*quits.py:18"),
        ("--task quits:In_reset", "the problem 'quits0': SystemExit: 0"),
        ("--task quits:In_reset --reward-workers 0", "SystemExit: 0 .*quits.py:24"),
        ("--task quits:Base --engine quits:engine", "engine = 'quits:engine' .*SystemExit: 0 .*quits.py:28"),
        ("--task no_guard:Base", "task = 'no_guard:Base' .*SystemExit: 0 .*no_guard.py:2"),
    ],
)
def test_code_that_calls_sys_exit_is_an_error_with_its_place(
    words: str, where: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "quits.py").write_text(QUITS)
    (tmp_path / "no_guard.py").write_text("import sys\nsys.exit(0)\n")
    sys.modules.pop("quits", None)
    assert re.search(where, refused("train", "--model", model, *words.split(), "--updates", "1"))


class HangsInReset(Growing):
    """One problem of eight."""

    def environment(self) -> Any:
        return SimpleNamespace(reset=hang, step=answer, finish=answer)

    score = None  # type: ignore[assignment]


def hang(problem: Problem) -> None:
    while problem.id == "train-5":
        time.sleep(1)


async def answer(text: str) -> float:
    return 1.0


def test_a_reset_that_hangs_is_an_error_with_its_problem(model: Path) -> None:
    settings = TrainSettings(model=str(model), task="test_resources:HangsInReset", score_limit_seconds=1.0)
    with pytest.raises(ConfigurationError, match=r"reset of the problem 'train-5': .*no result within 1 s"):
        read_resources(settings, print)


def repeats_a(problem: Problem, response: str) -> float:
    return 1.0


def test_questions_that_are_left_out_because_they_repeat_are_counted(model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"question": "{"q1 " * (1 + row % 10)}"}}\n' for row in range(12)))
    lines: list[str] = []
    settings = TrainSettings(model=str(model), task="test_resources:repeats_a", data=rows)
    assert len(read_resources(settings, lines.append).train) == 9
    assert lines == ["2 of 11 training problems repeat a question and are left out"]
    both = settings.model_copy(update={"task_options": {"held_out_data": str(rows)}})
    with pytest.raises(ConfigurationError, match="returned no problems"):
        read_resources(both, lines.append)
