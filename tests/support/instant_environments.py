"""Environments that answer inside `submit`, for tests with real engines."""

from collections.abc import Callable, Sequence
from typing import Any

from sortedrl.core import Answer, Rollout


class InstantEnvironments:
    """`respond` returns the tokens of an observation, or None at the end of the episode."""

    def __init__(self, respond: Callable[[Rollout], Sequence[int] | None]) -> None:
        self._respond = respond
        self._done: list[Answer] = []

    @property
    def pending(self) -> int:
        return len(self._done)

    def submit(self, rollout: Rollout, call: int) -> None:
        self._done.append(Answer(rollout.id, call, self._respond(rollout)))

    def collect(self) -> list[Answer]:
        done, self._done = self._done, []
        return done

    def wait(self, timeout_seconds: float) -> None:
        del timeout_seconds

    def cancel(self, rollout_id: int) -> None:
        self._done = [answer for answer in self._done if answer.rollout_id != rollout_id]

    def state(self, rollout_id: int) -> Any:
        del rollout_id

    def restore(self, rollout: Rollout, state: Any) -> bool:
        return True
