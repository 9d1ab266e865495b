"""`sortedrl train` and `sortedrl eval` with environments: several turns, in this process and in workers."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import forked
import toy
from chat_tokenizer import chat_tokenizer
from counting_task import CountingTask
from processes import PATIENCE_SECONDS, descendants_of, wait_for_end
from sortedrl.core import events
from sortedrl.core.engine import Change, Request, RequestFailed, RequestFinished, Tokens
from sortedrl.core.import_path import import_object
from sortedrl.core.rejections import RejectionWatch
from sortedrl.core.rollout import ENVIRONMENT as FROM_ENVIRONMENT
from sortedrl.core.rollout import Prompt, Rollout, Segment, State
from sortedrl.log.reading import read_events, without_rolled_back
from sortedrl.models import BUILT_IN_MODEL, DIALOGUE_MODEL, model_named
from sortedrl.observe.console import PlainConsole
from sortedrl.observe.metrics import Metrics
from sortedrl.tasks.environment_host import LocalHost
from sortedrl.tasks.environments import TaskEnvironments
from sortedrl.tasks.evaluation import Evaluation
from sortedrl.tasks.registry import task_by_name
from sortedrl.training.evaluate import evaluate
from sortedrl.training.resources import read_resources
from sortedrl.training.rewards import Rewards, RewardSource
from sortedrl.training.run_record import RunRecord
from sortedrl.training.settings import EvalSettings, TrainSettings
from toy_runs import flags, metrics_of, updates_of, without_times

ROOT = Path(__file__).parents[2]
SMALL = {"slots": 8, "max_response_tokens": 24, "max_prompt_tokens": 16, "max_context_tokens": 64, "eval_problems": 8}
TRAIN = {"rollouts_per_update": 16, "prompts_per_cohort": 16, "rollouts_per_prompt": 2, "threads": 1}
DIALOGUE = "eval --task knights_and_knaves:dialogue --task-options count 240 --eval-problems 40 --threads 1 --json"
GUESS = (
    "train --task guess:GuessTask --max-turns 3 --updates 1 --eval-problems 4 --rollouts-per-update 8 --threads 1 "
    "--prompts-per-cohort 4 --rollouts-per-prompt 2 --slots 8 --max-response-tokens 24"
)
TALK = flags({"task": "toy:Talk", **SMALL, **TRAIN})


def trained(model: Path, run: Path, *more: str, updates: int = 4) -> None:
    words = ["train", "--model", str(model), *TALK, "--updates", str(updates), "--out", str(run), *more]
    done = forked.run(words, run.parent / "output")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("mode", ["partial+elevator", "on-policy"])
def test_a_run_trains_on_rollouts_of_several_turns(model: Path, tmp_path: Path, mode: str) -> None:
    run = tmp_path / "run"
    trained(model, run, "--mode", mode, "--scoring", "at-once")
    updates = updates_of(run)
    kinds = [[version == FROM_ENVIRONMENT for version, _ in segments] for e in updates for segments in e.segments]
    assert len(updates) == 4 and any(sum(kind) == 2 for kind in kinds), "three turns, two answers between them"
    assert all(not kind[0] and not kind[-1] for kind in kinds)
    assert all(1 <= line["reward_parts"]["turns"] <= 3 for line in metrics_of(run, "reward"))
    assert all(1 <= line["held_out_parts"]["turns"] <= 3 for line in metrics_of(run, "held_out"))
    rollout = json.loads((run / "rollouts.jsonl").read_text().splitlines()[0])
    assert rollout["detail"]["parts"]["turns"] >= 1


def test_a_resumed_run_continues_as_if_it_had_not_stopped(model: Path, tmp_path: Path) -> None:
    words = ["--mode", "partial+elevator", "--scoring", "at-once"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    trained(model, whole, *words, updates=4)
    trained(model, parts, *words, updates=2)
    done = forked.run(["train", "--resume", str(parts), "--updates", "4"], tmp_path / "output")
    assert done.returncode == 0, done.stderr
    assert without_times(updates_of(whole)) == without_times(updates_of(parts))


def test_a_resumed_run_counts_a_turn_that_any_eos_token_ended(model: Path, tmp_path: Path) -> None:
    """Its last turn ended with the second of two EOS tokens, and a limit left no room for another one."""
    copy = shutil.copytree(model, tmp_path / "model")
    config = json.loads((copy / "generation_config.json").read_text())
    (copy / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": [2, toy.WORDS.index("d")]}))
    settings = TrainSettings(model=str(copy), task="toy:Talk", task_options={"remembers": "False"}, scoring="at-once")
    resources = read_resources(settings, lambda line: None)
    prompt = resources.train[0]
    rollout = Rollout(0, prompt, 0, 0, 0, 0)
    with closing(Rewards(settings, resources, "at-once")) as rewards:
        environments = rewards.source().environments
        assert environments is not None
        for call, said in enumerate(("a b b d", "a a a a d")):
            rollout.append(Segment([toy.WORDS.index(word) for word in said.split()], [-0.5] * len(said.split()), 0))
            environments.submit(rollout, call)
            (answer,) = environments.collect()
            assert answer.observation is not None
            if call == 0:
                rollout.observe(list(answer.observation))
        rollout.truncated, rollout.ended_by, rollout.state = True, "max_context_tokens", State.FINISHED
        state = environments.state(rollout.id)
    with closing(Rewards(settings, resources, "at-once")) as rewards:  # a resumed run
        scorer, environments = rewards.source()
        assert environments is not None and environments.restore(rollout, state)
        scorer.submit(rollout)
        (scored,) = scorer.collect()
    assert scored.reward == pytest.approx(5 / 9), "of the words of both turns"


def test_environments_in_workers_hold_no_slot_and_leave_no_process(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained(model, run, "--task-options", "seconds", "0.2", "--mode", "partial+elevator")
    log = list(read_events(run / "events.jsonl"))
    metrics = Metrics().fold(log).run_metrics()
    assert metrics.rejected == 0 and metrics.turns_mean > 1 and metrics.environment_seconds > 1
    running: set[int] = set()
    for event in log:
        if isinstance(event, events.Started):
            running.add(event.rollout)
        elif isinstance(event, events.TurnEnded | events.Finished | events.Aborted | events.Failed):
            running.discard(event.rollout)
        elif isinstance(event, events.Observed):
            assert event.rollout not in running


@pytest.mark.parametrize("is_asked_first", [True, False])  # as in a run, and as in `sortedrl eval`
def test_the_worker_that_is_ready_is_that_of_the_first_source(model: Path, is_asked_first: bool) -> None:
    settings = EvalSettings(model=str(model), task="toy:Talk", reward_workers=1)
    resources = read_resources(settings, lambda line: None)
    with Rewards(settings, resources) as rewards:
        if is_asked_first:
            rewards.require_ready()
        environments = rewards.source().environments
        rewards.require_ready()
        ready = [process for process in descendants_of(os.getpid()) if _is_worker(process)]
        assert environments is not None and ready
        rollout = Rollout(0, resources.held_out[0], 0, 0, 0, 0)
        rollout.append(Segment([toy.WORDS.index("d")], [-0.5], 0))
        environments.submit(rollout, 0)
        environments.wait(PATIENCE_SECONDS)
        (answer,) = environments.collect()
        assert answer.error is None
        assert [process for process in descendants_of(os.getpid()) if _is_worker(process)] == ready, "no other started"


@pytest.mark.slow
@pytest.mark.parametrize("remembers", ["True", "False"])
def test_a_killed_run_goes_on_with_rollouts_in_their_environments(model: Path, tmp_path: Path, remembers: str) -> None:
    """Killed after a checkpoint, with environments in worker processes; from their state, or by replay."""
    run = tmp_path / "run"
    words = ["train", "--model", str(model), *TALK, "--out", str(run), "--checkpoint-every", "1"]
    words += ["--task-options", "seconds", "0.3", "remembers", remembers]
    words += ["--mode", "partial+elevator", "--updates", "1000"]
    command = forked.Command(words, tmp_path / "output")
    command.wait_for_output("update 3/")
    assert command.process.pid is not None
    workers = [one for one in descendants_of(command.process.pid) if _is_worker(one)]
    command.send(signal.SIGKILL)
    assert command.wait().returncode == -signal.SIGKILL
    assert workers
    wait_for_end(*workers)
    updates = len(updates_of(run)) + 5
    done = forked.run(["train", "--resume", str(run), "--updates", str(updates)], tmp_path / "output")
    assert done.returncode == 0, done.stderr
    log = list(without_rolled_back(read_events(run / "events.jsonl")))
    trained_on = [id for event in log if isinstance(event, events.Updated) for id in event.rollouts]
    assert len(trained_on) == len(set(trained_on)) and len(updates_of(run)) >= updates
    assert not [event for event in log if isinstance(event, events.Rejected)]
    lost = [e for e in log if isinstance(e, events.EnvironmentFailed)]
    assert not lost, "every instance came back as it was"


def test_an_evaluation_of_a_dialogue_reports_its_parts(tmp_path: Path) -> None:
    done = forked.run(DIALOGUE.split(), tmp_path / "output")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["problems"] == 40 and result["unscored"] == 0
    assert 0 < result["parts"]["asked"] < 1 and result["parts"]["turns"] == pytest.approx(1.6, abs=0.5)


def test_an_evaluation_in_which_every_environment_failed_lists_no_parts() -> None:
    lines: list[str] = []
    folder: Any = SimpleNamespace(append=lambda name, line: None)
    tokenizer: Any = None
    record = RunRecord(folder, PlainConsole(lines.append), tokenizer, rollouts_per_update=0)
    record.evaluation(0, Evaluation(("p",), ((False,),)), samples=1, has_turns=True)
    assert lines == ["held-out score after 0 updates: 0.000 [0.000, 0.793] (1 problem)"]


class LosesSecondTurns:
    """An engine that says `one`, and loses every request that continues a rollout."""

    slots = 8

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._changes: list[Change] = []

    def now(self) -> float:
        return 0.0

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.prefix:
                self._changes.append(RequestFailed(request.id, 0.0, "lost"))
            else:
                said = Segment(list(self._tokens), [-0.5] * len(self._tokens), 0)
                self._changes += [Tokens(request.id, 0.0, said), RequestFinished(request.id, 0.0, False)]

    def poll(self, until: float | None = None) -> list[Change]:
        changes, self._changes = self._changes, []
        return changes

    def abort(self, ids: Sequence[int]) -> list[Change]:
        return []

    def update_weights(self, weights: Any, version: int) -> None: ...


def evaluated(engine: Any, task: CountingTask, problems: int = 2, chat: Any = None, **limits: int) -> RejectionWatch:
    """Evaluates the first problems with environments in this process; no response is right."""
    watch = RejectionWatch(64)
    with closing(LocalHost(task.environment, limit_seconds=30.0)) as host:
        environments = TaskEnvironments(chat_tokenizer(), host, chat=chat)
        prompts = [Prompt(problem.id, [3, 4], problem) for problem in task.held_out()[:problems]]
        settings = EvalSettings.model_validate({"max_response_tokens": 64, **limits})
        found = evaluate(engine, prompts, RewardSource(environments.ends, environments), settings, watch)
    assert found.correct == ((False,),) * problems
    return watch


def says_one() -> LosesSecondTurns:
    tokenizer = chat_tokenizer()
    return LosesSecondTurns([*tokenizer("one")["input_ids"], tokenizer.eos_token_id])


def test_an_evaluation_closes_the_environments_of_lost_rollouts(tmp_path: Path) -> None:
    """The next evaluation has rollouts with the same ids, and must not meet the instances of this one."""
    watch = evaluated(says_one(), CountingTask(str(tmp_path / "log")))
    assert watch.rejected == 2 and "lost" in watch.most_frequent(), "a score of 0 must not hide a broken engine"
    assert sorted((tmp_path / "log").read_text().splitlines()) == sorted(
        f"{problem} {what}" for problem in ("h0", "h1") for what in ("reset", "step one", "close") for _ in range(3)
    ), "each is tried three times"


class EncodesNothing:
    """As a tokenizer without a chat template that drops white space, for an empty observation."""

    def observation(self, messages: Sequence[Any], response: Sequence[int]) -> list[int]:
        return []


def test_an_observation_without_tokens_costs_an_evaluation_its_response() -> None:
    watch = evaluated(says_one(), CountingTask(), chat=EncodesNothing())
    assert watch.rejected == 2 and "an observation is a nonempty list" in watch.most_frequent()


class CutsTurns(LosesSecondTurns):
    """An engine whose turns never end by themselves."""

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            said = Segment(self._tokens[:1] * request.max_new_tokens, [-0.5] * request.max_new_tokens, 0)
            self._changes += [Tokens(request.id, 0.0, said), RequestFinished(request.id, 0.0, True)]


@pytest.mark.parametrize(("context", "reason"), [(8, "max_context_tokens"), (64, "max_response_tokens")])
def test_finish_gets_the_limit_that_cut_a_turn_of_an_evaluation(tmp_path: Path, context: int, reason: str) -> None:
    log = tmp_path / "log"
    task = CountingTask(str(log))
    evaluated(CutsTurns([5]), task, problems=1, max_response_tokens=16, max_context_tokens=context)
    assert log.read_text().splitlines() == ["h0 reset", f"h0 finish {reason}", "h0 close"]


def _is_worker(process: int) -> bool:
    try:
        return b"worker_server" in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False


def test_the_second_built_in_model_is_picked_for_its_task_and_small() -> None:
    assert model_named("built-in", "knights_and_knaves:dialogue") == str(DIALOGUE_MODEL)
    assert model_named("built-in", "knights_and_knaves:small") == str(BUILT_IN_MODEL)
    assert sum(file.stat().st_size for file in DIALOGUE_MODEL.iterdir()) < 2_000_000
    recipe = json.loads((DIALOGUE_MODEL / "recipe.json").read_text())
    assert recipe["measured_at_temperature_1"]["format_right"] > 0.95
    script = ROOT / "scripts" / "warm_start_dialogue.py"
    assert recipe["made_by"] == f"scripts/{script.name}" and script.exists()


@pytest.fixture
def documented(tmp_path: Path) -> Path:
    """A folder with the files of the documentation."""
    page = (ROOT / "docs" / "environments.md").read_text()
    for name, code in re.findall(r'```python title="(\S+)"\n(.*?)```', page, re.DOTALL):
        (tmp_path / name).write_text(code)
    return tmp_path


def test_the_environment_of_the_documentation_has_30_lines_and_plays(
    documented: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [line for line in (documented / "guess.py").read_text().splitlines() if line.strip()]
    assert len(lines) <= 30
    monkeypatch.syspath_prepend(str(documented))
    task: Any = task_by_name("guess:GuessTask")
    environment = task.environment()
    environment.reset(task.train()[41])
    said = [asyncio.run(environment.step(text)) for text in ("a number", "50", "30", "42")]
    assert said == ["Write a number.", "Lower.", "Higher.", 1.0]
    tool: Any = import_object("units:celsius")
    assert tool(212.0) == pytest.approx(100.0)


@pytest.mark.slow
def test_the_environment_of_the_documentation_trains(documented: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    words = [sys.executable, "-m", "sortedrl", *GUESS.split(), "--out", str(documented / "run")]
    done = subprocess.run(words, cwd=documented, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
