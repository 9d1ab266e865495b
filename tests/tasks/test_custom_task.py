import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from sortedrl.tasks.custom import CustomReward
from sortedrl.tasks.registry import task_by_name
from sortedrl.tasks.task import Problem, Reward, checked_problems

REWARDS = """
from sortedrl.tasks.task import Problem, Reward

def exact(problem, response):
    return float(response == problem.answer)

def truth(problem, response):
    return response == problem.answer

def conclusion(problem, response):
    return Reward(0.25, True, {"style": 0.25})

def text(problem, response):
    return "good"

def one_argument(response):
    return 1.0

limit = 3

class Fixed:
    def __init__(self, size=2):
        self.size = size
    def train(self):
        return [Problem(str(n), "?", n) for n in range(self.size)]
    def held_out(self):
        return []
    def score(self, problem, response):
        return Reward(1.0, True)

class Half:
    def train(self):
        return []

fixed = Fixed(5)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a module and prompts of its own."""
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    (tmp_path / "needs_more.py").write_text("import a_library_that_nobody_has")
    lines = [f'{{"ask": "say {n}", "data": {{"reply": ["{n}"]}}}}\n' for n in range(20)]
    (tmp_path / "prompts.jsonl").write_text("".join(lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    return tmp_path


def columns(folder: Path) -> dict[str, Any]:
    return {"data": str(folder / "prompts.jsonl"), "question_column": "ask", "answer_column": "data.reply.0"}


def test_a_reward_function_scores_prompts_from_a_file(folder: Path) -> None:
    task = task_by_name("my_rewards:exact", **columns(folder))
    assert task.name == "my_rewards:exact"
    assert len(task.train()) == 18 and len(task.held_out()) == 2
    problem = task.train()[0]
    assert problem.question == f"say {problem.answer}"
    assert task.score(problem, problem.answer) == Reward(1.0, True)
    assert task.score(problem, "nothing") == Reward(0.0, False)


@pytest.mark.parametrize(("name", "answers"), [("answer", {"1", "2"}), ("notes", {None})])
def test_columns_called_question_and_answer_need_no_option(folder: Path, name: str, answers: set[str | None]) -> None:
    rows = [{"question": f"say {n}", name: n} for n in "12"]
    (folder / "plain.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = task_by_name("my_rewards:exact", data="plain.jsonl")
    assert {problem.answer for problem in [*task.train(), *task.held_out()]} == answers


def test_bools_and_verdicts_are_taken_as_they_are(folder: Path) -> None:
    problem = Problem("p", "?", "yes")
    assert CustomReward("my_rewards:truth", **columns(folder)).score(problem, "yes") == Reward(1.0, True)
    reward = CustomReward("my_rewards:conclusion", **columns(folder)).score(problem, "no")
    assert reward == Reward(0.25, True, {"style": 0.25})


def test_another_return_type_is_named(folder: Path) -> None:
    task = CustomReward("my_rewards:text", **columns(folder))
    with pytest.raises(
        TypeError, match="result of my_rewards:text is 'good' of type str, not a number: return a number"
    ):
        task.score(Problem("p", "?", 1), "")


def test_a_task_class_gets_its_options_and_an_object_is_used_as_it_is(folder: Path) -> None:
    assert len(task_by_name("my_rewards:Fixed", size=3).train()) == 3
    assert len(task_by_name("my_rewards:fixed").train()) == 5


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("no_such_module:reward", {}, "no module 'no_such_module' for 'no_such_module:reward'"),
        ("my_rewards.sub:reward", {}, "no module 'my_rewards.sub'"),
        ("needs_more:reward", {}, "needs_more needs the module 'a_library_that_nobody_has'"),
        ("my_rewards:exakt", {}, "has no 'exakt'; did you mean 'exact'"),
        ("my_rewards:Nope", {}, "has no 'Nope'; it defines exact, truth, conclusion, text, one_argument, Fixed"),
        ("my_rewards:exact", {}, "needs prompts: set --data FILE"),
        ("my_rewards:exact", {"data": "prompts.jsonl", "color": "red"}, "'color'; its options are data, held_out_data"),
        ("my_rewards:one_argument", {"data": "prompts.jsonl"}, r"called with \(problem, response\)"),
        ("my_rewards:limit", {}, "is an int: expected a reward function"),
        ("my_rewards:Half", {}, "is not a task: it has no held_out and no score"),
        ("my_rewards:Fixed", {"length": 3}, "'length'; its options are size"),
        ("my_rewards:fixed", {"size": 3}, "takes no options: remove size"),
        ("chess", {}, "no task 'chess'; use knights_and_knaves, math"),
        ("verifiers", {}, "no task 'verifiers'; use .*verifiers:<taskset>"),
        ("reasoning_gym", {}, "choose a dataset"),
        ("math:gsm8k", {"sed": 1}, "'sed'; its options are data"),
    ],
)
def test_mistakes_are_named(folder: Path, name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        task_by_name(name, **options)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, r"train\(\) returned None instead of a list of problems"),
        ([], r"train\(\) returned no problems"),
        (
            [Problem("a", "ask", 1), {"id": "b"}],
            r"train\(\) returned a value of type dict among its problems: .*Problem",
        ),
    ],
)
def test_problems_that_are_none_are_named(result: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        checked_problems(result, "train()")


def test_the_examples_of_the_documentation_run(folder: Path) -> None:
    for library in ("math_verify", "reasoning_gym"):
        pytest.importorskip(library)
    text = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
    blocks = re.findall(r'```(?:python|json)(?: title="(\S+)")?\n(.*?)```', text, re.DOTALL)
    assert len(blocks) >= 8
    for number, (name, code) in enumerate(blocks):
        path = folder / (name or f"example_{number}.py")
        path.write_text(code)
        if not name:
            runpy.run_path(str(path))
