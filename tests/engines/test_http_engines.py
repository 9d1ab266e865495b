"""Engines behind HTTP, against a stand-in for SGLang (tests/support/sglang_stand_in.py), which can be made to fail.
Real servers are tested in tests/with_vllm and tests/with_sglang."""

import asyncio
import gc
import os
import threading
import time
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install '.[dev]'")

from closing import closed_after
from ledgers import completed, partly_generated
from server_contract import endless
from sglang_stand_in import SglangStandIn
from small_models import VOCABULARY, model_of
from sortedrl.core import UNCHANGED, Controller, EngineDied, Prompts, Request, Sampling, Schedule, ScoreAtOnce
from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.engine import Engine, EngineBase, EngineSpec, RequestPreempted, RequestStarted, Tokens
from sortedrl.core.rollout import Prompt, Segment
from sortedrl.engines import settings as engine_settings
from sortedrl.engines.checked_weights import CheckedWeights
from sortedrl.engines.lengths import ForcedLengths
from sortedrl.engines.registry import make_engine
from sortedrl.engines.servers import base as server_base
from sortedrl.engines.servers import weight_files
from sortedrl.engines.servers.base import HttpEngine, ServerPool
from sortedrl.engines.servers.sglang import SglangEngine
from sortedrl.engines.servers.vllm import VllmServerEngine
from sortedrl.engines.servers.weight_files import write_weights
from sortedrl.engines.vllm import VllmEngine
from sortedrl.studies.bench import BenchSettings
from sortedrl.testing.engine_contract import EngineContract, Ledger
from sortedrl.training.engine import bare_engine
from tiny_llama import logprobs_of

pytestmark = pytest.mark.usefixtures("one_thread", "closes_all")


def llama(seed: int = 0) -> Any:
    """With one layer: most of the time here is the stand-in's decoding."""
    return model_of("Llama", seed, num_hidden_layers=1)


def stand_in(**options: Any) -> SglangStandIn:
    return closed_after(SglangStandIn(llama(), **options))


def engine_at(server: SglangStandIn, slots: int = 4, **options: Any) -> SglangEngine:
    options = {"unavailable_seconds": 1.5, **options}
    return closed_after(SglangEngine(server.url, slots=slots, eos_token_ids=[7], **options))


@pytest.mark.parametrize(("slots", "interval", "is_warned"), [(64, 1, True), (64, 8, False), (63, 1, False)])
def test_a_message_per_token_of_many_responses_is_warned_of(
    slots: int, interval: int, is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine_at(stand_in(stream_interval=interval), slots)
    assert caplog.text.count("--stream-interval 8") == is_warned


class TestSglangStandIn(EngineContract):
    incremental = True
    long_limit = 120

    def make_engine(self, slots: int) -> Engine:
        return engine_at(stand_in(incremental=self.incremental), slots)

    def weights(self, version: int) -> Any:
        return llama(seed=version).state_dict()

    def reproducible(self, request: Request) -> Request:
        return request._replace(sampling=Sampling(temperature=0.0))


class TestSglangStandInThatRepeatsAllTokens(TestSglangStandIn):
    incremental = False


@pytest.mark.parametrize("end", ["budget", "end token"])
def test_what_was_whole_when_it_was_aborted_is_finished(end: str) -> None:
    """Else it would be resumed with nothing left to make."""
    server = stand_in()
    engine = engine_at(server, seeded=True)
    reference = completed(engine, [endless(0, 6)])
    server.calls_ends_aborts = True
    expected = reference.tokens(0)
    if end == "end token":
        newest = max(set(expected), key=expected.index)
        expected = expected[: expected.index(newest) + 1]
        engine = closed_after(SglangEngine(server.url, slots=4, eos_token_ids=[newest], seeded=True))
    ledger = Ledger(engine)
    max_new_tokens = 6 if end == "budget" else 40
    ledger.submit([endless(0, max_new_tokens)._replace(sampling=Sampling(ignore_eos=end == "budget"))])
    while len(ledger.tokens(0)) < len(expected) - 1:
        ledger.apply(engine.poll())
    while not server.held_ends:
        time.sleep(0.005)
    ledger.abort([0])
    assert ledger.finished == {0: end == "budget"}
    assert ledger.tokens(0) == expected


def test_log_probabilities_are_the_models_own_and_follow_a_load() -> None:
    server, learner = stand_in(), llama(seed=5)
    engine = engine_at(server)
    engine.update_weights(iter(learner.state_dict().items()), 3)
    assert server.calls == ["pause", "update 3", "continue"]
    ledger = completed(engine, [endless(0, 12, temperature=0.7)])
    expected = logprobs_of(learner, 0.7)(ledger.submitted[0].prompt.tokens, ledger.tokens(0))
    assert ledger.logprobs(0) == pytest.approx(expected, abs=1e-4)


def test_a_resumed_request_draws_from_a_seed_of_its_own() -> None:
    server = stand_in()
    first = endless(0, 5)
    ledger = completed(engine_at(server, seeded=True), [first])
    ledger.submit([Request(1, first.prompt, tuple(ledger.segments[0]), 5, first.seed, first.sampling)])
    ledger.run()
    seeds = [body["sampling_params"]["sampling_seed"] for body in server.bodies]
    assert seeds[0] != seeds[1]
    assert server.bodies[1]["input_ids"] == [*first.prompt.tokens, *ledger.tokens(0)]


def test_top_p_is_refused() -> None:
    with pytest.raises(ValueError, match=r"top_p = 0\.9"):
        engine_at(stand_in()).submit([endless(0, 4, top_p=0.9)])


def test_names_are_not_prefixes_of_each_other() -> None:
    """SGLang aborts every request whose name begins with the one that it is given."""
    server = stand_in(step_seconds=0.002)
    ledger = partly_generated(engine_at(server, slots=16), [endless(id, 40) for id in range(12)], tokens=2, of=12)
    ledger.abort([0])
    ledger.run()
    assert sorted(ledger.finished) == list(range(1, 12)) and not ledger.failed


def test_a_stop_string_ends_a_response_even_where_a_resume_cuts_it() -> None:
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")))
    ledger = completed(engine_at(stand_in(), tokenizer=tokenizer), [endless(0, 40, temperature=0.0)])
    reference = ledger.tokens(0)
    pair = tokenizer.decode(reference[:2])
    request = Request(1, ledger.submitted[0].prompt, (), 40, 0, Sampling(temperature=0.0, stop_strings=(pair,)))
    kept = Segment(reference[:1], [0.0], 0)
    ledger.submit([request, request._replace(id=2, prefix=(kept,), max_new_tokens=39)])
    ledger.run()
    assert ledger.tokens(1) == reference[:2] and ledger.tokens(2) == reference[1:2]
    assert ledger.finished[1] is False and ledger.finished[2] is False


def test_what_the_server_does_not_run_is_preempted_until_it_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_base, "WATCH_SECONDS", 0.05)
    server = stand_in(runs_at_once=2, step_seconds=0.005)
    ledger = Ledger(engine_at(server, slots=4))
    seen: list[Any] = []
    ledger.submit([endless(id, 40) for id in range(4)])
    while ledger.open_ids:
        changes = ledger.engine.poll()
        seen += changes
        ledger.apply(changes)
    waited = sorted((c.id, c.recompute) for c in seen if isinstance(c, RequestPreempted))
    assert waited == [(2, 0), (3, 0)], "they had computed nothing yet"
    assert sum(isinstance(change, RequestStarted) for change in seen) == 6


# What can go wrong


def test_a_token_that_the_model_does_not_have_is_not_sent() -> None:
    ledger = completed(
        engine_at(stand_in(), vocabulary=VOCABULARY), [Request(0, Prompt("0", [VOCABULARY]), (), 5, 0), endless(1, 5)]
    )
    assert list(ledger.failed) == [0] and "vocabulary size" in ledger.failed[0] and list(ledger.finished) == [1]


def test_every_option_that_is_a_switch_is_known_as_one() -> None:
    """Any other text would count as true."""
    engines: tuple[Any, ...] = (HttpEngine, SglangEngine, VllmEngine)
    options = [parameter for engine in engines for parameter in signature(engine.__init__).parameters.values()]
    assert {option.name for option in options if option.annotation is bool} == engine_settings._SWITCHES


def test_an_error_of_our_own_after_a_stream_does_not_go_unnoticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slot would never be freed, and the next request would wait forever."""
    engine = engine_at(stand_in(), slots=1)

    def broken(sent: Any) -> None:
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr(engine, "_leave", broken)
    engine.submit([endless(0, 2), endless(1, 2)])
    deadline = engine.now() + 20
    with pytest.raises(EngineDied, match="a bug of ours"):
        while engine.now() < deadline:
            engine.poll(deadline)


def test_a_closed_engine_holds_no_file_descriptor_and_no_thread() -> None:
    def held() -> tuple[int, list[str]]:
        return len(os.listdir("/proc/self/fd")), [thread.name for thread in threading.enumerate()]

    server = stand_in()
    gc.collect()
    gc.disable()  # it would close the event loop of an engine that does not
    try:
        before = held()
        engine = SglangEngine(server.url, slots=1, eos_token_ids=[7])
        assert held() != before
        engine.close()
        unreachable = EngineSpec(model="", slots=2, max_length=64, urls=(server.url, "http://127.0.0.1:9"))
        with pytest.raises(ConfigurationError, match="no server answers"):
            make_engine("sglang", unreachable)
        deadline = time.monotonic() + 10
        while held() != before and time.monotonic() < deadline:  # the server closes its ends later
            time.sleep(0.02)
        assert held() == before
    finally:
        gc.enable()
    with pytest.raises(RuntimeError, match="closed"):
        engine.abort([1])


def test_all_engines_share_one_thread_that_outlives_any_of_them() -> None:
    server = stand_in()
    before = threading.active_count()
    first, *others = [SglangEngine(server.url, slots=1, eos_token_ids=[7]) for _ in range(3)]
    assert threading.active_count() == before + 1
    first.close()
    others[0].submit([endless(0, 2)])
    assert others[0].poll()
    for engine in others:
        engine.close()
    assert threading.active_count() == before


def test_the_end_of_the_thread_is_the_end_of_its_engines_but_not_of_later_ones() -> None:
    server = stand_in()
    engine = SglangEngine(server.url, slots=1, eos_token_ids=[7])
    engine.submit([endless(0, 200)])

    def leave() -> None:
        raise SystemExit

    engine._loop.call_soon_threadsafe(leave)
    with pytest.raises(EngineDied, match="thread has ended"):
        while True:
            engine.poll(engine.now() + 20)
    engine.close()
    later = SglangEngine(server.url, slots=1, eos_token_ids=[7])
    later.submit([endless(0, 2)])
    assert later.poll()
    later.close()


def test_a_server_of_another_kind_is_a_configuration_error() -> None:
    with pytest.raises(ConfigurationError, match=r"not vLLM, or it runs without .*VLLM_SERVER_DEV_MODE=1 vllm serve"):
        VllmServerEngine(stand_in().url, slots=4, eos_token_ids=[])


def test_limits_of_the_server_are_read_and_more_slots_are_refused() -> None:
    server = stand_in(max_running_requests=3)
    assert engine_at(server, slots=3).info().kv_tokens == 4096
    with pytest.raises(ConfigurationError, match=r"--max-running-requests 3, .*--max-running-requests 4"):
        engine_at(server, slots=4)


def test_a_killed_server_hands_out_what_came_then_is_dead() -> None:
    server = stand_in(step_seconds=0.005)
    engine = engine_at(server)
    ledger = partly_generated(engine, [endless(id, 200) for id in range(6)], tokens=3)
    while len({change.id for change in engine._outbox.delivered if isinstance(change, Tokens)}) < 4:
        time.sleep(0.005)
    server.kill()
    with pytest.raises(EngineDied, match=f"{server.url}: it no longer responds"):
        while True:
            ledger.apply(ledger.engine.poll())
    assert not ledger.failed, "no retry is used up"
    assert min(len(ledger.tokens(id)) for id in range(4)) > 3
    assert ledger.engine.abort(range(6)) == []
    for call in (lambda: ledger.engine.submit([endless(9, 2)]), lambda: ledger.engine.update_weights({}, 1)):
        with pytest.raises(EngineDied):
            call()


def test_a_request_that_is_aborted_before_its_stream_starts_frees_its_slot() -> None:
    engine = engine_at(stand_in(), slots=1)

    async def send_and_abort() -> None:
        engine._enqueue([endless(0, 60)])
        await engine._abort({0})

    asyncio.run_coroutine_threadsafe(send_and_abort(), engine._loop).result()
    engine.poll(engine.now())
    assert list(completed(engine, [endless(1, 4)]).finished) == [1]


def test_weights_that_cannot_be_written_are_a_configuration_error(tmp_path: Path) -> None:
    server = stand_in()
    engine = engine_at(server, weights_folder=tmp_path / "not-there")
    with pytest.raises(ConfigurationError, match="weights_folder"):
        engine.update_weights(llama().state_dict(), 2)
    assert server.calls == [], "the server was not touched"


def test_a_new_version_without_new_weights_empties_the_cache_all_the_same() -> None:
    """Measurements load nothing, and must pay for every resume as a run does."""
    server = stand_in()
    engine = engine_at(server)
    engine.update_weights(None, 3)
    assert engine.version == 3 and server.calls == ["pause", "flush", "continue"]


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda engine: engine,
        lambda engine: ServerPool([engine]),
        lambda engine: ForcedLengths(engine, lambda request: 3),
        lambda engine: CheckedWeights(engine, lambda tokens, start: [], [[1]]),
    ],
    ids=["server", "pool", "forced lengths", "checked"],
)
def test_weights_that_were_forgotten_are_an_error(wrapped: Callable[[HttpEngine], EngineBase]) -> None:
    """The server has its own copy, which would go on under the new version without a word."""
    engine = wrapped(engine_at(stand_in()))
    controller = Controller(
        engine, Prompts([Prompt("p", [1])]), ScoreAtOnce(len), Schedule(rollouts_per_update=1, max_response_tokens=2)
    )
    with pytest.raises(ValueError, match=r"publish\(\) without weights.*UNCHANGED"):
        controller.publish()
    assert controller.version == 0
    assert controller.publish(UNCHANGED) == 1
    engine.close()


def test_a_pool_of_servers_writes_the_weights_once_and_takes_a_folder_as_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = [stand_in() for _ in range(3)]
    pool = ServerPool([engine_at(server, slots=2, weights_folder=tmp_path) for server in servers])
    folders = []
    monkeypatch.setattr(weight_files, "write_weights", lambda *given: (folders.append(given[1]), write_weights(*given)))
    first, second = llama(seed=8), llama(seed=9)
    pool.update_weights(first.state_dict(), 4)
    assert len(folders) == 1 and list(tmp_path.iterdir()) == []
    for server in servers:
        assert server.calls == ["pause", "update 4", "continue"]
        assert torch.equal(server.model.state_dict()["lm_head.weight"], first.state_dict()["lm_head.weight"])
    write_weights(second.state_dict(), tmp_path)
    pool.update_weights(tmp_path, 5)
    pool.close()
    for server in servers:
        assert torch.equal(server.model.state_dict()["lm_head.weight"], second.state_dict()["lm_head.weight"])
    assert (tmp_path / "model.safetensors").exists(), "a folder of the caller stays"


def test_several_servers_share_all_slots() -> None:
    urls = tuple(stand_in().url for _ in range(3))
    pool, _ = bare_engine(BenchSettings(engine="sglang", engine_urls=urls, slots=8), "built-in", max_length=64)
    assert pool.slots == 8
    pool.close()
    with pytest.raises(ConfigurationError, match="there are 3 servers"):
        bare_engine(BenchSettings(engine="sglang", engine_urls=urls, slots=2), "built-in", max_length=64)


@pytest.mark.parametrize(("bytes_per_file", "files"), [(2**28, 1), (16, 9)])
def test_weights_are_written_with_their_types_and_a_tied_output_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_per_file: int, files: int
) -> None:
    from safetensors.torch import load_file

    monkeypatch.setattr(weight_files, "_FILE_BYTES", bytes_per_file)
    embedding = torch.rand(6, 3).bfloat16().T  # not contiguous
    given = {"model.embed_tokens.weight": embedding, "bias": torch.ones(1).half(), "norm": torch.rand(2)}
    given |= {"step": torch.tensor(7), "none": torch.zeros(0, 2)}
    kinds = [torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32]
    kinds += [torch.int64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float64, torch.complex64]
    given |= {str(kind): torch.tensor([0, 1, 1]).to(kind) for kind in kinds}
    write_weights(iter(given.items()), tmp_path)
    loaded = [load_file(file) for file in tmp_path.iterdir()]
    written = {name: tensor for file in loaded for name, tensor in file.items()}
    assert len(loaded) == files and written.keys() == {*given, "lm_head.weight"}
    for name, tensor in (given | {"lm_head.weight": embedding}).items():
        assert torch.equal(written[name], tensor) and written[name].dtype == tensor.dtype
