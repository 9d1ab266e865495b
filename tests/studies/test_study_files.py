"""The study files of the repository: each is valid, names a primary contrast, and has 8 seeds or is called an anecdote.

A start model outside of the repository has to be made first; the study's text has the command or names the script.
"""

from pathlib import Path

import pytest

from sortedrl.studies.compare.study import read_study, validate_runs
from sortedrl.training.settings import TrainSettings

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "benchmarks" / "studies").glob("*.toml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_study_of_ours_can_run_and_is_listed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # paths of models are relative to it
    study = read_study(path)
    validate_runs(study, lambda settings: TrainSettings.model_validate(settings).check())
    runs = len(study.arms) * len(study.seeds)
    is_anecdote = "anecdote" in study.text
    model = study.settings.get("model", "built-in")
    made_first = model.startswith("runs/")
    # Intervals are over seeds: fewer problems make them wider, not wrong.
    assert is_anecdote or (len(study.seeds) >= 8 and study.settings["eval_problems"] >= (256 if made_first else 600))
    assert f"= {runs} runs of {study.settings['updates']} updates" in study.text
    listed = (path.parent / "README.md").read_text(encoding="utf-8")
    row = next(line for line in listed.splitlines() if line.startswith(f"| `{path.stem}` |"))
    assert [int(cell) for cell in row.split("|")[3:5]] == [runs, study.settings["updates"]]
    made = "start model" in study.text if made_first else (ROOT / model / "config.json").is_file()
    assert model == "built-in" or made
