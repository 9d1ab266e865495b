"""The study files of the repository: each is valid, names a primary contrast, and has 8 seeds or is called an anecdote.
A start model outside of the repository has to be made first; the study's text has the command or names the script.

The scripts beside them: figures match the results, a fall is found where it happens, and the log-ratio of stale tokens
is split into its parts."""

import runpy
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from sortedrl.studies.compare.comparison import compare
from sortedrl.studies.compare.results import read_results
from sortedrl.studies.compare.study import read_study, validate_runs
from sortedrl.training.settings import TrainSettings

ROOT = Path(__file__).parents[2]
STUDIES = ROOT / "benchmarks" / "studies"
FILES = sorted(STUDIES.glob("*.toml"))
WITH_RESULTS = sorted(path.stem for path in STUDIES.glob("*.jsonl"))
PICTURE = runpy.run_path(str(STUDIES / "difference_picture.py"))
ALARM = runpy.run_path(str(STUDIES / "ess_alarm.py"))
SPLIT = STUDIES / "mismatch_and_staleness.py"


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


@pytest.mark.parametrize("name", WITH_RESULTS)
def test_the_figure_is_the_one_that_its_command_makes(name: str) -> None:
    comparison = compare(read_study(STUDIES / f"{name}.toml"), read_results(STUDIES / f"{name}.jsonl"))
    drawn = PICTURE["picture"](comparison)
    assert drawn == (ROOT / "docs" / "img" / f"study-{name}.svg").read_text(encoding="utf-8")
    outcome = comparison.primary.outcome
    rows = [row for row in comparison.contrasts if row.outcome == outcome and row.seeds]
    marks = [mark.get("class") for mark in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}circle")]
    assert marks.count("mean") == len(rows)
    assert marks.count("seed") == sum(len(row.seeds) for row in rows)


def run_of(
    correct: list[float], ess: list[float], held_out: tuple[float, ...] = (0.5,), arm: str = "a"
) -> dict[str, Any]:
    series = {"correct": correct, "ess_rollout_fraction": ess}
    return {"arm": arm, "settings": {}, "curve": {"score": held_out}, "series": series}


def test_an_alarm_counts_only_before_the_fall() -> None:
    rising, falling = [0.5] * 4 + [0.7] * 8, [0.5] * 4 + [0.7] * 4 + [0.5] * 4
    calm = [0.9] * 12
    warned = [0.9] * 5 + [0.2] + [0.9] * 6
    too_late = [0.9] * 10 + [0.1] * 2
    answer = ALARM["answer"]([run_of(falling, warned), run_of(falling, too_late), run_of(rising, calm)])
    assert answer == {
        "runs": 3,
        "falls": 2,
        "falls_in_held_out_score_too": 0,
        "falls_in_held_out_score_only": 0,
        "auc": 0.75,  # one lower than the steady run, one equal
        "auc_same_arm": 0.75,
        "falls_after_an_alarm": 1,
        "lead_in_updates": 3,
        "steady": 1,
        "steady_runs_with_an_alarm": 0,
    }
    assert ALARM["answer"]([run_of(rising, too_late)])["steady_runs_with_an_alarm"] == 1


def test_a_run_that_falls_in_its_held_out_score_only_is_not_steady() -> None:
    rising, alarm = [0.5] * 4 + [0.7] * 8, [0.1] * 12
    answer = ALARM["answer"]([run_of(rising, alarm, (0.4, 0.8, 0.6)), run_of(rising, alarm, (0.4, 0.8, 0.75))])
    assert (answer["falls"], answer["falls_in_held_out_score_only"]) == (0, 1)
    assert (answer["steady"], answer["steady_runs_with_an_alarm"]) == (1, 1)


@pytest.mark.slow
def test_under_the_embedded_engine_the_log_ratio_of_stale_tokens_is_all_staleness() -> None:
    """Also in resumed responses, whose earlier tokens are older: their KV is recomputed with the new weights."""
    tokens = runpy.run_path(str(SPLIT))["tokens_of_a_run"](5, 0, rounded_weights=False)
    stale = [token for token in tokens if token.age > 0]
    assert len(stale) > 100
    assert max(abs(token.mismatch) for token in tokens) < 1e-4
    assert max(abs(token.staleness) for token in stale) > 1e-2
    assert all(token.staleness == 0 for token in tokens if token.age == 0)
