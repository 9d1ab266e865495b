"""What a task is: problems to train on, problems held out, and a score for a response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sortedrl.core.scoring import as_reward


@dataclass(frozen=True, slots=True)
class Problem:
    """A question as chat text (`system` may be empty) and what its scorer needs to judge an answer."""

    id: str
    question: str
    answer: Any
    system: str = ""


@dataclass(frozen=True, slots=True)
class Reward:
    """`value` trains; `correct` is what held-out scores count; `parts` says how the reward came about."""

    value: float
    correct: bool
    parts: Mapping[str, float] = field(default_factory=dict)


class Task(Protocol):
    name: str

    def train(self) -> Sequence[Problem]:
        """The problems to train on."""

    def held_out(self) -> Sequence[Problem]:
        """The problems to evaluate on; none of them is in `train`."""

    def score(self, problem: Problem, response: str) -> Reward:
        """Judge the text of a response, special tokens removed."""


def checked_reward(result: Any, name: str = "the reward") -> Reward:
    """What a reward returned, in plain numbers; a number counts as correct from 1 on. Raises where it is neither."""
    if not isinstance(result, Reward):
        try:
            reward = as_reward(result, name)
        except TypeError as error:
            raise TypeError(f"{error}: return a number or a sortedrl.tasks.task.Reward") from None
        return Reward(reward, reward >= 1.0)
    parts = {str(part): as_reward(value, f"part {part!r} of {name}") for part, value in dict(result.parts).items()}
    return Reward(as_reward(result.value, name), bool(result.correct), parts)
