"""The simulated engine with chunked prefill: its times on paper, as vLLM's scheduler batches prefills."""

from typing import Any

import pytest
from test_simulated_engine import ends, to_end, tokens_of

from sortedrl.core import Change, Prompt, Request, RequestStarted, Segment, Tokens
from sortedrl.engines.simulated_chunked_prefill import ChunkedPrefillEngine
from sortedrl.engines.step_time import StepTime

# A step takes 1 s; 2 s more if it prefills, and 0.1 s per token that it prefills.
STEP_TIME = StepTime(
    ((0, 1.0), (8, 1.0)), per_prefill_token=0.1, per_prefill_step=2.0, prefill_tokens_per_step=10
)  # fmt: skip


def engine(slots: int = 4, **options: Any) -> ChunkedPrefillEngine:
    """A request's seed is its length."""
    options = {"step_time": STEP_TIME, "length_of": lambda request: request.seed} | options
    return ChunkedPrefillEngine(slots=slots, **options)


def request(id: int, length: int, *, prompt: int = 1, name: str = "", prefix: int = 0) -> Request:
    segments = (Segment(range(prefix), range(-1, -prefix - 1, -1), 0),) if prefix else ()
    return Request(id, Prompt(name or str(id), range(prompt)), segments, 1000, seed=length)


def starts(changes: list[Change]) -> list[tuple[int, float]]:
    return [(change.id, pytest.approx(change.at)) for change in changes if isinstance(change, RequestStarted)]


# Time


def test_one_step_serves_several_prefills_and_generates_their_first_tokens() -> None:
    one = engine()
    one.submit([request(0, 1, prompt=4), request(1, 3, prompt=4)])
    assert dict(ends(to_end(one))) == pytest.approx({0: 3.8, 1: 5.8})


def test_requests_that_arrive_during_a_step_share_the_next_one_and_its_fixed_cost() -> None:
    one = engine()
    one.submit([request(0, 5)])
    changes = one.poll(until=3.4)  # its first step ended at 3.1
    one.submit([request(1, 1, prompt=3)])
    changes += one.poll(until=3.7)
    one.submit([request(2, 1, prompt=3)])
    changes += to_end(one)
    assert starts(changes) == [(0, 0.0), (1, 4.1), (2, 4.1)]
    assert dict(ends(changes)) == pytest.approx({1: 4.1 + 3.6, 2: 4.1 + 3.6, 0: 4.1 + 3.6 + 2.0})


def test_others_decode_in_the_steps_of_a_long_prefill() -> None:
    """Room for 9 tokens beside one that decodes: 25 tokens take three steps."""
    one = engine()
    one.submit([request(0, 4)])
    one.poll(until=3.1)
    one.submit([request(1, 1, prompt=25)])
    changes = to_end(one)
    assert dict(ends(changes)) == pytest.approx({0: 3.1 + 3 * 3.0 + 2.5, 1: 3.1 + 3 * 3.0 + 2.5})
    assert tokens_of(changes, 0) == [0, 1, 2, 3]


def test_a_request_takes_its_slot_when_a_step_has_room_for_its_tokens() -> None:
    one = engine()
    one.submit([request(id, 1, prompt=10) for id in range(3)])
    changes = to_end(one)
    assert starts(changes) == [(0, 0.0), (1, 4.0), (2, 8.0)]
    assert dict(ends(changes)) == pytest.approx({0: 4.0, 1: 8.0, 2: 12.0})


def test_contexts_that_are_still_prefilled_slow_no_decode_step_down() -> None:
    step_time = StepTime(
        ((0, 1.0), (8, 1.0)), per_cached_token=0.01, per_prefill_step=2.0, prefill_tokens_per_step=10
    )  # fmt: skip
    one = engine(step_time=step_time)
    one.submit([request(0, 2, prompt=5)])
    assert dict(ends(to_end(one))) == pytest.approx({0: 3.0 + 1.06})


def test_an_aborted_prefill_leaves_nothing_behind() -> None:
    one = engine()
    one.submit([request(0, 5, prompt=25), request(1, 5, prompt=25)])
    one.poll(until=5.0)  # the first step ended at 4
    assert one.running == 1
    changes = one.abort([0, 1])
    assert not [change for change in changes if isinstance(change, Tokens)]
    assert one.running == one._cached == 0
    one.update_weights(None, 1)
    one.submit([request(2, 1, prompt=4)])
    assert dict(ends(to_end(one))) == pytest.approx({2: 5.0 + 3.4})


def test_the_tokens_per_step_must_be_given() -> None:
    with pytest.raises(ValueError, match="prefill_tokens_per_step"):
        engine(step_time=StepTime(((0, 1.0), (8, 1.0)), per_prefill_step=1.0))


def test_more_slots_than_tokens_per_step_cause_no_halt() -> None:
    one = engine(slots=30)
    one.submit([request(id, 30, prompt=3) for id in range(30)])
    assert len(ends(to_end(one))) == 30


# The prefix cache


def seconds_of(engine: ChunkedPrefillEngine, *requests: Request) -> float:
    began = engine.now()
    engine.submit(requests)
    to_end(engine)
    return engine.now() - began


def test_a_group_prefills_its_prompt_once_per_weight_update() -> None:
    """Every other one prefills a token, as an engine must to generate the next."""
    one = engine(prefix_cache=True)
    pair = request(0, 1, prompt=5, name="p"), request(1, 1, prompt=5, name="p")
    assert seconds_of(one, *pair) == pytest.approx(3.0 + 0.5 + 0.1)
    one.update_weights(None, 1)
    assert seconds_of(one, *pair) == pytest.approx(3.0 + 0.5 + 0.1)
    assert seconds_of(one, *pair) == pytest.approx(3.0 + 0.1 + 0.1)
    assert seconds_of(one, request(2, 1, prompt=5, name="q")) == pytest.approx(3.0 + 0.5)


def test_with_reused_kv_cache_a_new_response_does_not_find_the_prompt_of_old_weights() -> None:
    one = engine(prefix_cache=True, reuse_kv_cache=True)
    assert seconds_of(one, request(0, 1, prompt=5, name="p")) == pytest.approx(3.0 + 0.5)
    one.update_weights(None, 1)
    assert seconds_of(one, request(1, 1, prompt=5, name="p")) == pytest.approx(3.0 + 0.5)
    assert seconds_of(one, request(2, 5, prompt=5, name="p", prefix=4)) == pytest.approx(3.0 + 0.1)
