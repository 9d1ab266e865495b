"""Both simulated engines keep the contract and their invariants, with ample memory and with one that preempts."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_simulated_engine import ends, request, to_end, tokens_of

from multi_token import MultiTokenEngine
from sortedrl.core import Change, RequestFailed, RequestFinished, RequestPreempted, RequestStarted
from sortedrl.core.engine import Engine
from sortedrl.engines.simulated import SimulatedEngine
from sortedrl.engines.simulated_chunked_prefill import ChunkedPrefillEngine
from sortedrl.engines.step_time import StepTime
from sortedrl.testing.engine_contract import EngineContract

STEP_TIME = StepTime(((1, 0.001), (8, 0.002)), 1e-6, 1e-5, prefill_tokens_per_step=64, per_prefill_step=0.001)
SLOW_STEPS = StepTime(((0, 0.5), (8, 2.5)), 0.01, 0.1, prefill_tokens_per_step=10, per_prefill_step=2.0)
KINDS = pytest.mark.parametrize("kind", [SimulatedEngine, ChunkedPrefillEngine])


def engine(kind: type[SimulatedEngine], slots: int, **options: Any) -> SimulatedEngine:
    return kind(slots=slots, step_time=SLOW_STEPS, length_of=lambda request: request.seed, **options)


class TestSimulated(EngineContract):
    honors_ignore_eos = False

    @pytest.fixture(autouse=True, params=[SimulatedEngine, ChunkedPrefillEngine, MultiTokenEngine])
    def _kind(self, request: pytest.FixtureRequest) -> None:
        self.kind = request.param

    @pytest.fixture(autouse=True, params=[None, 90], ids=["ample memory", "little memory"])
    def _memory(self, request: pytest.FixtureRequest) -> None:
        self.kv_tokens = request.param

    def make_engine(self, slots: int) -> Engine:
        return self.kind(
            slots=slots, step_time=STEP_TIME, length_of=lambda request: 20 + request.seed % 13, kv_tokens=self.kv_tokens
        )


@KINDS
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 30)), min_size=1, max_size=12),
    slots=st.integers(1, 4),
    limits=st.lists(st.floats(0.1, 5.0), max_size=6),
)
def test_looking_in_between_changes_nothing(
    kind: type[SimulatedEngine], sizes: list[tuple[int, int]], slots: int, limits: list[float]
) -> None:
    def run(limits: list[float]) -> list[tuple[int, float]]:
        one = engine(kind, slots)
        one.submit([request(id, length, prompt=prompt) for id, (length, prompt) in enumerate(sizes)])
        changes: list[Change] = []
        for limit in limits:
            changes += one.poll(until=one.now() + limit)
        return ends([*changes, *to_end(one)])

    looked, undisturbed = run(limits), run([])
    assert [id for id, _ in looked] == [id for id, _ in undisturbed]
    assert [at for _, at in looked] == pytest.approx([at for _, at in undisturbed])


@KINDS
@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 20)), min_size=1, max_size=15),
    slots=st.integers(1, 5),
    kv_tokens=st.integers(4, 60),
    stop_at=st.floats(0.0, 60.0),
    options=st.fixed_dictionaries({"prefix_cache": st.booleans(), "reuse_kv_cache": st.booleans()}),
)
def test_memory_is_never_overdrawn_and_every_request_ends_once(
    kind: type[SimulatedEngine],
    sizes: list[tuple[int, int]],
    slots: int,
    kv_tokens: int,
    stop_at: float,
    options: dict[str, bool],
) -> None:
    one = engine(kind, slots, kv_tokens=kv_tokens, **options)
    requests = [request(id, length, prompt=prompt) for id, (length, prompt) in enumerate(sizes)]
    one.submit(requests)
    changes: list[Change] = []
    while one.now() < stop_at and (new := one.poll(until=stop_at)):
        changes += new
        assert one._cached + one._turns.tokens <= kv_tokens
        assert one.running <= slots
    ended = [change.id for change in changes if isinstance(change, RequestFinished | RequestFailed)]
    changes += one.abort([r.id for r in requests if r.id not in ended])
    assert one.poll() == []
    assert one._cached == one.running == 0
    assert len(ended) == len(set(ended))
    for finished in (change for change in changes if isinstance(change, RequestFinished)):
        assert tokens_of(changes, finished.id) == list(range(sizes[finished.id][0]))
    began, left = (
        sorted(c.id for c in changes if isinstance(c, kinds))
        for kinds in (RequestStarted, RequestPreempted | RequestFinished | RequestFailed)
    )
    assert set(began) >= {c.id for c in changes if isinstance(c, RequestPreempted | RequestFinished)}
    assert len(began) <= len(left) + slots
