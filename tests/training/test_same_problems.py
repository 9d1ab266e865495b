"""Digests of problems: equal in every process for equal problems, different for different ones."""

import os
import subprocess
import sys
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sortedrl.core.rollout import Prompt
from sortedrl.learner.checkpoint import Checkpoint
from sortedrl.tasks.datasets import DIGITS
from sortedrl.tasks.task import Problem
from sortedrl.training.resources import problem_digests, why_other_problems


class Color(Enum):
    RED = 1
    BLUE = 2


@dataclass
class Node:
    name: str
    below: list[Any] = field(default_factory=list)


def digest(answer: Any, **changes: Any) -> str:
    problem = replace(Problem("one", "What is it?", answer), **changes)
    return problem_digests([Prompt(problem.id, [1, 2], problem)])


answers = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
)


@settings(max_examples=40, deadline=None)
@given(answers, answers)
def test_digests_are_equal_if_the_answers_are(first: Any, second: Any) -> None:
    if repr(first) == repr(second):
        assert digest(first) == digest(second)
    elif first != second:
        assert digest(first) != digest(second)


@pytest.mark.parametrize("change", [{"id": "two"}, {"question": "What was it?"}, {"system": "Be brief."}])
def test_every_part_of_a_problem_counts(change: dict[str, str]) -> None:
    assert digest(5, **change) != digest(5)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((1, 2), (2, 1)),
        ({"a": 1}, {"a": 2}),
        ({"a", "b"}, {"a", "c"}),
        (Color.RED, Color.BLUE),
        (Node("x", [Node("y")]), Node("x", [Node("z")])),
        ("\udc80", "\udc81"),
    ],
)
def test_the_content_of_an_answer_counts(first: Any, second: Any) -> None:
    assert digest(first) != digest(second)


def test_the_order_of_keys_does_not_count() -> None:
    assert digest({"a": 1, "b": {"c": 2, "d": 3}}) == digest({"b": {"d": 3, "c": 2}, "a": 1})


def test_objects_without_a_text_of_their_own_never_differ() -> None:
    """Their text has an address, which is another one in the next process."""
    assert digest([object(), SimpleNamespace(a=object())]) == digest([object(), SimpleNamespace(a=object())])


def test_an_answer_that_contains_itself_is_left_out() -> None:
    ring = Node("ring")
    ring.below.append(ring)
    assert digest(ring) != digest(ring, question="What was it?") and len(digest(ring)) == DIGITS


def prompts_of(*answers: Any) -> list[Prompt]:
    return [Prompt(str(answer), [1], Problem(str(answer), "What is it?", answer)) for answer in answers]


def saved(train: list[Prompt], held_out: list[Prompt]) -> Checkpoint:
    digests = {"train": problem_digests(train), "held_out": problem_digests(held_out)}
    notes = {"before_ids": [prompt.id for prompt in held_out], "problems": digests}
    return Checkpoint(Path(), {}, {"prompts": {"size": len(train)}}, notes, {})


def test_another_order_is_another_reason_than_an_edit() -> None:
    """Such as that of a set: the rest of the epoch would not be that of the run."""
    train, held_out = prompts_of(1, 2, 3), prompts_of(4)
    checkpoint = saved(train, held_out)
    assert why_other_problems(checkpoint, train, held_out) is None
    reason = why_other_problems(checkpoint, train[::-1], held_out)
    assert reason == "the problems to train on are in another order than when the run started"
    reason = why_other_problems(checkpoint, prompts_of(1, 2, 5), held_out)
    assert reason == "1 of 3 problems to train on changed since the run started, the first is '5'"
    reason = why_other_problems(checkpoint, prompts_of(1, 2), held_out)
    assert reason == "the task has 2 problems to train on, but had 3 when the run started"
    reason = why_other_problems(checkpoint, train, prompts_of(5))
    assert reason == "the task's held-out problems are not those of the run's first evaluation"


def test_numbers_of_numpy_count_by_value() -> None:
    numpy = pytest.importorskip("numpy")
    assert digest(numpy.array([1, 2])) == digest([1, 2]) != digest(numpy.array([1, 3]))


def test_digests_are_the_same_in_every_process() -> None:
    script = (
        "import random\n"
        "from sortedrl.core.rollout import Prompt\n"
        "from sortedrl.tasks.knights_dialogue import random_dialogue\n"
        "from sortedrl.tasks.task import Problem\n"
        "from sortedrl.training.resources import problem_digests\n"
        "answers = [[random_dialogue(3, random.Random(seed)), {str(seed), 'a', 'b'}] for seed in range(20)]\n"
        "print(problem_digests([Prompt('p', [1], Problem('p', '', answer)) for answer in answers]))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", script], env=os.environ | {"PYTHONHASHSEED": seed}, stdout=-1, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
    digests = found.pop().strip()
    assert len({digests[place : place + DIGITS] for place in range(0, len(digests), DIGITS)}) == 20
