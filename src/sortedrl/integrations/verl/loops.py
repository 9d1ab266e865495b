"""verl's agent loops as the environments and the scorer of the scheduler: what a loop does between two calls of
`generate`, and the reward of what it returned.

    generate returns --> the loop runs its tools --> it calls generate again: the observation
                                              |----> it returns: the end; verl's reward workers score it
                                              |----> it raises an error, or takes too long: a failure

The instance of an environment is the coroutine of the agent loop. It cannot be replayed: after a failure or in a
resumed run, a rollout of several turns is regenerated.
"""

from __future__ import annotations

from typing import Any, Protocol

from sortedrl.core.environment import Answer
from sortedrl.core.rollout import Rollout
from sortedrl.core.scoring import Scored
from sortedrl.integrations.verl.exchange import Ended, Failed, Observed

Outcome = Observed | Ended | Failed  # of the time between two turns


class AgentLoops(Protocol):
    """The part of the engine that this needs. `id`: of a rollout."""

    def now(self) -> float: ...

    def dispatch_of(self, id: int) -> int | None:
        """The number of its agent loop that works, waits or has ended with a result; None: it has none."""

    def outcome_of(self, id: int) -> Outcome | None:
        """What the rollout's agent loop did after its last turn; None: nothing yet."""

    def forget_outcome(self, id: int) -> None: ...

    def cancel(self, id: int) -> None: ...

    def await_reports(self, timeout_seconds: float) -> None: ...

    def receive(self, timeout_seconds: float) -> None:
        """As `await_reports`, without a check of the workers."""


class AgentLoopTurns:
    wakes_engine = True

    def __init__(self, loops: AgentLoops) -> None:
        self._loops = loops
        self._calls: dict[int, int] = {}  # by rollout id

    @property
    def pending(self) -> int:
        return len(self._calls)

    @property
    def has_answers(self) -> bool:
        return any(self._loops.outcome_of(id) or self._loops.dispatch_of(id) is None for id in self._calls)

    def submit(self, rollout: Rollout, call: int) -> None:
        """Nothing to send: the agent loop goes on by itself when `generate` returns."""
        self._calls[rollout.id] = call

    def collect(self) -> list[Answer]:
        answers = []
        for id, call in list(self._calls.items()):
            answer = self._answer(id, call)
            if answer is not None:
                del self._calls[id]
                self._loops.forget_outcome(id)
                answers.append(answer)
        return answers

    def _answer(self, id: int, call: int) -> Answer | None:
        if self._loops.dispatch_of(id) is None:
            return Answer(id, call, is_lost=True)
        match self._loops.outcome_of(id):
            case Observed(tokens=tokens):
                return Answer(id, call, observation=tokens.tolist())
            case Ended():
                return Answer(id, call)
            case Failed(reason=reason):
                return Answer(id, call, error=reason)
        return None

    def wait(self, timeout_seconds: float) -> None:
        deadline = self._loops.now() + timeout_seconds
        while not self.has_answers and self._loops.now() < deadline:
            self._loops.await_reports(deadline - self._loops.now())

    def cancel(self, rollout_id: int) -> None:
        self._calls.pop(rollout_id, None)
        self._loops.cancel(rollout_id)

    def state(self, rollout_id: int) -> Any:
        del rollout_id
        return None

    def restore(self, rollout: Rollout, state: Any) -> bool:
        """Only a finished trajectory survives the run: it is in the checkpoint of the TransferQueue."""
        del state
        return self._loops.dispatch_of(rollout.id) is not None


class VerlScores:
    """verl scores finished rollouts in the agent loop workers; this class waits for the rewards."""

    wakes_engine = True

    def __init__(self, loops: AgentLoops) -> None:
        self._loops = loops
        self._waiting: dict[int, tuple[int, int]] = {}  # by dispatch: rollout and attempt
        self._arrived: dict[int, tuple[float | None, str | None]] = {}

    @property
    def pending(self) -> int:
        return len(self._waiting)

    def submit(self, rollout: Rollout) -> None:
        dispatch = self._loops.dispatch_of(rollout.id)
        if dispatch is None:  # it finished, but the run was killed before it was scored
            dispatch = -1 - rollout.id
            self._arrived[dispatch] = (None, "the run ended before it was scored")
        self._waiting[dispatch] = (rollout.id, rollout.attempt)

    @property
    def has_scores(self) -> bool:
        return any(dispatch in self._arrived for dispatch in self._waiting)

    def collect(self) -> list[Scored]:
        done = [dispatch for dispatch in self._waiting if dispatch in self._arrived]
        return [self._scored(dispatch) for dispatch in done]

    def wait(self, timeout_seconds: float) -> None:
        deadline = self._loops.now() + timeout_seconds
        while not self.has_scores and self._loops.now() < deadline:
            self._loops.receive(deadline - self._loops.now())

    def wait_for_all(self, timeout_seconds: float) -> None:
        """Wait before a checkpoint: rollouts without a score would be lost with the run."""
        deadline = self._loops.now() + timeout_seconds
        while self._waiting.keys() - self._arrived.keys() and self._loops.now() < deadline:
            self._loops.receive(deadline - self._loops.now())

    def reward_of(self, dispatch: int) -> float | None:
        """Scores that the scheduler has not collected yet."""
        return self._arrived[dispatch][0] if dispatch in self._arrived else None

    def arrived(self, dispatch: int, reward: float | None, error: str | None) -> None:
        self._arrived[dispatch] = (reward, error)

    def forget(self, dispatch: int) -> None:
        self._waiting.pop(dispatch, None)
        self._arrived.pop(dispatch, None)

    def _scored(self, dispatch: int) -> Scored:
        rollout, attempt = self._waiting.pop(dispatch)
        reward, error = self._arrived.pop(dispatch)
        return Scored(rollout, reward, error=error, attempt=attempt)
