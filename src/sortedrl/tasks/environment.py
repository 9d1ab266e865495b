"""The environment interface: what answers the turns of a rollout (a tool, a game, a simulated user).

    class Guess:                                        # one instance per rollout
        def reset(self, problem): ...                   # the prompt
        async def step(self, response): ...             # text: the next observation; a reward: the end
        async def finish(self, reason): ...             # a limit ended the rollout: its reward

    class GuessTask:                                    # --task your.module:GuessTask
        name = "guess"
        def train(self): ...
        def held_out(self): ...
        def environment(self): return Guess()

Optional members of an environment:

    state() -> JSON data, restore(state)    for checkpoints; without them a resumed run replays the recorded turns
    async close()                           after the last turn, and if the rollout is dropped
    tools: functions                        their schemas go into the prompt (see tools.py)

An instance sees each turn of its rollout once. If it is lost (a killed worker process, a resumed run), a new one gets
`reset`, and then `restore` or the recorded turns. So `reset` must give the same prompt for the same problem.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from sortedrl.core.import_path import fault_in_your_code
from sortedrl.core.scoring import Scorer
from sortedrl.core.turns import Environments
from sortedrl.core.user_values import shown
from sortedrl.tasks.task import Problem, Problems, Reward, Task, checked_reward

Message = Mapping[str, Any]  # of a chat: role and content
Prompt = str | Sequence[Message] | Sequence[int] | None  # None: the problem's own system and question
Observation = str | Sequence[Message]  # text is a user message


class Response(str):
    """The text of a turn, without special tokens. `tool_calls`: what the chat template's own parser found in it.

    None if the tokenizer has no parser."""

    __slots__ = ("tool_calls",)
    tool_calls: list[Message] | None

    def __new__(cls, text: str, tool_calls: list[Message] | None = None) -> Response:
        response = super().__new__(cls, text)
        response.tool_calls = tool_calls
        return response

    def __getnewargs__(self) -> tuple[str, list[Message] | None]:  # type: ignore[override]
        return str(self), self.tool_calls


class Environment(Protocol):
    def reset(self, problem: Problem) -> Prompt:
        """Start an episode; returns its prompt: chat messages, a user's text, token ids, or None for the problem's."""

    async def step(self, response: Response) -> Observation | Reward | float:
        """Answer a turn of the policy: with the next observation, or with the reward, which ends the episode."""

    async def finish(self, reason: str) -> Reward | float:
        """The reward of a rollout that a limit ended. `reason`: max_response_tokens, max_turns or max_context_tokens.

        The text of a last turn that the limit cut is not passed to `step`."""


@runtime_checkable
class EnvironmentTask(Problems, Protocol):
    """A task whose rewards come from an environment instead of a `score`."""

    def environment(self) -> Environment:
        """A new instance, for one rollout."""


class ServedEnvironments(Protocol):
    """The processes of a run of a `ServedTask`."""

    def wait_until_ready(self) -> None:
        """Wait until an episode can start. Raises WorkerError (worker_process.py)."""

    def source(self) -> tuple[Scorer, Environments]:
        """For training, then for evaluation: they share nothing. The scorer gets rollouts that a limit ended."""

    def close(self) -> None: ...


@runtime_checkable
class ServedTask(Problems, Protocol):
    """A task whose environments another library plays (integrations/verifiers): it makes their prompts, observations
    and rewards, in processes of its own."""

    def prompt(self, problem: Problem, tokenizer: Any) -> Sequence[int]:
        """The tokens that an episode of this problem starts with."""

    def serve(
        self, tokenizer: Any, *, eos_token_ids: Collection[int], workers: int, limit_seconds: float
    ) -> ServedEnvironments:
        """Start to play, without waiting. `eos_token_ids` end a turn. `limit_seconds`: for one turn."""


AnyTask = Task | EnvironmentTask | ServedTask


def as_messages(observation: Any, name: str = "an observation") -> list[dict[str, Any]]:
    """An observation as chat messages that are plain data. Raises TypeError."""
    if isinstance(observation, str):
        return [{"role": "user", "content": str(observation)}]
    if not isinstance(observation, Sequence) or not observation:
        raise TypeError(f"{name} is {shown(observation)}: return text, chat messages, or a reward")
    for message in observation:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise TypeError(f"{name} holds {shown(message)}: a chat message is a dict with a role and a content")
    return [dict(message) for message in observation]


def is_end(result: Any) -> bool:
    """Whether the result of a step is a reward: neither text nor messages."""
    return not isinstance(result, str | Sequence)


def end_of(result: Any, name: str) -> tuple[float, bool, dict[str, float]]:
    reward = checked_reward(result, name)
    return reward.value, reward.correct, dict(reward.parts)


def require_environment(environment: Any, path: str) -> None:
    """Refuse an object that is not an environment, before the run. Raises ValueError."""
    members = ("reset", "step", "finish")
    missing = [member for member in members if not callable(getattr(environment, member, None))]
    if missing:
        raise ValueError(
            f"{path} gives a {type(environment).__name__}, which is not an environment: it has no "
            f"{' and no '.join(missing)}; see docs/environments.md"
        )
    for member in ("step", "finish", "close"):
        method = getattr(environment, member, None)
        if method is not None and not inspect.iscoroutinefunction(method):
            raise ValueError(
                f"{member} of {type(environment).__name__} ({path}) is not async: write `async def {member}`. A worker "
                "process answers many rollouts at a time"
            )
    if callable(getattr(environment, "state", None)) != callable(getattr(environment, "restore", None)):
        raise ValueError(f"{type(environment).__name__} ({path}) has only one of state and restore: define both")


def reset_of(task: EnvironmentTask) -> Callable[[Problem], tuple[Prompt, str]]:
    """For a worker process: the prompt of a new instance, and what was wrong, with its place."""

    def reset(problem: Problem) -> tuple[Prompt, str]:
        try:
            return task.environment().reset(problem), ""
        except (Exception, SystemExit) as error:
            return None, fault_in_your_code(error)

    return reset
