"""The environments of a run for the scheduler (core/turns.py), played by verifiers.

The same object is the scorer of rollouts that a limit ended: verifiers scores what they have.
"""

from collections.abc import Collection
from dataclasses import dataclass
from itertools import count
from typing import Any

from sortedrl.core.rollout import Rollout
from sortedrl.core.turns import Answer
from sortedrl.integrations.verifiers.episode import Ask, Report
from sortedrl.integrations.verifiers.service import EPISODES, Service
from sortedrl.tasks.environment_calls import EnvironmentCalls, Inbox, Pending, turns_of


@dataclass(frozen=True, slots=True)
class _Pending(Pending):
    turns: int


class VerifiersEnvironments(EnvironmentCalls[_Pending]):
    """Episodes that a service plays."""

    def __init__(self, service: Service, eos_token_ids: Collection[int]) -> None:
        super().__init__()
        self._service = service
        self._eos_token_ids = eos_token_ids
        self._reports: Inbox[Report] = Inbox()
        self._episodes: dict[int, tuple[int, int]] = {}  # by rollout id: its attempt, and the number of its episode
        self._numbers = count()

    # For the scheduler

    def submit(self, rollout: Rollout, call: int) -> None:
        self._ask(rollout, call)

    def state(self, rollout_id: int) -> Any:
        return None

    def restore(self, rollout: Rollout, state: Any) -> bool:
        return True

    # For rollouts that a limit ended

    def submit_end(self, rollout: Rollout) -> None:
        self._ask(rollout, None)

    # Episodes and their reports

    def _ask(self, rollout: Rollout, call: int | None) -> None:
        number = next(self._numbers)
        turns = turns_of(rollout, self._eos_token_ids if call is None else None)
        self._pending[number] = _Pending(rollout.id, rollout.attempt, call, len(turns))
        limit = "" if call is not None else rollout.ended_by or "the rollout ended"
        data = rollout.prompt.payload.answer
        ask = Ask(number, self._episode_of(rollout), data, rollout.prompt.tokens, turns, limit)
        self._service.ask(ask, lambda report: self._reports.add([report]))

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

    def _take_results(self) -> None:
        for report in self._reports.collect():
            pending = self._pending.pop(report.ask, None)
            if pending is None:  # canceled
                continue
            if report.observation is None:
                self._drop(pending.rollout_id)
            self._deliver(pending, _answer(pending, report))

    def _wait_for_results(self, timeout_seconds: float) -> None:
        self._reports.wait(timeout_seconds)


def _answer(pending: _Pending, report: Report) -> Answer:
    answer = pending.answer()
    if report.error is not None:
        return answer._replace(error=report.error, is_lost=report.is_lost)
    if report.observation is not None:
        return answer._replace(observation=report.observation)
    return answer._replace(reward=report.reward, detail=_detail(pending, report))


def _detail(pending: _Pending, report: Report) -> dict[str, Any]:
    assert report.reward is not None
    return {"correct": report.reward >= 1.0, "parts": {**report.parts, "turns": pending.turns}}
