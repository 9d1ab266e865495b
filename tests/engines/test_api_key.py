"""The API key of a server: it is sent, and it is in nothing that we write or print."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install '.[http]'")

from transformers import AutoModelForCausalLM

import toy
from sglang_stand_in import SglangStandIn
from small_models import model_of
from sortedrl.cli import main
from sortedrl.core import EngineDied, Request
from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.engine import Failed
from sortedrl.core.rollout import Prompt
from sortedrl.engines.servers.sglang import SglangEngine
from sortedrl.settings.api_key import VARIABLE

KEY = "sk-Zq83_only-for-the-server"
ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def server() -> Iterator[SglangStandIn]:
    found = SglangStandIn(model_of("Llama"), api_key=KEY)
    yield found
    found.close()


def engine_at(server: SglangStandIn, key: str | None) -> SglangEngine:
    return SglangEngine(server.url, slots=2, eos_token_ids=[7], api_key=key)


def test_the_key_is_sent_with_every_request(server: SglangStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, f"{KEY}\n")  # as a file of secrets has it
    engine = engine_at(server, None)
    engine.update_weights(model_of("Llama", seed=3).state_dict(), 1)
    engine.submit([Request(0, Prompt("p", [3, 4]), (), 4, 0)])
    changes = []
    while not changes or changes[-1].id != 0 or not hasattr(changes[-1], "truncated"):
        changes += engine.poll()
    assert not any(isinstance(change, Failed) for change in changes)
    engine.close()


@pytest.mark.parametrize(("key", "words"), [(None, "requires an API"), ("sk-wrong-one", "does not accept this API")])
def test_a_missing_or_wrong_key_is_one_clear_line(
    server: SglangStandIn, key: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ConfigurationError, match=f"{words}.*{VARIABLE}") as raised:
        engine_at(server, key)
    assert "sk-wrong-one" not in str(raised.value)


def test_a_key_that_the_server_repeats_is_hidden(server: SglangStandIn) -> None:
    """The stand-in puts what was sent into its answer: in a failed request, and in a weight update."""
    engine = engine_at(server, KEY)
    server.api_key = "another since"
    engine.submit([Request(0, Prompt("p", [3, 4]), (), 4, 0)])
    failed = [change for _ in range(2) for change in engine.poll() if isinstance(change, Failed)]
    assert "Unauthorized: Bearer (hidden)" in failed[0].reason
    with pytest.raises(EngineDied) as raised:
        engine.update_weights(model_of("Llama").state_dict(), 1)
    assert "(hidden)" in str(raised.value) and KEY not in str(raised.value)
    engine.close()


def test_no_file_of_a_run_and_nothing_that_it_prints_has_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setenv(VARIABLE, KEY)
    model = toy.make_model(tmp_path / "model")
    server = SglangStandIn(AutoModelForCausalLM.from_pretrained(model).eval(), api_key=KEY)
    words = ["--task", "toy:SayA", "--model", str(model), "--engine", "sglang", "--engine-urls", server.url]
    words += ["--slots", "8", "--rollouts-per-update", "4", "--prompts-per-cohort", "4", "--rollouts-per-prompt", "2"]
    words += ["--max-response-tokens", "6", "--max-prompt-tokens", "16", "--eval-problems", "2", "--threads", "1"]
    words += ["--reward-workers", "0"]
    try:
        assert main(["train", *words, "--updates", "1", "--out", str(tmp_path / "run")]) == 0
    finally:
        server.close()
    assert main(["train", *words, "--updates", "1", "--out", str(tmp_path / "other")]) == 2, "the server is gone"
    printed = capfd.readouterr()
    assert KEY not in printed.out + printed.err
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"config.json", "events.jsonl", "metrics.jsonl"} <= {path.name for path in files}
    assert not any(KEY.encode() in path.read_bytes() for path in files)


@pytest.mark.parametrize("engine", ["sglang", "vllm-server", "vllm", "embedded"])
def test_a_key_among_the_options_is_refused_without_showing_it(engine: str, capfd: Any, tmp_path: Path) -> None:
    urls = ["--engine-urls", "http://127.0.0.1:1"] if engine in ("sglang", "vllm-server") else []
    words = ["--engine", engine, *urls, "--engine-options", "api_key", KEY, "--out", str(tmp_path / "run")]
    for extra in ([], ["--dry-run"]):
        assert main(["train", *words, *extra]) == 2
    file = tmp_path / "settings.toml"
    file.write_text(f'engine = "{engine}"\n[engine_options]\napi_key = "{KEY}"\n')
    assert main(["train", "--config", str(file), *urls]) == 2
    printed = capfd.readouterr()
    assert KEY not in printed.out + printed.err and printed.err.count(VARIABLE) == 3
    assert not (tmp_path / "run").exists()


def test_a_key_that_no_header_can_hold_is_refused_without_showing_it(server: SglangStandIn) -> None:
    with pytest.raises(ConfigurationError, match="characters that an HTTP header cannot hold") as raised:
        engine_at(server, "sk-\nevil: 1")
    assert "evil" not in str(raised.value)


def test_every_server_command_in_the_project_binds_to_loopback() -> None:
    """vLLM's default is every interface, and its development mode runs methods for any client."""
    start = re.compile(r"(vllm serve|sglang\.launch_server) (?!--host|MODEL --host|--model-path MODEL --host).{0,60}")
    pages = [*ROOT.glob("src/**/*.py"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.sh")]
    unbound = [f"{page}: {found.group()}" for page in pages for found in start.finditer(page.read_text("utf-8"))]
    assert not unbound
