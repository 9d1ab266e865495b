"""`sortedrl watch` on real runs: growing, finished, interrupted, killed, resumed."""

import json
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import forked
import toy
from forked import Command, Done
from scenarios import run as simulated
from sortedrl.core import events
from sortedrl.core.configuration import ConfigurationError
from sortedrl.log.lines import written
from sortedrl.log.process_lock import RUN_LOCK, ProcessLock, lock_of_log
from sortedrl.log.reading import read_events, without_rolled_back
from sortedrl.observe import watch
from sortedrl.observe.console import PlainConsole, panel_rows, progress_line
from sortedrl.observe.metrics import Metrics
from sortedrl.observe.watch import Follower
from terminal import ENVIRONMENT, in_terminal, panel_of, train_command


def watched(*words: str) -> Done:
    return forked.run(["watch", *words], environment=ENVIRONMENT)


def wait_for_update(run: Path, update: int, command: Command) -> None:
    """Until the metrics file of a run that another process writes has that update."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and command.process.is_alive():
        path = run / "metrics.jsonl"
        if path.exists() and f'"update": {update},' in path.read_text():
            return
        time.sleep(0.05)
    raise AssertionError(f"update {update} was not written: {command.stdout} {command.stderr}")


def started(words: list[str]) -> Command:
    return Command(words, environment=ENVIRONMENT)


@pytest.fixture(scope="module")
def killed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed in its seventh or eighth update; its last checkpoint is that of the fourth."""
    run = tmp_path_factory.mktemp("killed") / "run"
    hold = run.with_name("hold")
    words = train_command(model, run, "--updates", "300", "--checkpoint-every", "4", *toy.held(hold, at=8 * 16 - 1))
    command = started(words)
    wait_for_update(run, 6, command)
    command.send(signal.SIGKILL)
    command.wait()
    hold.unlink()
    return run


@pytest.fixture(scope="module")
def resumed(killed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, gone on with to its end: its log has a part that was rolled back."""
    run = tmp_path_factory.mktemp("resumed") / "run"
    shutil.copytree(killed, run)
    done = started(["train", "--resume", str(run), "--updates", "12"]).wait()
    assert done.returncode == 0, done.stderr
    return run


def test_watching_a_growing_run_prints_its_lines_until_it_ends(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    hold = tmp_path / "hold"
    command = started(train_command(model, run, "--updates", "10", *toy.held(hold, at=4 * 16)))
    wait_for_update(run, 1, command)
    watching = started(["watch", str(run)])
    watching.wait_for_output("update ")
    hold.unlink()
    trained = command.wait().stdout
    seen = watching.wait()
    assert seen.returncode == 0, seen.stderr
    lines = [line for line in seen.stdout.splitlines() if line.startswith("update ")]
    assert lines == [line for line in trained.splitlines() if line.startswith("update ")][-len(lines) :]
    assert len(lines) > 1, "it saw the end only"
    written = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    run_metrics = [progress_line(line, None).rpartition("ETA")[0] for line in written if "reward" in line]
    assert [line.rpartition("ETA")[0] for line in trained.splitlines() if line.startswith("update ")] == run_metrics
    score = next(line for line in trained.splitlines() if line.startswith("score "))
    assert seen.stdout.splitlines()[-1].startswith("ended: " + score.split(":")[0])


def test_a_finished_run_shows_its_final_state_in_a_terminal_and_as_json(resumed: Path) -> None:
    session = in_terminal(["watch", str(resumed)], ENVIRONMENT, columns=80)
    assert session.code == 0, session.output
    panel = panel_of(session)
    run_metrics = Metrics().fold(without_rolled_back(read_events(resumed / "events.jsonl"))).run_metrics()
    assert panel["update"].startswith("12/12")
    assert f"run {run_metrics.bubble:.1%}" in panel["bubble"]
    assert session.screen.lines[-2].startswith("ended: score ")
    state = json.loads(watched(str(resumed), "--json").stdout)
    assert state["outcome"] == "ended"
    assert state["snapshot"]["goodput"] == run_metrics.goodput
    assert state["updates"] == state["updates_in_all"] == 12


@pytest.mark.parametrize("updates_in_all", [2, 9])
def test_a_run_whose_last_update_was_evaluated_has_ended(model: Path, tmp_path: Path, updates_in_all: int) -> None:
    """No evaluation follows its end then, only a checkpoint, as in a run that was interrupted. Updates may be left, if
    its data ended before them."""
    run, quiet = tmp_path / "run", PlainConsole(lambda line: None)
    assert started(train_command(model, run, "--updates", "2", "--eval-every", "2")).wait().returncode == 0
    metrics = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(metrics.replace('"updates_in_all": 2,', f'"updates_in_all": {updates_in_all},'))
    done = watched(str(run))
    assert done.returncode == 0 and done.stdout.splitlines()[-1].startswith("ended: score ")
    (run / "summary.json").unlink()
    lock = ProcessLock(run / RUN_LOCK)
    assert Follower(run, quiet).watched().outcome == watch.RUNS, "it saves its model"
    lock.release()
    assert Follower(run, quiet).watched().outcome == watch.INTERRUPTED
    (run / "config.json").unlink()
    assert Follower(run, quiet).watched().outcome == watch.ENDED, "a loop of its own saves at the end, too"


def test_a_killed_run_is_known_by_its_lock_or_by_its_silence(killed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(killed, run)
    done = watched(str(run))
    assert done.returncode == 1
    last = done.stdout.splitlines()[-1]
    assert last.startswith("stopped: its process has ended. The last event is ") and f"--resume {run}" in last
    said = float(last.split(" is ")[1].split(" s ")[0])
    assert said == pytest.approx(time.time() - (run / "events.jsonl").stat().st_mtime, abs=30)
    (run / ".lock").write_text("{}")  # as if written on another machine
    os.utime(run / "events.jsonl", (time.time() - 700,) * 2)
    done = watched(str(run))
    assert done.returncode == 1
    last = done.stdout.splitlines()[-1]
    assert last.startswith("stopped growing: the last event is ") and "was killed, continue with: sortedrl" in last


@pytest.mark.parametrize("name", [RUN_LOCK, lock_of_log(Path("events.jsonl")).name])
def test_a_silent_run_whose_process_is_there_has_not_ended(name: str, killed: Path, tmp_path: Path) -> None:
    """Of `sortedrl train`, or of a loop of its own."""
    run = tmp_path / "run"
    shutil.copytree(killed, run)
    lock = ProcessLock(run / name)
    os.utime(run / "events.jsonl", (time.time() - 3000,) * 2)
    follower = Follower(run, PlainConsole(lambda line: None))
    assert follower.watched().outcome == watch.RUNS
    lock.release()
    assert follower.watched().outcome == watch.STOPPED


@pytest.mark.slow
def test_an_interrupted_run_ends_what_watches_it(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = started(train_command(model, run, "--updates", "500"))
    wait_for_update(run, 2, command)
    command.send(signal.SIGINT)
    command.wait()
    done = watched(str(run))
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == f"interrupted and saved. Continue with: sortedrl train --resume {run}"


def test_ctrl_c_ends_watching_without_a_word(killed: Path) -> None:
    os.utime(killed / "events.jsonl")  # as if it had been written to just now
    lock = ProcessLock(killed / RUN_LOCK)
    command = started(["watch", str(killed)])
    command.wait_for_output("update ")
    printed = command.stdout
    command.send(signal.SIGINT)
    done = command.wait(30)
    assert done.returncode == 130
    assert printed.startswith("update ") and (done.stdout, done.stderr) == (printed, "")
    lock.release()


@pytest.mark.parametrize("size", [2_000, 10_000_000])
def test_of_two_runs_in_one_log_the_last_one_is_shown_with_a_notice(size: int, tmp_path: Path) -> None:
    """As a loop of your own may append them, and however much of them is read at a time."""
    first, second = (simulated(mode, [7, 1, 12, 2, 5, 5], rollouts_per_update=2) for mode in ("baseline", "partial"))
    shown: list[str] = []
    console = PlainConsole(shown.append)
    (tmp_path / "events.jsonl").touch()
    follower = Follower(tmp_path, console)
    text = written([*first.events, *second.events])
    for start in range(0, len(text), size):
        with (tmp_path / "events.jsonl").open("a") as file:
            file.write(text[start : start + size])
        follower.catch_up()
    assert console.state.metrics.run_metrics() == second.run_metrics
    assert shown == [f"{tmp_path}/events.jsonl: it has the events of 2 runs, of which only the last one counts"]


def test_a_log_that_grows_byte_by_byte_and_is_rolled_back_gives_the_view_of_the_whole(
    killed: Path, resumed: Path, tmp_path: Path
) -> None:
    """The real log of a resumed run, in pieces that end anywhere, and its metrics file replaced as a resume does."""
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(resumed / "config.json", run)
    content = (resumed / "events.jsonl").read_bytes()
    mark = content.index(b'"RolledBack"')
    said: list[str] = []
    console = PlainConsole(said.append)
    follower = Follower(run, console)
    shutil.copy(killed / "metrics.jsonl", run)
    log = (run / "events.jsonl").open("wb")
    with log:
        for start in range(0, len(content), 7001):
            log.write(content[start : start + 7001])
            log.flush()
            if start <= mark < start + 7001:
                shutil.copy(resumed / "metrics.jsonl", run / ".metrics.jsonl")
                (run / ".metrics.jsonl").replace(run / "metrics.jsonl")
            follower.catch_up()
    at_once = PlainConsole(said.append)
    Follower(resumed, at_once)
    assert rows_of(console) == rows_of(at_once)
    run_metrics = Metrics().fold(without_rolled_back(read_events(resumed / "events.jsonl"))).run_metrics()
    assert console.state.metrics.run_metrics() == run_metrics
    assert follower.watched().outcome == watch.RUNS  # no summary is there
    shutil.copy(resumed / "summary.json", run)
    assert follower.watched().outcome == watch.ENDED


def rows_of(console: PlainConsole) -> list[str]:
    """Without the time of day in them."""
    view = replace(console.state.view(0.0), ends_at=None)
    return list(panel_rows(view, view.seen_at).values())


def test_a_run_that_is_resumed_after_its_end_has_not_ended(resumed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(resumed, run)
    events = (run / "events.jsonl").read_text().splitlines()
    last_time = json.loads(events[-1])["at"]
    with (run / "events.jsonl").open("a") as log:
        log.write(json.dumps({"event": "RolledBack", "at": last_time, "events": 0}) + "\n")
    lock = ProcessLock(run / RUN_LOCK)
    assert Follower(run, PlainConsole(lambda line: None)).watched().outcome == watch.RUNS
    lock.release()


def test_wrong_folders_and_damaged_logs_give_one_line(killed: Path, tmp_path: Path) -> None:
    nowhere = watched(str(tmp_path / "nowhere"))
    assert nowhere.returncode == 2
    assert "there is no run" in nowhere.stderr and "Traceback" not in nowhere.stderr
    run = tmp_path / "damaged"
    shutil.copytree(killed, run)
    lines = (run / "events.jsonl").read_text().splitlines(keepends=True)
    lines[9] = "{half a li\n"
    (run / "events.jsonl").write_text("".join(lines))
    said = watched(str(run)).stdout.splitlines()
    assert [line for line in said if "line 10 cannot be read" in line] == said[:1], "once, and it is watched to its end"
    assert "its process has ended" in said[-1]


def test_a_log_of_an_older_version_is_refused_in_one_line(tmp_path: Path, refused: Any) -> None:
    (tmp_path / "events.jsonl").write_text('{"event":"RunBegan","at":0.0,"slots":4,"mode":"partial","settings":{}}\n')
    for command in ("watch", "report", "trace"):
        assert "event log format 1, written by an older sortedrl" in refused(command, tmp_path)


def test_the_newest_run_is_watched_where_none_is_named(killed: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no run"):
        watch.newest_run(tmp_path / "runs")
    for name, age in (("old", 500), ("new", 5), ("older", 900)):
        shutil.copytree(killed, tmp_path / "runs" / name)
        os.utime(tmp_path / "runs" / name / "events.jsonl", (time.time() - age,) * 2)
    assert watch.newest_run(tmp_path / "runs") == tmp_path / "runs" / "new"


def test_watching_ends_when_the_run_folder_is_removed(killed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(killed, folder)
    follower = Follower(folder, PlainConsole(lambda line: None))
    shutil.rmtree(folder)
    follower.catch_up()
    seen = follower.watched()
    assert seen.outcome == watch.REMOVED and "was removed" in watch.outcome_line(folder, seen)


def test_the_line_of_an_update_shows_a_slow_or_failing_reward() -> None:
    names = ("reward", "correct", "length", "bubble", "goodput", "waste", "run_staleness_mean")
    line: dict[str, Any] = {"update": 3, "updates_in_all": 9, "rejected": 0} | dict.fromkeys(names, 1.0)
    healthy = progress_line(line | {"mismatch_kl": 4e-15, "scoring_backlog": 0}, None)
    assert not any(word in healthy for word in ("mismatch", "backlog", "rejected"))
    failing = {
        "scoring_backlog": 41,
        "rejected": 7,
        "rejected_most": "7 times: ValueError: no number",
        "mismatch_kl": 1e-4,
    }
    shown = progress_line(line | failing, None)
    assert "mismatch 1.0e-04" in shown and "scoring backlog 41" in shown
    assert "rejected 7 (7 times: ValueError: no number)" in shown


def test_a_log_of_another_loop_is_not_resumed_by_train(tmp_path: Path) -> None:
    """Its folder has no settings of `sortedrl train`. It may save after the end, and is complete or not."""
    log = simulated("partial", [3, 5, 2, 9], slots=2, rollouts_per_update=2).events
    path = tmp_path / "events.jsonl"
    path.write_text(written(log[: len(log) // 2]))
    seen = watch.Watched(watch.STOPPED, "harvest", 700.0, process_is_there=None)
    assert watch.outcome_line(tmp_path, seen).endswith("If it was killed, resume it in its own loop")
    line = watch.outcome_line(tmp_path, seen._replace(process_is_there=False))
    assert line.startswith("stopped: its process has ended") and line.endswith("resume it in its own loop")
    (tmp_path / "config.json").write_text('{"updates": 8}')
    restart = f"it has no checkpoint yet: remove {tmp_path} and start it again"
    assert watch.outcome_line(tmp_path, seen).endswith(f"If it was killed, {restart}")
    (tmp_path / "checkpoints" / "update-000000").mkdir(parents=True)
    assert watch.outcome_line(tmp_path, seen).endswith(f"continue with: sortedrl train --resume {tmp_path}")
    (tmp_path / "config.json").unlink()
    path.write_text(written([*log, events.Phase(log[-1].at, "checkpoint")]))
    seen = Follower(tmp_path, PlainConsole(lambda line: None)).watched()
    assert watch.outcome_line(tmp_path, seen) == f"ended. For its metrics: sortedrl report {tmp_path}"
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "sortedrl-0.json").touch()
    assert "If it was interrupted, trainer.train(resume_from_checkpoint=True)" in watch.outcome_line(tmp_path, seen)
