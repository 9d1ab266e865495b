"""Plain Python functions as tools of a task.

    def weather(city: str) -> str:
        \"\"\"The weather in a city.

        Args:
            city: Its name.
        \"\"\"

The prompt holds the tools' schemas, which transformers derives from type hints and docstrings. A response that calls
tools gets their results as messages of role `tool`; a response without a call is the answer, which the task scores.

Calls are parsed with the chat template's own parser if the tokenizer has one (`response_template`). The default is
`<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>`, one block per call. A malformed call, an
unknown tool, wrong arguments or an exception become a message that starts with `error:`.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sortedrl.core.import_path import import_object
from sortedrl.core.user_values import one_line, reason_of
from sortedrl.core.wording import kind_of
from sortedrl.tasks.environment import Message, Response
from sortedrl.tasks.task import Problem, Reward, SplitTask, Task

Tool = Callable[..., Any]
BUILT_IN_TOOLS = {"calculator": "sortedrl.tasks.calculator:calculator"}
_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FORM = '<tool_call>{"name": NAME, "arguments": {...}}</tool_call>'


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call, or why it cannot be made (`error`)."""

    name: str = ""
    arguments: dict[str, Any] | None = None
    error: str | None = None


def tool_calls(response: Response) -> list[ToolCall]:
    """The calls in a response, in order; none if it does not attempt one."""
    if response.tool_calls is not None:
        return [
            _checked(call.get("function", call) if isinstance(call, dict) else call) for call in response.tool_calls
        ]
    return [_parsed(block.strip()) for block in _BLOCK.findall(response)]


def _parsed(block: str) -> ToolCall:
    try:
        return _checked(json.loads(block))
    except ValueError as error:
        return ToolCall(error=f"the call is not valid JSON ({error}); use {_FORM}")
    except RecursionError:
        return ToolCall(error=f"the call is nested too deeply; use {_FORM}")


def _checked(call: Any) -> ToolCall:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall(error=f"the call has no name; use {_FORM}")
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(error=f"the arguments are not an object; use {_FORM}")
    return ToolCall(call["name"], arguments)


class ToolEnvironment:
    """Tools for one rollout of a task that scores its final answer."""

    def __init__(self, task: Task, tools: Sequence[Tool]) -> None:
        self.tools = tuple(tools)
        self._by_name = {tool.__name__: tool for tool in tools}
        self._task = task

    def reset(self, problem: Problem) -> None:
        self._problem = problem

    async def step(self, response: Response) -> list[Message] | Reward | float:
        calls = tool_calls(response)
        if not calls:
            return self._task.score(self._problem, str(response))
        return [{"role": "tool", "name": call.name, "content": await self._result(call)} for call in calls]

    async def finish(self, reason: str) -> Reward | float:
        """A limit came before the answer: the task scores an empty one."""
        del reason
        return self._task.score(self._problem, "")

    async def _result(self, call: ToolCall) -> str:
        if call.error is not None:
            return f"error: {one_line(call.error)}"
        tool = self._by_name.get(call.name)
        if tool is None:
            return f"error: no tool {one_line(call.name, 60)!r}; the tools are {', '.join(self._by_name)}"
        try:
            inspect.signature(tool).bind(**(call.arguments or {}))
            result = tool(**(call.arguments or {}))
            if inspect.isawaitable(result):
                result = await result
            return result if isinstance(result, str) else json.dumps(result)
        except Exception as error:
            return f"error: {reason_of(error)}"


class WithTools(SplitTask):
    """A task whose responses may call tools. A tool that waits should be `async def`; others run one at a time."""

    def __init__(self, task: Task, tools: Sequence[str]) -> None:
        self.name = task.name
        self._task = task
        self._tools = tuple(tools)
        _ = self._functions  # an invalid one is refused now

    @cached_property
    def _functions(self) -> list[Tool]:
        """A worker process imports them by their paths."""
        return [function_of(path) for path in self._tools]

    def train(self) -> Sequence[Problem]:
        return self._task.train()

    def held_out(self) -> Sequence[Problem]:
        return self._task.held_out()

    def environment(self) -> ToolEnvironment:
        return ToolEnvironment(self._task, self._functions)


def function_of(path: str) -> Tool:
    """The tool with this name or import path."""
    try:
        found = import_object(BUILT_IN_TOOLS.get(path, path))
    except ValueError as error:
        raise ValueError(f"the tool {path}: {error}") from error
    if not callable(found) or inspect.isclass(found):
        raise ValueError(f"the tool {path} is {kind_of(found)}: a tool is a function")
    return found  # type: ignore[no-any-return]
