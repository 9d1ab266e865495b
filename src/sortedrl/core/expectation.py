"""Expected lengths from observed lengths, without a prediction model.

Expected = max(estimate, 1.3x the longest length that the rollout has reached in any attempt). The estimate is the
prompt's mean length in the last epoch, else the mean of the finished members of its group, else the median of recently
finished rollouts.
"""

from abc import abstractmethod
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from sortedrl.core.rollout import Rollout

BEYOND_REACHED = 1.3  # a rollout that has reached n tokens, in any attempt, is expected to reach at least 1.3 n
RECENT = 1024  # window of the running median, in finished rollouts


class Expectation(Protocol):
    @abstractmethod
    def estimate(self, rollout: Rollout) -> float:
        """Expected length, without regard to the length that the rollout itself has reached."""

    @abstractmethod
    def observe(self, rollout: Rollout) -> None:
        """A rollout finished."""

    @abstractmethod
    def forget(self, prompt_id: str) -> None:
        """The prompt will not be loaded again."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """JSON-ready, for a checkpoint."""

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""


def expected_length(rollout: Rollout, expectation: Expectation) -> float:
    estimate = expectation.estimate(rollout)
    if not (rollout.reached or rollout.segments):
        return estimate
    return max(estimate, BEYOND_REACHED * max(rollout.reached, rollout.policy_length))


class Sensed(NamedTuple):
    """Observed lengths of one prompt: the mean of its last epoch, and its finished rollouts of this one."""

    last_epoch: float | None
    group: int  # the prompt's rollouts of this epoch: two epochs can fall into one cohort
    mean: float
    seen: int


class SensedLengths:
    """The default expectation. `last_epoch` may come from an earlier run: mean length by prompt id."""

    def __init__(self, last_epoch: Mapping[str, float] | None = None, *, first_guess: float = 1024.0) -> None:
        self._by_prompt = {name: Sensed(length, -1, 0.0, 0) for name, length in (last_epoch or {}).items()}
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []
        self.median = first_guess  # of recently finished rollouts

    def estimate(self, rollout: Rollout) -> float:
        known = self._by_prompt.get(rollout.prompt.id)
        if known is None:
            return self.median
        if known.group != rollout.group and known.seen:
            return known.mean  # the group of the last epoch
        if known.last_epoch is not None:
            return known.last_epoch
        return known.mean if known.seen else self.median

    def observe(self, rollout: Rollout) -> None:
        length, group = rollout.policy_length, rollout.group
        last_epoch, group_before, mean, seen = self._by_prompt.get(rollout.prompt.id, (None, group, 0.0, 0))
        if group_before != group:
            last_epoch, mean, seen = mean if seen else last_epoch, 0.0, 0
        seen += 1
        mean += (length - mean) / seen
        self._by_prompt[rollout.prompt.id] = Sensed(last_epoch, group, mean, seen)
        self._recent.append(length)
        insort(self._sorted, length)
        if len(self._recent) > RECENT:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self.median = float(self._sorted[len(self._sorted) // 2])

    def forget(self, prompt_id: str) -> None:
        self._by_prompt.pop(prompt_id, None)

    def state(self) -> dict[str, Any]:
        return {"by_prompt": dict(self._by_prompt), "recent": list(self._recent)}

    def restore(self, state: dict[str, Any]) -> None:
        self._by_prompt = {name: Sensed(*fields) for name, fields in state["by_prompt"].items()}
        self._recent = deque(state["recent"])
        self._sorted = sorted(self._recent)
        if self._sorted:
            self.median = float(self._sorted[len(self._sorted) // 2])
