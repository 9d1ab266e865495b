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
import inspect
import threading
from collections.abc import Callable, Container, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.user_values import reason_of
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


def too_late(limit_seconds: float) -> TimeoutError:
    return TimeoutError(f"no result within {limit_seconds:g} s")


@dataclass(slots=True)
class EpisodeTurn:
    """A message of the policy, and the results of its calls; None if none were made."""

    message: dict[str, Any]
    results: list[dict[str, Any]] | None


@dataclass(eq=False, kw_only=True)
class ToolBox:
    """What the episodes of a run share. `factories`: by name, as in TRL; None if there are no environments.

    `observations`: what `reset` of a row returned when its prompt was made.
    """

    tools: Sequence[Tool]
    factories: Mapping[Any, Callable[[], Any]] | None
    several: bool  # factories by name: the row's `environment` is one
    max_iterations: int
    limit_seconds: float
    threads: int  # 0: in the calling thread, without a limit
    async_loop: asyncio.AbstractEventLoop | None  # TRL's, for async tools
    observations: dict[int, Any] = field(default_factory=dict)
    episodes: dict[int, Episode] = field(default_factory=dict)  # by rollout id
    fatal: ConfigurationError | None = None
    _free: dict[Any, list[Any]] = field(default_factory=dict)  # instances without a rollout, by name
    _running: asyncio.Semaphore = field(init=False)

    def start_run(self) -> None:
        self.episodes.clear()
        self._running = asyncio.Semaphore(max(1, self.threads))  # belongs to the event loop that it is used in

    def keep_only(self, live: Container[int]) -> None:
        """Forget episodes of rollouts that were rejected."""
        for id in [id for id in self.episodes if id not in live]:
            self.episodes.pop(id).release()

    def name_of(self, example: Example) -> Any:
        return example.get("environment") if self.several else None

    def take_instance(self, example: Example) -> Any:
        assert self.factories is not None
        free = self._free.get(self.name_of(example))
        return free.pop() if free else self.factories[self.name_of(example)]()

    def give_back(self, example: Example, instance: Any) -> None:
        self._free.setdefault(self.name_of(example), []).append(instance)

    def reset(self, instance: Any, example: Example) -> Any:
        hidden = "environment" if self.several else None
        return instance.reset(**{key: value for key, value in example.items() if key != hidden})

    async def call(self, call: Callable[[], Any], started: Callable[[threading.Thread], None] | None = None) -> Any:
        """The result of a plain function, in a thread that `started` gets. Raises its error, or TimeoutError."""
        if not self.threads:
            return call()
        async with self._running:
            future, thread = in_daemon_thread(call)
            if started is not None:
                started(thread)
            done, _ = await asyncio.wait([asyncio.wrap_future(future)], timeout=self.limit_seconds)
            if not done:
                raise too_late(self.limit_seconds)
            return done.pop().result()

    async def awaited(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """The result of an async function, in TRL's event loop. Raises its error, or TimeoutError."""
        assert self.async_loop is not None
        running = asyncio.run_coroutine_threadsafe(coroutine, self.async_loop)
        limit_seconds = self.limit_seconds if self.threads else None
        try:
            done, _ = await asyncio.wait([asyncio.wrap_future(running)], timeout=limit_seconds)
            if not done:
                raise too_late(self.limit_seconds)
            return done.pop().result()
        finally:
            running.cancel()  # if it has not ended


def methods_of(instance: Any) -> list[Tool]:
    """The tools of an instance: its public methods but two. Listed on the class, which evaluates no property."""
    return [
        getattr(instance, name)
        for name, _ in inspect.getmembers(type(instance), predicate=inspect.isfunction)
        if name not in ("reset", "get_reward") and not name.startswith("_")
    ]


class Episode:
    """The turns of one rollout (of one attempt), with its own instance until its reward is known."""

    def __init__(self, box: ToolBox) -> None:
        self._box = box
        self._thread: threading.Thread | None = None  # of the last call to a method of the instance
        self._has_ended = False
        self.instance: Any = None
        self.turns: list[EpisodeTurn] = []
        self.calls = self.failures = 0

    # The environment's methods

    def reset(self, problem: Any) -> None:
        self._rollout_id, self._row, self._example = problem
        earlier = self._box.episodes.get(self._rollout_id)
        self._box.episodes[self._rollout_id] = self
        if earlier is not None:
            earlier.release()

    async def step(self, response: Response) -> list[Message] | float:
        assert isinstance(response, ParsedResponse)
        await self._start()
        calls = response.message.get("tool_calls")
        if not calls or len(self.turns) >= self._box.max_iterations:
            return self._ended(EpisodeTurn(response.message, None))
        results = await self._results(calls)
        if response.is_cut:  # as in TRL, the calls are made, and there is no room for the results
            return self._ended(EpisodeTurn(response.message, None))
        self.turns.append(EpisodeTurn(response.message, results))
        return list(results)

    async def finish(self, reason: str) -> float:
        """The results of the last turn did not fit."""
        del reason
        await self._start()
        self._has_ended = True
        return 0.0

    async def close(self) -> None:
        """An ended episode waits for its reward."""
        if not self._has_ended:
            if self._box.episodes.get(self._rollout_id) is self:
                del self._box.episodes[self._rollout_id]
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
            self._box.give_back(self._example, instance)

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
        if self._box.factories is None or self.instance is not None:
            return
        instance, observation = await self._box.call(self._new_instance)
        if observation != self._box.observations[self._row]:
            self._box.fatal = different_observation(instance, self._row)
            raise self._box.fatal
        self.instance = instance

    def _new_instance(self) -> tuple[Any, Any]:
        instance = self._box.take_instance(self._example)
        return instance, self._box.reset(instance, self._example)

    async def _results(self, calls: Sequence[Any]) -> list[dict[str, Any]]:
        """One message per call: first those of plain functions."""
        tools = {tool.__name__: tool for tool in [*self._box.tools, *methods_of(self.instance)]}
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
        done = await asyncio.gather(*(self._box.awaited(coroutine) for _, coroutine in later), return_exceptions=True)
        for (name, _), result in zip(later, done, strict=True):
            results.append((name, self._failed(result) if isinstance(result, Exception) else content_of(result)))
        return [{"role": "tool", "name": name, "content": content} for name, content in results]

    async def _called(self, tool: Tool, arguments: Mapping[str, Any]) -> Any:
        started = None
        if self.instance is not None and getattr(tool, "__self__", None) is self.instance:
            if self._is_busy():
                raise RuntimeError("the environment is busy: an earlier call has not ended")
            started = partial(setattr, self, "_thread")
        return await self._box.call(lambda: content_of(tool(**arguments)), started)

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
