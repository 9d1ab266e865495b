"""The trace of a run: the rules of the format on random and on real runs, what it shows, and the command."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from random_runs import troubled
from scenarios import MODES, STREAMABLE, Run, Scenario, run
from sortedrl.cli import main
from sortedrl.core.events import Event, RolledBack, Streamed
from sortedrl.log.lines import JsonLines
from sortedrl.observe.trace import trace_events
from trace_rules import assert_tokens_agree, assert_valid_trace, written_trace

RANDOM = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
SMALL: dict[str, Any] = {
    "rollouts_per_update": 4,
    "prompts_per_cohort": 8,
    "learner_seconds": 2.0,
    "weight_update_seconds": 0.5,
}
LENGTHS = [3, 20, 5, 9, 2, 14, 8, 30, 4, 11, 6, 17, 2, 2, 25, 7]


@pytest.mark.parametrize("mode", MODES)
def test_the_trace_of_any_simulated_run_is_valid(mode: str) -> None:
    @RANDOM
    @given(troubled([mode]), st.floats(0, 1))
    def check(scenario: Scenario, share: float) -> None:
        log = Run(scenario).to_end().events
        assert_tokens_agree(log)
        assert_valid_trace(log)
        assert_valid_trace(log[: max(1, round(share * len(log)))])  # as a killed run leaves it

    check()


@RANDOM
@given(troubled(STREAMABLE))
def test_the_trace_of_a_streamed_run_is_valid(scenario: Scenario) -> None:
    assert_valid_trace(Run(replace(scenario, streams=True)).to_end().events)


def test_learner_work_during_the_harvest_is_on_the_learner_s_track() -> None:
    log = run("baseline", LENGTHS, slots=4, streams=True, **SMALL).events
    trace = written_trace(log)
    phases = {event["name"]: event for event in trace if event.get("cat") == "phase"}
    streamed = [event for event in trace if event.get("cat") == "streamed"]
    assert [event["name"] for event in streamed[:2]] == ["streamed to update 1"] * 2
    assert sum(event["dur"] for event in streamed) == pytest.approx(
        1e6 * sum(event.seconds for event in log if isinstance(event, Streamed))
    )
    harvest = next(event for event in trace if event.get("cat") == "phase" and event["name"] == "harvest")
    assert harvest["ts"] < streamed[0]["ts"] < harvest["ts"] + harvest["dur"] and "learner" in phases


def test_a_slice_tells_its_outcome_in_its_name_and_what_it_made() -> None:
    found = run("on-policy", LENGTHS, **SMALL)
    slices = [e for e in written_trace(found.events) if e["ph"] == "X" and "rollout" in e.get("args", {})]
    assert {e["name"].split()[0] for e in slices} == {"trained", "dropped"}
    assert all(e["name"] == f"{e['cat']} #{e['args']['rollout']}" for e in slices)
    assert sum(e["args"]["tokens"] for e in slices) == found.run_metrics.generated_tokens
    assert sum(e["args"]["tokens"] for e in slices if e["cat"] == "dropped") == found.run_metrics.dropped_tokens


def test_the_learner_and_the_phases_take_the_time_that_the_figures_say() -> None:
    found = run("partial", LENGTHS, **SMALL)
    trace = written_trace(found.events)
    learner = [e for e in trace if e["ph"] == "X" and e.get("cat") == "update"]
    assert len(learner) == len(found.batches)
    assert [e["args"]["rollouts"] for e in learner] == found.sizes
    wall = found.run_metrics.wall_seconds * 1e6
    shares = {"learner": 0.0, "weights": 0.0}
    for event in trace:
        if event["ph"] == "X" and event.get("cat") == "phase" and event["name"] in shares:
            shares[event["name"]] += event["dur"] / wall
    assert shares == pytest.approx({phase: found.run_metrics.idle_parts[phase] for phase in shares})
    assert sum(e["dur"] for e in learner) / wall == pytest.approx(shares["learner"])


def test_an_empty_log_gives_an_empty_trace_and_a_rolled_back_one_what_counts() -> None:
    assert trace_events([]) == []
    log: list[Event] = list(run("partial", LENGTHS, **SMALL).events)
    half = len(log) // 2
    assert trace_events([*log, RolledBack(log[-1].at, len(log) - half)]) == trace_events(log[:half])


# The command


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    with (folder / "events.jsonl").open("w") as file:
        write = JsonLines(file)
        for event in run("partial", LENGTHS, **SMALL).events:
            write(event)
    return folder


def test_the_command_writes_the_trace_of_the_last_run_in_the_log(run_folder: Path, told: Any) -> None:
    log = run_folder / "events.jsonl"
    for runs in (1, 2):
        log.write_text(log.read_text() * runs)
        printed = told("trace", run_folder)
        assert str(run_folder / "trace.json") in printed.out
        assert ("events of 2 runs, of which only the last one counts" in printed.err) is (runs == 2)
        found = json.loads((run_folder / "trace.json").read_text())
        assert found["traceEvents"] == written_trace(run("partial", LENGTHS, **SMALL).events)


def test_without_a_name_the_newest_run_is_traced(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    run_folder.rename(tmp_path / "runs" / "newest")
    monkeypatch.chdir(tmp_path)
    assert main(["trace"]) == 0
    assert (tmp_path / "runs" / "newest" / "trace.json").exists()


def test_the_command_takes_a_log_file_and_writes_where_it_is_told(run_folder: Path, tmp_path: Path, told: Any) -> None:
    out = tmp_path / "elsewhere.json"
    found = json.loads(told("trace", run_folder / "events.jsonl", "--out", out, "--json").out)
    assert found["trace"] == str(out) and found["slices"] > 0 and found["unreadable_lines"] == 0
    assert out.exists() and not (run_folder / "trace.json").exists()


def test_a_torn_and_damaged_log_gives_a_trace_of_the_rest(run_folder: Path, told: Any) -> None:
    log = run_folder / "events.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    lines[40] = "\x00\x00 rubbish\n"
    log.write_text("".join([*lines[:-1], lines[-1][:9]]))
    assert "left out 2 unreadable lines of" in told("trace", run_folder).err
    assert json.loads((run_folder / "trace.json").read_text())["traceEvents"]
    log.write_text("".join([*lines[:40], *lines[41:-1], lines[-1][:9]]))
    assert "left out 1 unreadable line of" in told("trace", run_folder).err


def test_what_is_no_run_is_refused_in_one_line(tmp_path: Path, refused: Any) -> None:
    assert "nowhere" in refused("trace", tmp_path / "nowhere")
    (tmp_path / "events.jsonl").write_text("")
    assert "it has no events" in refused("trace", tmp_path)
