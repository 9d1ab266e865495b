"""What a task is: problems to train on, problems held out, and a score for a response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Problem:
    """A question as chat text (`system` may be empty) and what its scorer needs to judge an answer."""

    id: str
    question: str
    answer: Any
    system: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`reward` trains; `correct` is what held-out scores count; `parts` says how the reward came about."""

    reward: float
    correct: bool
    parts: Mapping[str, float] = field(default_factory=dict)


class Task(Protocol):
    name: str

    def train(self) -> Sequence[Problem]:
        """The problems to train on."""

    def held_out(self) -> Sequence[Problem]:
        """The problems to evaluate on; none of them is in `train`."""

    def score(self, problem: Problem, response: str) -> Verdict:
        """Judge the text of a response, special tokens removed."""
