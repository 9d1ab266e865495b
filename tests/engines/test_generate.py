"""One way to run requests to their end, and one policy on failures."""

from collections.abc import Callable
from typing import Any

import numpy
import pytest

from paced import PacedEngine
from sortedrl.core.engine import Change, Request, RequestFailed, Tokens
from sortedrl.core.rollout import Prompt, Segment
from sortedrl.engines import generate as module
from sortedrl.engines.generate import ATTEMPTS, NotInTime, Response, generate


class Flaky(PacedEngine):
    """Generates two tokens. Fails a request as often as `failures` has it, each time after one token."""

    def __init__(self, failures: dict[int, int], tokens: int = 2) -> None:
        super().__init__(slots=4, length_of=lambda request: tokens)
        self.failures = failures

    def _report(self) -> list[Change]:
        changes: list[Change] = []
        for change in super()._report():
            changes.append(change)
            if isinstance(change, Tokens) and self.failures.get(change.id, 0) > 0:
                self.failures[change.id] -= 1
                del self._running[change.id]
                changes.append(RequestFailed(change.id, change.at, "lost"))
        return changes


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.0)


def requests(count: int) -> list[Request]:
    return [Request(id, Prompt(str(id), [1, 2]), (), 8, id) for id in range(count)]


def test_responses_come_in_the_order_of_the_requests() -> None:
    asked = [*requests(2), requests(3)[2]._replace(max_new_tokens=1)]
    responses = generate(Flaky({1: 2}), asked)
    assert [response.request.id for response in responses] == [0, 1, 2]
    assert [response.tokens for response in responses] == [[0, 1], [0, 1], [0]], "tokens before a failure are gone"
    assert [response.truncated for response in responses] == [False, False, True]
    assert all(response.failure is None for response in responses) and responses[1].logprobs == [-1.0, -2.0]


class Garbles(Flaky):
    """Alters the tokens of the first attempts at request 1."""

    def __init__(self, alter: Callable[[Tokens], list[Change]], attempts: int) -> None:
        super().__init__({})
        self.alter, self.attempts = alter, attempts

    def _report(self) -> list[Change]:
        changes = super()._report()
        if sum(request.id == 1 for request in self.submitted) > self.attempts:
            return changes
        parts = [self.alter(one) if isinstance(one, Tokens) and one.id == 1 else [one] for one in changes]
        return [change for part in parts for change in part]


def of(token: Any) -> Callable[[Tokens], list[Change]]:
    return lambda change: [change._replace(segment=Segment([token], [-1.0], 0))]


@pytest.mark.parametrize(
    ("alter", "why"),
    [
        (of(-1), "the engine reported token id -1"),
        (of("7"), "the engine reported a token id"),
        (of(None), "the engine reported a token id"),
        (lambda change: [], "it ended without a token"),
    ],
)
def test_a_response_that_no_tokenizer_or_environment_can_read_is_a_failure(alter: Any, why: str) -> None:
    responses = generate(Garbles(alter, attempts=1), requests(3))
    assert [response.tokens for response in responses] == [[0, 1]] * 3
    response = generate(Garbles(alter, attempts=ATTEMPTS), requests(3))[1]
    assert response.failure is not None and response.failure.startswith(why)


def test_more_tokens_than_were_asked_for_are_a_failure() -> None:
    response = Response(requests(1)[0]._replace(max_new_tokens=1))
    response.add(Segment([5, 6], [-0.5, -1.5], 0))
    response.end(truncated=False)
    assert response.failure == "the engine reported 2 tokens, and max_new_tokens is 1"


@pytest.mark.parametrize("kind", [tuple, numpy.array])
def test_tokens_may_come_in_arrays(kind: Any) -> None:
    response = Response(requests(1)[0])
    response.add(Segment(kind([5, 6]), kind([-0.5, -1.5]), 0))
    assert {type(token) for token in response.tokens} == {int} and response.tokens == [5, 6]
    assert {type(value) for value in response.logprobs} == {float}


def test_a_request_that_always_fails_is_reported_with_its_reason() -> None:
    engine = Flaky({1: 100})
    responses = generate(engine, requests(2))
    assert responses[0].failure is None and responses[1].failure == "lost"
    assert engine.failures[1] == 100 - ATTEMPTS


def test_nothing_is_left_in_the_engine_after_the_time_limit() -> None:
    engine = PacedEngine(slots=4)
    asked = [request._replace(max_new_tokens=10**9) for request in requests(2)]
    with pytest.raises(NotInTime) as caught:
        generate(engine, asked, limit_seconds=0.05)
    assert caught.value.unfinished == 2
    assert engine.poll() == [] and not engine._running
