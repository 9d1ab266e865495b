"""Rollouts of several turns: the environments that answer them (a tool, a simulated user, a game), and what happens
between a turn of the policy and the next one.

    engine: finished --> end_turn --> environment: observation --> returning, starts before every waiting rollout
                                          |------ end -----------> scored, or to the scorer
                                          |------ error, late ---> retried, in the end rejected
                                          |------ lost ----------> regenerated

A turn ends when the engine reports the request as finished. A rollout in its environment holds no slot, and no strategy
holds it back or starts it again. Modes that keep tokens leave it there across weight updates, all others drop it.

If a limit ends the rollout, its environment gets no further turn, and the scorer finds the limit in `Rollout.ended_by`:
an environment that has the final word on the reward is used as environments and as scorer.

Rules for every implementation:
- Each rollout has its own instance. It is created with the rollout's first submit and sees each turn once.
- A submit without a live instance, after `cancel` or in a resumed run, gets a new one: from `restore`, or by replaying
  the turns in the rollout's segments. If that is not possible, or an observation differs, the answer is
  `Answer(..., is_lost=True)`: the rollout is regenerated.
- The tokens of an observation are appended as they are, with what the chat template puts between the turns.
- Errors and time limits of an instance are answers with an `error`, never exceptions of these methods.

After an error, or no answer within `max_environment_seconds`, the controller cancels, and submits again up to
`max_retries` times; then the rollout is rejected. Only the answer to the last call of a rollout counts.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from sortedrl.core import events
from sortedrl.core.ledger import Ledger
from sortedrl.core.rollout import Rollout, State
from sortedrl.core.schedule import Schedule
from sortedrl.core.scoring import Score, check_detail
from sortedrl.core.waiting import poll_deadline, wait_briefly

CANNOT_BRING_BACK = "its environment cannot bring back the turns so far"


class Answer(NamedTuple):
    """To one call. With `observation` the rollout goes on, without one the episode is over.

    `reward`: at the end of an episode; None leaves it to the scorer. `error`: why there is neither, for example an
    exception or a timeout. `is_lost`: the recorded turns cannot be brought back; `counts`: that is a failure of this
    environment, not of another one that took it along."""

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


class _Call(NamedTuple):
    number: int
    deadline: float  # on the engine's clock
    is_retry: bool


class Turns:
    """Submits turns to the environments and takes in their answers.

    Invariants: every rollout in its environment has exactly one call, and every call ends by its deadline. Only an
    answer to that call counts."""

    def __init__(
        self, environments: Environments, ledger: Ledger, now: Callable[[], float], score: Callable[[Rollout], None]
    ) -> None:
        ledger.release = environments.cancel
        self._environments = environments
        self._ledger = ledger
        self._buffer = ledger.state.buffer
        self._schedule = ledger.state.schedule
        self._now = now
        self._score = score
        self._calls: dict[int, _Call] = {}  # by rollout id; earliest deadline first, because all have the same time
        self._last_call = 0
        self._lost: list[Rollout] = []  # after `restore`: rollouts whose turns cannot be brought back

    def end_turn(self, rollout: Rollout, at: float) -> None:
        """It leaves its slot and goes to its environment."""
        made = self._ledger.clock.leave(rollout)
        self._buffer.move(rollout, State.ENVIRONMENT)
        self._ledger.log.append(events.TurnEnded(at, rollout.id, made, rollout.length))
        self._submit(rollout)

    def _submit(self, rollout: Rollout, *, is_retry: bool = False) -> None:
        self._last_call += 1
        deadline = self._now() + self._schedule.max_environment_seconds
        self._calls[rollout.id] = _Call(self._last_call, deadline, is_retry)
        self._environments.submit(rollout, self._last_call)

    # Waiting, while calls are pending

    def poll_until(self, until: float | None) -> float:
        """Until when to poll the engine: at most the next deadline, and only briefly if no answer would end it."""
        deadline = next(iter(self._calls.values())).deadline
        soon = poll_deadline(self._environments, self._now, until)
        return deadline if soon is None else min(soon, deadline)

    def wait(self, until: float | None) -> None:
        """Wait for an answer, at most until the next deadline."""
        wait_briefly(self._environments, self.poll_until(until) - self._now())

    # Answers

    def collect(self) -> None:
        for answer in self._environments.collect():
            call = self._calls.get(answer.rollout_id)
            if call is not None and call.number == answer.call:  # otherwise it is the answer to an old call
                del self._calls[answer.rollout_id]
                self._take(answer, self._buffer.in_environment[answer.rollout_id], call)
        while self._calls:
            id, call = next(iter(self._calls.items()))
            if self._now() < call.deadline:
                break
            del self._calls[id]
            seconds = f"{self._schedule.max_environment_seconds:g}"
            self._fail(self._buffer.in_environment[id], f"no answer within max_environment_seconds = {seconds}")

    def _take(self, answer: Answer, rollout: Rollout, call: _Call) -> None:
        fault = answer.error or fault_of(answer)
        if answer.is_lost:
            if self._may_ask_again(rollout, CANNOT_BRING_BACK, counts=answer.counts and not call.is_retry):
                self._ledger.regenerate(rollout, CANNOT_BRING_BACK)
        elif fault is not None:
            self._fail(rollout, f"its environment: {fault}")
        elif answer.observation is None:
            self._ledger.finish(rollout, self._ledger.clock.now(), truncated=False)
            if answer.reward is None:
                self._score(rollout)
            else:
                check_detail(self._environments, rollout.id, answer.detail)
                self._ledger.score(Score(rollout.id, answer.reward, answer.detail, attempt=rollout.attempt))
        elif limit := limit_reached(self._schedule, rollout, len(answer.observation)):
            rollout.ended_by = limit
            self._ledger.finish(rollout, self._ledger.clock.now(), truncated=True)
            self._score(rollout)
        else:
            rollout.observe(answer.observation)
            self._buffer.move(rollout, State.RETURNING)
            self._ledger.note(events.Observed, rollout.id, len(answer.observation), rollout.length)

    def _fail(self, rollout: Rollout, reason: str) -> None:
        if self._may_ask_again(rollout, reason):
            self._submit(rollout, is_retry=True)

    def _may_ask_again(self, rollout: Rollout, reason: str, *, counts: bool = True) -> bool:
        """Its environment failed. If that was once too often, it is rejected."""
        self._ledger.note(events.EnvironmentFailed, rollout.id, reason)
        self._environments.cancel(rollout.id)
        return self._ledger.may_try_again(rollout, reason, counts=counts)

    # Harvests and checkpoints

    def drop(self) -> None:
        """Regenerate every rollout between two turns: the weights change, and the mode keeps no tokens."""
        self._calls.clear()
        for rollout in [*self._buffer.in_environment.values(), *self._buffer.returning.values()]:
            self._ledger.regenerate(rollout, "between two turns at the harvest")

    def state(self) -> dict[str, Any]:
        """The instances that a resumed run needs, by rollout id; JSON-ready."""
        needed = [id for id, rollout in self._buffer.live.items() if self._needs_instance(rollout)]
        return {str(id): self._environments.state(id) for id in needed}

    def _needs_instance(self, rollout: Rollout) -> bool:
        """Whether a resumed run must bring back the instance of a rollout that is not in the engine."""
        if rollout.reward is None:
            return rollout.observations > 0
        return bool(getattr(self._environments, "keeps_scored", False))

    def restore(self, state: dict[str, Any]) -> None:
        """Call it after the buffer was restored, and `ask_again` when the log takes events."""
        live = self._buffer.live  # one whose prompt is too long for the settings of now was rejected
        saved = [(live[int(id)], instance) for id, instance in state.items() if int(id) in live]
        self._lost = [
            rollout
            for rollout, instance in saved
            if self._needs_instance(rollout)  # not if its tokens were invalid: it has no turns now
            and not self._environments.restore(rollout, instance)
        ]

    def ask_again(self) -> None:
        """Submit the rollouts that a checkpoint found in their environments, and regenerate what cannot be brought
        back."""
        for rollout in self._lost:
            self._ledger.regenerate(rollout, CANNOT_BRING_BACK)
        self._lost.clear()
        for id, rollout in self._buffer.in_environment.items():
            if id not in self._calls:
                self._submit(rollout)


def fault_of(answer: Answer) -> str | None:
    """What is wrong with an observation; None if nothing is. A range comes from the simulator."""
    tokens = answer.observation
    if tokens is None or (type(tokens) is range and len(tokens)):
        return None
    if not isinstance(tokens, list | tuple) or not tokens:
        return f"an observation is a nonempty list of token ids, got {tokens!r:.60}"
    if not all(type(token) is int and token >= 0 for token in tokens):
        return "an observation has a token id that is not an integer of 0 or more"
    return None


def limit_of_cut(schedule: Schedule, rollout: Rollout) -> str:
    """The limit that cut its last turn."""
    has_room = schedule.response_length(rollout) < schedule.max_response_tokens
    return "max_context_tokens" if has_room else "max_response_tokens"


def limit_reached(schedule: Schedule, rollout: Rollout, observed: int) -> str:
    """The limit that leaves no room for another turn after an observation of so many tokens; empty if none does."""
    if schedule.max_turns is not None and rollout.observations + 1 >= schedule.max_turns:
        return "max_turns"
    if schedule.response_length(rollout) + observed * schedule.count_observations >= schedule.max_response_tokens:
        return "max_response_tokens"
    context = schedule.max_context_tokens
    if context is not None and len(rollout.prompt.tokens) + rollout.length + observed >= context:
        return "max_context_tokens"
    return ""
