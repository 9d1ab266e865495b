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

import ast
import inspect
import json
import operator
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
BUILT_IN_TOOLS = {"calculator": "sortedrl.tasks.tools:calculator"}
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


# A calculator: arithmetic on numbers, with limits on the size of results

MAX_CHARACTERS = 200
MAX_DIGITS = 50  # of a result
_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[float], float]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, for example (3 + 4) * 12.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"the expression has {len(expression)} characters; the maximum is {MAX_CHARACTERS}")
    try:
        parsed = ast.parse(expression.strip(), mode="eval")
    except SyntaxError:
        raise ValueError(f"{expression!r} is not an arithmetic expression") from None
    value = _value(parsed.body)
    return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else str(value)


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(operation, operand) if type(operation) in _UNARY:
            return _UNARY[type(operation)](_value(operand))
        case ast.BinOp(left, operation, right) if type(operation) in _BINARY:
            return _applied(operation, _value(left), _value(right))
    raise ValueError(f"{ast.unparse(node)!r} is not arithmetic")


def _applied(operation: ast.operator, left: float, right: float) -> float:
    if isinstance(operation, ast.Pow) and (abs(right) > MAX_DIGITS or abs(left) > 10**MAX_DIGITS):
        raise ValueError("the power is too large")
    value = _BINARY[type(operation)](left, right)
    if isinstance(value, complex):
        raise ValueError("the result is not a real number")
    if abs(value) > 10**MAX_DIGITS:
        raise ValueError(f"the result has more than {MAX_DIGITS} digits")
    return value
