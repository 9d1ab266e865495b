"""Does a run survive SIGKILL at any time? Kills runs at random and during checkpoint replacement, and resumes them.

python benchmarks/kill_campaign.py --kills 1000

Uses the toy model of the tests and the embedded engine, in all modes. There are four tasks: responses of one turn,
responses of several turns whose environments answer at once, and the same with slow environments in worker processes,
so that checkpoints hold rollouts in their environments: restored from their state, or replayed. Each run is killed and
resumed until it completes. There are three kinds of kill, chosen at random:
- by the clock: at any time after the start of the process;
- by operation: just before a file of the run folder is opened, created, renamed or removed;
- in replacement: the same, while a checkpoint replaces another one of the same update.

Each completed run is compared with an uninterrupted run of the same mode: weights and optimizer state must be bitwise
equal, the same rollouts trained on in the same updates, the exported model and the held-out score the same, every
loaded rollout trained on at most once, and the event log intact: each line is an event, slots and tokens add up, and no
half-written folder is left. What slow environments answer first depends on the clock, so their runs are not compared
with another one; in all else they must be as right, no rollout may be rejected, no instance lost, and no worker process
left after a kill. Exits with 1 at the first difference.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

import torch

import forked
import toy
from sortedrl.core import events
from sortedrl.core.rollout import State
from sortedrl.learner import checkpoint
from sortedrl.log.reading import read_events, read_intact, without_rolled_back
from sortedrl.observe.metrics import Metrics

MODES = ("baseline", "on-policy", "on-policy+planned", "partial", "partial+elevator", "partial+lookahead")
UPDATES = 24
TASKS = {
    "one-turn": "--task toy:SayA --scoring at-once",
    "turns": "--task toy:Talk --scoring at-once --max-context-tokens 48",
    "slow-turns": "--task toy:Talk --task-options seconds 0.1 --max-context-tokens 48",
    "slow-replayed-turns": "--task toy:Talk --task-options seconds 0.1 remembers False --max-context-tokens 48",
}
SMALL = (
    "--slots 8 --rollouts-per-update 8 --prompts-per-cohort 4 "
    "--rollouts-per-prompt 4 --max-response-tokens 16 --max-prompt-tokens 16 --eval-problems 2 --learning-rate 3e-3 "
    f"--threads 1 --updates {UPDATES}"
).split()
CLOCK, OPERATION, REPLACEMENT = "by the clock", "by operation", "in replacement"
SECONDS_FOR_WORKERS = 20.0  # to end after their run was killed
MOST_OPERATIONS = 60  # before a kill by operation: resume and about three checkpoints
OPERATIONS_OF_A_REPLACEMENT = 22
SHARE_BETWEEN_KILLS = 0.25  # maximum fraction of an uninterrupted run's duration before a kill by the clock


class Different(AssertionError):
    """A killed and resumed run differs from the uninterrupted one."""


@dataclass(frozen=True)
class Outcome:
    """The results in which two runs with the same settings must agree."""

    learner: dict[str, Any]
    model: bytes
    updates: list[events.Updated]
    scores: tuple[float, float]


@dataclass
class Tally:
    kills: Counter[str] = field(default_factory=Counter)
    kills_by_mode: Counter[str] = field(default_factory=Counter)
    ended_runs: int = 0
    begun_again: int = 0  # killed before the first checkpoint
    in_environment: int = 0  # rollouts in their environments in the checkpoints that killed runs resumed from

    @property
    def all_kills(self) -> int:
        return self.kills.total()


class Campaign:
    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.draw = random.Random(seed)
        self.model = toy.make_model(folder / "model")
        self.tally = Tally()
        self._references: dict[tuple[str, str], tuple[Outcome, float]] = {}

    def kill_one_run(self, mode: str, task: str, most_kills: int) -> None:
        """Kill and resume a run until it completes; after `most_kills` it is not killed again."""
        run, output = self.folder / "run", self.folder / "output"
        every = str(self.draw.choice((1, 1, 2, 3)))
        fresh = [*self._fresh(run, mode, task), "--checkpoint-every", every]
        reference, seconds = self._reference(mode, task)
        name = f"{mode}, {task}"
        words, killed = fresh, 0
        while True:
            kind = self.draw.choice((CLOCK, CLOCK, OPERATION, REPLACEMENT)) if killed < most_kills else None
            done = self._run_until_killed(words, output, run, kind, seconds)
            if done.returncode == 0:
                break
            if done.returncode != -signal.SIGKILL or kind is None:
                raise Different(f"{name}: exit code {done.returncode}: {done.stderr[-2000:]}")
            killed += 1
            self.tally.kills[kind] += 1
            self.tally.kills_by_mode[name] += 1
            words = self._next_words(run, fresh)
        found = outcome(run)
        if task.startswith("slow"):
            require_nothing_lost(run, found)
        else:
            require_equal(name, reference, found)
        require_consistent_log(run)
        require_nothing_left_over(run)
        self.tally.ended_runs += 1
        shutil.rmtree(run)

    def _next_words(self, run: Path, fresh: list[str]) -> list[str]:
        saved = run / "checkpoints"
        if saved.exists() and (checkpoint.all_in(saved) or list(saved.glob(".replaced-*"))):
            self.tally.in_environment += rollouts_in_environments(saved)
            return ["train", "--resume", str(run)]
        shutil.rmtree(run, ignore_errors=True)
        self.tally.begun_again += 1
        return fresh

    def _run_until_killed(
        self, words: list[str], output: Path, run: Path, kind: str | None, seconds: float
    ) -> forked.Done:
        fault = None
        if kind == OPERATION:
            fault = forked.Fault(run, self.draw.randint(1, MOST_OPERATIONS))
        elif kind == REPLACEMENT:
            save, operation = self.draw.randint(1, 3), self.draw.randint(1, OPERATIONS_OF_A_REPLACEMENT)
            fault = forked.Fault(run, operation, replaced_save=save)
        command = forked.Command(words, output, fault=fault)
        if kind == CLOCK:
            command.process.join(self.draw.uniform(0.0, SHARE_BETWEEN_KILLS * seconds))
            if command.process.exitcode is None:
                command.send(signal.SIGKILL)
        done = command.wait()
        assert command.process.pid is not None
        require_no_worker_of(command.process.pid)
        return done

    def _fresh(self, run: Path, mode: str, task: str) -> list[str]:
        words = ["train", "--model", str(self.model), "--out", str(run), "--mode", mode]
        return [*words, *TASKS[task].split(), *SMALL]

    def _reference(self, mode: str, task: str) -> tuple[Outcome, float]:
        key = mode, task
        if key not in self._references:
            run = self.folder / f"reference-{mode}-{task}"
            began = time.perf_counter()
            done = forked.run(self._fresh(run, mode, task), self.folder / "output")
            if done.returncode:
                raise Different(f"{mode}, {task}: the uninterrupted run failed: {done.stderr[-2000:]}")
            self._references[key] = (outcome(run), time.perf_counter() - began)
            require_consistent_log(run)
        return self._references[key]


def outcome(run: Path) -> Outcome:
    newest = checkpoint.all_in(run / "checkpoints")[-1]
    learner = torch.load(newest / "learner.pt", map_location="cpu", weights_only=True)
    summary = json.loads((run / "summary.json").read_text())
    log = without_rolled_back(read_events(run / "events.jsonl"))
    updates = [event._replace(at=0.0) for event in log if isinstance(event, events.Updated)]
    scores = summary["score_before"]["value"], summary["score_after"]["value"]
    return Outcome(learner, (run / "model" / "model.safetensors").read_bytes(), updates, scores)


def rollouts_in_environments(saved: Path) -> int:
    """In the newest checkpoint."""
    for folder in reversed(checkpoint.all_in(saved)):
        groups = json.loads((folder / "state.json").read_text())["controller"]["buffer"]["groups"]
        return sum(rollout["state"] == State.ENVIRONMENT for _, _, members in groups for rollout in members)
    return 0


def require_no_worker_of(process: int) -> None:
    """The kernel ends the workers of a killed run; it may take a moment."""
    until = time.monotonic() + SECONDS_FOR_WORKERS
    while left := [path.parent.name for path in Path("/proc").glob("[0-9]*/cmdline") if is_worker_of(process, path)]:
        if time.monotonic() > until:
            raise Different(f"worker processes of {process} are left: {', '.join(left)}")
        time.sleep(0.05)


def is_worker_of(process: int, command_line: Path) -> bool:
    try:
        return f", {process}, ".encode() in command_line.read_bytes() and b"serve(" in command_line.read_bytes()
    except OSError:
        return False


def require_nothing_lost(run: Path, found: Outcome) -> None:
    log = list(without_rolled_back(read_events(run / "events.jsonl")))
    if len(found.updates) != UPDATES:
        raise Different(f"{run}: {len(found.updates)} updates instead of {UPDATES}")
    lost = [event for event in log if isinstance(event, events.Rejected | events.EnvironmentFailed)]
    if lost:
        raise Different(f"{run}: {len(lost)} rollouts or instances were lost, for example {lost[0]}")


def require_equal(mode: str, reference: Outcome, found: Outcome) -> None:
    if len(found.updates) != UPDATES or found.updates != reference.updates:
        raise Different(f"{mode}: different rollouts were trained on")
    difference = first_difference(reference.learner, found.learner, "learner")
    if difference:
        raise Different(f"{mode}: {difference}")
    if found.model != reference.model or found.scores != reference.scores:
        raise Different(f"{mode}: the exported model or its score differs")


def first_difference(expected: Any, found: Any, where: str) -> str | None:
    """Where two states differ, or None if they are bitwise equal."""
    if type(expected) is not type(found):
        return f"{where} has a different type"
    if isinstance(expected, torch.Tensor):
        same = expected.dtype == found.dtype and expected.shape == found.shape
        same = same and expected.contiguous().numpy().tobytes() == found.contiguous().numpy().tobytes()
        return None if same else f"{where} differs"
    if isinstance(expected, dict):
        if expected.keys() != found.keys():
            return f"{where} has different keys"
        pairs = ((f"{where}.{key}", expected[key], found[key]) for key in expected)
    elif isinstance(expected, list | tuple):
        if len(expected) != len(found):
            return f"{where} has a different length"
        pairs = ((f"{where}.{place}", *both) for place, both in enumerate(zip(expected, found, strict=True)))
    else:
        return None if expected == found else f"{where} differs"
    return next((text for name, a, b in pairs if (text := first_difference(a, b, name))), None)


def require_consistent_log(run: Path) -> None:
    log, damage, earlier_runs, _ = read_intact(run / "events.jsonl")
    times = [event.at for event in log]
    trained = Counter(id for event in log if isinstance(event, events.Updated) for id in event.rollouts)
    loaded = {event.first + i for event in log if isinstance(event, events.Loaded) for i in range(event.rollouts)}
    run_metrics = Metrics().fold(log).run_metrics()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    checks = {
        "each line is an event": not damage,
        "the log has one run": not earlier_runs,
        "times never go back": times == sorted(times),
        "no rollout is trained on twice": max(trained.values()) == 1,
        "only loaded rollouts are trained on": trained.keys() <= loaded,
        "tokens add up": run_metrics.generated_tokens
        == run_metrics.trained_tokens + run_metrics.dropped_tokens + run_metrics.cached_tokens
        and run_metrics.cached_tokens >= 0,
        "slot-time adds up": 0 <= run_metrics.bubble <= run_metrics.idle <= 1 + 1e-9,
        "metrics.jsonl has each update once": [line["update"] for line in lines if "reward" in line]
        == list(range(1, UPDATES + 1)),
    }
    failed = [name for name, holds in checks.items() if not holds]
    if failed:
        raise Different(f"{run}: not true of the log: {', '.join(failed)}")


def require_nothing_left_over(run: Path) -> None:
    left = [path.name for place in (run, run / "checkpoints") for path in place.glob(".*") if path.name != ".lock"]
    if left:
        raise Different(f"{run}: left over: {', '.join(left)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, help="default: random, and printed")
    parser.add_argument("--modes", nargs="+", default=MODES)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    began = time.perf_counter()
    with TemporaryDirectory() as folder:
        campaign = Campaign(Path(folder), seed)
        tally, run = campaign.tally, 0
        while tally.all_kills < options.kills:
            mode = options.modes[run % len(options.modes)]
            task = options.tasks[run // len(options.modes) % len(options.tasks)]
            try:
                campaign.kill_one_run(mode, task, options.kills - tally.all_kills)
            except Different as error:
                print(f"FAILED with seed {seed} after {tally.all_kills} kills: {error}", flush=True)
                return 1
            run += 1
            print(f"{tally.all_kills} kills, {tally.ended_runs} runs ended", flush=True)
    seconds = time.perf_counter() - began
    print(
        f"seed {seed}: {tally.all_kills} kills in {seconds:.0f} s, {tally.ended_runs} runs completed, all equal to the "
        f"uninterrupted ones; {tally.begun_again} restarted because they were killed before the first checkpoint; "
        f"{tally.in_environment} rollouts were in their environments in the checkpoints that runs resumed from"
    )
    for counts in (tally.kills, tally.kills_by_mode):
        print(", ".join(f"{name}: {count}" for name, count in sorted(counts.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
