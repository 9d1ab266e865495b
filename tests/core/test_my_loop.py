"""The loop of docs/my_loop.md, as a user would copy it: a run is interrupted and resumed, and its log is whole."""

import re
import runpy
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from closing import closed_after
from sortedrl.core import ConfigurationError, Controller, Prompt
from sortedrl.core.events import Published, RunBegan, SettingsChanged
from sortedrl.core.strategies.paper import Partial
from sortedrl.log import read_events
from sortedrl.log.reading import without_rolled_back
from sortedrl.observe.metrics import Metrics

ROOT = Path(__file__).parents[2]
PROMPTS = 640
LOOP = "for batch in controller:"


class CountingLearner:
    def __init__(self, interrupt_at: int | None = None) -> None:
        self.steps = 0
        self.trained: list[str] = []
        self.interrupt_at = interrupt_at

    def step(self, batch: Any) -> None:
        self.steps += 1
        self.trained += [rollout.prompt.id for rollout in batch]
        if self.steps == self.interrupt_at:
            signal.raise_signal(signal.SIGINT)

    def weights(self) -> int:
        return self.steps

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "trained": self.trained}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.trained = state["steps"], list(state["trained"])


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closes_all: None) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGINT)
    yield tmp_path
    signal.signal(signal.SIGINT, before)


def blocks() -> tuple[str, str, str]:
    """The set-up, the loop that saves, and the lines that resume."""
    page = (ROOT / "docs" / "my_loop.md").read_text(encoding="utf-8")
    first, _check, saving, resuming, *_ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    return first[: first.index(LOOP)].replace("epochs=3", "epochs=1"), saving, resuming


def without_recorder(set_up: str) -> str:
    return set_up.replace('recorder = Recorder(controller, "my_run")\n', "")


def names_of_a_user(learner: CountingLearner) -> dict[str, Any]:
    engine = runpy.run_path(str(ROOT / "examples" / "bring_your_own_engine.py"))["LetterEngine"](slots=64)
    return {
        "engine": engine,
        "learner": learner,
        "dataset": [(f"p{number}", [0, 1, 2], "e") for number in range(PROMPTS)],
        "my_reward": lambda tokens, answer: float("abcdefghijklmnopqrstuvwxyz".index(answer) in tokens),
    }


def begun(set_up: str | None = None) -> dict[str, Any]:
    """The names of a user who has run the set-up."""
    made = names_of_a_user(CountingLearner())
    exec(set_up or blocks()[0], made)
    closed_after(made["recorder"])
    return made


def interrupted_run() -> CountingLearner:
    learner = CountingLearner(interrupt_at=2)
    made = names_of_a_user(learner)
    set_up, saving, _ = blocks()
    exec(set_up + saving, made)
    made["recorder"].close()
    assert learner.steps == 2
    return learner


def test_a_run_is_interrupted_and_resumed_as_documented(in_folder: Path) -> None:
    interrupted_run()
    set_up, saving, resuming = blocks()
    learner = CountingLearner()
    made = names_of_a_user(learner)
    exec(without_recorder(set_up) + resuming + saving, made)
    made["recorder"].close()
    assert sorted(learner.trained) == sorted(f"p{number}" for number in range(PROMPTS))
    log = without_rolled_back(read_events(in_folder / "my_run" / "events.jsonl"))
    assert [type(event) for event in log].count(RunBegan) == 1
    assert [event.version for event in log if isinstance(event, Published)] == list(range(1, learner.steps + 1))
    metrics = Metrics()
    metrics.fold(log)
    assert metrics.run_metrics().updates == learner.steps


def test_a_second_run_sets_the_log_of_the_first_aside_and_what_a_resumed_one_changes_is_recorded(
    in_folder: Path,
) -> None:
    interrupted_run()
    first = (in_folder / "my_run" / "events.jsonl").read_bytes()
    set_up, saving, resuming = blocks()
    with_settings = set_up.replace('"my_run")', '"my_run", settings={"rate": 1, "same": 2})')
    made = names_of_a_user(CountingLearner(interrupt_at=1))
    exec(with_settings + saving, made)
    assert (in_folder / "my_run" / "events.earlier-1.jsonl").read_bytes() == first
    with pytest.raises(ConfigurationError, match="a run is still writing to it"):
        exec(set_up, names_of_a_user(CountingLearner()))
    made["recorder"].close()
    made = names_of_a_user(CountingLearner(interrupt_at=2))
    changed = resuming.replace("saved=state)", 'saved=state, settings={"rate": 3, "same": 2, "new": 4})')
    exec(without_recorder(set_up) + changed + saving, made)
    made["recorder"].close()
    log = without_rolled_back(read_events(in_folder / "my_run" / "events.jsonl"))
    assert [event.changes for event in log if isinstance(event, SettingsChanged)] == [{"rate": [1, 3]}]


def test_a_checkpoint_that_does_not_fit_leaves_the_log_as_it_is(in_folder: Path) -> None:
    interrupted_run()
    log = (in_folder / "my_run" / "events.jsonl").read_bytes()
    set_up, _, resuming = blocks()
    seen = []  # as a notebook keeps the last error, and all that it refers to
    for mode, dataset, why in (("partial", 0, "made in mode"), ("partial+elevator", 1, "made with 640 prompts")):
        made = names_of_a_user(CountingLearner())
        made["dataset"] = made["dataset"][dataset:]
        with pytest.raises(ValueError, match=why) as refused:
            exec(without_recorder(set_up).replace("partial+elevator", mode) + resuming, made)
        seen.append(refused)
        assert (in_folder / "my_run" / "events.jsonl").read_bytes() == log
    exec(set_up, made)  # a new run in the same folder
    made["recorder"].close()


def test_an_engine_with_the_weights_of_before_the_checkpoint_is_named(in_folder: Path) -> None:
    interrupted_run()
    set_up, _, resuming = blocks()
    forgetful = "\n".join(line for line in resuming.splitlines() if "update_weights" not in line)
    made = begun(without_recorder(set_up) + forgetful)
    with pytest.raises(ConfigurationError, match=r"version = 0: .*Call engine.update_weights\(weights, 2\) before"):
        next(iter(made["controller"]))


def test_another_process_sees_the_log_up_to_the_last_phase(in_folder: Path) -> None:
    next(iter(begun()["controller"]))
    *_, last = read_events(in_folder / "my_run" / "events.jsonl")
    assert last.phase == "learner"  # type: ignore[union-attr]


def test_a_second_publish_after_one_batch_is_refused_under_a_staleness_bound(in_folder: Path) -> None:
    controller = begun(blocks()[0].replace("Schedule(", "Schedule(max_staleness=4, "))["controller"]
    controller.publish(0)  # the first weights: no token is older
    batches = iter(controller)
    for version in (2, 3):
        next(batches)
        assert controller.publish(version) == version
        with pytest.raises(RuntimeError, match=r"publish was called twice after update \d.*once per batch"):
            controller.publish(version)


def test_weights_published_before_a_restore_do_not_count(in_folder: Path) -> None:
    set_up = blocks()[0].replace("Schedule(", "Schedule(max_staleness=4, ")
    first, second = begun(set_up), begun(set_up.replace('"my_run"', '"resumed"'))
    next(iter(first["controller"]))
    assert first["controller"].publish(1) == 1
    controller = second["controller"]
    controller.publish(0)
    controller.restore(first["controller"].state())
    assert not controller.update_engine(), "the engine holds the weights of the checkpoint"
    with pytest.raises(RuntimeError, match="publish was called twice after update 0"):
        controller.publish(1)  # as before the checkpoint
    second["engine"].update_weights(0, 1)
    next(iter(controller))
    assert controller.publish(2) == 2


def test_without_a_bound_every_optimizer_step_may_publish(in_folder: Path) -> None:
    controller = begun()["controller"]
    next(iter(controller))
    assert [controller.publish(step) for step in range(2)] == [1, 2]


def test_a_batch_without_a_publish_after_it_is_pointed_out_once(
    in_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the engine keeps the old weights, and the report calls every token on-policy."""
    controller = begun()["controller"]
    batches = iter(controller)
    for version in (1, 2):
        next(batches)
        assert controller.publish(version) == version
    assert not caplog.messages
    for _ in range(3):
        next(batches)
    assert caplog.messages == [
        "update 3 is handed out, but no weights were published after the one before: staleness is wrong until you call "
        "controller.publish(weights) once per batch"
    ]


PARTS = {
    "prompts": ([Prompt("a", [1])], r"prompts is a list: pass Prompts\(dataset\)"),
    "scorer": (lambda rollout: 1.0, r"scorer is a function: pass ScoreAtOnce\(reward\)"),
    "schedule": ("partial", r"schedule is a str: pass Schedule\(mode="),
    "strategy": (Partial, "strategy is the class Partial: pass an instance with its name"),
    "environments": (dict, "environments is the class dict: pass an object with the methods of"),
    "expectation": ({"a": 12.0}, r"expectation is a dict: pass SensedLengths\(\)"),
    "sampling": ({"temperature": 0.7}, r"sampling is a dict: pass Sampling\("),
    "stream_to": (CountingLearner(), "stream_to is a CountingLearner: pass a function, such as learner.accumulate"),
    "log": ("my_run/events.jsonl", r"log is a str: pass EventLog\(sink\) and Recorder"),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_wrong_part_of_the_loop_is_named_with_what_to_write_instead(name: str, in_folder: Path) -> None:
    made = begun()
    parts = {key: made[key] for key in ("engine", "prompts", "scorer", "schedule")}
    part, expected = PARTS[name]
    with pytest.raises(TypeError, match=expected):
        Controller(**parts | {name: part})


def test_a_strategy_of_the_user_s_own_runs_as_documented(in_folder: Path) -> None:
    made = names_of_a_user(CountingLearner())
    made["dataset"] = [(f"p{number}", [0] * (1 + number * 7 % 5), "e") for number in range(PROMPTS)]
    page = (ROOT / "docs" / "my_loop.md").read_text(encoding="utf-8")
    own = next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "strategy=" in block)
    exec(blocks()[0] + own, made)
    lengths = []
    for batch in made["controller"]:
        lengths.append([len(rollout.prompt.tokens) for rollout in batch])
        made["controller"].publish(len(lengths))
    made["recorder"].close()
    assert sum(map(len, lengths)) == PROMPTS
    assert max(lengths[0]) < max(lengths[-1]), "short prompts come first"
    assert made["controller"].state()["mode"] == "short-prompts-first"
