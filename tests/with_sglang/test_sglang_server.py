"""A real SGLang server over HTTP: the contracts of engines and of servers.

On a CPU its compiled kernels are not there (without_kernels), so that its PyTorch code computes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from ledgers import completed
from server_contract import SLOTS, ServerContract, ServerEnds, ServerTests
from server_process import ServerProcess, serving
from sortedrl.cli import main
from sortedrl.core import Request
from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.rollout import Prompt
from sortedrl.engines.servers import sglang
from sortedrl.engines.servers.sglang import SglangEngine
from sortedrl.models import BUILT_IN_MODEL
from sortedrl.studies.profile_file import read
from tiny_llama import ON_GPU, tiny_model
from weight_handles import GPU, fabricated

WITHOUT_KERNELS = Path(__file__).parent / "without_kernels"
STREAMING = ("--incremental-streaming-output", "--stream-interval", "8")


def command(model: Path, *flags: str) -> list[str]:
    parts = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--skip-tokenizer-init"]
    parts += ["--host", "127.0.0.1", "--port", "{port}", "--disable-cuda-graph", "--skip-server-warmup"]
    if ON_GPU:  # its kernels have no float32
        parts += ["--dtype", "bfloat16", "--attention-backend", "fa3", "--sampling-backend", "pytorch"]
        parts += ["--mem-fraction-static", "0.95"]  # at most: --max-total-tokens is far less
    else:
        parts += ["--dtype", "float32", "--attention-backend", "torch_native", "--device", "cpu"]
    return [*parts, "--max-running-requests", str(SLOTS), "--max-total-tokens", "8192", *flags]


def serve(model: Path, log: Path, *flags: str) -> AbstractContextManager[ServerProcess]:
    if ON_GPU:
        return serving(command(model, *flags), log)
    path = os.pathsep.join(filter(None, [str(WITHOUT_KERNELS), os.environ.get("PYTHONPATH", "")]))
    return serving(command(model, *flags), log, SGLANG_USE_CPU_ENGINE="1", OMP_NUM_THREADS="1", PYTHONPATH=path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("tied-model")
    return folder, tiny_model(folder, tied=True)


@pytest.fixture(scope="module")
def server(model: tuple[Path, Any], tmp_path_factory: Any) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    with serve(model[0], log, *STREAMING) as made:
        yield made


@pytest.fixture(scope="module")
def doomed(model: tuple[Path, Any], tmp_path_factory: Any) -> Iterator[ServerProcess]:
    """Repeats all tokens in every event."""
    with serve(model[0], tmp_path_factory.mktemp("log") / "server.log") as made:
        yield made


class TestContract(ServerContract):
    engine_type = SglangEngine


class TestContractWhereAllTokensAreRepeated(ServerContract):
    engine_type = SglangEngine

    @pytest.fixture
    def server(self, doomed: ServerProcess) -> ServerProcess:
        return doomed


class TestServer(ServerTests):
    engine_type = SglangEngine
    tolerance = 0.1 if ON_GPU else 1e-3

    def test_what_the_server_rejects_fails_with_its_reason(self, server: ServerProcess) -> None:
        too_long = Request(0, Prompt("long", [3] * 300), (), 4, 0)
        ledger = completed(self.engine_at(server, eos=[2]), [too_long, Request(2, Prompt("good", [3, 4]), (), 4, 0)])
        assert list(ledger.finished) == [2] and set(ledger.failed) == {0}, ledger.failed
        assert "the server refused it" in ledger.failed[0] and "length" in ledger.failed[0]

    def test_limits_of_the_server_are_read_and_more_slots_are_refused(self, server: ServerProcess) -> None:
        assert self.engine_at(server).info().kv_tokens == 8192
        with pytest.raises(ConfigurationError, match=r"--max-running-requests 8, but this engine has 9 slots"):
            self.engine_at(server, slots=9)

    def test_a_message_per_token_is_warned_of(
        self,
        server: ServerProcess,
        doomed: ServerProcess,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(sglang, "_MANY_SLOTS", 1)
        for at in (server, doomed):
            self.engine_at(at).close()
        assert [record.args for record in caplog.records if "message per token" in record.message] == [(doomed.url,)]


class TestEnds(ServerEnds):
    engine_type = SglangEngine


def test_a_profile_times_how_long_a_prefill_stops_the_others(tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    sizes = ["--slots", "4", "--max-context-tokens", "400", "--steps", "2", "--repeats", "1"]
    with serve(BUILT_IN_MODEL, tmp_path / "server.log", *STREAMING) as server:
        assert main(["profile", "--engine", "sglang", "--engine-urls", server.url, "--out", str(out), *sizes]) == 0
    found = read(out)
    assert found.prefill_step_tokens == 50 and not found.step_time().has_chunked_prefill


def test_sglang_reads_our_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its unpickler allows only what it knows."""
    from sglang.srt.utils.common import MultiprocessingSerializer
    from torch.multiprocessing import reductions

    weights = fabricated()
    payload = weights.for_sglang()
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", lambda *arguments: arguments[6])
    assert MultiprocessingSerializer.deserialize(payload) == [(name, GPU) for name in weights.tensors]
