"""One way to run requests to their end, and one policy on failures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import pytest

from sortedrl.core.engine import Change, Request, RequestFailed, RequestFinished, RequestStarted, Tokens
from sortedrl.core.rollout import Prompt, Segment
from sortedrl.engines import generate as module
from sortedrl.engines.generate import ATTEMPTS, NotInTime, Response, generate


class Flaky:
    """Fails a request as often as `failures` has it, each time after one token; then generates two tokens."""

    def __init__(self, failures: dict[int, int], hangs: bool = False) -> None:
        self.slots = 4
        self.failures, self.hangs = failures, hangs
        self.time = 0.0
        self.inside: list[Request] = []
        self.aborted: list[int] = []

    def now(self) -> float:
        return self.time

    def submit(self, requests: Sequence[Request]) -> None:
        self.inside += requests

    def poll(self, until: float | None = None) -> list[Change]:
        self.time += 1.0
        if self.hangs:
            return []
        changes: list[Change] = []
        for request in self.inside:
            id, token = request.id, Segment([request.id], [-1.0], 0)
            changes += [RequestStarted(id, self.time), Tokens(id, self.time, token)]
            if self.failures.get(id, 0) > 0:
                self.failures[id] -= 1
                changes.append(RequestFailed(id, self.time, "lost"))
            else:
                changes += [Tokens(id, self.time, token), RequestFinished(id, self.time, truncated=id == 2)]
        self.inside = []
        return changes

    def abort(self, ids: Sequence[int]) -> list[Change]:
        self.aborted += ids
        return []

    def update_weights(self, weights: Any, version: int) -> None: ...


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.0)


def requests(count: int) -> list[Request]:
    return [Request(id, Prompt(str(id), [1, 2]), (), 8, id) for id in range(count)]


def test_responses_come_in_the_order_of_the_requests_and_each_ends_once() -> None:
    ended: list[Response] = []
    engine = Flaky({1: 2})
    responses = generate(engine, requests(3), on_end=ended.append)
    assert [response.request.id for response in responses] == [0, 1, 2]
    assert [response.tokens for response in responses] == [[0, 0], [1, 1], [2, 2]], "tokens before a failure are gone"
    assert [response.truncated for response in responses] == [False, False, True]
    assert all(response.failure is None and response.logprobs == [-1.0, -1.0] for response in responses)
    assert sorted(response.request.id for response in ended) == [0, 1, 2] and ended[-1].request.id == 1


class SaysNothing(Flaky):
    """Ends the first request of each id without a token."""

    def poll(self, until: float | None = None) -> list[Change]:
        changes = super().poll(until)
        silent = [id for id, left in self.failures.items() if left < 0]
        self.failures = {}
        return [change for change in changes if change.id not in silent or not isinstance(change, Tokens)]


def test_a_response_without_a_token_is_a_failure() -> None:
    """An environment has nothing to answer: an evaluation with environments ended with an error."""
    responses = generate(SaysNothing({1: -1}), requests(3))
    assert [response.tokens for response in responses] == [[0, 0], [1, 1], [2, 2]]


class Garbles(Flaky):
    """Reports the token `made` in the first requests with id 1."""

    def __init__(self, made: Any, times: int) -> None:
        super().__init__({})
        self.made, self.times = made, times

    def poll(self, until: float | None = None) -> list[Change]:
        changes = super().poll(until)
        self.times -= 1
        if self.times < 0:
            return changes
        return [
            change._replace(segment=Segment([self.made], [-1.0], 0))
            if isinstance(change, Tokens) and change.id == 1
            else change
            for change in changes
        ]


@pytest.mark.parametrize(("made", "why"), [(-1, "token id -1"), ("7", "a token id"), (None, "a token id")])
def test_a_response_with_a_token_that_cannot_be_one_is_a_failure(made: Any, why: str) -> None:
    """A tokenizer cannot decode it: an evaluation ended with a traceback."""
    responses = generate(Garbles(made, times=1), requests(3))
    assert [response.tokens for response in responses] == [[0, 0], [1, 1], [2, 2]]
    response = generate(Garbles(made, times=ATTEMPTS), requests(3))[1]
    assert response.failure is not None and response.failure.startswith(f"the engine reported {why}")


def test_more_tokens_than_were_asked_for_are_a_failure() -> None:
    asked = [request._replace(max_new_tokens=2 - request.id % 2) for request in requests(3)]
    failures = [response.failure for response in generate(Flaky({}), asked)]
    assert failures == [None, "the engine reported 2 tokens, and max_new_tokens is 1", None]


@pytest.mark.parametrize("kind", [tuple, numpy.array])
def test_tokens_may_come_in_arrays(kind: Any) -> None:
    """The check of the weights refused log-probabilities that are not Python's."""
    response = Response(requests(1)[0])
    response.add(Segment(kind([5, 6]), kind([-0.5, -1.5]), 0))
    assert {type(token) for token in response.tokens} == {int} and response.tokens == [5, 6]
    assert {type(value) for value in response.logprobs} == {float}


def test_a_request_that_always_fails_is_reported_with_its_reason() -> None:
    engine = Flaky({1: 100})
    ended: list[Response] = []
    responses = generate(engine, requests(2), on_end=ended.append)
    assert responses[0].failure is None and responses[1].failure == "lost"
    assert engine.failures[1] == 100 - ATTEMPTS
    assert len(ended) == 2


def test_nothing_is_left_in_the_engine_after_the_time_limit() -> None:
    engine = Flaky({}, hangs=True)
    with pytest.raises(NotInTime) as caught:
        generate(engine, requests(2), limit_seconds=3.0)
    assert caught.value.unfinished == 2
    assert engine.aborted == [0, 1]
