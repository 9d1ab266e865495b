"""The environments of a run for the scheduler (core/environment.py), played by verifiers.

The same object is the scorer of rollouts that a limit ended: verifiers scores what they have.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

from sortedrl.core.environment import Answer
from sortedrl.core.rollout import Rollout
from sortedrl.core.scoring import Scored
from sortedrl.integrations.verifiers.episode import Ask, Report, Turn
from sortedrl.integrations.verifiers.service import EPISODES, Service
from sortedrl.tasks.environments import Ends


@dataclass(frozen=True, slots=True)
class _Pending:
    rollout_id: int
    attempt: int
    turns: int
    call: int | None  # None: the end of a rollout, for the scorer


class VerifiersEnvironments:
    """Environments and, for rollouts that a limit ended, scorer (`ends`)."""

    def __init__(self, service: Service, eos_token_id: int) -> None:
        self._service = service
        self._eos_token_id = eos_token_id
        self._changed = threading.Condition()
        self._reports: list[Report] = []
        self._pending: dict[int, _Pending] = {}  # by number of the ask
        self._episodes: dict[int, tuple[int, int]] = {}  # by rollout id: its attempt, and the number of its episode
        self._answers: list[Answer] = []
        self._scores: list[Scored] = []
        self._numbers = count()
        self.ends = Ends(self)

    # For the scheduler

    @property
    def pending(self) -> int:
        return len(self._answers) + sum(one.call is not None for one in self._pending.values())

    def submit(self, rollout: Rollout, call: int) -> None:
        self._ask(rollout, call)

    def collect(self) -> list[Answer]:
        self._take_reports()
        answers, self._answers = self._answers, []
        return answers

    def wait(self, timeout_seconds: float) -> None:
        if not self._answers and not self._scores:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._reports), timeout_seconds)

    def cancel(self, rollout_id: int) -> None:
        for number in [number for number, one in self._pending.items() if one.rollout_id == rollout_id]:
            del self._pending[number]
        self._answers = [answer for answer in self._answers if answer.rollout_id != rollout_id]
        self._drop(rollout_id)

    def state(self, rollout_id: int) -> Any:
        return None

    def restore(self, rollout: Rollout, state: Any) -> bool:
        return True

    # For rollouts that a limit ended

    def submit_end(self, rollout: Rollout) -> None:
        self._ask(rollout, None)

    @property
    def pending_ends(self) -> int:
        return len(self._scores) + sum(one.call is None for one in self._pending.values())

    def collect_ends(self) -> list[Scored]:
        self._take_reports()
        scores, self._scores = self._scores, []
        return scores

    # Episodes and their reports

    def _ask(self, rollout: Rollout, call: int | None) -> None:
        number = next(self._numbers)
        turns = list(turns_of(rollout, self._eos_token_id if call is None else None))
        self._pending[number] = _Pending(rollout.id, rollout.attempt, len(turns), call)
        limit = "" if call is not None else rollout.ended_by or "the rollout ended"
        data = rollout.prompt.payload.answer
        ask = Ask(number, self._episode_of(rollout), data, rollout.prompt.tokens, turns, limit)
        self._service.ask(ask, self._add_report)

    def _episode_of(self, rollout: Rollout) -> int:
        attempt, episode = self._episodes.get(rollout.id, (None, -1))
        if attempt != rollout.attempt:
            self._drop(rollout.id)
            episode = next(EPISODES)
            self._episodes[rollout.id] = (rollout.attempt, episode)
        return episode

    def _drop(self, rollout_id: int) -> None:
        _, episode = self._episodes.pop(rollout_id, (None, None))
        if episode is not None:
            self._service.drop(episode)

    def _add_report(self, report: Report) -> None:
        with self._changed:
            self._reports.append(report)
            self._changed.notify_all()

    def _take_reports(self) -> None:
        with self._changed:
            reports, self._reports = self._reports, []
        for report in reports:
            pending = self._pending.pop(report.ask, None)
            if pending is None:  # canceled
                continue
            if report.observation is None:
                self._drop(pending.rollout_id)
            if pending.call is not None:
                self._answers.append(_answer(pending, pending.call, report))
            else:
                detail = None if report.error is not None else _detail(pending, report)
                self._scores.append(Scored(pending.rollout_id, report.reward, detail, report.error, pending.attempt))


def _answer(pending: _Pending, call: int, report: Report) -> Answer:
    answer = Answer(pending.rollout_id, call)
    if report.error is not None:
        return answer._replace(error=report.error, is_lost=report.is_lost)
    if report.observation is not None:
        return answer._replace(observation=report.observation)
    return answer._replace(reward=report.reward, detail=_detail(pending, report))


def _detail(pending: _Pending, report: Report) -> dict[str, Any]:
    assert report.reward is not None
    return {"correct": report.reward >= 1.0, "parts": {**report.parts, "turns": pending.turns}}


def turns_of(rollout: Rollout, eos_token_id: int | None = None) -> Iterator[Turn]:
    """The policy's turns with their observations. With an EOS token, a last turn without it was cut by a limit."""
    tokens: list[int] = []
    logprobs: list[float] = []
    for segment in rollout.segments:
        if segment.is_environment:
            yield Turn(tokens, logprobs, list(segment.tokens))
            tokens, logprobs = [], []
        else:
            tokens = [*tokens, *segment.tokens]
            logprobs = [*logprobs, *segment.logprobs]
    if tokens:
        yield Turn(tokens, logprobs, None, eos_token_id is not None and tokens[-1] != eos_token_id)
