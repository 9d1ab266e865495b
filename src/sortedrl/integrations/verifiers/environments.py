"""The environments of a run for the scheduler (core/turns.py), played by verifiers.

The same object is the scorer of rollouts that a limit ended: verifiers scores what they have.
"""

from collections.abc import Collection
from itertools import count
from typing import Any

from sortedrl.core.rollout import Rollout
from sortedrl.core.turns import Answer
from sortedrl.integrations.verifiers.episode import Ask, Report
from sortedrl.integrations.verifiers.service import EPISODES, Service
from sortedrl.tasks.environment_calls import EnvironmentCalls, Inbox, Pending, turns_of


class VerifiersEnvironments(EnvironmentCalls[Report]):
    """Episodes that a service plays."""

    def __init__(self, service: Service, eos_token_ids: Collection[int]) -> None:
        self._reports: Inbox[Report] = Inbox()
        super().__init__(self._reports)
        self._service = service
        self._eos_token_ids = eos_token_ids
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
        self._pending[number] = Pending(rollout.id, rollout.attempt, call, turns)
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

    def _answer(self, pending: Pending, result: Report) -> Answer:
        answer = pending.answer()
        if result.observation is not None:
            return answer._replace(observation=result.observation)
        self._drop(pending.rollout_id)
        if result.reward is None:
            return answer._replace(error=result.error, is_lost=result.is_lost)
        parts = {**result.parts, "turns": len(pending.turns)}
        return answer._replace(reward=result.reward, detail={"correct": result.reward >= 1.0, "parts": parts})
