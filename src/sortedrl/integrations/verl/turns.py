"""verl's agent loops as the environments of the scheduler: what a loop does between two calls of `generate`.

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
from sortedrl.integrations.verl.exchange import Ended, Failed, Observed

Outcome = Observed | Ended | Failed  # of the time between two turns


class AgentLoops(Protocol):
    """The part of the engine that this needs."""

    def now(self) -> float: ...

    def has_loop(self, id: int) -> bool:
        """Whether the rollout has an agent loop that works, waits or has ended with a result."""

    def outcome_of(self, id: int) -> Outcome | None:
        """What the rollout's agent loop did after its last turn; None: nothing yet."""

    def forget_outcome(self, id: int) -> None: ...

    def cancel(self, id: int) -> None: ...

    def await_reports(self, timeout_seconds: float) -> None: ...


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
        return any(self._loops.outcome_of(id) or not self._loops.has_loop(id) for id in self._calls)

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
        if not self._loops.has_loop(id):
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
        return self._loops.has_loop(rollout.id)
