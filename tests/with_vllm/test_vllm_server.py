"""A real vLLM server over HTTP: the contracts of engines and of servers, and what is vLLM's own."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from test_vllm_engine import DTYPE, TOLERANCE

from ledgers import completed
from server_contract import SLOTS, ServerContract, ServerEnds, ServerTests, endless
from server_process import ServerProcess, serving
from sortedrl.cli import main
from sortedrl.core import Request
from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.engine import EngineDied, RequestPreempted, Sampling
from sortedrl.core.rollout import Prompt
from sortedrl.engines.checked_weights import CheckedWeights
from sortedrl.engines.servers import base as server_base
from sortedrl.engines.servers import vllm as vllm_server
from sortedrl.engines.servers.vllm import VllmServerEngine
from sortedrl.models import BUILT_IN_MODEL, DIALOGUE_MODEL
from sortedrl.settings.api_key import VARIABLE
from sortedrl.testing.engine_contract import Ledger
from tiny_llama import ON_GPU, logprobs_of, shake, tiny_model
from weight_handles import GPU, fabricated

MAX_LENGTH = 256


def command(model: Path, *flags: str) -> list[str]:
    """vLLM's own server, with the flags that docs/engines.md names."""
    parts = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    parts += ["--host", "127.0.0.1", "--port", "{port}", "--dtype", DTYPE, "--enforce-eager"]
    parts += ["--max-model-len", str(MAX_LENGTH), "--max-num-seqs", str(SLOTS)]
    parts += ["--tokens-only", "--logprobs-mode", "processed_logprobs", *flags]
    # A fixed size: vLLM would otherwise measure what others on the GPU leave.
    return parts + (["--gpu-memory-utilization", "0.03", "--kv-cache-memory-bytes", str(2**30)] if ON_GPU else [])


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
    flags = ["--num-gpu-blocks-override", "80" if ON_GPU else "9", "--no-enable-prefix-caching"]
    with serve(model[0], tmp_path_factory.mktemp("log") / "server.log", *flags, "--stream-interval", "8") as made:
        yield made


def prefix_cache_hits(server: ServerProcess) -> float:
    with urllib.request.urlopen(server.url + "/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:prefix_cache_hits_total{"))


def test_a_server_with_drafts(model: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU it is refused, because sampled responses would be wrong. Greedy ones are right, and tell the rest."""
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    with serve(model[0], tmp_path / "server.log", "--speculative-config", json.dumps(ngram)) as server:
        with pytest.raises(ConfigurationError, match="does not decide its tokens"):
            VllmServerEngine(server.url, slots=SLOTS, eos_token_ids=[2], seeded=True)
        if not ON_GPU:
            with pytest.raises(ConfigurationError, match="does not apply the temperature to drafts"):
                VllmServerEngine(server.url, slots=SLOTS, eos_token_ids=[2])
            monkeypatch.setattr(vllm_server, "refused_drafts_of_server", lambda *_, **__: None)
        engine = VllmServerEngine(server.url, slots=SLOTS, eos_token_ids=[2])
        greedy = Sampling(temperature=0.0, ignore_eos=True)
        prompts = [[5, 6, 7], [9] * 20, [11, 12] * 8]
        asked = [Request(i, Prompt(str(i), prompt), (), 61 + i, i, greedy) for i, prompt in enumerate(prompts)]
        ledger = completed(engine, asked)
        for i, prompt in enumerate(prompts):
            assert len(ledger.tokens(i)) == 61 + i and ledger.finished[i]
            expected = logprobs_of(model[1])(prompt, ledger.tokens(i))
            assert ledger.logprobs(i) == pytest.approx(expected, abs=10 * TOLERANCE)
        with urllib.request.urlopen(server.url + "/metrics") as answer:
            counts = [
                line for line in answer.read().decode().splitlines() if "spec_decode_num_accepted_tokens_total" in line
            ]
        assert float(counts[-1].split()[-1]) > 10, "several tokens per step"
        engine.close()


class TestContract(ServerContract):
    engine_type = VllmServerEngine


class TestServer(ServerTests):
    engine_type = VllmServerEngine
    tolerance = TOLERANCE

    def test_seeds_repeat_a_response_and_a_resume_does_not_replay_its_noise(self, server: ServerProcess) -> None:
        def run(*requests: Request) -> Ledger:
            return completed(self.engine_at(server, slots=1, seeded=True), requests)

        request = endless(0, 40)
        first, second = run(request), run(request)
        assert first.tokens(0) == second.tokens(0)
        other = Request(0, request.prompt, (), 40, 99, request.sampling)
        assert run(other).tokens(0) != first.tokens(0)

    def test_a_load_without_weights_empties_the_prefix_cache(self, server: ServerProcess) -> None:
        def hits_of_a_repeated_prompt(version: int | None) -> float:
            before = prefix_cache_hits(server)
            if version is not None:
                ledger.engine.update_weights(None, version)
            ledger.submit([Request(next(ids), Prompt("same", [7] * 150), (), 2, 0)])
            ledger.run()
            return prefix_cache_hits(server) - before

        ledger, ids = Ledger(self.engine_at(server)), iter(range(3))
        hits_of_a_repeated_prompt(None)
        assert hits_of_a_repeated_prompt(None) > 0 == hits_of_a_repeated_prompt(5)

    def test_what_the_server_rejects_fails_with_its_reason(self, server: ServerProcess) -> None:
        too_long = Request(0, Prompt("long", [3] * (MAX_LENGTH + 10)), (), 4, 0)
        nothing = Request(1, Prompt("nothing", []), (), 4, 0)
        asked = [too_long, nothing, Request(2, Prompt("good", [3, 4]), (), 4, 0)]
        ledger = completed(self.engine_at(server), asked)
        assert list(ledger.finished) == [2] and set(ledger.failed) == {0, 1}
        assert f"longer than the maximum model length of {MAX_LENGTH}" in ledger.failed[0]
        assert all("the server refused it" in reason for reason in ledger.failed.values())

    def test_preemptions_come_from_the_servers_own_count(
        self, doomed: ServerProcess, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """All requests fit at first. Then their KV does not, and half of them wait, each time for about a second.

        On a busy machine the tokens of that second arrive at once, and the wait cannot be seen: hence several rounds.
        """
        monkeypatch.setattr(server_base, "WATCH_SECONDS", 0.1)
        ledger = Ledger(self.engine_at(doomed, slots=SLOTS))
        preempted_midway: list[RequestPreempted] = []
        first_id = 0
        while not preempted_midway and first_id < 10 * 2 * SLOTS:
            ids = range(first_id, first_id + 2 * SLOTS)
            ledger.submit([endless(id, 240) for id in ids])
            while ledger.open_ids:
                changes = ledger.engine.poll()
                preempted_midway += [c for c in changes if isinstance(c, RequestPreempted) and c.recompute > 100]
                ledger.apply(changes)
            assert not ledger.failed
            assert all(len(ledger.tokens(id)) == 240 for id in ids)
            first_id = ids.stop
        assert preempted_midway


def metrics_of(run: Path, updates: int) -> dict[str, Any]:
    """Of a whole run in which engine and learner had the same weights at each of so many updates."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    checked = [line for line in lines if "weight_difference" in line]
    assert len(checked) == updates
    assert all(line["weight_difference"] < 1e-2 and 0 <= line.get("mismatch_kl", 0.0) < 1e-3 for line in checked)
    return dict(json.loads((run / "summary.json").read_text())["metrics"])


OVERLAP = ["--overlap", "--max-staleness", "4"]


@pytest.mark.parametrize(
    "flags",
    [[], OVERLAP, ["--stream", "--mode", "baseline"], [*OVERLAP, "--stream"]],
    ids=["in turn", "overlap", "streamed", "overlap, streamed"],
)
def test_training_with_a_server(
    tmp_path: Path, flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server requires an API key."""
    small = [
        "--slots",
        str(SLOTS),
        "--rollouts-per-update",
        "8",
        "--prompts-per-cohort",
        "8",
        "--rollouts-per-prompt",
        "4",
    ]
    small += ["--max-prompt-tokens", "128", "--max-response-tokens", "96", "--eval-problems", "8", "--dtype", DTYPE]
    monkeypatch.delenv(VARIABLE, raising=False)
    with serve(BUILT_IN_MODEL, tmp_path / "server.log", "--enable-prefix-caching", "--api-key", "sk-a-b") as server:
        at = ["--engine", "vllm-server", "--engine-urls", server.url]
        assert main(["train", *at, *small, *flags, "--updates", "4", "--out", str(tmp_path / "run")]) == 2
        assert "requires an API key" in capsys.readouterr().err
        monkeypatch.setenv(VARIABLE, "sk-a-b")
        assert main(["train", *at, *small, *flags, "--updates", "4", "--out", str(tmp_path / "run")]) == 0
    run_metrics = metrics_of(tmp_path / "run", updates=4)
    assert ("learner" in run_metrics["idle_parts"]) != ("--overlap" in flags)
    if flags != [*OVERLAP, "--stream"]:  # a slow learner leaves nothing to stream: the next update is complete by then
        assert (run_metrics["streamed_fraction"] > 0) == ("--stream" in flags)


@pytest.mark.parametrize("flags", [[], OVERLAP], ids=["in turn", "overlap"])
def test_rollouts_of_several_turns_with_a_server(tmp_path: Path, flags: list[str]) -> None:
    """Environments in worker processes."""
    small = ["--slots", str(SLOTS), "--rollouts-per-update", "8", "--prompts-per-cohort", "8", "--updates", "3"]
    small += ["--rollouts-per-prompt", "4", "--max-response-tokens", "96", "--eval-problems", "8", "--dtype", DTYPE]
    small += ["--max-prompt-tokens", "256", "--max-context-tokens", "480", "--task", "knights_and_knaves:dialogue"]
    with serve(DIALOGUE_MODEL, tmp_path / "server.log", "--enable-prefix-caching", "--max-model-len", "480") as server:
        at = ["--engine", "vllm-server", "--engine-urls", server.url, "--task-options", "count", "400"]
        words = ["train", *at, *small, "--scoring", "background", *flags, "--out", str(tmp_path / "run")]
        assert main(words) == 0
    run_metrics = metrics_of(tmp_path / "run", updates=3)
    assert run_metrics["rejected"] == 0 and run_metrics["turns_mean"] > 1 and run_metrics["environment_tokens"] > 0


def test_a_profile_loads_the_servers_own_weights_again(tmp_path: Path) -> None:
    sizes = ["--slots", "4", "--max-context-tokens", "400", "--steps", "2", "--repeats", "1"]
    out = tmp_path / "profile.json"
    with serve(BUILT_IN_MODEL, tmp_path / "server.log", "--max-model-len", "400") as server:
        at = ["--engine", "vllm-server", "--engine-urls", server.url, "--out", str(out)]
        assert main(["profile", *at, *sizes]) == 0
        found = json.loads(out.read_text())
        assert found["kv_tokens"] > 400 and found["weight_update_seconds"] is None  # which weights it serves is unknown
        assert main(["profile", *at, *sizes, "--model", str(BUILT_IN_MODEL)]) == 0
        assert json.loads(out.read_text())["weight_update_seconds"] > 0.01


class TestEnds(ServerEnds):
    engine_type = VllmServerEngine


@pytest.fixture(scope="module")
def ipc_server(model: tuple[Path, Any], tmp_path_factory: Any) -> Iterator[ServerProcess]:
    """With the IPC backend, for which vLLM 0.25 imports ray. On a GPU the weights really go by CUDA IPC."""
    flags = ["--weight-transfer-config", '{"backend": "ipc"}']
    folder = tmp_path_factory.mktemp("log")
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    if find_spec("ray") is None:
        (folder / "ray.py").write_text("def is_initialized():\n    return False\n")
        environment["PYTHONPATH"] = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(folder)])
    with serving(command(model[0], *flags), folder / "server.log", **environment) as made:
        yield made


class TestWeightHandles:
    def test_every_weight_changes(self, ipc_server: ServerProcess, model: tuple[Path, Any]) -> None:
        engine = VllmServerEngine(ipc_server.url, slots=SLOTS, eos_token_ids=[2], vocabulary=64)
        assert engine.takes_handles
        shake(model[1], seed=5)
        checked = CheckedWeights(engine, logprobs_of(model[1]), [[5, 6, 7, 8] * 20], tolerance=TOLERANCE)
        checked.update_weights(dict(model[1].named_parameters()), 1)
        engine.close()

    def test_handles_of_another_gpu_end_the_engine(self, ipc_server: ServerProcess) -> None:
        """The last test of this server: it stays paused in the middle of a weight update."""
        engine = VllmServerEngine(ipc_server.url, slots=SLOTS, eos_token_ids=[2], vocabulary=64)
        with pytest.raises(EngineDied, match=f"restart the server on the learner's GPU .{GPU}., or without the IPC"):
            engine._update_from(fabricated(), 2)
        with pytest.raises(EngineDied):
            engine.submit([endless(0, 1)])
        engine.close()


def test_vllm_reads_our_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferUpdateInfo

    weights = fabricated()
    read = IPCWeightTransferUpdateInfo(**weights.for_vllm())
    assert read.names == list(weights.tensors)
    assert read.ipc_handles == [{GPU: handle} for handle in weights.handles]
