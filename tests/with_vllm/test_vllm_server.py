"""A real vLLM server over HTTP: the engine contract, weights, and everything that can go wrong with a server."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_vllm_engine import DTYPE, TOLERANCE

from engine_contract import EngineContract, Ledger
from server_process import ServerProcess, serving
from sortedrl.core import Controller, EngineDied, Prompts, Request, Sampling, Schedule, ScoreAtOnce
from sortedrl.core.engine import Engine, Preempted
from sortedrl.core.rollout import Prompt
from sortedrl.core.schedule import ConfigurationError
from sortedrl.engines.checked_weights import CheckedWeights
from sortedrl.engines.pool import Pool
from sortedrl.engines.vllm_server import VllmServerEngine
from tiny_llama import ON_GPU, PROBES, logprobs_of, shake, tiny_model

SLOTS = 8
MAX_LENGTH = 256


def command(model: Path, *flags: str) -> list[str]:
    """vLLM's own server, with the flags that docs/engines.md names."""
    parts = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    parts += ["--host", "127.0.0.1", "--port", "{port}", "--dtype", DTYPE, "--enforce-eager"]
    parts += ["--max-model-len", str(MAX_LENGTH), "--max-num-seqs", str(SLOTS)]
    parts += ["--tokens-only", "--logprobs-mode", "processed_logprobs", *flags]
    return parts + (["--gpu-memory-utilization", "0.1"] if ON_GPU else [])


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("tied-model")
    torch.manual_seed(0)
    made = tiny_model(folder, tied=True)
    return folder, made


def serve(folder: Path, log: Path, *flags: str) -> AbstractContextManager[ServerProcess]:
    return serving(command(folder, *flags), log, VLLM_SERVER_DEV_MODE="1")


@pytest.fixture(scope="module")
def server(model: tuple[Path, Any], tmp_path_factory: Any) -> Iterator[ServerProcess]:
    with serve(model[0], tmp_path_factory.mktemp("log") / "server.log", "--enable-prefix-caching") as made:
        yield made


@pytest.fixture(scope="module")
def doomed(model: tuple[Path, Any], tmp_path_factory: Any) -> Iterator[ServerProcess]:
    """Has memory for a few requests only, and is killed in the last test that uses it."""
    flags = [
        "--num-gpu-blocks-override",
        "80" if ON_GPU else "9",
        "--no-enable-prefix-caching",
        "--stream-interval",
        "8",
    ]
    with serve(model[0], tmp_path_factory.mktemp("log") / "server.log", *flags) as made:
        yield made


def engine_at(server: ServerProcess, slots: int = 4, eos: Sequence[int] = (), **options: Any) -> VllmServerEngine:
    return VllmServerEngine(server.url, slots=slots, eos_token_ids=eos, **options)


def endless(id: int, budget: int, **sampling: Any) -> Request:
    return Request(id, Prompt(str(id), [3 + id % 40] * 6), (), budget, id, Sampling(ignore_end=True, **sampling))


class TestVllmServer(EngineContract):
    long_budget = 220

    @pytest.fixture(autouse=True)
    def _server(self, server: ServerProcess, model: tuple[Path, Any]) -> Iterator[None]:
        self._at, self._model = server, model[1]
        self._engines: list[VllmServerEngine] = []
        yield
        for engine in self._engines:
            engine.close()

    def make_engine(self, slots: int) -> Engine:
        self._engines.append(engine_at(self._at, slots))
        return self._engines[-1]

    def weights(self, version: int) -> Any:
        return self._model.state_dict()

    def reproducible(self, request: Request) -> Request:
        """vLLM's noise is drawn for the whole batch, or replayed from a resume."""
        return replace(request, sampling=Sampling(temperature=0.0))


def test_an_end_token_ends_a_response_and_is_part_of_it(server: ServerProcess) -> None:
    reference = Ledger(engine_at(server))
    reference.submit([endless(0, 30, temperature=0.0)])
    reference.run()
    end = reference.tokens(0)[7]
    ledger = Ledger(engine_at(server, eos=[end]))
    ledger.submit([replace(endless(0, 30), sampling=Sampling(temperature=0.0))])
    ledger.run()
    assert ledger.finished == {0: False}
    assert ledger.tokens(0) == reference.tokens(0)[: reference.tokens(0).index(end) + 1]


def test_weights_change_every_weight_and_old_keys_are_forgotten(server: ServerProcess, model: tuple[Path, Any]) -> None:
    """Both of vLLM's silent traps: the tied output layer, which only the tied model has, and the prefix cache."""
    learner = model[1]
    engine = engine_at(server)
    checked = CheckedWeights(engine, logprobs_of(learner), PROBES)
    for version in (1, 2):
        shake(learner, seed=version)
        checked.load(dict(learner.named_parameters()), version)
        assert checked.last_difference < TOLERANCE
    assert engine.load_seconds < 30
    engine.close()


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_is_in_the_log_probabilities(
    server: ServerProcess, model: tuple[Path, Any], temperature: float
) -> None:
    learner = model[1]
    ledger = Ledger(engine_at(server))
    ledger.engine.load(dict(learner.named_parameters()), 1)
    prompt = [5, 6, 7]
    ledger.submit([Request(0, Prompt("p", prompt), (), 12, 0, Sampling(temperature=temperature))])
    ledger.run()
    tokens = ledger.tokens(0)
    ids = torch.tensor([[*prompt, *tokens]], device=learner.device)
    with torch.no_grad():
        logits = learner(ids).logits[0, len(prompt) - 1 : -1].float()
    expected = torch.log_softmax(logits / temperature, -1)
    for position, token in enumerate(tokens):
        assert ledger.logprobs(0)[position] == pytest.approx(float(expected[position, token]), abs=10 * TOLERANCE)


def test_seeds_repeat_a_response_and_a_resume_does_not_replay_its_noise(server: ServerProcess) -> None:
    def run(*requests: Request) -> Ledger:
        ledger = Ledger(engine_at(server, slots=1, seeded=True))
        ledger.submit(requests)
        ledger.run()
        return ledger

    request = endless(0, 40)
    first, second = run(request), run(request)
    assert first.tokens(0) == second.tokens(0)
    other = Request(0, request.prompt, (), 40, 99, request.sampling)
    assert run(other).tokens(0) != first.tokens(0)


def test_what_the_server_rejects_fails_with_its_reason(server: ServerProcess) -> None:
    ledger = Ledger(engine_at(server))
    too_long = Request(0, Prompt("long", [3] * (MAX_LENGTH + 10)), (), 4, 0)
    nothing = Request(1, Prompt("nothing", []), (), 4, 0)
    ledger.submit([too_long, nothing, Request(2, Prompt("good", [3, 4]), (), 4, 0)])
    ledger.run()
    assert list(ledger.finished) == [2] and set(ledger.failed) == {0, 1}
    assert f"longer than the maximum model length of {MAX_LENGTH}" in ledger.failed[0]
    assert all("the server refused it" in reason for reason in ledger.failed.values())


def test_an_address_without_a_server_is_a_configuration_error() -> None:
    with pytest.raises(ConfigurationError, match=r"url = 'http://127.0.0.1:9': no server answers there"):
        VllmServerEngine("http://127.0.0.1:9", slots=4, eos_token_ids=[2])


def test_more_slots_than_the_server_runs_are_refused(server: ServerProcess) -> None:
    with pytest.raises(ConfigurationError, match=r"--max-num-seqs 8, and this engine has 9 slots.*--max-num-seqs 9"):
        engine_at(server, slots=9)


def test_a_whole_run_of_the_scheduler(server: ServerProcess, model: tuple[Path, Any]) -> None:
    prompts = [Prompt(f"p{i}", [3 + i % 50, 4, 5]) for i in range(24)]
    schedule = Schedule(
        mode="partial+elevator", rollouts_per_update=6, prompts_per_cohort=12, max_response_tokens=48, max_staleness=3
    )
    controller = Controller(engine_at(server, slots=8), Prompts(prompts), ScoreAtOnce(len), schedule)
    trained = []
    for batch in controller:
        trained += [rollout.id for rollout in batch]
        assert all(len(r.tokens) == len(r.logprobs) == len(r.versions) <= 48 for r in batch)
        controller.publish(model[1].state_dict())
    assert sorted(trained) == list(range(24))


def test_preemptions_come_from_the_servers_own_count(doomed: ServerProcess) -> None:
    ledger = Ledger(engine_at(doomed, slots=SLOTS))
    seen: list[Any] = []
    ledger.submit([endless(id, 240) for id in range(2 * SLOTS)])
    while ledger.open_ids:
        changes = ledger.engine.poll()
        seen += changes
        ledger.apply(changes)
    assert all(len(ledger.tokens(id)) == 240 for id in range(2 * SLOTS))
    assert any(isinstance(change, Preempted) for change in seen)


def test_a_server_killed_in_mid_rollout_hands_out_what_came_then_is_dead(
    doomed: ServerProcess, server: ServerProcess
) -> None:
    """In a pool the other server goes on with its requests; alone, the engine says that it died."""
    alone = Ledger(engine_at(doomed, slots=2))
    pooled = Ledger(Pool([engine_at(doomed, slots=2), engine_at(server, slots=2)]))
    pooled.submit([endless(id, 240) for id in range(8)])
    while min(len(pooled.tokens(id)) for id in range(4)) < 5:
        pooled.apply(pooled.engine.poll())
    alone.submit([endless(id, 240) for id in range(1000)])  # more than it can have done
    while not alone.tokens(1):
        alone.apply(alone.engine.poll())
    doomed.kill()
    pooled.run()
    assert sorted(pooled.finished) == list(range(8)) and not pooled.failed
    assert all(len(pooled.tokens(id)) == 240 for id in range(8))
    with pytest.raises(EngineDied, match="does not answer any more"):
        while True:
            alone.apply(alone.engine.poll())
    assert not alone.failed, "no retry is used up"
    assert alone.engine.stop(range(1000)) == []
    with pytest.raises(EngineDied, match=doomed.url):
        alone.engine.submit([endless(5, 3)])
    pooled.engine.close()  # type: ignore[attr-defined]


def test_weights_that_do_not_load_end_the_engine(server: ServerProcess, model: tuple[Path, Any]) -> None:
    """The last test of this server: it stays paused, with some of the new weights."""
    engine = engine_at(server)
    wrong = {name: weight[:-1] if weight.ndim == 2 else weight for name, weight in model[1].state_dict().items()}
    with pytest.raises(EngineDied, match=r"weights of version 1 did not load to the end .*restart the server"):
        engine.load(wrong, 1)
    with pytest.raises(EngineDied, match="did not load to the end"):
        engine.submit([endless(0, 3)])
    engine.close()
