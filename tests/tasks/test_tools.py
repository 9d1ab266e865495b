"""Functions as tools: schemas in the prompt, calls in responses, errors as observations."""

import asyncio
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat_tokenizer import chat_tokenizer
from sortedrl.models import BUILT_IN_MODEL
from sortedrl.tasks.encode import environment_prompt
from sortedrl.tasks.environment import Response
from sortedrl.tasks.knights_and_knaves import KnightsAndKnaves
from sortedrl.tasks.math import Math
from sortedrl.tasks.registry import task_by_name
from sortedrl.tasks.task import Problem, Task
from sortedrl.tasks.tools import ToolEnvironment, WithTools, calculator, tool_calls


class Sums:
    name = "sums"

    def train(self) -> list[Problem]:
        return [Problem("p", "What is 17 * 23?", "391")]

    def held_out(self) -> list[Problem]:
        return []

    def score(self, problem: Problem, response: str) -> float:
        return float(problem.answer in response)


async def slow_double(number: int) -> int:
    """Doubles a number.

    Args:
        number: It.
    """
    await asyncio.sleep(0)
    return 2 * number


def turn(environment: ToolEnvironment, response: str, calls: Any = None) -> Any:
    return asyncio.run(environment.step(Response(response, calls)))


@pytest.fixture
def environment() -> ToolEnvironment:
    tools = ToolEnvironment(Sums(), [calculator, slow_double])
    tools.reset(Sums().train()[0])
    return tools


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_a_calculator_and_a_scripted_policy_solve_a_task(environment: ToolEnvironment) -> None:
    observed = turn(environment, f"Let me see. {call('calculator', expression='17 * 23')}")
    assert observed == [{"role": "tool", "name": "calculator", "content": "391"}]
    assert turn(environment, f"It is {observed[0]['content']}.") == 1.0
    several = turn(environment, call("calculator", expression="1/4") + call("slow_double", number=21))
    assert [message["content"] for message in several] == ["0.25", "42"]


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("<tool_call>{not json}</tool_call>", "not valid JSON"),
        ('<tool_call>{"name": "calculator"', "not valid JSON"),
        ("<tool_call>[1, 2]</tool_call>", "has no name"),
        ('<tool_call>{"name": "calculator", "arguments": "2 + 2"}</tool_call>', "arguments are not an object"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "use <tool_call>"),
        (call("weather", city="Rome"), "no tool 'weather'; the tools are calculator, slow_double"),
        (call("calculator", formula="2"), "missing a required argument"),
        (call("calculator", expression="1/0"), "ZeroDivisionError"),
        (call("calculator", expression="__import__('os').system('true')"), "not arithmetic"),
        (call("slow_double", number=None), "TypeError"),
    ],
)
def test_a_call_that_cannot_be_made_is_an_error_observation(
    environment: ToolEnvironment, response: str, reason: str
) -> None:
    (message,) = turn(environment, response)
    assert message["role"] == "tool" and message["content"].startswith("error: ")
    assert reason in message["content"] and "\n" not in message["content"]


@given(st.text())
def test_no_text_breaks_the_parser(text: str) -> None:
    for response in (text, f"<tool_call>{text}</tool_call>"):
        for one in tool_calls(Response(response)):
            assert (one.error is None) != (one.arguments is None)


def test_calls_that_the_template_parsed_are_used_instead_of_the_default(environment: ToolEnvironment) -> None:
    parsed = [{"type": "function", "function": {"name": "calculator", "arguments": {"expression": "6*7"}}}]
    assert turn(environment, "no tags here", parsed)[0]["content"] == "42"
    assert turn(environment, call("calculator", expression="1") + "391", []) == 1.0, "the template found no call"


@pytest.mark.parametrize("parsed", ["calculator", 7, None, {"function": None}, {"function": "calculator"}])
def test_a_malformed_call_of_the_template_is_an_error_observation(environment: ToolEnvironment, parsed: Any) -> None:
    assert "the call has no name" in turn(environment, "no tags here", [parsed])[0]["content"]


def test_a_limit_before_the_answer_scores_an_empty_one(environment: ToolEnvironment) -> None:
    assert asyncio.run(environment.finish("max_turns")) == 0.0


def test_the_prompt_shows_the_tools() -> None:
    task = WithTools(Sums(), ["calculator", f"{__name__}:slow_double"])
    tokenizer, tools = chat_tokenizer(), task.environment().tools
    text = tokenizer.decode(environment_prompt(None, task.train()[0], tokenizer, tools))
    assert '"name": "calculator"' in text and "for example (3 + 4) * 12" in text and "slow_double" in text
    assert text.endswith("What is 17 * 23?<|im_end|>\n<|im_start|>assistant\n")


def test_a_template_that_does_not_show_tools_is_refused() -> None:
    from transformers import AutoTokenizer

    task = task_by_name("knights_and_knaves:small", tools=["calculator"], count=100)
    with pytest.raises(ValueError, match="does not show tools, so the model would not see calculator"):
        environment_prompt(None, task.train()[0], AutoTokenizer.from_pretrained(BUILT_IN_MODEL), [calculator])


@pytest.mark.parametrize("make", [KnightsAndKnaves.small, lambda: Math("gsm8k")])
def test_a_task_with_tools_travels_to_a_worker_process(make: Callable[[], Task]) -> None:
    task = pickle.loads(pickle.dumps(WithTools(make(), ["calculator"])))
    assert task.environment().tools == (calculator,)


def test_a_task_with_an_environment_takes_no_tools() -> None:
    with pytest.raises(ValueError, match="has an environment of its own"):
        task_by_name("knights_and_knaves:dialogue", tools=["calculator"])


@pytest.mark.parametrize("path", ["nowhere:tool", f"{__name__}:Sums"])
def test_a_tool_that_is_no_function_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match=r"nowhere|a tool is a function"):
        WithTools(Sums(), [path])


@pytest.mark.parametrize(
    ("expression", "value"),
    [("(3 + 4) * 12", "84"), ("-2 ** 2", "-4"), ("7 // 2 % 2", "1"), ("10 / 4", "2.5"), ("2 ** 0.5", str(2**0.5))],
)
def test_the_calculator_calculates(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression", ["9**9**9", "10**51", "(-8)**0.5", "a + 1", "1 +", "", "True + 1", "1" * 201, "1e308 * 10", "'a'*3"]
)
def test_the_calculator_refuses_the_rest(expression: str) -> None:
    with pytest.raises((ValueError, ArithmeticError)):
        calculator(expression)
