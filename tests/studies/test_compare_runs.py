"""`sortedrl compare` on a real task: a whole study, killed and continued, with an arm that fails."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forked
import toy
from forked import Done
from processes import is_running, wait_for_end, wait_until
from sortedrl.studies.compare import study_folder
from sortedrl.studies.compare.results import FROM_THE_SUMMARY, read_run
from sortedrl.studies.compare.study import parsed_study
from sortedrl.studies.compare.study_folder import StudyRun, core_shares, error_of, run_all, run_study, runs_of

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests' / 'support'}"}
SETTINGS = """
task = "toy:SayA"
scoring = "at-once"
reward_workers = 0
updates = 20
eval_every = 5
checkpoint_every = 2
rollouts_per_update = 16
prompts_per_cohort = 8
rollouts_per_prompt = 4
max_response_tokens = 16
max_prompt_tokens = 16
slots = 8
eval_problems = 20
learning_rate = 1e-2
device = "cpu"
"""
STUDY = """
question = "Does the elevator learn?"
seeds = 2
threshold = 0.5
metrics = ["grad_norm"]
contrasts = [{{ arm = "elevator", minus = "baseline", outcome = "curve_area" }}]
[settings]
model = "{model}"
{settings}
[arms.baseline]
mode = "baseline"
[arms.elevator]
mode = "partial+elevator"
"""
BROKEN_ARM = '[arms.broken]\nmode = "partial"\ndata = "/nowhere.jsonl"\n'


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    path = folder / "toy.toml"
    path.write_text(STUDY.format(model=toy.make_model(folder / "model"), settings=SETTINGS))
    return path


@pytest.fixture(scope="module")
def finished(study: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the whole study, run without an interruption."""
    out = tmp_path_factory.mktemp("finished") / "out"
    done = compare(study, "--jobs", "2", "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[4/4]" in done.stdout and "left" in done.stdout
    assert "An anecdote: 2 seeds prove nothing" in done.stdout
    return out


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "sortedrl", "compare", *map(str, words)]


def compare(*words: str | Path) -> Done:
    return forked.run(["compare", *map(str, words)])


def lines(out: Path) -> list[dict[str, Any]]:
    found = [json.loads(text) for text in (out / "results.jsonl").read_text().splitlines()]
    return [line for line in found if "plan" not in line]


def without_time(line: dict[str, Any]) -> dict[str, Any]:
    """What does not depend on how fast the machine was."""
    metrics = {name: value for name, value in line["metrics"].items() if name not in ("bubble", "goodput")}
    curve = {name: values for name, values in line["curve"].items() if name != "seconds"}
    return {"arm": line["arm"], "seed": line["seed"], "metrics": metrics, "curve": curve, "series": line["series"]}


def by_name(line: dict[str, Any]) -> tuple[str, int]:
    return line["arm"], line["seed"]


# Quick


def test_seeds_are_complete_one_after_another() -> None:
    runs = runs_of(parsed_study(STUDY.format(model="m", settings=SETTINGS), "toy"), Path("out"))
    assert [str(run.folder) for run in runs] == [
        "out/runs/baseline/seed-0",
        "out/runs/elevator/seed-0",
        "out/runs/baseline/seed-1",
        "out/runs/elevator/seed-1",
    ]


@pytest.mark.parametrize(
    ("cores", "jobs", "expected"),
    [
        (16, 14, [(i,) for i in range(14)]),
        (8, 2, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (5, 2, [(0, 1), (2, 3)]),
        (2, 3, [(0,), (1,), (0,)]),
        (1, 1, [(0,)]),
    ],
)
def test_every_job_has_its_share_of_the_cores(cores: int, jobs: int, expected: list[tuple[int, ...]]) -> None:
    assert core_shares(range(cores), jobs) == expected


def test_a_run_that_cannot_be_pinned_runs_on_any_core(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A core that it may not use, or that is absent: no error of one run may end the study."""
    run = runs_of(parsed_study(STUDY.format(model="m", settings=SETTINGS), "toy"), tmp_path)[0]
    monkeypatch.setattr(sys, "executable", "/bin/true")
    assert study_folder.start(run, (1023,)).wait() == 0


def test_an_error_is_the_last_line_and_how_the_run_ended(tmp_path: Path) -> None:
    run = runs_of(parsed_study(STUDY.format(model="m", settings=SETTINGS), "toy"), tmp_path)[0]
    assert error_of(run, -9) == "SIGKILL"
    run.log.parent.mkdir(parents=True)
    run.log.write_text("Traceback ...\nCUDA out of memory\n\n")
    assert error_of(run, 2) == "CUDA out of memory (exit code 2)"


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ('task = "knihgts"', "task = 'knihgts' (set by {file}): no task 'knihgts'"),
        ('task = "knights_and_knaves:smal"', "knights_and_knaves has no variant 'smal'"),
        ('task = "toy:SayB"', "did you mean 'SayA'? (arm c)"),
        ('task = "toi:SayA"', "task = 'toi:SayA' (set by {file}): no module 'toi'"),
        ('tools = ["toy:no_tool"]', "tools = 'toy:no_tool' (set by {file}): the tool toy:no_tool: the module 'toy'"),
        ('model = "./nowhere"', "model = './nowhere' (set by {file}): there is no such folder (arm c)"),
        ('engine = "embeded"', "Did you mean embedded?"),
        ('engine = "toy:no_engine"', "engine = 'toy:no_engine' (set by {file}): the module 'toy'"),
        ('mode = "partiel"', "mode = 'partiel' (set by {file}): "),
        ("learning_rat = 1.0", "Did you mean learning_rate?"),
        ("slots = 0", "slots = 0"),
    ],
)
@pytest.mark.parametrize("flags", [[], ["--dry-run"]])
def test_a_wrong_setting_is_refused_before_anything_starts(
    wrong: str, expected: str, flags: list[str], tmp_path: Path
) -> None:
    """The run itself would find it, after its start and, at the end of a pause, a second one."""
    file = tmp_path / "wrong.toml"
    file.write_text(STUDY.format(model=tmp_path, settings=SETTINGS) + f"[arms.c]\n{wrong}\n")
    (tmp_path / "config.json").write_text("{}")
    done = compare(file, "--out", tmp_path / "out", *flags)
    assert done.returncode == 2
    assert expected.format(file=file) in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("flags", [[], ["--dry-run"]])
@pytest.mark.parametrize("place", ["top", "settings", "arm"])
@pytest.mark.parametrize("wrong", ['out = "elsewhere"', "jobs = 3"])
def test_a_key_of_the_file_is_not_taken_for_a_flag(wrong: str, place: str, flags: list[str], tmp_path: Path) -> None:
    file, key = tmp_path / "wrong.toml", wrong.partition(" ")[0]
    text = STUDY.format(model="m", settings=f"{SETTINGS}\n{wrong if place == 'settings' else ''}")
    file.write_text(f"{wrong}\n{text}" if place == "top" else f"{text}{wrong}\n" if place == "arm" else text)
    done = compare(file, "--out", tmp_path / "out", "--jobs", "1", *flags)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"sortedrl: {key} = ") and f"(set by {file})" in done.stderr


def test_a_dry_run_finds_what_the_folder_of_the_study_refuses(tmp_path: Path) -> None:
    file, out = tmp_path / "study.toml", tmp_path / "out"
    file.write_text(STUDY.format(model="m", settings=SETTINGS))
    run = runs_of(parsed_study(file.read_text(), "study"), out)[0]
    run.folder.mkdir(parents=True)
    assert "out = " in (done := compare(file, "--out", out, "--dry-run")).stderr and done.returncode == 2
    (out / "study.toml").write_text(file.read_text())
    run.config.write_text("slots = 99\n")
    done = compare(file, "--out", out, "--dry-run")
    assert done.returncode == 2 and "was started with" in done.stderr and f"(set by {file})" in done.stderr


def test_a_dry_run_asks_no_server_and_needs_no_engine(tmp_path: Path) -> None:
    """It may be made elsewhere than the study."""
    file = tmp_path / "study.toml"
    file.write_text(STUDY.format(model="m", settings=f'{SETTINGS}\nengine = "vllm"'))
    done = compare(file, "--out", tmp_path / "out", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_blamed_on_the_flag(tmp_path: Path) -> None:
    file = tmp_path / "study.toml"
    file.write_text(STUDY.format(model=toy.make_model(tmp_path / "model"), settings=SETTINGS))
    done = compare(file, "--out", file / "out")
    assert done.returncode == 2 and f"out = '{file / 'out'}' (set by flag --out)" in done.stderr


# Runs that fail: shell scripts in place of training runs

FINISHES = "mkdir -p {folder} && echo '{{}}' > {folder}/summary.json"
FAILS = "echo no space left; exit 2"
WAITS_FOR_OTHERS = (
    "for i in $(seq 400); do [ -e {study}/go ] && break; sleep 0.05; done; [ -e {study}/go ] && " + FINISHES
)


class Scripted:
    """Runs the script that `script_of` names for a run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, script_of: Callable[[StudyRun], str]) -> None:
        self.started: list[str] = []
        self._folder = folder

        def start(run: StudyRun, cores: Any) -> subprocess.Popen[bytes]:
            self.started.append(run.name)
            run.folder.parent.mkdir(parents=True, exist_ok=True)
            script = script_of(run).format(folder=run.folder, study=folder)
            with run.log.open("ab") as log:
                return subprocess.Popen(["/bin/sh", "-c", script], stdout=log, stderr=log, start_new_session=True)

        monkeypatch.setattr(study_folder, "start", start)
        monkeypatch.setattr(study_folder, "POLL_SECONDS", 0.02)

    def run(self, *, seeds: int, jobs: int = 1) -> None:
        study = STUDY.replace("seeds = 2", f"seeds = {seeds}").format(model="m", settings=SETTINGS)
        runs = runs_of(parsed_study(study, "toy"), self._folder)
        run_all(runs, jobs, self._on_end, lambda line: None)

    def _on_end(self, run: StudyRun, error: str | None) -> str:
        return ""


def test_the_other_runs_save_if_a_result_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    saves = "trap 'touch {study}/saved; exit 0' TERM; touch {study}/go; while true; do sleep 0.05; done"
    study = Scripted(monkeypatch, tmp_path, lambda run: WAITS_FOR_OTHERS if run.arm == "baseline" else saves)

    def full_disk(run: StudyRun, error: str | None) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(study, "_on_end", full_disk)
    with pytest.raises(OSError, match="No space left"):
        study.run(seeds=1, jobs=2)
    assert (tmp_path / "saved").exists()


SUMMARY = {"seconds": 3.0, "metrics": dict.fromkeys(FROM_THE_SUMMARY.values(), 0.1)}
METRICS = [
    {"update": 0, "seconds": 1.0, "held_out": {"value": 0.2}},
    {"update": 1, "seconds": 2.0, "rollouts": 16, "length": 5.0, "correct": 0.5, "grad_norm": 1.0},
    {"update": 1, "seconds": 3.0, "held_out": {"value": 0.6}},
]


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """The folder of a finished run."""
    folder = tmp_path / "good"
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps(SUMMARY))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in METRICS))
    return folder


@pytest.mark.parametrize("damage", ['{"update": 1, "sec', "5\n", "[1, 2]\n", '{"held_out": 3}\n', "\0", "\n", ""])
def test_damaged_metrics_are_one_error(damage: str, good: Path) -> None:
    read_run(good, ["grad_norm"])
    (good / "metrics.jsonl").write_text(damage)
    with pytest.raises(ValueError, match=str(good)):
        read_run(good, ["grad_norm"])


def test_a_finished_run_with_damaged_metrics_has_failed(
    good: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The study was killed before it had read the results."""
    out, printed = tmp_path / "out", list[str]()
    scripted = Scripted(monkeypatch, tmp_path, lambda run: FAILS if run.seed else f"cp -r {good} {{folder}}")
    shutil.copytree(good, broken := out / "runs/elevator/seed-0")
    (broken / "metrics.jsonl").write_text('{"update": 1, "sec')
    found = run_study(parsed_study(STUDY.format(model="m", settings=SETTINGS), "toy"), out, 1, printed.append)
    assert scripted.started == ["baseline seed 0", "baseline seed 1", "elevator seed 1"]
    assert [(one["arm"], one["seed"]) for one in found.failures] == [("elevator", 0), ("baseline", 1), ("elevator", 1)]
    assert found.failures[0]["error"].endswith("Remove the folder to run it again")
    assert "[2/4] baseline seed 0: held-out score 0.200 -> 0.600 in 0:03; 0 running, 0:0" in "\n".join(printed)
    assert "[4/4] elevator seed 1: FAILED: no space left (exit code 2); 0 running" in printed


# Real studies


@pytest.mark.slow
def test_a_study_leaves_a_line_per_run_a_page_and_the_numbers(finished: Path) -> None:
    found = sorted(lines(finished), key=by_name)
    assert [by_name(line) for line in found] == [(arm, seed) for arm in ("baseline", "elevator") for seed in (0, 1)]
    for line in found:
        assert line["curve"]["update"] == [0, 5, 10, 15, 20]
        assert line["curve"]["rollouts"][-1] == sum(line["rollouts_per_update"])
        assert len(line["series"]["grad_norm"]) == 20
        assert line["curve"]["seconds"][-1] < line["wall_seconds"]
        assert line["versions"]["torch"] and line["device"].startswith("CPU")
    assert found[0]["metrics"]["staleness"] == 0 < found[2]["metrics"]["staleness"]
    assert found[0]["curve"]["score"][0] == found[2]["curve"]["score"][0], "arms of a seed start alike"
    assert len({line["problems"] for line in found}) == 1 and found[0]["problems"]
    numbers = json.loads((finished / "compare.json").read_text())
    (contrast,) = numbers["contrasts"]
    outcomes = {by_name(run): run["outcomes"] for run in numbers["runs"]}
    assert all(outcomes[by_name(line)]["final_score"] == line["curve"]["score"][-1] for line in found)
    assert all(one["grad_norm"] > 0 for one in outcomes.values())
    areas = {name: one["curve_area"] for name, one in outcomes.items()}
    differences = [areas["elevator", seed] - areas["baseline", seed] for seed in (0, 1)]
    assert contrast["difference"]["mean"] == pytest.approx(sum(differences) / 2)
    assert contrast["anecdote"] and contrast["primary"]
    page = (finished / "compare.html").read_text()
    assert "Does the elevator learn?" in page and "elevator minus baseline, curve_area" in page
    assert not list(finished.glob("runs/*/*/checkpoints")), "a finished run keeps no checkpoints"


@pytest.mark.slow
def test_a_finished_study_is_not_run_again_and_can_be_shown_from_its_results(
    study: Path, finished: Path, tmp_path: Path
) -> None:
    before = (finished / "results.jsonl").read_text()
    again = compare(study, "--out", finished, "--json")
    assert again.returncode == 0
    assert (finished / "results.jsonl").read_text() == before
    numbers = json.loads(again.stdout)
    shutil.copy(finished / "results.jsonl", tmp_path / "toy.jsonl")
    shutil.copy(study, tmp_path / "toy.toml")
    rebuilt = compare("--from", tmp_path / "toy.jsonl", "--json")
    assert rebuilt.returncode == 0
    assert json.loads(rebuilt.stdout) == numbers
    assert (tmp_path / "toy.html").read_text() == (finished / "compare.html").read_text()


@pytest.mark.slow
def test_on_another_machine_results_are_enough_to_run_only_what_is_missing(
    study: Path, finished: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    known = (finished / "results.jsonl").read_text().splitlines(keepends=True)
    last = json.loads(known[-1])
    (out / "results.jsonl").write_text("".join(known[:-1]))
    done = compare(study, "--jobs", "2", "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 of 4 runs are finished" in done.stdout
    assert [str(path.relative_to(out / "runs")) for path in out.glob("runs/*/seed-*/")] == [
        f"{last['arm']}/seed-{last['seed']}"
    ]
    assert (out / "results.jsonl").read_text().startswith("".join(known[:-1]))
    assert without_time(lines(out)[-1]) == without_time(last)


@pytest.mark.slow
def test_settings_of_a_run_that_was_started_cannot_change(study: Path, finished: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed.toml"
    changed.write_text(study.read_text().replace("slots = 8", "slots = 9"))
    done = compare(changed, "--out", finished)
    assert done.returncode == 2
    assert "slots = 9" in done.stderr and "slots = 8" in done.stderr


@pytest.mark.slow
def test_a_failing_arm_is_listed_and_the_others_are_compared(study: Path, finished: Path, tmp_path: Path) -> None:
    """The broken arm joins the finished study; its two runs fail at each call."""
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    more = tmp_path / "toy.toml"
    more.write_text(study.read_text() + BROKEN_ARM)
    for call in (1, 2):
        done = compare(more, "--jobs", "2", "--out", out, "--json")
        assert done.returncode == 2
        numbers = json.loads(done.stdout)
        assert [(one["arm"], one["seed"]) for one in numbers["failed"]] == [("broken", 0), ("broken", 1)]
        assert all("nowhere.jsonl" in one["error"] for one in numbers["failed"])
        assert numbers["contrasts"][0]["difference"]["pairs"] == 2
        assert len(lines(out)) == 4 + 2 * call
    assert "broken seed 1" in (out / "compare.html").read_text()


@pytest.mark.slow
def test_interrupted_and_killed_in_mid_study_it_continues_to_the_same_results(
    study: Path, finished: Path, tmp_path: Path
) -> None:
    """Between two updates: responses that an interrupt aborts are regenerated with another seed."""
    out, hold, held = tmp_path / "out", tmp_path / "evaluations.hold", tmp_path / "evaluations.held"
    first, second = out / "runs/baseline/seed-0", out / "runs/elevator/seed-0"
    held_study = tmp_path / "toy.toml"
    held_study.write_text(study.read_text().replace("toy:SayA", "toy:HeldInEvaluation"))
    words = command(held_study, "--jobs", "1", "--out", out)
    environment = ENVIRONMENT | {"HOLD_EVALUATIONS": str(hold)}

    hold.touch()
    interrupted = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_until(held.exists)
    child = json.loads((first / ".lock").read_text())["pid"]
    interrupted.send_signal(signal.SIGINT)
    _, errors = interrupted.communicate(timeout=120)
    assert interrupted.returncode == 130 and "The same command continues" in errors
    assert not is_running(child) and not (first / "summary.json").exists()

    held.unlink()
    killed = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL)
    wait_until((first / "summary.json").exists)
    hold.touch()
    wait_until(held.exists)
    child = json.loads((second / ".lock").read_text())["pid"]
    killed.kill()
    killed.wait()
    wait_for_end(child)  # it saved by itself
    assert not (second / "summary.json").exists()

    assert subprocess.run(words, env=environment, stdout=subprocess.DEVNULL).returncode == 0
    for folder in (first, second):
        assert "resumed after 10 updates" in folder.with_name("seed-0.log").read_text()
    expected = [without_time(line) for line in sorted(lines(finished), key=by_name)]
    assert [without_time(line) for line in sorted(lines(out), key=by_name)] == expected
