"""A model folder with a damaged file is one line that names the model, not a traceback."""

import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch")

import toy
from sortedrl.core.configuration import ConfigurationError
from sortedrl.models import check_model_path
from sortedrl.studies.bench import BenchSettings
from sortedrl.training.engine import bare_engine
from sortedrl.training.resources import read_model
from sortedrl.training.settings import EvalSettings


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.make_model(tmp_path_factory.mktemp("model") / "toy")


@pytest.fixture
def model(intact: Path, tmp_path: Path) -> Path:
    shutil.copytree(intact, tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[1, 2]", "its config.json has a list in place of a JSON object"),
        (b'{"model_type": ', r"its config.json cannot be read \(Expecting value"),
        (b"\xff\xfe", r"its config.json cannot be read \('utf-8' codec"),
    ],
)
def test_a_damaged_configuration_is_refused_before_the_model_is_read(content: bytes, reason: str, model: Path) -> None:
    check_model_path(str(model))
    (model / "config.json").write_bytes(content)
    with pytest.raises(ConfigurationError, match=reason):
        check_model_path(str(model))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", '{"model_type": "llama", "hidden_size": "many"}'),
        ("generation_config.json", "[1]"),
        ("tokenizer_config.json", "[1]"),
        ("tokenizer.json", "{}"),
        ("model.safetensors", "no weights"),
    ],
)
def test_any_other_damage_is_one_line(name: str, content: str, model: Path) -> None:
    (model / name).write_text(content)
    with pytest.raises(ConfigurationError, match="no causal language model can be read there") as raised:
        read_model(str(model), EvalSettings(model=str(model)))
    assert raised.value.key == "model" and "\n" not in str(raised.value)
    if not name.startswith("token"):
        with pytest.raises(ConfigurationError, match="no causal language model can be read there"):
            bare_engine(BenchSettings(), str(model), max_length=64)
