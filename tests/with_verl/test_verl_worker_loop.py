"""What an agent loop may send and return, the gate in front of the servers, and reasons: no Ray cluster, no verl."""

import asyncio
from array import array
from types import SimpleNamespace
from typing import Any

from ray.exceptions import RayTaskError

from sortedrl.integrations.verl.exchange import (
    Exchange,
    LoopObserved,
    TurnAborted,
    TurnFinished,
    TurnStarted,
    reason_for_report,
)
from sortedrl.integrations.verl.worker_loop import NOT_SAMPLED, Ticket, WorkerLoop


def loop_with(*turns: tuple[list[int], list[int]]) -> tuple[WorkerLoop, list[list[int] | None]]:
    """Each turn is a prompt and what was sampled after it. Also returns the observations."""
    loop = WorkerLoop(Ticket(0, ()), None, is_single_turn=False)
    observed = []
    for prompt, tokens in turns:
        observation = loop.begin_turn(prompt)
        observed.append(None if observation is None else observation.tolist())
        loop.end_turn(tokens)
    return loop, observed


def output(prompt: list[int], ids: list[int], mask: list[int]) -> Any:
    return SimpleNamespace(prompt_ids=prompt, response_ids=ids, response_mask=mask)


def test_what_a_prompt_adds_is_the_observation() -> None:
    loop, observed = loop_with(([1, 2], [3, 4]), ([1, 2, 3, 4, 5, 6], [7]))
    assert observed == [None, [5, 6]]
    assert loop.fault_of([output([1, 2], [3, 4, 5, 6, 7], [1, 1, 0, 0, 1])]) is None
    assert loop.fault_of([output([1, 2], [3, 4, 5], [1, 1, 0])]) is None, "cut at response_length"
    assert loop.fault_of([output([1, 2], [3, 4, 5, 6, 7, 8], [1, 1, 0, 0, 1, 0])]) is None


def test_tokens_of_a_tool_must_not_be_trained_on() -> None:
    loop, _ = loop_with(([1, 2], [3, 4]), ([1, 2, 3, 4, 5, 6], [7]))
    assert loop.fault_of([output([1, 2], [3, 4, 5, 6, 7], [1, 1, 1, 0, 1])]) == NOT_SAMPLED
    assert loop.fault_of([output([1, 2], [3, 4, 5, 6, 7, 8], [1, 1, 0, 0, 1, 1])]) == NOT_SAMPLED


def test_a_history_that_was_encoded_again_must_not_be_trained_on() -> None:
    loop, observed = loop_with(([1, 2], [3, 4]), ([1, 2, 9, 4, 5], [7]))
    assert observed == [None, [9, 4, 5]]
    assert loop.fault_of([output([1, 2], [9, 4, 5, 7], [1, 1, 0, 1])]) == NOT_SAMPLED
    assert loop.fault_of([output([1, 2], [3, 4, 5, 7], [1, 1, 0, 1])]) == NOT_SAMPLED, "7 was sampled after a 9"
    assert loop.fault_of([output([1, 2, 9, 4, 5], [7], [1])]) is None, "a context of its own"


def test_a_loop_may_trim_the_end_of_a_turn() -> None:
    """Some templates write the token that ended a turn differently."""
    loop, observed = loop_with(([1, 2], [3, 4]), ([1, 2, 3, 8, 5], [7]))
    assert observed == [None, [8, 5]]
    assert loop.fault_of([output([1, 2], [3, 8, 5, 7], [1, 0, 0, 1])]) is None
    assert loop.fault_of([output([1, 2], [3, 8, 5, 7], [1, 1, 0, 1])]) == NOT_SAMPLED


def test_a_call_that_adds_nothing_counts_one_token() -> None:
    loop, observed = loop_with(([1, 2], [3, 4]), ([1, 2, 3, 4], [5]), ([1, 2], [6]))
    assert observed == [None, [4], [2]]
    assert loop.fault_of([output([1, 2], [3, 4, 5], [1, 1, 1]), output([1, 2], [6], [1])]) is None


async def _enters(exchange: Exchange, dispatch: int) -> asyncio.Task[int | None]:
    task = asyncio.create_task(exchange.enter(dispatch))
    await asyncio.sleep(0)
    return task


async def _kinds(exchange: Exchange) -> list[type]:
    return [type(report) for _, report in await exchange.collect(0.0)]


def test_no_loop_passes_the_gate_without_a_slot() -> None:
    async def scenario() -> None:
        exchange = Exchange()
        waiting = await _enters(exchange, 1)
        assert not waiting.done()
        await exchange.grant({1: 5})
        assert await waiting == 5
        assert await _kinds(exchange) == [TurnStarted]
        await exchange.report([TurnFinished(1, truncated=False)])
        assert not await exchange.has_slot(1)
        again = asyncio.create_task(exchange.enter(1, array("i", [7])))
        await asyncio.sleep(0)
        assert not again.done(), "the slot of the first turn is gone"
        assert await _kinds(exchange) == [TurnFinished, LoopObserved]
        await exchange.grant({1: 3})
        assert await again == 3

    asyncio.run(scenario())


def test_an_abort_names_those_at_the_servers_and_parks_them() -> None:
    async def scenario() -> None:
        exchange = Exchange()
        await exchange.grant({1: 5, 2: 5})
        assert await exchange.enter(1) == 5
        assert await exchange.abort([1, 2]) == [1], "2 has not come yet"
        late = await _enters(exchange, 2)
        parked = await _enters(exchange, 1)
        assert not late.done() and not parked.done()
        assert await _kinds(exchange) == [TurnStarted, TurnAborted]
        await exchange.grant({1: 2})
        assert await parked == 2 and not late.done()

    asyncio.run(scenario())


def test_a_cancel_ends_those_at_the_gate_and_names_the_others() -> None:
    async def scenario() -> None:
        exchange = Exchange()
        waiting = await _enters(exchange, 1)
        assert await exchange.cancel([1, 2]) == [2]
        assert await waiting is None
        await exchange.grant({2: 4})
        assert await exchange.enter(2) is None, "canceled in its tool; a grant does not help"

    asyncio.run(scenario())


def test_the_reason_of_an_error_in_a_ray_actor_is_its_cause() -> None:
    """Ray's text starts with a traceback, of which one line of a report would show only the beginning."""

    def raised_in_actor(error: Exception) -> Exception:
        raised: Exception = RayTaskError(
            "RewardLoopWorker.compute_score", "File ...\n" * 40, error
        ).as_instanceof_cause()
        return raised

    assert reason_for_report(raised_in_actor(KeyError("anwser"))) == "KeyError: 'anwser'"
    assert reason_for_report(raised_in_actor(raised_in_actor(ValueError("no digits")))) == "ValueError: no digits"
    assert reason_for_report(TimeoutError("60 s")) == "TimeoutError: 60 s"
