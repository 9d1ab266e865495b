"""The task interface: training problems, held-out problems, and a reward function."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from sortedrl.core.user_values import as_reward, shown


@dataclass(frozen=True, slots=True)
class Problem:
    """A question as chat text (`system` may be empty), and the data that its reward function needs."""

    id: str
    question: str
    answer: Any
    system: str = ""


@dataclass(frozen=True, slots=True)
class Reward:
    """`value` is for training, `correct` for held-out scores; `parts` breaks the reward down."""

    value: float
    correct: bool
    parts: Mapping[str, float] = field(default_factory=dict)


class Problems(Protocol):
    """What every task has."""

    name: str

    def train(self) -> Sequence[Problem]:
        """The problems to train on."""

    def held_out(self) -> Sequence[Problem]:
        """The problems to evaluate on; none of them is in `train`."""


class Task(Problems, Protocol):
    def score(self, problem: Problem, response: str) -> Reward:
        """Score the text of a response, without special tokens."""


class SplitTask:
    """What built-in tasks share: both parts of the problems are made or read once, when they are first needed.

    A worker process gets a copy without its cached properties. It makes again what it needs, which is never the
    problems.
    """

    @cached_property
    def _problems(self) -> tuple[Sequence[Problem], Sequence[Problem]]:
        """To train on, and held out."""
        raise NotImplementedError

    def train(self) -> Sequence[Problem]:
        return self._problems[0]

    def held_out(self) -> Sequence[Problem]:
        return self._problems[1]

    def __getstate__(self) -> dict[str, Any]:
        members = {name: member for kind in type(self).__mro__ for name, member in vars(kind).items()}
        return {key: value for key, value in vars(self).items() if not isinstance(members.get(key), cached_property)}


def checked_problems(result: Any, name: str) -> tuple[Problem, ...]:
    """The result of `train` or `held_out`, which `name` names, as problems. Raises TypeError or ValueError."""
    if not isinstance(result, Iterable):
        raise TypeError(f"{name} returned {shown(result)} instead of a list of problems")
    problems = tuple(result)
    if not problems:
        raise ValueError(f"{name} returned no problems")
    for problem in problems:
        if not isinstance(problem, Problem):
            raise TypeError(
                f"{name} returned {shown(problem)} among its problems: make it a sortedrl.tasks.task.Problem"
            )
    return problems


def checked_reward(result: Any, name: str = "the reward") -> Reward:
    """The result of a reward function as a Reward; a number counts as correct if it is at least 1. Raises TypeError."""
    if not isinstance(result, Reward):
        try:
            reward = as_reward(result, name)
        except TypeError as error:
            raise TypeError(f"{error}: return a number or a sortedrl.tasks.task.Reward") from None
        return Reward(reward, reward >= 1.0)
    parts = {str(part): as_reward(value, f"part {part!r} of {name}") for part, value in dict(result.parts).items()}
    return Reward(as_reward(result.value, name), bool(result.correct), parts)
