"""Commands that read a folder never run code from it, whatever its files name."""

import json
from pathlib import Path
from typing import Any

import pytest

from scenarios import run as simulated
from sortedrl.cli import main
from sortedrl.log.lines import written
from sortedrl.settings.base import as_json
from sortedrl.training.settings import TrainSettings

MARK = "code-was-run"
COMMANDS = [
    ["compare", "--from", "."],
    ["compare", "--from", ".", "--json"],
    ["compare", "--from", ".", "--dry-run"],
    ["compare", "study.toml", "--from", "results.jsonl", "--dry-run", "--json"],
    ["report", "."],
    ["report", ".", "--json"],
    ["watch", ".", "--json"],
    ["trace", "."],
    ["simulate", "--lengths", ".", "--modes", "partial"],
    ["plan", "--lengths", ".", "--dry-run"],
]


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A run and a study in one folder. All that they name is in a module beside them, which leaves a mark."""
    planted = tmp_path.name  # another module for each test: one that was imported would not be imported again
    (tmp_path / f"{planted}.py").write_text(f"open({str(tmp_path / MARK)!r}, 'w').close()\nname = 0\n")
    named: dict[str, Any] = {"mode": f"{planted}:name", "task": f"{planted}:name", "engine": f"{planted}:name"}
    named |= {"tools": [f"{planted}:name"]}
    log = simulated("partial", [3, 9, 2, 17, 5, 8, 1, 12], rollouts_per_update=2).events
    (tmp_path / "events.jsonl").write_text(written(log))
    (tmp_path / "config.json").write_text(json.dumps(as_json(TrainSettings()) | named))
    (tmp_path / "summary.json").write_text("{}")
    arms = "".join(f"[arms.{arm}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in named.items())
                   for arm in ("a", "b"))  # fmt: skip
    contrast = 'contrasts = [{ arm = "a", minus = "b", outcome = "final_score" }]\n'
    (tmp_path / "study.toml").write_text(f"seeds = 1\n{contrast}{arms}slots = 8\n")
    for arm, own in (("a", {}), ("b", {"slots": 8})):
        result = {
            "settings": {"threads": 1, **named, **own},
            "curve": {"update": [0, 1], "rollouts": [0, 8], "seconds": [0.0, 1.0], "score": [0.1, 0.2]},
            "series": {"length": [5.0], "correct": [0.5]},
            "rollouts_per_update": [8], "metrics": {}, "versions": {}, "device": "CPU",
        }  # fmt: skip
        with (tmp_path / "results.jsonl").open("a") as file:
            file.write(json.dumps({"arm": arm, "seed": 0, **result}) + "\n")
    return tmp_path


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_reading_a_folder_runs_no_code_from_it(
    words: list[str], hostile: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(hostile)
    code = main(words)
    assert not (hostile / MARK).exists(), "a module of the folder was imported"
    assert code == 0, capsys.readouterr().err
