"""Any dataset of the reasoning-gym library by name: generated puzzles, scored by the library's scorer.

The answer is the content of the last <answer>...</answer>, or else the last line. Many scorers evaluate it as Python
(`countdown`, `puzzle24`, integrals): `9**9**9` takes hours there, and a function call is executed. So scorers run in
processes that are killed if they do not finish in time; the answer then counts as wrong. One scorer is not trusted at
all: that of `knights_knaves` rewards wrong answers, so its answers are compared exactly.
"""

import os
import re
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any

from sortedrl.settings.install_hint import install_hint
from sortedrl.tasks.datasets import Distinct
from sortedrl.tasks.task import Problem, Reward, SplitTask
from sortedrl.tasks.workers import WorkerPool

INSTRUCTION = "Think step by step, then give only the final answer between <answer> and </answer>."
# A generator creates puzzle i from seed + i, so held-out seeds must be beyond any number of training puzzles.
HELD_OUT_SEED_OFFSET = 10_000_000


class ReasoningGym(SplitTask):
    """`count` training puzzles, `held_out_count` from other seeds; further options go to the generator.

    `limit_seconds` is the time limit of a score.
    """

    def __init__(
        self,
        dataset: str,
        *,
        count: int = 1000,
        held_out_count: int = 200,
        seed: int = 0,
        limit_seconds: float = 5.0,
        **options: Any,
    ) -> None:
        self.name = f"reasoning_gym:{dataset}"
        self._dataset = dataset
        self._train_options = options | {"seed": seed, "size": count}
        self._held_out_options = options | {"seed": seed + HELD_OUT_SEED_OFFSET, "size": held_out_count}
        self._limit_seconds = limit_seconds
        _create(dataset, self._train_options)  # an unknown name or option is an error now

    @cached_property
    def _library_score(self) -> WorkerPool:
        """No process starts before the first call."""
        load = partial(load_scorer, self._dataset, self._train_options)
        return WorkerPool(load, workers=max((os.cpu_count() or 1) // 2, 1), limit_seconds=self._limit_seconds)

    def score(self, problem: Problem, response: str) -> Reward:
        answer, tagged = extract_answer(response)
        timed_out = False
        found: float | None = 0.0
        if self._dataset == "knights_knaves":
            found = float(roles(answer) == roles(problem.answer["answer"]))
        else:
            try:
                found = self._library_score(answer, problem.answer)
            except TimeoutError:
                timed_out = True
        reward = found or 0.0
        parts = {"tagged": float(tagged), "unreadable": float(found is None), "timed_out": float(timed_out)}
        return Reward(reward, reward >= 1.0, parts)

    @cached_property
    def _problems(self) -> tuple[Distinct, Distinct]:
        """Small generators repeat themselves, so held-out puzzles are removed from training."""
        held_out = Distinct(self._generated(self._held_out_options, "held-out"))
        return Distinct(self._generated(self._train_options, "train"), held_out), held_out

    def _generated(self, options: dict[str, Any], part: str) -> Iterator[Problem]:
        for index, entry in enumerate(_create(self._dataset, options)):
            yield Problem(f"{self.name}/{part}/{index}", entry["question"], entry, INSTRUCTION)


def load_scorer(dataset: str, options: dict[str, Any]) -> Callable[[str, dict[str, Any]], float | None]:
    """Runs in a worker process: the score of an answer to a puzzle, or None if the library cannot read it."""
    scorer = _create(dataset, options)

    def score(answer: str, entry: dict[str, Any]) -> float | None:
        try:
            return float(scorer.score_answer(answer, entry))
        except Exception:
            return None

    return score


def extract_answer(response: str) -> tuple[str, bool]:
    """The answer, and whether it was between tags. In linear time: a response may repeat a tag ten thousand times."""
    *closed, _ = response.split("</answer>")
    tagged = [part.partition("<answer>")[2] for part in closed if "<answer>" in part]
    if tagged:
        return tagged[-1].strip(), True
    lines = response.strip().splitlines()
    return (lines[-1].strip() if lines else ""), False


def roles(answer: str) -> set[tuple[str, str]]:
    """Who is claimed to be what, in lower case. Contradictory claims give two pairs."""
    return set(re.findall(r"\b(\w+) is an? (\w+)", answer.lower()))  # without \b, a long word takes a minute


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
