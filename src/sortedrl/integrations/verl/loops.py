"""verl's agent loops as the environments and the scorer of the scheduler: what a loop does between two calls of
`generate`, and the reward of what it returned.

    generate returns --> the loop runs its tools --> it calls generate again: the observation
                                              |----> it returns: the end; verl's reward workers score it
                                              |----> it raises an error, or takes too long: a failure

The instance of an environment is the coroutine of the agent loop. It cannot be replayed: after a failure or in a
resumed run, a rollout of several turns is regenerated.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sortedrl.core.rollout import Rollout
from sortedrl.core.scoring import Score
from sortedrl.core.turns import Answer
from sortedrl.integrations.verl.exchange import LoopEnded, LoopFailed, LoopObserved

Outcome = LoopObserved | LoopEnded | LoopFailed  # of the time between two turns
WaitUntil = Callable[[Callable[[], bool], float], None]  # a condition, or so many seconds


@dataclass(slots=True)
class SchedulerLoop:
    """What the scheduler knows of one run of an agent loop, or of its result."""

    id: int  # of the rollout
    dispatch: int
    length: int = 0  # tokens of the response so far, with observations
    turns: int = 0
    is_live: bool = True  # it works, or waits for its next turn
    has_ended: bool = False  # its response is complete, and a score follows
    outcome: Outcome | None = None  # of the time since its last turn
    keys: tuple[str, ...] = ()
    score: tuple[float | None, str | None] | None = None  # reward or error, not collected yet
    metric: float | None = None  # by which its group is filtered, if it is not the reward

    @property
    def has_result(self) -> bool:
        return self.has_ended and not self.is_live


Loops = Mapping[int, SchedulerLoop]  # by rollout id: its agent loop that works, waits or has ended with a result


class AgentLoopTurns:
    wakes_engine = True

    def __init__(self, loops: Loops, wait_until: WaitUntil, cancel: Callable[[int], None]) -> None:
        self._loops = loops
        self._wait_until = wait_until
        self._cancel = cancel
        self._calls: dict[int, int] = {}  # by rollout id

    @property
    def pending(self) -> int:
        return len(self._calls)

    @property
    def has_answers(self) -> bool:
        return any(id not in self._loops or self._loops[id].outcome for id in self._calls)

    def submit(self, rollout: Rollout, call: int) -> None:
        """Nothing to send: the agent loop goes on by itself when `generate` returns."""
        self._calls[rollout.id] = call

    def collect(self) -> list[Answer]:
        answers = []
        for id, call in list(self._calls.items()):
            answer = self._answer(id, call)
            if answer is not None:
                del self._calls[id]
                answers.append(answer)
        return answers

    def _answer(self, id: int, call: int) -> Answer | None:
        loop = self._loops.get(id)
        if loop is None:
            return Answer(id, call, is_lost=True)
        outcome, loop.outcome = loop.outcome, None
        match outcome:
            case LoopObserved(tokens=tokens):
                return Answer(id, call, observation=tokens.tolist())
            case LoopEnded():
                return Answer(id, call)
            case LoopFailed(reason=reason):
                return Answer(id, call, error=reason)
        return None

    def wait(self, timeout_seconds: float) -> None:
        self._wait_until(lambda: self.has_answers, timeout_seconds)

    def cancel(self, rollout_id: int) -> None:
        self._calls.pop(rollout_id, None)
        self._cancel(rollout_id)

    def state(self, rollout_id: int) -> Any: ...

    def restore(self, rollout: Rollout, state: Any) -> bool:
        """Only a finished trajectory survives the run: it is in the checkpoint of the TransferQueue."""
        return rollout.id in self._loops


class VerlScores:
    """verl scores finished rollouts in the agent loop workers; this class waits for the rewards."""

    wakes_engine = True

    def __init__(self, loops: Loops, wait_until: WaitUntil) -> None:
        self._loops = loops
        self._wait_until = wait_until
        self._attempts: dict[int, int] = {}  # by id of the rollouts that wait

    @property
    def pending(self) -> int:
        return len(self._attempts)

    def submit(self, rollout: Rollout) -> None:
        self._attempts[rollout.id] = rollout.attempt

    @property
    def has_scores(self) -> bool:
        return any(map(self._is_scored, self._attempts))

    def collect(self) -> list[Score]:
        return [self._scored(id) for id in list(self._attempts) if self._is_scored(id)]

    def wait(self, timeout_seconds: float) -> None:
        self._wait_until(lambda: self.has_scores, timeout_seconds)

    def wait_for_all(self, timeout_seconds: float) -> None:
        """Wait before a checkpoint: rollouts without a score would be lost with the run."""
        self._wait_until(lambda: all(map(self._is_scored, self._attempts)), timeout_seconds)

    def forget(self, rollout_id: int) -> None:
        self._attempts.pop(rollout_id, None)

    def _is_scored(self, id: int) -> bool:
        """Or never will be: it finished, but the run was killed before it was scored."""
        return id not in self._loops or self._loops[id].score is not None

    def _scored(self, id: int) -> Score:
        loop, attempt = self._loops.get(id), self._attempts.pop(id)
        reward, error = (loop and loop.score) or (None, "the run ended before it was scored")
        if loop is not None:
            loop.score = None
        return Score(id, reward, loop and loop.metric, error, attempt)
