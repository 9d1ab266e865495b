"""`sortedrl doctor`: what it says is installed is, what is missing has its command, and the self-test can fail."""

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import forked
from sortedrl.cli import doctor, main
from terminal import ENVIRONMENT


def test_requirements_are_read_with_their_extras() -> None:
    lines = ["rich>=14", "torch>=2.11; extra == 'train'", 'math-verify>=0.9 ; extra == "math"', "plain; extra == 'x'"]
    assert [(one["name"], one["least"], one["extra"]) for one in doctor.required(lines)] == [
        ("rich", "14", None),
        ("torch", "2.11", "train"),
        ("math-verify", "0.9", "math"),
        ("plain", None, "x"),
    ]


def test_what_is_absent_or_too_old_is_missing() -> None:
    rows = [
        ("torch", "2.9.1+cpu", "2.11", "train"),
        ("transformers", "5.17.0", "5.17", "train"),
        ("safetensors", None, "0.5", "train"),
        ("rich", "15.0.0", "14", None),
        ("peft", "0.18.0", "0.18", "lora"),
    ]
    packages = [dict(zip(("name", "version", "least", "extra"), row, strict=True)) for row in rows]
    assert [one["name"] for one in packages if doctor.is_missing(one)] == ["torch", "safetensors"]


def test_versions_are_those_of_the_installed_packages_and_nothing_heavy_is_imported() -> None:
    code = (
        "import json, sys\n"
        "from sortedrl.cli import doctor, main\n"
        "code = main(['doctor'])\n"
        "found = doctor.installation()\n"
        "heavy = sorted({'torch', 'transformers', 'datasets', 'peft', 'numpy'} & sys.modules.keys())\n"
        "print(json.dumps([{p['name']: p['version'] for p in found['packages']}, heavy, found['devices'], code]))\n"
    )
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=ENVIRONMENT, check=True)
    *_, said, last = done.stdout.splitlines()
    versions, heavy, devices, ended = json.loads(last)
    assert heavy == [] and devices[-1].endswith(" CPU cores") and ended == 0
    assert "two updates of training: not run; `sortedrl doctor --full` runs it" in said
    for name in ("torch", "transformers", "rich"):
        assert versions[name] == metadata.version(name)
    assert {"vllm", "sglang", "verl", "trl", "ray", "peft", "datasets", "math-verify"} <= versions.keys()


def test_the_self_test_passes_here_and_finds_a_mismatch_of_engine_and_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    done = forked.run(["doctor", "--full", "--json"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["passed"] is True
    monkeypatch.setattr(doctor, "MOST_MISMATCH", 0.0)
    found = doctor.self_test()
    assert found["passed"] is False and "differ by" in found["detail"]


def test_a_failure_is_said_and_gives_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "BUILT_IN_MODEL", tmp_path / "no-model-here")
    assert main(["doctor", "--full"]) == 1
    shown = capsys.readouterr().out
    assert "two updates of training: FAILED: " in shown and "no-model-here" in shown
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "torch" else True)
    assert "pip install '.[train]' in the SortedRL checkout" in doctor.self_test()["detail"]
