"""Whole training jobs whose servers have GPUs of their own: weights by a checkpoint engine of verl, on gloo."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cpu_backend import DIES_AFTER
from test_verl_job import PROMPTS, SEPARATE, SIBLINGS, TOOLS, check_log, check_turns, command_of, job, run, staleness

from sortedrl.core import events
from sortedrl.log.reading import read_events

pytestmark = pytest.mark.slow
RESUME = "trainer.resume_mode=auto"
COHORT = 4 * PROMPTS * SIBLINGS


def updates_in(log: list[events.Event]) -> list[events.Updated]:
    return [event for event in log if isinstance(event, events.Updated)]


def generates_during_steps(log: list[events.Event]) -> bool:
    """Whether requests took slots while the learner stepped."""
    learning = False
    for event in log:
        if isinstance(event, events.Updated | events.Published):
            learning = isinstance(event, events.Updated)
        elif learning and isinstance(event, events.Started):
            return True
    return False


def trainer_process(job: int) -> int:
    """The TaskRunner of verl among the descendants of this job."""

    def status(pid: int) -> dict[str, str]:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return dict(line.split(":\t", 1) for line in lines if ":\t" in line)

    def ancestors(pid: int) -> Iterator[int]:
        while pid > 1:
            yield pid
            pid = int(status(pid)["PPid"])

    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if b"ray::TaskRunner" in (folder / "cmdline").read_bytes() and job in ancestors(int(folder.name)):
                return int(folder.name)
        except (FileNotFoundError, ProcessLookupError):
            continue
    raise AssertionError("the job has no TaskRunner")


def kill_trainer_after(updates: int, command: list[str], out: Path) -> None:
    log = out / "events.jsonl"
    with (
        (out.parent / "killed.txt").open("w") as output,
        subprocess.Popen(command, stdout=output, stderr=output) as running,
    ):
        while not log.exists() or len(updates_in(list(read_events(log)))) < updates:
            assert running.poll() is None, (out.parent / "killed.txt").read_text()[-6000:]
            time.sleep(0.5)
        os.kill(trainer_process(running.pid), signal.SIGKILL)
        assert running.wait(timeout=120) != 0


def test_on_policy_in_turn(data: Path, tmp_path: Path) -> None:
    result = run("on-policy", data, tmp_path / "run", "--override", *SEPARATE, "trainer.test_freq=2")
    log = check_log(tmp_path / "run", updates=4)
    assert staleness(log) == {0} and not generates_during_steps(log)
    assert max(result["probability_difference_max"]) < 1e-5, "the servers sample from the learner's weights"


def test_twenty_updates_with_overlap_and_a_killed_trainer(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    more = ["--save-every", "4", "--override", *SEPARATE, "trainer.test_freq=5"]
    kill_trainer_after(7, command_of("partial", data, out, *more, steps=20), out)
    before = updates_in(list(read_events(out / "events.jsonl")))
    saved = int((out / "latest_checkpointed_iteration.txt").read_text())
    assert saved in (4, 8)
    run("partial", data, out, *more, RESUME, steps=20)
    log = check_log(out, updates=20)
    assert generates_during_steps(log)
    assert 1 <= max(staleness(log)) <= 4
    trained = [rollout for event in updates_in(log) for rollout in event.rollouts]
    assert set(range(4 * COHORT)) <= set(trained), "nothing was lost"
    assert [event.rollouts for event in updates_in(log)[:saved]] == [event.rollouts for event in before[:saved]]
    assert not any(isinstance(event, events.Rejected) for event in log)


def test_tools_with_overlap(dialogue: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run("partial", dialogue, out, "--override", *SEPARATE, *TOOLS, steps=5, model=dialogue / "model")
    log = check_log(out, updates=5)
    check_turns(log)
    assert generates_during_steps(log) and max(staleness(log)) <= 4


def test_a_server_that_dies_ends_the_job_and_a_resumed_one_loses_nothing(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    more = ["--save-every", "1", "--override", *SEPARATE]
    monkeypatch.setenv(DIES_AFTER, "40")  # more than half of what both may start before the first checkpoint
    done = job("partial", data, out, *more, steps=8)
    assert done.returncode != 0
    output = (done.stdout + done.stderr)[-6000:]
    assert "EngineDied: a rollout server is gone. Resume the run from its last checkpoint" in output, output
    assert 0 < int((out / "latest_checkpointed_iteration.txt").read_text()) < 8
    monkeypatch.delenv(DIES_AFTER)
    run("partial", data, out, *more, RESUME, steps=8)
    log = check_log(out, updates=8)
    assert set(range(COHORT)) <= {rollout for event in updates_in(log) for rollout in event.rollouts}
    assert not any(isinstance(event, events.Rejected) for event in log)
