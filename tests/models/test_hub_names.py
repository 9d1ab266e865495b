"""Hub names where the hub cannot be reached: an answer at once, not after a minute of retries."""

import os
import socket
from pathlib import Path

import pytest

from sortedrl.core.configuration import ConfigurationError
from sortedrl.models import PROXIES, model_named, unreadable_model
from sortedrl.tasks.datasets import Source, read_rows

constants = pytest.importorskip("huggingface_hub.constants")


@pytest.fixture(autouse=True)
def own_hub_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def listening() -> socket.socket:
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    return server


def test_a_hub_out_of_reach_is_not_asked_again(listening: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    port = listening.getsockname()[1]  # bound, but not listening: connections are refused
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    assert model_named("some-owner/no-such-model") == "some-owner/no-such-model"
    assert constants.is_offline_mode() and os.environ["HF_HUB_OFFLINE"] == "1"
    listening.listen()
    listening.setblocking(False)
    with pytest.raises(OSError) as raised:
        transformers.AutoTokenizer.from_pretrained("some-owner/no-such-model")
    with pytest.raises(BlockingIOError):
        listening.accept()
    assert "could be loaded from the Hugging Face hub" in str(
        unreadable_model("some-owner/no-such-model", raised.value)
    )


def test_a_dataset_on_a_hub_out_of_reach_is_one_error(
    listening: socket.socket, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{listening.getsockname()[1]}")
    with pytest.raises(ValueError, match=r"there is no such file, and split 'train' of 'nofile' .* cannot be reached"):
        list(read_rows(Source("nofile")))
    assert capfd.readouterr().err == ""


def test_a_hub_that_answers_is_asked(listening: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    listening.listen()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{listening.getsockname()[1]}")
    model_named("some-owner/some-model")
    assert not constants.HF_HUB_OFFLINE
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.invalid:3128")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    model_named("some-owner/some-model")
    assert not constants.HF_HUB_OFFLINE, "only the proxy can tell whether the hub is there"


def test_a_path_is_refused_without_asking(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no such folder"):
        model_named(str(tmp_path / "nothing"))
