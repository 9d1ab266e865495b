"""`sortedrl train` and `sortedrl eval` with rewards of a user's own that fail."""

import contextlib
import json
import re
import signal
import time
from pathlib import Path

import pytest

import forked
from config_file import config_file
from forked import Command, Done
from processes import PATIENCE_SECONDS, cpu_seconds, descendants_of, wait_for_end
from sortedrl.cli import main
from sortedrl.core import events
from sortedrl.log.reading import read_events
from toy_runs import SMALL, flags

TRAIN = {"rollouts_per_update": 16, "prompts_per_cohort": 16, "rollouts_per_prompt": 2, "updates": 2}


def words(command: str, model: Path, task: str, *more: str) -> list[str]:
    small = SMALL | {"task": task, "max_response_tokens": 24, "eval_problems": 10, "reward_workers": 2}
    return [command, "--model", str(model), *flags(small | (TRAIN if command == "train" else {})), *more]


def ran(*command: str) -> Done:
    return forked.run(command)


def options(fault: str, every: int = 1) -> list[str]:
    return ["--task-options", "fault", fault, "every", str(every)]


def wait_for_a_reward_that_hangs(run: int) -> list[int]:
    """Until a worker has computed for longer than its start takes; returns all workers."""
    until = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < until:
        workers = descendants_of(run)
        if any(cpu_seconds(worker) > 1.0 for worker in workers):
            return workers
        time.sleep(0.2)
    raise AssertionError("no worker spins")


@pytest.mark.slow
def test_a_slow_reward_shows_as_the_bottleneck_everywhere(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the lines of the updates and the last ones, in the summary, in `watch` and in the report.

    The rewards of an update take 2.4 s. Responses are short, so that generation and the learner take a small fraction
    of that, and less than the rewards even on a machine that is ten times slower.
    """
    run = tmp_path / "run"
    more = ["--out", str(run), "--mode", "partial+elevator", "--reward-workers", "1", "--updates", "2"]
    more += ["--max-response-tokens", "4", "--scoring", "background"]
    done = ran(*words("train", model, "toy:SlowAndRaisesSometimes", *more))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    updates = [line for line in lines if line.startswith("update ")]
    assert all(re.search(r"scoring backlog \d+ ", line) for line in updates)
    assert re.search(r"rejected \d+ \(\d+ times: RuntimeError: reward server is down", updates[-1])
    named = next(line for line in lines if line.startswith("bottleneck: "))
    assert re.match(r"bottleneck: scoring, \d\d% of wall-clock time \(generation", named)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["bottleneck"] == "scoring"
    (reason,) = summary["metrics"]["rejected_reasons"]
    assert re.fullmatch(r"RuntimeError: reward server is down \(.*toy\.py:\d+\)", reason)
    assert main(["watch", str(run)]) == 0
    assert named in capsys.readouterr().out
    assert main(["watch", str(run), "--json"]) == 0
    state = json.loads(capsys.readouterr().out)
    assert state["places"]["finished"] > 0 and "reward server is down" in state["snapshot"]["rejected_most"]
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "Bottleneck: scoring" in page and "reward server is down" in page


@pytest.mark.slow
def test_a_run_with_every_fault_in_it_goes_to_its_end(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    rare = config_file(tmp_path, score_limit_seconds=3, max_rejected_fraction=1)
    more = ["--out", str(run), "--json", "--updates", "10", *rare]
    done = ran(*words("train", model, "reward_faults:Faults", *options("each", 1), *more, "--reward-workers", "3"))
    assert done.returncode == 2, "every response has a fault"
    done = ran(*words("train", model, "reward_faults:Faults", *options("each", 2), *more, "--out", f"{run}-2"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["metrics"]["rejected"] > 0
    reasons = {e.reason for e in read_events(Path(f"{run}-2/events.jsonl")) if isinstance(e, events.Rejected)}
    assert len(reasons) > 10


def test_a_reward_that_always_exits_stops_the_run_with_the_reason(model: Path, tmp_path: Path) -> None:
    more = ["--out", str(tmp_path / "run"), "--scoring", "background"]
    done = ran(*words("train", model, "reward_faults:FaultsInTraining", *options("exits_with_0"), *more))
    assert done.returncode == 2
    assert "the first 16 rollouts were all rejected; 16 times: SystemExit: 0" in done.stderr
    assert "--resume" in done.stderr and "Traceback" not in done.stderr
    assert "no reward: SystemExit: 0" in done.stdout, "the first is printed at once"
    rejected = [e for e in read_events(tmp_path / "run/events.jsonl") if isinstance(e, events.Rejected)]
    assert len(rejected) == 16


def test_an_evaluation_without_one_score_is_an_error(model: Path) -> None:
    done = ran(*words("eval", model, "reward_faults:Faults", *options("returns_text"), "--json"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "all 10 responses were rejected; 10 times: TypeError: the reward is 'good' of type str" in done.stderr


def test_an_evaluation_tells_how_many_have_no_score(model: Path) -> None:
    done = ran(*words("eval", model, "reward_faults:Faults", *options("prints_much", 3), "--json"))
    assert done.returncode == 0 and json.loads(done.stdout)["unscored"] == 0, done.stderr
    done = ran(*words("eval", model, "reward_faults:Faults", *options("segfaults", 5), "--json"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["unscored"] == 2
    said = "2 of 10 responses of the evaluation got no score and count as wrong; 2 times: a worker process died"
    assert said in done.stderr


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("reward_faults:HoldsLock", "cannot be sent to a worker process: .*--reward-workers 0"),
        ("reward_faults:FailsInWorker", "could not start: ImportError: this library works in the first process alone"),
    ],
)
def test_a_task_that_cannot_be_used_in_a_worker_is_refused_before_the_run(
    task: str, message: str, model: Path, tmp_path: Path
) -> None:
    done = ran(*words("train", model, task, "--out", str(tmp_path / "run")))
    assert done.returncode == 2 and re.search(message, done.stderr), done.stderr
    assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "run").exists()


@pytest.mark.parametrize("task", ["Faults", "FaultsInTraining"])  # it hangs in the first evaluation, or in training
@pytest.mark.parametrize("scoring", ["background", pytest.param("at-once", marks=pytest.mark.slow)])
def test_ctrl_c_ends_a_run_whose_reward_hangs(task: str, scoring: str, model: Path, tmp_path: Path) -> None:
    more = ["--out", str(tmp_path / "run"), "--scoring", scoring, *config_file(tmp_path, score_limit_seconds=600)]
    command = words("train", model, f"reward_faults:{task}", *options("spins_in_c"), *more)
    run = Command([*command, "--reward-workers", "1"])
    run.wait_for_output("held-out score" if task == "FaultsInTraining" else "updates, mode")
    assert run.process.pid is not None
    workers = wait_for_a_reward_that_hangs(run.process.pid)
    run.send(signal.SIGINT)
    until = time.monotonic() + PATIENCE_SECONDS
    while scoring == "at-once" and time.monotonic() < until:  # the first one waits for the score, the second does not
        run.process.join(2.0)
        if not run.process.is_alive():
            break
        with contextlib.suppress(ProcessLookupError):
            run.send(signal.SIGINT)
    done = run.wait(60)
    assert done.returncode in (130, -signal.SIGINT), done.stdout + done.stderr
    wait_for_end(*workers)
