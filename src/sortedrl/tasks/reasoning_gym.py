"""Any dataset of the reasoning-gym library by name: generated puzzles, scored by the library's scorer.

The answer is the content of the last <answer>...</answer>, or else the last line. One scorer is not trusted: that of
`knights_knaves` rewards wrong answers, so its answers are compared exactly.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from sortedrl.core.install_hint import install_hint
from sortedrl.tasks.datasets import without
from sortedrl.tasks.task import Problem, Reward

INSTRUCTION = "Think step by step, then give only the final answer between <answer> and </answer>."
# A generator creates puzzle i from seed + i, so held-out seeds must be beyond any number of training puzzles.
HELD_OUT_SEED_OFFSET = 10_000_000


class ReasoningGym:
    """`count` training puzzles, `held_out_count` from other seeds; further options go to the generator."""

    def __init__(
        self, dataset: str, *, count: int = 1000, held_out_count: int = 200, seed: int = 0, **options: Any
    ) -> None:
        self.name = f"reasoning_gym:{dataset}"
        self._dataset = dataset
        self._train = _create(dataset, options | {"seed": seed, "size": count})
        self._held_out = _create(dataset, options | {"seed": seed + HELD_OUT_SEED_OFFSET, "size": held_out_count})

    def train(self) -> Sequence[Problem]:
        return self._train_problems

    def held_out(self) -> Sequence[Problem]:
        return self._held_out_problems

    def score(self, problem: Problem, response: str) -> Reward:
        answer, tagged = extract_answer(response)
        unreadable = False
        if self._dataset == "knights_knaves":
            reward = float(roles(answer) == roles(problem.answer["answer"]))
        else:
            try:
                reward = float(self._train.score_answer(answer, problem.answer))
            except Exception:  # if the scorer cannot parse the answer, the answer is wrong
                reward, unreadable = 0.0, True
        return Reward(reward, reward >= 1.0, {"tagged": float(tagged), "unreadable": float(unreadable)})

    @cached_property
    def _held_out_problems(self) -> list[Problem]:
        return self._problems(self._held_out, "held-out")

    @cached_property
    def _train_problems(self) -> list[Problem]:
        """Small generators repeat themselves, so held-out puzzles are removed from training."""
        return without(self._problems(self._train, "train"), self._held_out_problems)

    def _problems(self, dataset: Any, part: str) -> list[Problem]:
        problems: dict[str, Problem] = {}
        for index in range(len(dataset)):
            entry = dataset[index]
            problem = Problem(f"{self.name}/{part}/{index}", entry["question"], entry, INSTRUCTION)
            problems.setdefault(problem.question, problem)
        return list(problems.values())


def extract_answer(response: str) -> tuple[str, bool]:
    """The answer, and whether it was between tags."""
    tagged = re.findall(r"<answer>(.*?)</answer>", response, re.DOTALL)
    if tagged:
        return tagged[-1].strip(), True
    lines = response.strip().splitlines()
    return (lines[-1].strip() if lines else ""), False


def roles(answer: str) -> set[tuple[str, str]]:
    """Who is claimed to be what, in lower case. Contradictory claims give two pairs."""
    return set(re.findall(r"(\w+) is an? (\w+)", answer.lower()))


def _create(dataset: str, options: dict[str, Any]) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ValueError(f"reasoning_gym tasks need reasoning-gym: {install_hint('puzzles')}") from error
    if dataset not in DATASETS:
        close = [name for name in sorted(DATASETS) if set(dataset.split("_")) & set(name.split("_"))]
        raise ValueError(
            f"reasoning-gym has no dataset {dataset!r}; "
            + (f"similar names: {', '.join(close)}" if close else f"it has {', '.join(sorted(DATASETS))}")
        )
    try:
        return reasoning_gym.create_dataset(dataset, **options)
    except (TypeError, AssertionError) as error:
        raise ValueError(f"reasoning_gym:{dataset} does not accept the options {options}: {error}") from error
