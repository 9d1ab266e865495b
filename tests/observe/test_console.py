"""The console: what it counts is what the scheduler holds, what it prints is what the folds say, and it behaves in a
terminal. Training runs are real ones, of the toy model, in a real pseudo-terminal."""

import io
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console as Terminal

from sortedrl import Schedule
from sortedrl.core import events
from sortedrl.core.controller import Controller
from sortedrl.core.events import Event
from sortedrl.engines.lengths import LognormalLengths
from sortedrl.engines.step_time import PRESETS
from sortedrl.log.file import Batched
from sortedrl.log.reading import read_events, without_rolled_back
from sortedrl.observe.console import (
    ROUNDING_NATS,
    PanelConsole,
    PlainConsole,
    clock,
    panel,
    panel_rows,
    run_console,
    shown,
    sparkline,
)
from sortedrl.observe.metrics import Metrics
from sortedrl.observe.run_state import RunState
from sortedrl.studies.workload import ControllerRun, Workload
from terminal import ENVIRONMENT, Session, in_terminal, panel_of, train_command

MODES = ("baseline", "on-policy", "on-policy+planned", "partial", "partial+lookahead", "partial+elevator")


def small_controller(mode: str, *sinks: Any, **workload_settings: Any) -> Controller:
    workload = Workload(
        lengths=LognormalLengths(limit=512), slots=8, prompts=64, prompt_tokens=8, step_time=PRESETS["h200-8b"],
        **workload_settings,
    )  # fmt: skip
    schedule = Schedule(
        mode=mode, rollouts_per_update=8, prompts_per_cohort=16, rollouts_per_prompt=2, whole_groups=True,
        max_response_tokens=512,
    )  # fmt: skip
    return ControllerRun(workload, schedule, sinks, None).controller


def simulated_state(mode: str = "partial+elevator", **workload_settings: Any) -> RunState:
    metrics = Metrics()
    state = RunState(metrics, "a-run", 12)
    controller = small_controller(mode, metrics, **workload_settings)
    for _ in controller:
        controller.publish()
    return state


# The fold


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("workload", [{}, {"kv_tokens": 1500}, {"score_seconds": 0.5}], ids=["plain", "kv", "scores"])
def test_the_console_counts_what_the_scheduler_holds(mode: str, workload: dict[str, Any]) -> None:
    metrics = Metrics()
    state = RunState(metrics, "a-run", None)
    compared = 0

    def compare(event: Event) -> None:
        nonlocal compared
        if isinstance(event, events.Submitted | events.HarvestBegan | events.Updated):
            compared += 1
            places, buffer = state.view(0.0).places, controller.buffer
            updated = event.rollouts if isinstance(event, events.Updated) else ()
            waiting = [r for r in buffer.live.values() if r.state.name == "WAITING"]
            assert places["resumable"] == sum(bool(rollout.segments) for rollout in waiting)
            assert places["waiting"] == sum(not rollout.segments for rollout in waiting)
            assert places["queued"] + places["running"] == len(buffer.running)
            assert places["finished"] == buffer.finished
            assert places["ready"] == buffer.ready - len(updated)
            in_all = sum(places.values())
            assert in_all + len(updated) == buffer.loaded - buffer.trained - buffer.rejected

    controller = small_controller(mode, metrics, compare, **workload)
    for _ in controller:
        controller.publish()
    assert compared > 100
    assert sum(state.view(0.0).places.values()) == 0
    assert state.view(0.0).updates == metrics.run_metrics().updates


def test_the_time_left_is_the_pace_so_far_times_what_is_left() -> None:
    state = RunState(Metrics(), "a-run", 10)
    assert state.remaining_seconds() is None
    state.add_line({"update": 0, "seconds": 5.0, "held_out": {"value": 0.5}}, seen_at=0.0)
    assert state.remaining_seconds() is None
    state.add_line({"update": 4, "seconds": 13.0, "reward": 0.0}, seen_at=100.0)
    assert state.remaining_seconds() == pytest.approx(6 * 2.0)
    assert state.view(100.0).ends_at == pytest.approx(112.0)
    state.add_line({"update": 5, "seconds": 15.0, "reward": 0.0, "updates_in_all": 5}, seen_at=0.0)
    assert state.remaining_seconds() == 0


def test_the_time_left_of_a_resumed_run_is_the_pace_since_then() -> None:
    """It may be on another machine."""
    state = RunState(Metrics(), "a-run", 10)
    state.resumed(4)
    for update, seconds in ((1, 10.0), (2, 20.0), (4, 40.0)):
        state.add_line({"update": update, "seconds": seconds, "reward": 0.0}, seen_at=0.0)
    state.add_line({"update": 4, "seconds": 45.0, "held_out": {"value": 0.5}}, seen_at=0.0)
    assert state.remaining_seconds() is None
    state.add_line({"update": 5, "seconds": 47.0, "reward": 0.0}, seen_at=0.0)
    assert state.remaining_seconds() == pytest.approx(5 * 2.0)


def test_batches_hand_on_every_event_once_in_order_and_soon() -> None:
    log: list[Event] = []
    seen: list[Event] = []
    batched = Batched(seen.append, most=40, seconds=5.0)

    def follow(event: Event) -> None:
        batched(event)
        log.append(event)
        assert seen == log[: len(seen)]
        assert len(log) - len(seen) < 40
        if isinstance(event, events.Phase):
            assert len(seen) == len(log)
        assert event.at - seen[-1].at < 5.0

    controller = small_controller("partial", follow)
    for _ in controller:
        controller.publish()
    batched.flush()
    assert seen == log and len(log) > 400


# The drawing


def test_every_line_fits_every_width() -> None:
    state = simulated_state(kv_tokens=1500)
    for update in range(1, 9):
        state.add_line(
            {"update": update, "seconds": 3.0 * update, "reward": 0.1, "correct": 0.5, "mismatch_kl": 1e-4}, 0.0
        )
    state.add_line({"update": 8, "seconds": 30.0, "held_out": {"value": 0.448}}, 0.0)
    view = state.view(0.0)
    for width in range(24, 140):
        printed = Terminal(width=width, file=io.StringIO(), record=True, force_terminal=True)
        printed.print(panel(view, 5.0, printed.options, note="no event for 20 s"))
        lines = printed.export_text().splitlines()
        assert {cell_len(line) for line in lines} == {min(width, 84)}
        assert len(lines) == 14, "no line wraps"
    rows = panel_rows(view, 5.0)
    for label, words in {
        "update": ("/12", "ETA"), "held-out": ("0.448",), "slots": ("running",), "bubble": ("now", "run"),
        "staleness": ("mean", "max", "mismatch"), "rollouts": ("waiting", "resumable", "ready"),
        "goodput": ("tok/s", "waste"), "reward": ("correct 50%",),
    }.items():  # fmt: skip
        assert all(word in rows[label] for word in words), label
        assert len(rows[label]) < 56 - 11, "a terminal of 60 columns shows all of it, too"
    assert re.search(r"[▁▂▃▄▅▆▇█]{8}", rows["reward"])


def test_a_run_that_has_done_nothing_yet_can_be_drawn() -> None:
    assert panel_rows(RunState(Metrics(), "a-run", None).view(0.0), 0.0)["update"].split() == ["0", "ETA", "-"]


def test_the_panel_shows_the_scoring_backlog_and_the_most_frequent_reason_of_rejections() -> None:
    metrics = Metrics()
    state = RunState(metrics, "a-run", 12)
    log: list[Event] = [events.RunBegan(0.0, 4, "partial", {}), events.Loaded(0.0, 0, 0, 6, ("p",) * 6)]
    log += [events.Submitted(0.0, i, 0, 4, 0, 1.0) for i in range(6)]
    log += [events.Finished(1.0, i, 3, 3, False) for i in range(6)]
    log += [events.Rejected(2.0, i, 3, f"no reward: no result within {i} s: the server is busy") for i in range(2)]
    log += [events.Rejected(2.0, 5, 3, "no reward: KeyError")]
    for event in log:
        metrics(event)
    said = "backlog 3   rejected 3   2 times: no result within 0 s: the server is busy (1 other reason)"
    assert panel_rows(state.view(0.0), 0.0)["scoring"] == said


def test_a_sparkline_spans_least_to_greatest_and_shows_the_newest() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([99, *range(24)])[0] == "▁" and len(sparkline(range(99))) == 24
    assert sparkline([3.0, 3.0]) == "▁▁" and sparkline([]) == "" == sparkline([3.0])


def test_a_clock_shows_hours_only_where_there_are_any() -> None:
    assert [clock(s) for s in (0, 59.9, 61, 3600 + 62)] == ["0:00", "0:59", "1:01", "1:01:02"]


def test_pipes_get_lines_and_terminals_the_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tty(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(run_console(io.StringIO()), PlainConsole)
    assert isinstance(run_console(Tty()), PanelConsole)
    monkeypatch.setenv("FORCE_COLOR", "1")  # means colors, not a cursor that moves
    assert isinstance(run_console(io.StringIO()), PlainConsole)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(run_console(Tty()), PlainConsole)


@pytest.mark.parametrize(("encoding", "has_panel"), [("utf-8", True), ("latin-1", False), ("ascii", False)])
@pytest.mark.parametrize("errors", ["strict", "replace"])
def test_a_terminal_without_the_characters_of_the_panel_gets_lines(
    monkeypatch: pytest.MonkeyPatch, encoding: str, has_panel: bool, errors: str
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, errors=errors)
    monkeypatch.setattr(stream, "isatty", lambda: True)
    console = run_console(stream)
    with console:
        console.begin(Metrics(), "a-run", 12)
        console.log("a line")
    assert isinstance(console, PanelConsole) == has_panel
    assert "a line" in raw.getvalue().decode(encoding) and b"?" not in raw.getvalue().replace(b"[?", b"")


def test_the_panel_is_redrawn_at_most_once_a_second() -> None:
    file = io.StringIO()
    console = PanelConsole(Terminal(file=file, force_terminal=True, width=80))
    log: list[Event] = []
    for _ in small_controller("partial", log.append):
        pass

    def drawn() -> int:
        return file.getvalue().count("sortedrl")

    began = time.monotonic()
    with console:
        while time.monotonic() - began < 1.5 or drawn() < 3:  # far more events a second than a run has
            metrics = Metrics()
            sink = console.begin(metrics, "a-run", 12)
            for event in log:
                metrics(event)
                sink(event)
    seconds = time.monotonic() - began
    assert drawn() <= seconds + 2  # and the first and the last


def test_a_terminal_that_goes_away_stops_no_run() -> None:
    class Gone(io.StringIO):
        gone = False
        refused = 0

        def write(self, text: str) -> int:
            if self.gone:
                self.refused += 1
                raise OSError(5, "Input/output error")
            return super().write(text)

    file = Gone()
    console = PanelConsole(Terminal(file=file, force_terminal=True, width=80))
    with console:
        file.gone = True
        time.sleep(2.1)
        console.evaluating(1, 2)
        refused = file.refused
        assert refused > 0, "the panel was drawn"
        console.log("a line")
        assert file.refused > refused
    assert panel_rows(console.state.view(0.0), 0.0)["phase"].startswith("start 1/2")


# Real runs in a real terminal


@pytest.fixture(scope="module")
def live(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Session]:
    run = tmp_path_factory.mktemp("live") / "run"
    words = train_command(model, run, "--updates", "12", "--eval-every", "6")
    return run, in_terminal(words, ENVIRONMENT, columns=80)


def test_a_run_in_a_terminal_leaves_one_panel_and_its_lines(live: tuple[Path, Session]) -> None:
    run, session = live
    assert session.code == 0, session.output
    assert session.screen.cursor_is_shown
    text = [line.rstrip() for line in session.screen.lines if line.strip()]
    held_out = [line for line in text if line.startswith("held-out score after")]
    assert len(held_out) == 3  # after 0, 6 and 12 updates
    assert text[-2].startswith("score ") and text[-1] == f"model in {run}/model"
    assert text.index(held_out[-1]) < min(i for i, line in enumerate(text) if line.startswith("╭"))
    panel = panel_of(session)
    assert panel["update"].startswith("12/12")
    assert "Traceback" not in session.output
    assert not any(line.startswith("update 1/") for line in text)
    assert session.output.count("╭") <= session.seconds + 8  # each line that is said draws it again


def test_every_number_of_the_panel_is_that_of_the_log_and_of_the_metrics_file(live: tuple[Path, Session]) -> None:
    run, session = live
    panel = panel_of(session)
    log = without_rolled_back(read_events(run / "events.jsonl"))
    run_metrics = Metrics().fold(log).run_metrics()
    summary = json.loads((run / "summary.json").read_text())["metrics"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    updates = [line for line in lines if "reward" in line]
    held_out = [line["held_out"]["value"] for line in lines if "held_out" in line]
    last = updates[-1]
    newest = [event for event in log if isinstance(event, events.Updated)][-1]
    assert panel["bubble"].split() == [
        "now", shown("bubble", run_metrics.bubble_per_harvest[-1]), "run", shown("bubble", run_metrics.bubble),
    ]  # fmt: skip
    assert panel["goodput"].split("   ") == [shown("goodput", run_metrics.goodput), f"waste {run_metrics.waste:.0%}"]
    assert panel["staleness"].split("   ") == [
        f"mean {run_metrics.staleness_mean:.2f}", f"max {run_metrics.staleness_max}",
    ]  # fmt: skip
    assert 0 <= last["mismatch_kl"] < ROUNDING_NATS, "engine and learner share the model: the panel leaves it out"
    assert panel["scoring"].split() == ["backlog", "0", "rejected", "0"]
    assert panel["length"].split("   ") == [
        f"mean {last['length']:.0f}", f"shortest {min(newest.lengths)}", f"longest {max(newest.lengths)}"
    ]  # fmt: skip
    reward, correct, curve = panel["reward"].split("   ")
    assert (reward, correct) == (f"{last['reward']:+.2f}", f"correct {last['correct']:.0%}")
    assert curve == sparkline([line["reward"] for line in updates])
    assert panel["held-out"] == f"{held_out[0]:.3f} -> {held_out[-1]:.3f}"
    assert clock(run_metrics.wall_seconds) in panel["phase"]
    for name in ("bubble", "goodput", "waste", "staleness_mean", "staleness_max", "wall_seconds"):
        assert summary[name] == getattr(run_metrics, name), name


def test_a_narrow_terminal_without_colours(model: Path, tmp_path: Path) -> None:
    words = train_command(model, tmp_path / "run", "--updates", "2")
    session = in_terminal(words, ENVIRONMENT | {"NO_COLOR": "1"}, columns=60)
    assert session.code == 0, session.output
    assert panel_of(session)["update"].startswith("2/2")
    styles = {number for match in re.findall(r"\x1b\[([0-9;]*)m", session.output) for number in match.split(";")}
    assert styles <= {"", "0", "1", "2"}  # bold and dim are no colors
    in_panel = [line for line in session.screen.lines if line.startswith(("╭", "│", "╰"))]
    assert {cell_len(line) for line in in_panel} == {60}


def has_done_some_updates(output: str) -> bool:
    return bool(re.search(r"m([3-9]|\d\d)/\d", output))


@pytest.mark.slow
def test_a_terminal_that_shrinks_while_a_run_goes_on(model: Path, tmp_path: Path) -> None:
    words = train_command(model, tmp_path / "run", "--updates", "60")
    session = in_terminal(words, ENVIRONMENT, columns=100, resize_to=60, when=has_done_some_updates)
    assert session.code == 0, session.output
    assert session.has_acted
    assert panel_of(session)["update"].startswith("60/60")
    in_panel = [line for line in session.screen.lines if line.startswith(("╭", "│", "╰"))]
    assert {cell_len(line) for line in in_panel} == {60}


@pytest.mark.slow
def test_ctrl_c_leaves_the_terminal_in_order(model: Path, tmp_path: Path) -> None:
    words = train_command(model, tmp_path / "run", "--updates", "5000")  # far more than it has time for
    session = in_terminal(words, ENVIRONMENT, columns=100, interrupt=True, when=has_done_some_updates)
    assert session.code == 130, session.output
    assert session.screen.cursor_is_shown
    updates = int(panel_of(session)["update"].split("/")[0])
    assert 3 <= updates < 5000
    said = [line for line in session.screen.lines if line.strip()][-1]
    assert "interrupted and saved. Continue with" in session.output and said.strip().endswith("run")
