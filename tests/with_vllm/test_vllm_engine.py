"""vLLM in process: the engine contract, real log-probabilities, and the ways in which vLLM goes silently wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ledgers import completed
from sortedrl.core.engine import Engine, EngineDied, Request, RequestPreempted, Sampling
from sortedrl.core.rollout import ENVIRONMENT, Prompt, Segment
from sortedrl.engines.checked_weights import CheckedWeights, WeightsDiffer
from sortedrl.engines.vllm import VllmEngine
from sortedrl.models import BUILT_IN_MODEL
from sortedrl.testing.engine_contract import EngineContract, Ledger, resumed
from tiny_llama import ON_GPU, PROBES, logprobs_of, parted_after_a_load, shake, tiny_model

DTYPE = "float32"
TOLERANCE = 1e-3 if not ON_GPU else 2e-2  # attention in float32 is done in TF32 on a GPU
BASE: dict[str, Any] = {"enforce_eager": True, "dtype": DTYPE, "seed": 0} | (
    {"gpu_memory_utilization": 0.1} if ON_GPU else {}
)


def engine_of(model: Path, slots: int, **options: Any) -> VllmEngine:
    return VllmEngine(
        str(model), slots=slots, eos_token_ids=[2], max_length=options.pop("max_length", 256), **BASE, **options
    )


@pytest.fixture(scope="module")
def shared_engines() -> Any:
    engines: dict[int, VllmEngine] = {}
    yield engines
    for engine in engines.values():
        engine.close()


class TestVllm(EngineContract):
    """One engine for all tests, as one serves a whole run: each must leave it as it found it."""

    deterministic = not ON_GPU

    @pytest.fixture(autouse=True)
    def _engines(self, shared_engines: dict[int, VllmEngine]) -> Any:
        self._shared = shared_engines
        yield
        for engine in shared_engines.values():
            engine.abort(list(engine._name_of))
            assert engine.poll() == []

    def make_engine(self, slots: int) -> Engine:
        if slots not in self._shared:
            self._shared[slots] = engine_of(BUILT_IN_MODEL, slots)
        engine = self._shared[slots]
        engine.abort(list(engine._name_of))
        return engine

    def test_aborts_do_not_change_the_tokens(self) -> None:
        """vLLM's noise is drawn for the whole batch: greedy tokens are what can be compared."""
        requests = {r.id: r for r in map(_greedy, self.requests())}
        reference = self.undisturbed(list(requests.values()))
        ledger = Ledger(self.make_engine(self.slots))
        ledger.submit(list(requests.values()))
        ledger.run_until_first_end()
        first = {id: list(ledger.segments[id]) for id in requests}
        left = ledger.open_ids
        ledger.abort(left)
        first |= {id: list(ledger.segments[id]) for id in left}
        ledger.submit([resumed(requests[id], first[id]) for id in left])
        ledger.run()
        for id in left:
            whole = [token for segment in first[id] for token in segment.tokens] + ledger.tokens(id)
            assert whole == reference.tokens(id)


def _greedy(request: Request) -> Request:
    return request._replace(sampling=Sampling(temperature=0.0))


class TestWeights:
    @pytest.fixture(scope="class", params=[True, False], ids=["tied", "untied"])
    def pair(self, request: Any, tmp_path_factory: Any) -> Any:
        folder = tmp_path_factory.mktemp("model")
        model = tiny_model(folder, tied=request.param)
        engine = engine_of(folder, 4, enable_prefix_caching=True)
        yield model, engine
        engine.close()

    def test_a_weight_update_changes_every_weight_and_drops_old_kv(self, pair: Any) -> None:
        """Both traps at once: a tied output layer that stays behind, and a prefix cache of stale KV."""
        model, engine = pair
        checked = CheckedWeights(engine, logprobs_of(model), PROBES)
        assert checked.difference() < TOLERANCE  # this fills the prefix cache with keys of the old weights
        for version in (1, 2):
            shake(model, seed=version)
            checked.update_weights(dict(model.named_parameters()), version)
            assert checked.last_difference < TOLERANCE

    def test_a_forgotten_load_is_noticed(self, pair: Any) -> None:
        model, engine = pair
        checked = CheckedWeights(engine, logprobs_of(model), PROBES)
        shake(model, seed=7)
        with pytest.raises(WeightsDiffer, match="nats per token"):
            checked.update_weights(None, 3)
        checked.update_weights(dict(model.named_parameters()), 4)

    def test_without_a_cache_reset_vllm_serves_stale_kv(self, pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """The trap itself, so that a vLLM which has fixed it shows here."""
        model, engine = pair
        checked = CheckedWeights(engine, logprobs_of(model), PROBES)
        checked.difference()
        shake(model, seed=8)
        monkeypatch.setattr(engine._core, "reset_prefix_cache", lambda: True)
        with pytest.raises(WeightsDiffer):
            checked.update_weights(dict(model.named_parameters()), 5)
        monkeypatch.undo()
        checked.update_weights(dict(model.named_parameters()), 6)

    def test_a_load_that_fails_halfway_ends_the_engine(self, tmp_path: Path) -> None:
        model = tiny_model(tmp_path, tied=False)
        engine = engine_of(tmp_path, 2)

        def torn() -> Any:
            weights = list(model.named_parameters())
            yield from weights[:3]
            raise OSError("the connection broke")

        with pytest.raises(EngineDied, match=r"failed halfway: .*connection broke"):
            engine.update_weights(torn(), 1)
        for call in (lambda: engine.submit([Request(0, Prompt("p", [3, 4]), (), 4, 0)]), engine.poll):
            with pytest.raises(EngineDied, match="failed halfway"):
                call()
        engine.close()

    @pytest.mark.parametrize("call", ["get_output", "reset_prefix_cache", "sleep", "wake_up"])
    def test_an_error_of_vllm_around_a_load_ends_the_engine(
        self, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*_: Any) -> Any:
            raise RuntimeError("CUDA error: an illegal memory access")

        model = tiny_model(tmp_path, tied=False)
        engine = engine_of(tmp_path, 2)
        engine._can_sleep = True
        monkeypatch.setattr(engine._scheduler, "has_requests", lambda: call == "get_output")
        for name in ("sleep", "wake_up"):
            monkeypatch.setattr(engine._core, name, lambda *_: None)
        monkeypatch.setattr(engine._core, call, broken)
        with pytest.raises(EngineDied, match="illegal memory access"):
            engine.sleep()
            engine.update_weights(dict(model.named_parameters()), 1)
        with pytest.raises(EngineDied, match="illegal memory access"):
            engine.submit([Request(0, Prompt("p", [3, 4]), (), 4, 0)])
        monkeypatch.undo()
        engine.close()


@pytest.mark.parametrize("reuse_kv_cache", [False, True])
def test_kept_keys_serve_the_responses_that_were_made_with_them_only(tmp_path: Path, *, reuse_kv_cache: bool) -> None:
    model = tiny_model(tmp_path, tied=False)
    engine = engine_of(tmp_path, 4, reuse_kv_cache=reuse_kv_cache)
    apart = parted_after_a_load(engine, model)
    assert apart > 0.1 if reuse_kv_cache else apart < TOLERANCE
    assert engine.reused_kv_tokens > 0  # of its own response, or of the probe with the same prompt
    engine.close()


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_is_in_the_log_probabilities(tmp_path: Path, temperature: float) -> None:
    model = tiny_model(tmp_path, tied=False)
    engine = engine_of(tmp_path, 2)
    prompt = [5, 6, 7]
    ledger = completed(engine, [Request(0, Prompt("p", prompt), (), 12, 0, Sampling(temperature=temperature))])
    expected = logprobs_of(model, temperature)(prompt, ledger.tokens(0))
    assert ledger.logprobs(0) == pytest.approx(expected, abs=10 * TOLERANCE)
    engine.close()


def test_preemptions_are_reported_and_nothing_is_lost(tmp_path: Path) -> None:
    tiny_model(tmp_path, tied=False)
    engine = engine_of(tmp_path, 8, num_gpu_blocks_override=50 if ON_GPU else 7, enable_prefix_caching=False)
    assert engine.info().kv_tokens < 8 * 200
    ledger = Ledger(engine)
    seen: list[Any] = []
    apply = ledger.apply
    ledger.apply = lambda changes: (seen.extend(changes), apply(changes))[1]  # type: ignore[method-assign]
    ledger.submit([Request(i, Prompt(str(i), [3 + i] * 100), (), 100, i, Sampling(ignore_eos=True)) for i in range(8)])
    ledger.run()
    assert all(len(ledger.tokens(i)) == 100 for i in range(8))
    assert any(isinstance(change, RequestPreempted) for change in seen)
    engine.close()


def test_what_vllm_cannot_take_fails_with_a_reason(tmp_path: Path) -> None:
    tiny_model(tmp_path, tied=False)
    engine = engine_of(tmp_path, 2, max_length=64)
    ledger = Ledger(engine)
    too_long, none, outside, good = [3] * 70, [], [3, 9999], [3, 4]
    ledger.submit([Request(i, Prompt(str(i), p), (), 4, i) for i, p in enumerate((too_long, none, outside, good))])
    answered = (Segment([5], [-1.0], 0), Segment([9999], [0.0], ENVIRONMENT))
    ledger.submit([Request(4, Prompt("4", good), answered, 4, 4)])
    ledger.run()
    assert 3 in ledger.finished and {0, 1} <= set(ledger.failed)
    assert "raise it if the model has more positions" in ledger.failed[0] and "the prompt is empty" in ledger.failed[1]
    assert all(id in ledger.failed and "token id 9999" in ledger.failed[id] for id in (2, 4))
    stops = Request(6, Prompt("6", good), (), 4, 6, Sampling(stop_strings=("x",)))
    twice = Request(5, Prompt("5", good), (), 4, 5)
    for requests, reason in (([twice, stops], "tokenizer"), ([twice, twice], "request 5")):
        with pytest.raises(ValueError, match=reason):
            engine.submit(requests)
    assert engine.poll() == [], "none of them was taken"
    engine.close()


class Numbers:
    """A tokenizer that writes token 7 as <7>."""

    def __len__(self) -> int:
        return 64

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return "".join(f"<{token}>" for token in tokens)

    def batch_decode(self, many: Sequence[Sequence[int]], **_: Any) -> list[str]:
        return [self.decode(tokens) for tokens in many]


def test_a_stop_string_that_is_completed_at_the_limit_is_no_truncation() -> None:
    engine = engine_of(BUILT_IN_MODEL, 2, tokenizer=Numbers())
    asked = _greedy(Request(0, Prompt("0", [3, 4]), (), 4, 0))
    free = completed(engine, [asked])
    assert free.finished == {0: True}
    stops = replace(asked.sampling, stop_strings=(Numbers().decode(free.tokens(0)),))
    ledger = completed(engine, [asked._replace(sampling=stops)])
    assert ledger.tokens(0) == free.tokens(0) and ledger.finished == {0: False}
    engine.close()


@pytest.mark.skipif(not ON_GPU, reason="sleeping needs a GPU's memory to give away")
def test_sleep_gives_memory_away_and_comes_back(tmp_path: Path) -> None:
    """Both ways to sleep with one engine: vLLM allows a process only one with sleep mode."""
    model = tiny_model(tmp_path, tied=True)
    engine = engine_of(tmp_path, 4, enable_sleep_mode=True)
    checked = CheckedWeights(engine, logprobs_of(model), PROBES)
    assert checked.difference() < TOLERANCE
    for version, sleep in enumerate((engine.sleep, engine.sleep_until_update, engine.sleep), start=1):
        free_before = torch.cuda.mem_get_info()[0]
        sleep()
        assert torch.cuda.mem_get_info()[0] > free_before + (1 << 30)
        if sleep == engine.sleep_until_update:
            with pytest.raises(RuntimeError, match="dropped its weights"):
                checked.difference()
            with pytest.raises(RuntimeError, match="dropped its weights"):
                engine.update_weights(None, version)
        shake(model, seed=version)
        checked.update_weights(dict(model.named_parameters()), version)
        assert checked.last_difference < TOLERANCE
    engine.sleep()
    assert checked.difference() < TOLERANCE, "it wakes for what is submitted"
    engine.close()
