"""The API key of a server: it is sent, and it is in nothing that we write or print."""

import json
import re
import traceback
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install '.[dev]'")

from aiohttp import web
from transformers import AutoModelForCausalLM

import toy
from nasty_server import NastyServer, ServerLoop
from sglang_stand_in import SglangStandIn
from small_models import model_of
from sortedrl.cli import main
from sortedrl.core import EngineDied, Request
from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.engine import RequestFailed
from sortedrl.core.rollout import Prompt
from sortedrl.engines.servers.credentials import Credentials
from sortedrl.engines.servers.sglang import SglangEngine
from sortedrl.settings.api_key import VARIABLE

KEY = "sk-Zq83_only-for-the-server"
LOGIN = "some-user:only-for-the-proxy"
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
    assert not any(isinstance(change, RequestFailed) for change in changes)
    engine.close()


@pytest.mark.parametrize(("key", "words"), [(None, "requires an API"), ("sk-wrong-one", "does not accept this API")])
def test_a_missing_or_wrong_key_is_one_clear_line(
    server: SglangStandIn, key: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ConfigurationError, match=f"{words}.*{VARIABLE}") as raised:
        engine_at(server, key)
    assert "sk-wrong-one" not in str(raised.value)


@pytest.mark.parametrize("use", ["a request", "a weight update"])
def test_a_key_that_the_server_repeats_is_hidden(use: str, server: SglangStandIn) -> None:
    """The stand-in puts what was sent into its answer."""
    engine = SglangEngine(server.url, slots=2, eos_token_ids=[7], api_key=KEY, unavailable_seconds=0.3)
    server.api_key = "another since"
    if use == "a request":
        engine.submit([Request(0, Prompt("p", [3, 4]), (), 4, 0)])
    with pytest.raises(EngineDied, match=r"Unauthorized: Bearer \(hidden\)") as raised:
        while use == "a request":
            engine.poll()
        engine.update_weights({}, 1)
    assert not shown_of(KEY, "".join(traceback.format_exception(raised.value)))
    engine.close()


def shown_of(secret: str, text: str) -> list[str]:
    """Parts of it, too: what is left of a key that was cut."""
    parts = [secret[i : i + 8] for i in range(len(secret) - 7)]
    return [part for part in parts if part in text]


class EchoServer(NastyServer):
    """Answers every request with status 400 and what it was sent, behind so many other characters."""

    def __init__(self, loop: ServerLoop, before: int, escaped: bool) -> None:
        self._before, self._escaped = before, escaped
        super().__init__("sglang", loop.loop)

    async def _answer(self, request: web.Request) -> web.Response:
        text = json.dumps({"message": "x" * self._before + f" {request.headers['Authorization']}"})
        return web.Response(status=400, text=text.replace("s", "\\u0073") if self._escaped else text)


@pytest.mark.parametrize("escaped", [False, True])
@pytest.mark.parametrize("before", [0, 410, 420, 430, 440])
def test_a_server_that_echoes_headers_at_the_start_shows_no_secret(before: int, *, escaped: bool) -> None:
    """Nor a part of one where the reason is cut."""
    with closing(ServerLoop()) as loop, closing(EchoServer(loop, before, escaped)) as echo:
        with pytest.raises(ConfigurationError) as raised:
            SglangEngine(echo.url, slots=2, eos_token_ids=[7], api_key=KEY)
        text = "".join(traceback.format_exception(raised.value))
        assert before or "(hidden)" in text
        assert not shown_of(KEY, text)


def test_a_user_and_a_password_in_the_url_are_refused_without_showing_them() -> None:
    with pytest.raises(ConfigurationError, match=f"url = 'http://host:1': it has a user.*{VARIABLE}") as raised:
        Credentials(f"http://{LOGIN}@host:1/")
    assert not shown_of(LOGIN, str(raised.value))


@pytest.mark.parametrize("engine", ["sglang", "vllm-server", "embedded"])
def test_a_password_among_the_settings_is_refused_without_showing_it(engine: str, capfd: Any, tmp_path: Path) -> None:
    words = ["--engine", engine, "--engine-urls", f"http://{LOGIN}@127.0.0.1:1", "--out", str(tmp_path / "run")]
    for extra in ([], ["--dry-run"]):
        assert main(["train", *words, *extra]) == 2
    printed = capfd.readouterr()
    assert LOGIN.partition(":")[2] not in printed.out + printed.err and printed.err.count(VARIABLE) == 2
    assert not (tmp_path / "run").exists()


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
