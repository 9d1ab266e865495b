"""A real SGLang server over HTTP, on a CPU: the engine contract, weights, and what can go wrong with a server.

SGLang's scheduler, cache, sampler, HTTP interface and weight updates are its own; its compiled kernels are not there
(without_kernels), so that its PyTorch code computes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_contract import EngineContract, Ledger
from server_process import ServerProcess, serving
from sortedrl.core import Controller, EngineDied, Prompts, Request, Sampling, Schedule, ScoreAtOnce
from sortedrl.core.engine import Engine
from sortedrl.core.rollout import Prompt
from sortedrl.core.schedule import ConfigurationError
from sortedrl.engines.checked_weights import CheckedWeights
from sortedrl.engines.pool import Pool
from sortedrl.engines.sglang import SglangEngine
from tiny_llama import PROBES, logprobs_of, shake, tiny_model

SLOTS = 8
END = 2  # the model's own, which SGLang heeds whatever it is told
TOLERANCE = 1e-3
WITHOUT_KERNELS = Path(__file__).parent / "without_kernels"


def command(model: Path, *flags: str) -> list[str]:
    parts = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--skip-tokenizer-init"]
    parts += ["--host", "127.0.0.1", "--port", "{port}", "--dtype", "float32", "--device", "cpu"]
    parts += ["--attention-backend", "torch_native", "--disable-cuda-graph", "--skip-server-warmup"]
    return [*parts, "--max-running-requests", str(SLOTS), "--max-total-tokens", "8192", *flags]


def serve(model: Path, log: Path, *flags: str) -> AbstractContextManager[ServerProcess]:
    path = os.pathsep.join(filter(None, [str(WITHOUT_KERNELS), os.environ.get("PYTHONPATH", "")]))
    return serving(command(model, *flags), log, SGLANG_USE_CPU_ENGINE="1", OMP_NUM_THREADS="1", PYTHONPATH=path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("tied-model")
    return folder, tiny_model(folder, tied=True)


@pytest.fixture(scope="module")
def server(model: tuple[Path, Any], tmp_path_factory: Any) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    with serve(model[0], log, "--incremental-streaming-output") as made:
        yield made


@pytest.fixture(scope="module")
def doomed(model: tuple[Path, Any], tmp_path_factory: Any) -> Iterator[ServerProcess]:
    """Repeats all tokens in every event, and is killed in the last test that uses it."""
    with serve(model[0], tmp_path_factory.mktemp("log") / "server.log") as made:
        yield made


def engine_at(server: ServerProcess, slots: int = 4, eos: Sequence[int] = (), **options: Any) -> SglangEngine:
    return SglangEngine(server.url, slots=slots, eos_token_ids=eos, **options)


def endless(id: int, budget: int, **sampling: Any) -> Request:
    return Request(id, Prompt(str(id), [3 + id % 40] * 6), (), budget, id, Sampling(ignore_end=True, **sampling))


class Contract(EngineContract):
    long_budget = 200

    def at(self, server: ServerProcess, model: tuple[Path, Any]) -> Iterator[None]:
        self._at, self._model = server, model[1]
        self._engines: list[SglangEngine] = []
        yield
        for engine in self._engines:
            engine.close()

    def make_engine(self, slots: int) -> Engine:
        self._engines.append(engine_at(self._at, slots, eos=[END]))
        return self._engines[-1]

    def weights(self, version: int) -> Any:
        return self._model.state_dict()

    def reproducible(self, request: Request) -> Request:
        return replace(request, sampling=Sampling(temperature=0.0))


class TestSglangServer(Contract):
    @pytest.fixture(autouse=True)
    def _server(self, server: ServerProcess, model: tuple[Path, Any]) -> Iterator[None]:
        yield from self.at(server, model)


class TestSglangServerThatRepeatsAllTokens(Contract):
    @pytest.fixture(autouse=True)
    def _server(self, doomed: ServerProcess, model: tuple[Path, Any]) -> Iterator[None]:
        yield from self.at(doomed, model)


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
    learner = model[1]
    engine = engine_at(server)
    checked = CheckedWeights(engine, logprobs_of(learner), PROBES)
    for version in (1, 2):
        shake(learner, seed=version)
        checked.load(dict(learner.named_parameters()), version)
        assert checked.last_difference < TOLERANCE
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
    with torch.no_grad():
        logits = learner(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float()
    expected = torch.log_softmax(logits / temperature, -1)
    for position, token in enumerate(tokens):
        assert ledger.logprobs(0)[position] == pytest.approx(float(expected[position, token]), abs=10 * TOLERANCE)


def test_what_the_server_rejects_fails_with_its_reason(server: ServerProcess) -> None:
    ledger = Ledger(engine_at(server))
    too_long = Request(0, Prompt("long", [3] * 300), (), 4, 0)
    ledger.submit([too_long, Request(2, Prompt("good", [3, 4]), (), 4, 0)])
    ledger.run()
    assert list(ledger.finished) == [2] and set(ledger.failed) == {0}
    assert "the server refused it" in ledger.failed[0] and "length" in ledger.failed[0]


def test_more_slots_than_the_server_runs_are_refused(server: ServerProcess) -> None:
    with pytest.raises(ConfigurationError, match=r"at most 8 requests at once, and this engine has 9 slots"):
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


def test_a_server_killed_in_mid_rollout_hands_out_what_came_then_is_dead(
    doomed: ServerProcess, server: ServerProcess
) -> None:
    """In a pool the other server goes on with its requests; alone, the engine says that it died."""
    alone = Ledger(engine_at(doomed, slots=2))
    pooled = Ledger(Pool([engine_at(doomed, slots=2), engine_at(server, slots=2)]))
    pooled.submit([endless(id, 200) for id in range(8)])
    while min(len(pooled.tokens(id)) for id in range(4)) < 5:
        pooled.apply(pooled.engine.poll())
    alone.submit([endless(id, 200) for id in range(1000)])  # more than it can have done
    while not alone.tokens(1):
        alone.apply(alone.engine.poll())
    doomed.kill()
    pooled.run()
    assert sorted(pooled.finished) == list(range(8)) and not pooled.failed
    assert all(len(pooled.tokens(id)) == 200 for id in range(8))
    with pytest.raises(EngineDied, match="does not answer any more"):
        while True:
            alone.apply(alone.engine.poll())
    assert not alone.failed, "no retry is used up"
    assert alone.engine.stop(range(1000)) == []
    pooled.engine.close()  # type: ignore[attr-defined]


def test_weights_that_do_not_load_end_the_engine(server: ServerProcess, model: tuple[Path, Any]) -> None:
    """The last test of this server: it stays paused."""
    engine = engine_at(server)
    wrong = {name: weight[:-1] if weight.ndim == 2 else weight for name, weight in model[1].state_dict().items()}
    with pytest.raises(EngineDied, match=r"weights of version 1 did not load to the end .*restart the server"):
        engine.load(wrong, 1)
    with pytest.raises(EngineDied, match="did not load to the end"):
        engine.submit([endless(0, 3)])
    engine.close()
