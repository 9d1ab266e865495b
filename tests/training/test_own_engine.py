"""`--engine your.module:factory`: a real run with an engine that is not part of the package."""

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from config_file import config_file
from sortedrl.cli import main
from sortedrl.core.engine import EngineBase, with_defaults
from sortedrl.engines.simulated import SimulatedEngine
from sortedrl.models import BUILT_IN_MODEL
from toy_runs import SMALL, SMALL_TRAINING, flags, metrics_of

EXAMPLES = Path(__file__).parents[2] / "examples"
TRAIN = flags(SMALL_TRAINING | {"prompts_per_cohort": 4, "updates": 2, "scoring": "at-once"})


def own_module(name: str, source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a module of this name importable, also after another test had one; returns its file."""
    file = folder / f"{name}.py"
    file.write_text(source)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return file


def test_a_run_with_an_engine_by_import_path(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example over Hugging Face `generate` has the five methods of the protocol and nothing else."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    out = tmp_path / "run"
    words = ["--model", str(model), "--out", str(out), "--engine", "hugging_face_engine:engine", *TRAIN]
    assert main(["train", *words, *config_file(tmp_path, warmup_updates=0)]) == 0
    updates = metrics_of(out, "weight_difference")
    assert [line["update"] for line in updates] == [1, 2]
    assert all(line["weight_difference"] < 1e-3 for line in updates), "the engine samples from the learner's weights"


METHODS = {"now", "submit", "poll", "abort", "update_weights"}
MODULE = """
import copy
import os
from pathlib import Path

from transformers import AutoModelForCausalLM

from sortedrl.engines.embedded.engine import EmbeddedEngine


class Mine(EmbeddedEngine):
    {methods}


def engine(spec):
    {first}
    module = spec.module or AutoModelForCausalLM.from_pretrained(spec.model)
    return Mine({module}, slots=spec.slots, eos_token_ids=spec.eos_token_ids, max_length=spec.max_length)
"""


def module_with(methods: str, *, first: str = "", module: str = "module") -> str:
    """The source of an engine of one's own: the embedded one, with these methods."""
    return MODULE.format(methods=methods.strip(), first=first, module=module)


CLOSING = """
    def close(self):
        Path(__file__).with_suffix(".closed").touch()
"""


@pytest.fixture
def closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes `closing_engine:engine` importable; this file shows that it was closed."""
    return own_module("closing_engine", module_with(CLOSING), tmp_path, monkeypatch).with_suffix(".closed")


def test_an_evaluation_closes_its_engine(model: Path, closed: Path) -> None:
    words = ["--model", str(model), "--engine", "closing_engine:engine", *flags(SMALL)]
    assert main(["eval", *words]) == 0
    assert closed.exists()


def test_a_run_that_cannot_start_closes_its_engine(model: Path, closed: Path, tmp_path: Path) -> None:
    """The engine may have started a server, which would outlive the run."""
    words = ["--model", str(model), "--engine", "closing_engine:engine", *TRAIN]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = config_file(tmp_path, prometheus_port=taken.getsockname()[1])
        assert main(["train", *words, "--out", str(tmp_path / "run"), *port]) == 2
    assert closed.exists()


TALKATIVE = """
    def poll(self, *args, **kwargs):
        print("a line")
        os.write(1, b"a line of C code\\n")
        return super().poll(*args, **kwargs)
"""


@pytest.mark.parametrize("command", ["train", "eval", "profile", "bench"])
def test_stdout_is_one_json_object_although_the_engine_prints(
    command: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """vLLM prints its log to stdout."""
    source = module_with(TALKATIVE, first='os.system("echo a line of a process")')
    own_module("talkative_engine", f"print('loaded'){source}", tmp_path, monkeypatch)
    folder = BUILT_IN_MODEL if command == "profile" else model  # which is too short
    engine = ["--model", str(folder), "--engine", "talkative_engine:engine"]
    profile, short = ["--out", str(tmp_path / "profile.json")], ["--max-response-tokens", "20"]
    words = {
        "train": [*TRAIN, "--out", str(tmp_path / "run")],
        "eval": flags(SMALL),
        "profile": ["--slots", "4", "--steps", "4", "--repeats", "1", *profile],
        "bench": ["--modes", "baseline", "--prompts-per-cohort", "4", "--rollouts-per-update", "4", *short],
    }
    assert main([command, *engine, *words[command], "--json"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)
    assert {"a line", "a line of C code", "a line of a process"} <= set(err.splitlines())


NO_METHODS = """
from sortedrl.core.engine import EngineBase
class Mine(EngineBase): slots = 4
def factory(spec): return Mine()
"""


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def factory(spec): return object()", "without now, submit, poll, abort, update_weights, slots"),
        ("factory = 3", "it is not a function"),
        (NO_METHODS, "the factory raised TypeError: Can't instantiate abstract class Mine with"),
        ("def factorie(spec): return None", "did you mean 'factorie'?"),
        ("import json\ndef factory(spec): json.loads('no\\nJSON')", "the factory raised JSONDecodeError: Expecting"),
        ("def factory(): return None", "factory() takes 0 positional arguments but 1 was given"),
        ("def factory(spec: return None", "cannot be imported: SyntaxError: "),
        ("\n1 / 0", "cannot be imported: ZeroDivisionError: division by zero ("),
    ],
)
def test_a_wrong_factory_is_one_line(
    source: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Any
) -> None:
    own_module("wrong_engine", source, tmp_path, monkeypatch)
    error = refused("profile", "--engine", "wrong_engine:factory", "--out", tmp_path / "profile.json")
    assert expected in error and "set by flag --engine" in error
    assert "JSON" not in expected or "wrong_engine.py:2)" in error, "the line of the factory, not that of the library"


@pytest.mark.parametrize("missing", sorted(METHODS))
def test_an_engine_that_lacks_a_method_of_the_protocol_cannot_be_made(missing: str) -> None:
    """It inherited the protocol's empty method, which returns None."""
    mine = type("Mine", (EngineBase,), {name: getattr(SimulatedEngine, name) for name in METHODS - {missing}})
    with pytest.raises(TypeError, match=f"abstract class Mine .*{missing}"):
        mine()


FORGETFUL = """
    has_weights = True

    def sleep_until_update(self):
        self.has_weights = False
        with Path(__file__).with_suffix(".sleeps").open("a") as file:
            file.write("sleep\\n")

    def update_weights(self, weights, version):
        self.has_weights = True
        super().update_weights(weights, version)

    def submit(self, requests):
        assert self.has_weights
        super().submit(requests)
"""


@pytest.mark.parametrize("mode", ["baseline", "cohort-at-once", "partial+elevator"])
def test_weights_come_before_any_request_after_the_sleep_of_an_update(
    mode: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So an engine may drop its weights while the learner steps: also if updates share a harvest, and to evaluate."""
    own_module("forgetful_engine", module_with(FORGETFUL), tmp_path, monkeypatch)
    words = ["--model", str(model), "--engine", "forgetful_engine:engine", *TRAIN]
    words += ["--mode", mode, "--updates", "4", "--eval-every", "3", "--out", str(tmp_path / "run")]
    assert main(["train", *words]) == 0
    assert (tmp_path / "forgetful_engine.sleeps").read_text() == 4 * "sleep\n"


@pytest.mark.parametrize("flags", [["--stream"], ["--overlap", "--max-staleness", "4"]])
@pytest.mark.parametrize("is_declared", [True, False])
def test_the_learner_works_beside_an_engine_that_has_its_own_device(
    flags: list[str], is_declared: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Any
) -> None:
    """Only its author knows it: it may be the client of a server, or decode with the learner's own module."""
    source = module_with("has_own_device = True" if is_declared else "pass", module="copy.deepcopy(module)")
    own_module("engine_apart", source, tmp_path, monkeypatch)
    words = ["--model", str(model), "--engine", "engine_apart:engine", *TRAIN, *flags]
    error = told("train", *words, "--out", tmp_path / "run", code=0 if is_declared else 2).err
    if not is_declared:
        assert not (tmp_path / "run").exists()
        assert f"{flags[0][2:]} = True" in error and "its class Mine does not set has_own_device" in error


def test_an_engine_with_only_the_protocol_gets_the_defaults() -> None:
    class Plain:
        slots = 3

        def now(self) -> float:
            return 1.5

    engine = with_defaults(Plain())  # type: ignore[arg-type]
    assert isinstance(engine, EngineBase) and engine.slots == 3 and engine.now() == 1.5
    assert engine.is_available and engine.info().kv_tokens is None
    engine.sleep()
    engine.sleep_until_update()
    engine.close()
    assert with_defaults(engine) is engine
    assert issubclass(SimulatedEngine, EngineBase)
