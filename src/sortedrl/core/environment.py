"""Environments: what answers the turns of a rollout (a tool, a simulated user, a game).

A turn of the policy ends when the engine reports the request as finished. The rollout then leaves its slot and is
submitted here. The answer is an observation, with which the next turn of the policy starts, or the end of the episode:

    Engine --turn ended--> Environments --observation--> next turn (before every waiting rollout)
                               |--------end------------> ready (with a reward), or the Scorer (without one)

If a limit ends the rollout (`max_turns`, `max_response_tokens`, `max_context_tokens`), its environment gets no further
turn. The rollout goes to the scorer with the name of the limit in `Rollout.ended_by`. So an environment that has the
final word on the reward is used as environments and as scorer.

Rules for every implementation:
- Each rollout has its own instance. It is created with the rollout's first submit and sees each turn once.
- A submit without a live instance, after `cancel` or in a resumed run, gets a new one: from `restore`, or by replaying
  the turns recorded in the rollout's segments. If a replayed observation differs, or replay is not possible, the answer
  is `Answer(..., is_lost=True)`: the rollout is regenerated.
- The tokens of an observation extend the rollout's tokens as they are. They include what the chat template puts
  between the turns.
- Errors and time limits of an instance are answers with an `error`, never exceptions of these methods.

The controller has its own deadline for each submit (`max_environment_seconds`). After an error or a missed deadline it
cancels, and submits again up to `max_retries` times; then the rollout is rejected with a reason. An answer to any call
but the last one of a rollout is void.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from sortedrl.core.rollout import Rollout


class Answer(NamedTuple):
    """To one call. With `observation` the rollout goes on, without one the episode is over.

    `reward`: at the end of an episode; None leaves it to the scorer. `error`: why there is neither, for example an
    exception or a timeout. `is_lost`: the recorded turns cannot be brought back; `counts`: that is a failure of this
    environment, not of another one that took it along.
    """

    rollout_id: int
    call: int
    observation: Sequence[int] | None = None  # token ids
    reward: float | None = None
    detail: Any = None
    error: str | None = None
    is_lost: bool = False
    counts: bool = True


class Environments(Protocol):
    """All environment instances of a run. Instances that make `engine.poll` return when an answer arrives set an
    attribute `wakes_engine = True`, as scorers do. With any others the controller polls only briefly while calls are
    pending.

    If the final rewards are computed only when a batch is handed out, scored rollouts still need their instances. Then
    set `keeps_scored = True`: a checkpoint asks for the state of scored rollouts, too."""

    @property
    @abstractmethod
    def pending(self) -> int:
        """Calls that were submitted and neither collected nor canceled."""

    @abstractmethod
    def submit(self, rollout: Rollout, call: int) -> None:
        """Answer the rollout's last turn, as it is now. Must not block. `call` is a new number for every submit."""

    @abstractmethod
    def collect(self) -> list[Answer]:
        """Answers, in any order; never blocks."""

    @abstractmethod
    def wait(self, timeout_seconds: float) -> None:
        """Block until something can be collected or the time is up."""

    @abstractmethod
    def cancel(self, rollout_id: int) -> None:
        """The rollout needs its instance no longer: end its call, if one is pending, and close it. Must not block.
        Also called for rollouts without an instance."""

    @abstractmethod
    def state(self, rollout_id: int) -> Any:
        """JSON-ready state of the rollout's instance after the last turn that it answered, for a checkpoint.

        None: it has none, and a resumed run replays the recorded turns. Must not block."""

    @abstractmethod
    def restore(self, rollout: Rollout, state: Any) -> bool:
        """Called once per rollout with recorded turns when a run resumes; `state` is what `state` returned. Returns
        False if the turns cannot be brought back, neither from the state nor by replay: the rollout is regenerated."""
