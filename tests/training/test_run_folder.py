"""A run folder under real faults: two processes, damaged files, a full disk, removal, signals, a closed terminal."""

import hashlib
import json
import os
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import forked
import toy_runs
from config_file import config_file
from forked import Command, Done
from full_disk import fill, small_file_system
from sortedrl.core import events
from sortedrl.core.batch import Batch
from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.rollout import Prompt, Rollout
from sortedrl.log.process_lock import FolderInUse, FolderLock
from sortedrl.log.reading import read_events, read_intact, without_rolled_back
from sortedrl.observe.metrics import Metrics
from sortedrl.training.run_dir import RunFolder
from sortedrl.training.run_record import sampled
from sortedrl.training.settings import TrainSettings
from toy_runs import SMALL_TRAINING, flags, metrics_of

SMALL = flags(
    SMALL_TRAINING | {"prompts_per_cohort": 4, "eval_problems": 2, "learning_rate": 3e-3, "checkpoint_every": 2}
)


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four updates with checkpoints after 2 and 4."""
    folder = tmp_path_factory.mktemp("finished")
    done = forked.run(fresh(model, folder / "run", "--updates", "4"), folder / "output")
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def fresh(model: Path, out: Path, *words: str) -> list[str]:
    return ["train", "--model", str(model), "--out", str(out), *SMALL, *words]


def test_what_is_there_already_is_named_and_resumed_only_if_it_is_a_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    text = {}
    for path in tmp_path.iterdir():
        settings = TrainSettings(out=path)
        with pytest.raises(ConfigurationError) as error:
            RunFolder.unused(settings).create(settings, print)
        text[path.name] = str(error.value)
    assert all("something has this name" in text[name] for name in ("file", "folder", "link"))
    assert "this run folder already exists" in text["run"]
    assert [name for name in text if "--resume" in text[name]] == ["run"]


def resume(run: Path, updates: int) -> Done:
    return forked.run(["train", "--resume", str(run), "--updates", str(updates)], run.parent / "output")


def updates_of(run: Path) -> list[int]:
    log = read_intact(run / "events.jsonl").events
    return [event.update for event in log if isinstance(event, events.Updated)]


def one_line(done: Done) -> str:
    assert done.returncode not in (0, 130), done.stdout
    lines = [line for line in done.stderr.splitlines() if "Writing model" not in line]
    assert len(lines) == 1, done.stderr
    return lines[0]


@pytest.fixture
def training(model: Path, tmp_path: Path) -> Iterator[Command]:
    """A run without end in `tmp_path / "run"`, that has done two updates."""
    command = Command(fresh(model, tmp_path / "run", "--updates", "5000"), tmp_path / "output-of-training")
    wait_until(lambda: "update 2/" in command.stdout, command)
    yield command
    if command.process.exitcode is None:
        command.process.kill()
        command.process.join()


def wait_until(holds: Callable[[], bool], command: Command) -> None:
    deadline = time.monotonic() + 300
    while not holds():
        assert command.process.exitcode is None and time.monotonic() < deadline, command.wait(0.1)
        time.sleep(0.02)


# The lock


def test_a_second_process_is_told_who_holds_the_folder(model: Path, training: Command, tmp_path: Path) -> None:
    run, output = tmp_path / "run", tmp_path / "output"
    for words in (["train", "--resume", str(run)], fresh(model, run)):
        line = one_line(forked.run(words, output))
        assert f"process {training.process.pid} on {os.uname().nodename}, since 20" in line
        assert str(run) in line and "Traceback" not in line
    before = json.loads((run / "config.json").read_text())
    one_line(forked.run(["train", "--resume", str(run), "--updates", "3"], output))
    assert json.loads((run / "config.json").read_text()) == before
    assert forked.run(["trace", str(run)], output).returncode == 0, "reading needs no lock"
    training.send(signal.SIGKILL)
    training.wait()
    assert resume(run, len(updates_of(run)) + 1).returncode == 0


def test_of_two_that_resume_at_once_one_is_refused(run: Path) -> None:
    words = ["train", "--resume", str(run), "--updates", "5000"]
    commands = [Command(words, run.parent / f"output{i}") for i in range(2)]
    until = time.monotonic() + 300
    while all(command.process.is_alive() for command in commands) and time.monotonic() < until:
        time.sleep(0.02)
    refused, trains = sorted(commands, key=lambda command: command.process.is_alive())
    assert "is in use by process" in one_line(refused.wait()) and refused.wait().returncode == 2
    trains.wait_for_output("update 7/")
    trains.send(signal.SIGINT)
    assert trains.wait().returncode == 130, trains.stderr
    trained = Counter(id for update in toy_runs.updates_of(run) for id in update.rollouts)
    assert set(trained.values()) == {1}
    assert updates_of(run) == list(range(max(7, len(updates_of(run)))))


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path, print)
    reader, writer = os.pipe()
    started, starts = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(starts, b"x")
        os.read(reader, 1)
        os._exit(0)
    try:
        os.read(started, 1)
        with pytest.raises(FolderInUse):
            FolderLock(tmp_path, print)
        lock.release()
        FolderLock(tmp_path, print).release()
    finally:
        os.write(writer, b"x")
        os.waitpid(child, 0)


# Damaged files


DAMAGE: dict[str, Callable[[list[bytes]], bytes]] = {
    "middle line": lambda lines: b"".join([*lines[:40], b'{"event":"Garb\x00\xff\n', *lines[41:]]),
    "binary block": lambda lines: b"".join([*lines[:30], bytes(range(256)) * 4, *lines[45:]]),
    "removed": lambda lines: b"removed",
    "every line": lambda lines: b"\xff[]\n3\nnull\n" * 40,
    "all but the end": lambda lines: b"".join(lines[len(lines) // 2 :]),
    "truncated": lambda lines: b"".join(lines[: len(lines) // 2])[:-9],
    "empty": lambda lines: b"",
}


@pytest.mark.parametrize(
    "damage", [pytest.param(name, marks=[pytest.mark.slow] * (place > 2)) for place, name in enumerate(DAMAGE)]
)
def test_a_damaged_event_log_costs_metrics_and_not_the_run(damage: str, run: Path) -> None:
    path = run / "events.jsonl"
    path.write_bytes(DAMAGE[damage](path.read_bytes().splitlines(keepends=True)))
    if damage == "removed":
        path.unlink()
    done = resume(run, 5)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if "are lost" in line]
    assert len(said) == 1, done.stdout
    assert updates_of(run)[-1] == 4
    assert len(updates_of(run)) == len(set(updates_of(run)))
    list(read_events(run / "events.jsonl"))  # each line is an event again
    again = resume(run, 6)
    assert again.returncode == 0, again.stderr
    assert "are lost" not in again.stdout
    watched = forked.run(["watch", str(run), "--json"], run.parent / "output")
    assert watched.returncode == 0, watched.stderr
    assert json.loads(watched.stdout)["updates"] == 6


def test_all_other_files_may_be_damaged_at_once(run: Path) -> None:
    (run / "summary.json").write_text("[")
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\xfe\n[]\n{"update": "x"}\n{"upd')
    (run / "rollouts.jsonl").write_bytes(b"\x00" * 100 + b"\n")
    done = resume(run, 5)
    assert done.returncode == 0, done.stderr
    for part in ("left out 3 unreadable lines", "left out 1 unreadable line"):
        assert part in done.stdout
    assert json.loads((run / "summary.json").read_text())["updates"] == 5
    assert [line["update"] for line in metrics_of(run, "reward")] == [1, 2, 3, 4, 5]


def test_resume_falls_back_to_the_intact_checkpoint_and_says_so(run: Path) -> None:
    learner = run / "checkpoints" / "update-000004" / "learner.pt"
    os.truncate(learner, learner.stat().st_size - 1)
    (run / "checkpoints" / ".writing-update-000006").mkdir()
    done = resume(run, 5)
    assert done.returncode == 0, done.stderr
    assert "update-000004 is damaged" in done.stdout and "continues from update-000002" in done.stdout
    assert updates_of(run) == [0, 1, 2, 3, 4]
    names = {path.name for path in (run / "checkpoints").iterdir()}
    assert "damaged-update-000004" in names and not any(name.startswith(".") for name in names)


def other_state(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """A state that is intact, but not that of this run."""
    path, manifest = checkpoint / "state.json", checkpoint / "manifest.json"
    state = json.loads(path.read_text())
    change(state)
    path.write_text(json.dumps(state))
    digest = {"size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"state.json": digest}))


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def test_a_checkpoint_of_another_run_is_refused_before_anything_is_touched(run: Path) -> None:
    newest = run / "checkpoints" / "update-000004"
    other_state(newest, lambda state: state["notes"]["settings"].update(algorithm="ppo", seed=7))
    before = content_of(run)
    line = one_line(resume(run, 5))
    reason = "it is that of another run (algorithm: 'ppo' -> 'grpo', seed: 7 -> 0)"
    assert f"checkpoint {newest} cannot be used: {reason}" in line
    assert content_of(run) == before
    shutil.rmtree(newest)
    assert resume(run, 5).returncode == 0


def test_a_checkpoint_that_lacks_a_part_costs_one_line(run: Path) -> None:
    newest = run / "checkpoints" / "update-000004"
    other_state(newest, lambda state: state["controller"].pop("sweep"))
    assert f"checkpoint {newest} cannot be used: it lacks 'sweep'. Move it out of" in one_line(resume(run, 5))
    newest.rename(run / "aside")
    assert resume(run, 5).returncode == 0


def test_a_run_and_its_model_are_told_apart(run: Path) -> None:
    def refused(*words: str) -> str:
        return one_line(forked.run(list(words), run.parent / "output"))

    assert refused("eval", "--model", str(run)).endswith(f"this is the folder of a run. Name its model: {run}/model.")
    assert "it is that of a model, not of a run" in refused("train", "--resume", str(run / "model"))
    (run / "model").rename(run / "moved")
    assert refused("train", "--model", str(run)).endswith(f"a model when it has ended: sortedrl train --resume {run}.")


def test_a_run_that_is_resumed_at_its_end_saves_nothing_again(run: Path) -> None:
    state = run / "checkpoints" / "update-000004" / "state.json"
    before = state.stat().st_ino
    done = resume(run, 4)
    assert done.returncode == 0 and state.stat().st_ino == before
    assert "no update is left to make: for more, set --updates to more than 4" in done.stdout


def test_a_run_whose_data_ends_before_its_updates_says_so(model: Path, tmp_path: Path) -> None:
    """More updates would not help: all epochs are trained on."""
    out, ends = tmp_path / "run", r"the data ended after 2 updates: 1 epoch of 4 problems\. For more, set epochs"
    data = ["--updates", "9", *config_file(tmp_path, epochs=1)]
    first = forked.run([*fresh(model, out, *data), "--task-options", "problems", "4"], tmp_path / "output")
    assert first.returncode == 0, first.stderr
    for done in (first, resume(out, 12)):
        assert len(re.findall(ends, done.stdout)) == 1
        assert "set --updates" not in done.stdout
    more = forked.run(["train", "--resume", str(out), *config_file(tmp_path, epochs=3)], tmp_path / "output")
    assert updates_of(out) == [0, 1, 2, 3, 4, 5]
    assert "the data ended after 6 updates: 3 epochs" in more.stdout


def test_two_runs_of_the_same_second_have_a_folder_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both look for a free name before either makes its folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sortedrl.training.run_dir.time.strftime", lambda text: "now")
    folders = [RunFolder.unused(TrainSettings()) for _ in range(2)]
    for folder in folders:
        folder.create(TrainSettings(), print)
    later = RunFolder.unused(TrainSettings())
    names = ["now-partial+elevator-seed0", "now-partial+elevator-seed0-2", "now-partial+elevator-seed0-3"]
    assert [folder.path.name for folder in (*folders, later)] == names
    assert folders[1].checkpoints.parent == folders[1].path
    for folder in folders:
        folder.close()


@pytest.mark.parametrize(
    ("size", "count", "ids"),
    [(9, 3, [0, 4, 8]), (9, 1, [0]), (9, 0, []), (3, 8, [0, 1, 2]), (1, 8, [0]), (2, 2, [0, 1]), (10, 4, [0, 3, 6, 9])],
)
def test_the_sample_of_an_update_reaches_from_the_shortest_to_the_longest(
    size: int, count: int, ids: list[int]
) -> None:
    batch = Batch(0, 0, 0, tuple(Rollout(id, Prompt("p", [1]), 0, 0, 0, 0) for id in range(size)))
    assert [rollout.id for rollout in sampled(batch, count)] == ids


# A full disk, and a folder that goes away


@pytest.mark.parametrize("what", ["events", "checkpoint"])
def test_a_full_disk_ends_a_run_with_one_line_and_it_can_be_resumed(what: str, model: Path, tmp_path: Path) -> None:
    with small_file_system(tmp_path / "disk", "4m") as disk:
        run = disk / "run"
        every = ["--checkpoint-every", "1" if what == "checkpoint" else "0", *config_file(tmp_path, save_rollouts=0)]
        command = Command(fresh(model, run, "--updates", "5000", *every), tmp_path / "output")
        wait_until(lambda: "update 2/" in command.stdout, command)
        filler = fill(disk)
        line = one_line(command.wait())
        assert "No space left on device" in line and f"--resume {run}" in line
        assert ("checkpoint" if what == "checkpoint" else "jsonl cannot be written") in line
        filler.unlink()
        done = resume(run, 3)
        assert done.returncode == 0, done.stderr
        assert "are lost" not in done.stdout
        assert updates_of(run) == list(range(max(3, len(updates_of(run)))))


@pytest.mark.parametrize("replaced", [False, True], ids=["removed", "replaced"])
def test_a_run_whose_folder_is_removed_ends_with_one_line(replaced: bool, training: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.rename(tmp_path / "elsewhere")
    if replaced:
        run.mkdir()
    shutil.rmtree(tmp_path / "elsewhere", ignore_errors=True)
    line = one_line(training.wait())
    assert f"run folder {run} or its lock was removed or replaced" in line
    assert not (run / "metrics.jsonl").exists()


def test_a_run_whose_lock_is_removed_ends_with_one_line_and_can_be_resumed(training: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / ".lock").unlink()
    line = one_line(training.wait())
    assert f"{run} or its lock was removed or replaced" in line and f"sortedrl train --resume {run}" in line
    assert resume(run, len(updates_of(run)) + 1).returncode == 0


# Signals


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_saves_and_the_run_can_be_resumed(number: signal.Signals, training: Command, tmp_path: Path) -> None:
    training.send(number)
    done = training.wait()
    assert done.returncode == 130, done.stderr
    assert "interrupted and saved" in done.stderr
    run = tmp_path / "run"
    count = len(updates_of(run))
    assert (run / "checkpoints" / f"update-{count:06d}").is_dir()
    assert f"--resume {run}" in done.stderr
    assert resume(run, count + 1).returncode == 0
    assert updates_of(run) == list(range(count + 1))
    assert_nothing_lost_or_trained_twice(run)


def assert_nothing_lost_or_trained_twice(run: Path) -> None:
    """Over the joined log: each rollout at most once, slot-time sound, tokens accounted for."""
    log = without_rolled_back(read_events(run / "events.jsonl"))
    updates = toy_runs.updates_of(run)
    times = Counter(id for update in updates for id in update.rollouts)
    assert max(times.values()) == 1
    assert times.keys() <= {e.first + i for e in log if isinstance(e, events.Loaded) for i in range(e.rollouts)}
    metrics = Metrics().fold(log).run_metrics()
    assert 0 <= metrics.bubble <= metrics.idle <= 1 + 1e-9 and metrics.cached_tokens >= 0
    assert metrics.generated_tokens == metrics.trained_tokens + metrics.dropped_tokens + metrics.cached_tokens
    for update in updates:
        for length, segments in zip(update.lengths, update.segments, strict=True):
            assert length == sum(tokens for _, tokens in segments) <= 40
            assert [version for version, _ in segments] == sorted(version for version, _ in segments)
