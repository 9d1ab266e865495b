"""What all environments of a run share: the turns of a rollout, the calls that are pending, and their results.

A call is a turn of a rollout, whose result is an answer for the scheduler (core/turns.py), or the end of a
rollout by a limit, whose result is a score (core/scoring.py).
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from sortedrl.core.rollout import Rollout
from sortedrl.core.scoring import Score
from sortedrl.core.turns import Answer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of the policy, and the observation that followed: None if there is none yet, or if a limit ended the
    rollout there. `is_cut`: the limit cut the turn itself."""

    response: Sequence[int]
    logprobs: Sequence[float]
    observation: Sequence[int] | None = None
    is_cut: bool = False


def turns_of(rollout: Rollout, eos_token_ids: Collection[int] | None = None) -> list[Turn]:
    """With EOS tokens, a last turn that ends with none of them counts as cut."""
    turns: list[Turn] = []
    tokens: list[int] = []
    logprobs: list[float] = []
    for segment in rollout.segments:
        if segment.is_environment:
            turns.append(Turn(tokens, logprobs, list(segment.tokens)))
            tokens, logprobs = [], []
        else:
            tokens = [*tokens, *segment.tokens]
            logprobs = [*logprobs, *segment.logprobs]
    if tokens:
        turns.append(Turn(tokens, logprobs, None, eos_token_ids is not None and tokens[-1] not in eos_token_ids))
    return turns


class Inbox(Generic[T]):
    """Results in the order in which they came, each collected once."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._items: list[T] = []

    def add(self, items: Iterable[T]) -> None:
        with self._changed:
            self._items += items
            self._changed.notify_all()

    def collect(self) -> list[T]:
        with self._changed:
            items, self._items = self._items, []
        return items

    def wait(self, timeout_seconds: float) -> None:
        """Until there is something to collect."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._items), timeout_seconds)


@dataclass(frozen=True, slots=True)
class Pending:
    """`call`: the scheduler's number; None for the end of a rollout by a limit. `turns` are those of the rollout."""

    rollout_id: int
    attempt: int
    call: int | None
    turns: Sequence[Turn]

    def answer(self) -> Answer:
        """One without content."""
        return Answer(self.rollout_id, -1 if self.call is None else self.call)


class Numbered(Protocol):
    @property
    def call(self) -> int: ...


R = TypeVar("R", bound=Numbered)


class Results(Protocol[R]):
    def collect(self) -> list[R]: ...

    def wait(self, timeout_seconds: float) -> None: ...


class EnvironmentCalls(ABC, Generic[R]):
    """The environments of a run; `ends` is the scorer of rollouts that a limit ended."""

    def __init__(self, results: Results[R]) -> None:
        self._results = results
        self._pending: dict[int, Pending] = {}  # by a number of its own for each call
        self._answers: list[Answer] = []
        self._scores: list[Score] = []
        self.ends = Ends(self)

    @property
    def pending(self) -> int:
        return len(self._answers) + sum(pending.call is not None for pending in self._pending.values())

    @property
    def pending_ends(self) -> int:
        return len(self._scores) + sum(pending.call is None for pending in self._pending.values())

    def collect(self) -> list[Answer]:
        self._take_results()
        answers, self._answers = self._answers, []
        return answers

    def collect_ends(self) -> list[Score]:
        self._take_results()
        scores, self._scores = self._scores, []
        return scores

    def wait(self, timeout_seconds: float) -> None:
        if not self._answers and not self._scores:
            self._results.wait(timeout_seconds)

    def cancel(self, rollout_id: int) -> None:
        for number in [number for number, pending in self._pending.items() if pending.rollout_id == rollout_id]:
            del self._pending[number]
        self._answers = [answer for answer in self._answers if answer.rollout_id != rollout_id]
        self._drop(rollout_id)

    def _take_results(self) -> None:
        for result in self._results.collect():
            pending = self._pending.pop(result.call, None)
            if pending is None:  # canceled
                continue
            answer = self._answer(pending, result)
            if pending.call is not None:
                self._answers.append(answer)
            else:
                _, _, _, reward, detail, error, is_lost, counts = answer
                self._scores.append(Score(pending.rollout_id, reward, detail, error, pending.attempt, is_lost, counts))

    @abstractmethod
    def submit_end(self, rollout: Rollout) -> None:
        """A limit ended the rollout: ask for its reward."""

    @abstractmethod
    def _answer(self, pending: Pending, result: R) -> Answer: ...

    @abstractmethod
    def _drop(self, rollout_id: int) -> None:
        """End the rollout's instance or episode, if there is one."""


class Ends:
    """The scorer of a run with environments: it only gets rollouts that a limit ended."""

    def __init__(self, environments: EnvironmentCalls[Any]) -> None:
        self._environments = environments

    @property
    def pending(self) -> int:
        return self._environments.pending_ends

    def submit(self, rollout: Rollout) -> None:
        self._environments.submit_end(rollout)

    def collect(self) -> list[Score]:
        return self._environments.collect_ends()

    def wait(self, timeout_seconds: float) -> None:
        self._environments.wait(timeout_seconds)
