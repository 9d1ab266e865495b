"""Runs the tool calls of a rollout as GRPOTrainer does, beside generation.

An `Episode` is the environment (tasks/environment.py) of one rollout. It calls `tools` and the methods of the rollout's
own instance from `environment_factory`. TRL's rules hold: plain functions in the order of the calls, then async ones
together; an error becomes the result `{"error": ...}`; after `max_tool_calling_iterations` turns with calls, a turn's
calls are not made.

A plain function runs in a daemon thread. After `limit_seconds` the thread is abandoned, and the call has an error as
its result. The instance that such a thread is in gets no further call until the thread ends.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import threading
from collections.abc import Callable, Container, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.rollout import Rollout
from sortedrl.core.schedule import Schedule
from sortedrl.core.user_values import reason_of
from sortedrl.integrations.trl.rows import Row
from sortedrl.tasks.environment import Message, Response

Tool = Callable[..., Any]
Example = Mapping[str, Any]  # a row of the dataset


class ParsedResponse(Response):
    """A turn as TRL parses it. `is_cut`: a limit ended it, so that no turn follows."""

    __slots__ = ("is_cut", "message")
    message: dict[str, Any]
    is_cut: bool

    def __new__(cls, message: Mapping[str, Any], *, is_cut: bool = False) -> ParsedResponse:
        response = super().__new__(cls, str(message.get("content", "")), message.get("tool_calls"))
        assert isinstance(response, ParsedResponse)
        response.message, response.is_cut = dict(message), is_cut
        return response


def in_daemon_thread(call: Callable[[], Any]) -> tuple[Future[Any], threading.Thread]:
    """Start the call. A thread that never ends does not keep the process alive."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)
        except BaseException as error:  # would end the event loop
            future.set_exception(RuntimeError(reason_of(error)))

    thread = threading.Thread(target=run, name="tool", daemon=True)
    thread.start()
    return future, thread


@dataclass(slots=True)
class EpisodeTurn:
    """A message of the policy, and the results of its calls; None if none were made."""

    message: dict[str, Any]
    results: list[dict[str, Any]] | None


class ToolUse:
    """Tools and environments of a run: what its episodes share, and what the trainer's hooks need of the episodes.

    `grpo`: the trainer. With `threads` = 0, plain functions run in the calling thread, without a limit.
    `observations`: what `reset` of a row returned when its prompt was made.
    """

    def __init__(self, grpo: Any, schedule: Schedule, *, threads: int, limit_seconds: float) -> None:
        self.grpo = grpo
        self.schedule = schedule
        self.threads = threads
        self.max_iterations = grpo.max_tool_calling_iterations if grpo.tools else 0
        self.has_environments = grpo.environment_factories is not None
        self.observations: dict[int, Any] = {}
        self.episodes: dict[int, Episode] = {}  # by rollout id
        self.fatal: ConfigurationError | None = None
        self._limit_seconds = limit_seconds
        self._in_hand: dict[int, Episode] = {}  # of the update in hand, by rollout id
        self._free: dict[Any, list[Any]] = {}  # instances without a rollout, by name

    def start_run(self) -> None:
        self.episodes.clear()
        self._running = asyncio.Semaphore(max(1, self.threads))  # belongs to the event loop that it is used in

    # Instances and calls, for the episodes

    def name_of(self, example: Example) -> Any:
        """Of its environment: TRL's factories have names, one of which the row may say."""
        return example["environment"] if self.grpo._multi_environment else None

    def new_instance(self, example: Example) -> tuple[Any, Any]:
        """A free one or another, and what its `reset` returned."""
        name = self.name_of(example)
        free = self._free.get(name)
        instance = free.pop() if free else self.grpo.environment_factories[name]()
        return instance, self._reset(instance, example)

    def give_back(self, example: Example, instance: Any) -> None:
        self._free.setdefault(self.name_of(example), []).append(instance)

    def _reset(self, instance: Any, example: Example) -> Any:
        hidden = "environment" if self.grpo._multi_environment else None
        return instance.reset(**{key: value for key, value in example.items() if key != hidden})

    async def call(self, call: Callable[[], Any], started: Callable[[threading.Thread], None] | None = None) -> Any:
        """The result of a plain function, in a thread that `started` gets. Raises its error, or TimeoutError."""
        if not self.threads:
            return call()
        async with self._running:
            future, thread = in_daemon_thread(call)
            if started is not None:
                started(thread)
            return await self._result(future, self._limit_seconds)

    async def awaited(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """The result of an async function, in TRL's event loop. Raises its error, or TimeoutError."""
        running = asyncio.run_coroutine_threadsafe(coroutine, self.grpo.async_loop)
        try:
            return await self._result(running, self._limit_seconds if self.threads else None)
        finally:
            running.cancel()  # if it has not ended

    async def _result(self, future: Future[Any], limit_seconds: float | None) -> Any:
        done, _ = await asyncio.wait([asyncio.wrap_future(future)], timeout=limit_seconds)
        if not done:
            raise TimeoutError(f"no result within {limit_seconds:g} s")
        return done.pop().result()

    # Prompts

    def with_observation(self, row: int, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The prompt of a row: with environments, it ends with what `reset` returns. One instance per environment is
        used for all prompts, as in TRL."""
        if not self.has_environments:
            return messages
        example = self.grpo.example(row)
        name = self.name_of(example)
        self.grpo._batch_environments = [name]  # TRL's own: the prompt shows the tools of this environment
        instance = self.grpo._environment_pool[name][0]
        observation = self._reset(instance, example)
        if self.observations.setdefault(row, observation) != observation:
            raise different_observation(instance, row)
        return _ending_with(messages, observation)

    # A group that is scored before its update is composed

    def of_group(self, group: Sequence[Rollout]) -> ToolUse:
        """A copy that has the episodes of these rollouts in hand. They keep their turns after `release`."""
        made = copy.copy(self)
        made._in_hand = {rollout.id: self.episodes[rollout.id] for rollout in group}
        return made

    def prompts(self, rows: Sequence[Row], messages: Sequence[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
        """As `with_observation`, without another reset."""
        if not self.has_environments:
            return list(messages)
        places = [row.rollout.prompt.payload for row in rows]
        self.grpo._batch_environments = [self.name_of(self.grpo.example(place)) for place in places]
        observations = [self.observations[place] for place in places]
        return [_ending_with(prompt, seen) for prompt, seen in zip(messages, observations, strict=True)]

    # An update

    def take(self, rows: Sequence[Row], live: Container[int]) -> None:
        """The episodes of an update that is handed out; those of rejected rollouts are forgotten."""
        ids = {row.rollout.id for row in rows}
        self._in_hand = {id: self.episodes.pop(id) for id in ids}
        for id in list(self.episodes):  # in the thread of the tools some may start or end now
            if id not in live and (episode := self.episodes.pop(id, None)) is not None:
                episode.release()

    def release(self) -> None:
        """The rewards are known."""
        for episode in self._in_hand.values():
            episode.release()
        self._in_hand = {}

    def instances(self, rows: Sequence[Row]) -> list[Any] | None:
        """One per row, as TRL's `environments`."""
        if not self.has_environments:
            return None
        return [self._in_hand[row.rollout.id].instance for row in rows]

    @contextmanager
    def nothing_to_reset(self, rows: Sequence[Row]) -> Iterator[None]:
        """TRL takes instances from its pool, in the order of the rows, and resets them. Here it gets what the reset of
        each rollout's own instance returned."""
        if not self.has_environments:
            yield
            return
        pool = self.grpo._environment_pool
        prepared: dict[Any, list[Any]] = {name: [] for name in pool}
        for row in rows:
            place = row.rollout.prompt.payload
            instance = SimpleNamespace(reset=partial(_seen, self.observations[place]))
            prepared[self.name_of(self.grpo.example(place))].append(instance)
        self.grpo._environment_pool = prepared
        try:
            yield
        finally:
            self.grpo._environment_pool = pool

    def loop_result(self, rows: Sequence[Row]) -> tuple[Any, ...]:
        """What TRL's `_tool_call_loop` returns: masks, completions, tokens, log-probabilities, calls, failures,
        images."""
        episodes = [self._in_hand[row.rollout.id] for row in rows]
        made = [self._row(row.rollout, episode) for row, episode in zip(rows, episodes, strict=True)]
        calls, failures = (sum(getattr(episode, name) for episode in episodes) for name in ("calls", "failures"))
        return (*map(list, zip(*made, strict=True)), calls, failures, [[] for _ in rows])

    def _row(self, rollout: Rollout, episode: Episode) -> tuple[list[int], list[Any], list[int], list[float]]:
        last = self._results_without_turn(rollout, episode)
        return (
            [*rollout.mask, *[0] * len(last)],
            episode.messages(rollout.observations + bool(last)),
            [*rollout.tokens, *last],
            [*rollout.logprobs, *[0.0] * len(last)],
        )

    def _results_without_turn(self, rollout: Rollout, episode: Episode) -> list[int]:
        """The results of the last turn if they end exactly at `max_completion_length`: TRL keeps them. Empty if not."""
        place, schedule = rollout.observations, self.schedule
        results = episode.turns[place].results if place < len(episode.turns) else None
        if not results:
            return []
        tokens = self.grpo._get_tool_suffix_ids(results)
        length = len(rollout) + len(tokens)
        assert schedule.max_context_tokens is not None
        fits = length == schedule.max_response_tokens
        return tokens if fits and len(rollout.prompt.tokens) + length < schedule.max_context_tokens else []


def methods_of(instance: Any) -> list[Tool]:
    """The tools of an instance: its public methods but two. Listed on the class, which evaluates no property."""
    return [
        getattr(instance, name)
        for name, _ in inspect.getmembers(type(instance), predicate=inspect.isfunction)
        if name not in ("reset", "get_reward") and not name.startswith("_")
    ]


class Episode:
    """The turns of one rollout (of one attempt), with its own instance until its reward is known."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._thread: threading.Thread | None = None  # of the last call to a method of the instance
        self._has_ended = False
        self.instance: Any = None
        self.turns: list[EpisodeTurn] = []
        self.calls = self.failures = 0

    # The environment's methods

    def reset(self, problem: Any) -> None:
        self._rollout_id, self._row, self._example = problem
        earlier = self._use.episodes.get(self._rollout_id)
        self._use.episodes[self._rollout_id] = self
        if earlier is not None:
            earlier.release()

    async def step(self, response: Response) -> list[Message] | float:
        assert isinstance(response, ParsedResponse)
        await self._start()
        calls = response.message.get("tool_calls")
        if not calls or len(self.turns) >= self._use.max_iterations:
            return self._ended(EpisodeTurn(response.message, None))
        results = await self._results(calls)
        if response.is_cut:  # as in TRL, the calls are made, and there is no room for the results
            return self._ended(EpisodeTurn(response.message, None))
        self.turns.append(EpisodeTurn(response.message, results))
        return list(results)

    async def finish(self, reason: str) -> float:
        """The results of the last turn did not fit."""
        await self._start()
        self._has_ended = True
        return 0.0

    async def close(self) -> None:
        """An ended episode waits for its reward."""
        if not self._has_ended:
            if self._use.episodes.get(self._rollout_id) is self:
                self._use.episodes.pop(self._rollout_id, None)
            self.release()

    def _ended(self, turn: EpisodeTurn) -> float:
        """The value is not a reward: TRL's reward functions run when the batch is complete."""
        self.turns.append(turn)
        self._has_ended = True
        return 0.0

    # For the trainer

    def end(self) -> None:
        """It was brought back for its reward."""
        self._has_ended = True

    def release(self) -> None:
        """The instance may serve another rollout, unless a call is still running in it."""
        instance, self.instance = self.instance, None
        if instance is not None and not self._is_busy():
            self._use.give_back(self._example, instance)

    def messages(self, observations: int) -> list[dict[str, Any]]:
        """The completion as TRL shows it to reward functions, with the results of so many turns."""
        found: list[dict[str, Any]] = []
        for place, turn in enumerate(self.turns):
            found += [turn.message, *((turn.results or ()) if place < observations else ())]
        return found

    # The instance and its calls

    def _is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    async def _start(self) -> None:
        """An instance of its own, in the state after `reset`."""
        if not self._use.has_environments or self.instance is not None:
            return
        instance, observation = await self._use.call(partial(self._use.new_instance, self._example))
        if observation != self._use.observations[self._row]:
            self._use.fatal = different_observation(instance, self._row)
            raise self._use.fatal
        self.instance = instance

    async def _results(self, calls: Sequence[Any]) -> list[dict[str, Any]]:
        """One message per call: first those of plain functions."""
        tools = {tool.__name__: tool for tool in [*self._use.grpo._standalone_tools, *methods_of(self.instance)]}
        results: list[tuple[str, Any]] = []
        later: list[tuple[str, Coroutine[Any, Any, Any]]] = []
        self.calls += len(calls)
        for call in calls:
            name = "unknown"
            try:
                name, arguments = name_and_arguments(call)
                if name not in tools:
                    raise ValueError(f"Tool {name} not found.")
                tool = tools[name]
                if inspect.iscoroutinefunction(tool):
                    later.append((name, tool(**arguments)))
                else:
                    results.append((name, await self._called(tool, arguments)))
            except Exception as error:
                results.append((name, self._failed(error)))
        done = await asyncio.gather(*(self._use.awaited(coroutine) for _, coroutine in later), return_exceptions=True)
        for (name, _), result in zip(later, done, strict=True):
            results.append((name, self._failed(result) if isinstance(result, Exception) else content_of(result)))
        return [{"role": "tool", "name": name, "content": content} for name, content in results]

    async def _called(self, tool: Tool, arguments: Mapping[str, Any]) -> Any:
        started = None
        if self.instance is not None and getattr(tool, "__self__", None) is self.instance:
            if self._is_busy():
                raise RuntimeError("the environment is busy: an earlier call has not ended")
            started = partial(setattr, self, "_thread")
        return await self._use.call(lambda: content_of(tool(**arguments)), started)

    def _failed(self, error: BaseException) -> str:
        self.failures += 1
        return str({"error": str(error)})


def name_and_arguments(call: Any) -> tuple[str, Mapping[str, Any]]:
    kind = call.get("type")
    if kind != "function" or not isinstance(call.get("function"), dict):
        raise ValueError(f"Unsupported tool call type: {kind}")
    return call["function"]["name"], call["function"]["arguments"]


def content_of(result: Any) -> Any:
    return result if isinstance(result, list) else str(result)


def different_observation(instance: Any, row: int) -> ConfigurationError:
    return ConfigurationError(
        "environment_factory", type(instance).__name__,
        f"its reset returned different observations for row {row} of the dataset, but all members of a group answer "
        "the same prompt",
        "Let reset return the same observation for the same row.",
    )  # fmt: skip


def _ending_with(messages: list[dict[str, Any]], observation: Any) -> list[dict[str, Any]]:
    """As TRL does it: added to the last message."""
    if observation is None:
        return messages
    content = messages[-1]["content"]
    if isinstance(observation, list) and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if isinstance(observation, str) and isinstance(content, list):
        observation = [{"type": "text", "text": observation}]
    return [*messages[:-1], {**messages[-1], "content": content + observation}]


def _seen(observation: Any, /, **example: Any) -> Any:
    """In the place of `reset` where TRL calls it: the rollout's own instance has already been through its turns."""
    return observation
