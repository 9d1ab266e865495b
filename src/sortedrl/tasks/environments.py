"""The environments of a run for the scheduler (core/turns.py): tokens to text, text to tokens.

The same object is the scorer of rollouts that a limit ended: `finish` of their instance gives the reward.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

from sortedrl.core.rollout import Rollout, State
from sortedrl.core.turns import Answer
from sortedrl.tasks.encode import ChatTurns, TemplateRefused
from sortedrl.tasks.environment import Message, Response
from sortedrl.tasks.environment_calls import EnvironmentCalls, Pending, Turn, turns_of
from sortedrl.tasks.environment_host import Call, Host, Result


@dataclass(slots=True)
class _Instance:
    """Of one attempt of a rollout; `answered` turns are behind it."""

    number: int
    attempt: int
    answered: int
    state: Any = None


class ObservationTokens(Protocol):
    def observation(self, messages: Sequence[Message], response: Sequence[int]) -> list[int]:
        """The tokens from the end of a response to the start of the next one. Raises TemplateRefused."""


class TaskEnvironments(EnvironmentCalls[Result]):
    """Instances of a task's environments in a host. `eos_token_ids`: all tokens that end a turn; default: the
    tokenizer's."""

    def __init__(
        self,
        tokenizer: Any,
        host: Host,
        tools: Sequence[Callable[..., Any]] = (),
        *,
        eos_token_ids: Collection[int] | None = None,
        chat: ObservationTokens | None = None,
    ) -> None:
        super().__init__(host)
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset([tokenizer.eos_token_id] if eos_token_ids is None else eos_token_ids)
        self._tools = tools
        self._chat = chat or ChatTurns(tokenizer)
        self._host = host
        self._instances: dict[int, _Instance] = {}  # by rollout id
        self._numbers = count()

    # For the scheduler

    def submit(self, rollout: Rollout, call: int) -> None:
        turns = turns_of(rollout)
        *earlier, last = self._responses(rollout, turns)
        self._start(rollout, turns, earlier, last, call)

    def state(self, rollout_id: int) -> Any:
        instance = self._instances.get(rollout_id)
        return None if instance is None else instance.state

    def restore(self, rollout: Rollout, state: Any) -> bool:
        """An instance has also answered the last turn of a rollout that a limit ended, unless the limit cut it."""
        has_ended = rollout.state is State.FINISHED
        answered = self._whole_turns(rollout, turns_of(rollout)) if has_ended else rollout.observations
        self._instances[rollout.id] = _Instance(next(self._numbers), rollout.attempt, answered, state)
        return True

    # For rollouts that a limit ended

    def submit_end(self, rollout: Rollout) -> None:
        turns = turns_of(rollout)
        earlier = self._responses(rollout, turns[: self._passed(rollout, turns)])
        self._start(rollout, turns, earlier, None, None, rollout.ended_by)

    # Calls and results

    def _passed(self, rollout: Rollout, turns: Sequence[Turn]) -> int:
        """How many turns of a rollout that a limit ended its instance got: all, unless the limit cut the last one."""
        instance = self._instances.get(rollout.id)
        if instance is not None and instance.attempt == rollout.attempt and instance.answered >= len(turns) - 1:
            return instance.answered
        return self._whole_turns(rollout, turns)

    def _whole_turns(self, rollout: Rollout, turns: Sequence[Turn]) -> int:
        """The turns of a rollout that a limit ended, without one that the limit cut."""
        last = turns[-1]
        ends_itself = rollout.ended_by == "max_turns" or last.response[-1] in self._eos_token_ids
        return len(turns) if last.observation is not None or ends_itself else len(turns) - 1

    def _start(
        self,
        rollout: Rollout,
        turns: list[Turn],
        earlier: Sequence[Response],
        response: Response | None,
        call: int | None,
        reason: str = "",
    ) -> None:
        instance = self._instance_of(rollout, len(earlier))
        number = next(self._numbers)
        self._pending[number] = Pending(rollout.id, rollout.attempt, call, turns)
        problem = self._problem(rollout)
        self._host.submit(Call(number, instance.number, problem, tuple(earlier), instance.state, response, reason))

    def _problem(self, rollout: Rollout) -> Any:
        """What `reset` of an instance gets."""
        return rollout.prompt.payload

    def _instance_of(self, rollout: Rollout, answered: int) -> _Instance:
        """The rollout's own, if it has answered these turns; otherwise a new one, which the host brings there."""
        instance = self._instances.get(rollout.id)
        if instance is None or (instance.attempt, instance.answered) != (rollout.attempt, answered):
            self._drop(rollout.id)
            instance = self._instances[rollout.id] = _Instance(next(self._numbers), rollout.attempt, answered)
        return instance

    def _drop(self, rollout_id: int) -> None:
        instance = self._instances.pop(rollout_id, None)
        if instance is not None:
            self._host.drop(instance.number)

    def _answer(self, pending: Pending, result: Result) -> Answer:
        answer = pending.answer()
        difference = self._difference(pending.turns, result)
        if difference is not None:
            result = Result(result.call, error=difference, is_lost=True, counts=result.counts)
        if result.observation is None:
            self._drop(pending.rollout_id)
        if result.error is not None:
            return answer._replace(error=result.error, is_lost=result.is_lost, counts=result.counts)
        if result.reward is not None:
            value, correct, parts = result.reward
            turns = sum(turn.observation is not None for turn in pending.turns) + 1
            return answer._replace(reward=value, detail={"correct": correct, "parts": parts | {"turns": turns}})
        try:
            tokens = self._chat.observation(result.observation or [], pending.turns[-1].response)
        except TemplateRefused as error:
            self._drop(pending.rollout_id)
            return answer._replace(error=str(error))
        instance = self._instances[pending.rollout_id]
        instance.answered += 1
        instance.state = result.state
        return answer._replace(observation=tokens)

    def _difference(self, turns: Sequence[Turn], result: Result) -> str | None:
        """Why a replay is not what the rollout recorded; None if it is, or if nothing was replayed."""
        for place, (turn, messages) in enumerate(zip(turns, result.replayed or (), strict=False), 1):
            if turn.observation is None:
                continue
            try:
                again = self._chat.observation(messages, turn.response)
            except TemplateRefused as error:
                return f"the observation of turn {place} differed when it was replayed: {error}"
            if again != turn.observation:
                return f"the observation of turn {place} differed when it was replayed"
        return None

    def _responses(self, rollout: Rollout, turns: Sequence[Turn]) -> list[Response]:
        """The text of each turn, with the tool calls that the chat template's parser finds in it."""
        context = list(rollout.prompt.tokens)
        responses = []
        for turn in turns:
            text = str(self._tokenizer.decode(turn.response, skip_special_tokens=True))
            responses.append(Response(text, self._tool_calls(turn.response, context)))
            context += [*turn.response, *(turn.observation or ())]
        return responses

    def _tool_calls(self, response: Sequence[int], context: Sequence[int]) -> list[Message] | None:
        """None if the tokenizer has no parser. A response that it cannot parse is a call without a name."""
        if getattr(self._tokenizer, "response_template", None) is None:
            return None
        tools = {"tools": list(self._tools)} if self._tools else {}
        try:
            parsed = self._tokenizer.parse_response(list(response), prefix=list(context), **tools)
            return list(parsed.get("tool_calls") or ())
        except Exception:  # no response of a model may end the run
            return [{}]
