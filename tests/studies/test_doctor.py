"""`sortedrl doctor`: what it says is installed is, what is missing has its command, and the self-test can fail."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import forked
from sortedrl.cli import main
from sortedrl.cli.doctor import show_checks
from sortedrl.models import BUILT_IN_MODEL
from sortedrl.studies import doctor
from sortedrl.studies.doctor import Package, missing, required
from terminal import ENVIRONMENT


def test_requirements_are_read_with_their_extras() -> None:
    lines = ["rich>=14", "torch>=2.11; extra == 'train'", 'math-verify>=0.9 ; extra == "math"', "plain; extra == 'x'"]
    assert [(one.name, one.least, one.extra) for one in required(lines)] == [
        ("rich", "14", None),
        ("torch", "2.11", "train"),
        ("math-verify", "0.9", "math"),
        ("plain", None, "x"),
    ]


def test_an_extra_misses_what_is_absent_or_too_old() -> None:
    packages = [
        Package("torch", "2.9.1+cpu", "2.11", "train"),
        Package("transformers", "5.17.0", "5.17", "train"),
        Package("safetensors", None, "0.5", "train"),
        Package("rich", "15.0.0", "14", None),
        Package("peft", "0.18.0", "0.18", "lora"),
    ]
    assert missing(packages) == {"train": ["torch", "safetensors"], "lora": []}


def test_versions_are_those_of_the_installed_packages_and_nothing_heavy_is_imported() -> None:
    code = (
        "import json, sys\n"
        "from sortedrl.studies import doctor\n"
        "found = doctor.installation()\n"
        "heavy = sorted({'torch', 'transformers', 'datasets', 'peft', 'numpy'} & sys.modules.keys())\n"
        "print(json.dumps([{p.name: p.version for p in found.packages}, heavy, found.cpu_cores]))\n"
    )
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=ENVIRONMENT, check=True)
    versions, heavy, cores = json.loads(done.stdout)
    assert heavy == []
    assert cores >= 1
    for name in ("torch", "transformers", "rich"):
        assert versions[name] == metadata.version(name)
    assert {"vllm", "sglang", "verl", "trl", "ray", "peft", "datasets", "math-verify"} <= versions.keys()


def test_the_self_test_passes_here_within_its_time() -> None:
    done = forked.run(["doctor", "--full", "--json"])
    assert done.returncode == 0, done.stdout + done.stderr
    checks = json.loads(done.stdout)["self_test"]
    assert [check["name"] for check in checks] == list(doctor.SELF_TESTS)
    assert all(check["passed"] for check in checks)
    assert sum(check["seconds"] for check in checks) < 60  # 10 on a machine of one's own


def test_the_quick_self_test_names_what_it_skipped_and_imports_no_pytorch() -> None:
    code = "import sys; from sortedrl.cli import main; main(['doctor', '--json']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=ENVIRONMENT)
    output, has_torch = done.stdout.splitlines()
    checks = json.loads(output)["self_test"]
    assert [(check["name"], check["passed"]) for check in checks] == [
        (name, passed) for name, passed in zip(doctor.SELF_TESTS, (True, None), strict=True)
    ]
    assert all("sortedrl doctor --full" in check["detail"] for check in checks[1:])
    assert has_torch == "False"


def test_a_part_that_fails_is_said_and_gives_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sortedrl.cli.doctor.BUILT_IN_MODEL", tmp_path / "no-model-here")
    assert main(["doctor", "--full", "--json"]) == 1
    checks = json.loads(capsys.readouterr().out)["self_test"]
    assert [check["passed"] for check in checks] == [True, False]
    assert "no-model-here" in checks[1]["detail"]
    show_checks([doctor.Check(**check) for check in checks])
    assert "FAILED" in capsys.readouterr().out


def test_a_mismatch_of_engine_and_learner_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MOST_MISMATCH", 0.0)
    checks = doctor.self_test(BUILT_IN_MODEL, full=True)
    assert checks[1].passed is False and "differ by" in checks[1].detail


def test_without_pytorch_the_rest_is_skipped_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version_of", lambda name: None if name == "torch" else "1.0")
    checks = doctor.self_test(BUILT_IN_MODEL, full=True)
    assert [check.passed for check in checks] == [True, None]
    assert "pip install '.[train]' in the SortedRL checkout" in checks[1].detail
