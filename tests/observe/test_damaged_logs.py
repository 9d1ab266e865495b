"""Event logs that lack lines or have unreadable ones: every fold reads what is left, and the report states the loss."""

import random
from pathlib import Path
from typing import Any

import pytest

from scenarios import MODES
from simulated_logs import figures_of, simulated_log
from sortedrl.log.reading import read_events, read_intact
from sortedrl.observe.report import build as report
from sortedrl.observe.report.runs import read_runs


@pytest.mark.parametrize("seed", range(40))
def test_any_lines_may_be_missing(tmp_path: Path, seed: int) -> None:
    """Whatever was lost: the log is read, every fold works, and shares stay shares."""
    chance = random.Random(seed)
    mode = chance.choice(MODES)
    path = simulated_log(tmp_path / "log.jsonl", mode)
    lines = path.read_bytes().splitlines(keepends=True)
    for _ in range(chance.choice((1, 3, 30))):
        place = chance.randrange(1, len(lines))
        kind = chance.choice(("lost", "garbage", "cut", "flipped", "twice"))
        if kind == "lost":
            lines[place] = b""
        elif kind == "garbage":
            lines[place] = bytes(chance.randrange(256) for _ in range(40)) + b"\n"
        elif kind == "cut":
            lines[place] = lines[place][: len(lines[place]) // 2]
        elif kind == "twice":
            lines[place] *= 2
        else:
            lines[place] = lines[place].replace(b":", b";", 1)
    path.write_bytes(b"".join(lines))
    (read,) = read_runs([path])
    run_metrics = read.run_metrics
    assert 0 <= run_metrics.bubble <= run_metrics.idle + 1e-9 <= 1 + 2e-9
    assert sum(run_metrics.bubble_parts.values()) == pytest.approx(run_metrics.bubble)
    assert sum(read.slot_time.values()) == pytest.approx(1)
    assert "<html" in report.page([read], "0")


def test_damage_is_named_with_its_line_and_figures_stay_near(tmp_path: Path) -> None:
    whole = figures_of(list(read_events(simulated_log(tmp_path / "whole.jsonl"))))
    path = simulated_log(tmp_path / "damaged.jsonl")
    lines = path.read_text().splitlines()
    broken = next(i for i, line in enumerate(lines) if '"Finished"' in line)
    lines[broken] = lines[broken][:-9] + "#"
    path.write_text("\n".join(lines) + "\n")
    (read,) = read_runs([path])
    assert f"skipped 1 unreadable line: line {broken + 1} (not an event). Metrics lack" in read.notices[0]
    assert read.run_metrics.updates == whole.updates
    assert read.run_metrics.trained_tokens == whole.trained_tokens
    assert read.run_metrics.bubble == pytest.approx(whole.bubble, abs=0.05)
    assert read.notices[0] in report.page([read], "0")


def test_a_log_cut_in_mid_line_is_shown_up_to_there(tmp_path: Path) -> None:
    path = simulated_log(tmp_path / "log.jsonl")
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    intact = list(read_events(path))
    (read,) = read_runs([path])
    assert read.run_metrics == figures_of(intact)
    assert any("torn" in notice and f"line {len(intact) + 1} " in notice for notice in read.notices)
    assert any("killed or is still running" in notice for notice in read.notices)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13, 21, 34, 55])
def test_a_run_that_has_only_begun_has_a_report(tmp_path: Path, count: int) -> None:
    path = simulated_log(tmp_path / "log.jsonl", "partial+elevator")
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:count]))
    (read,) = read_runs([path])
    assert read.run_metrics == figures_of(list(read_events(path)))
    assert "is still running" in report.page([read], "0")


@pytest.mark.parametrize("reward", ["Infinity", "-Infinity", "NaN", "1e999", "9" * 400])
def test_an_infinite_reward_is_damage_in_every_command(tmp_path: Path, told: Any, refused: Any, reward: str) -> None:
    """Older versions wrote it, and the report ended in a traceback."""
    path = simulated_log(tmp_path / "events.jsonl")
    lines = path.read_text().splitlines(keepends=True)
    place = max(i for i, line in enumerate(lines) if '"Updated"' in line)
    start, rest = lines[place].split('"rewards":[')
    lines[place] = f'{start}"rewards":[{reward},{rest.split(",", 1)[1]}'
    path.write_text("".join(lines))
    why = "Updated with a reward that is not a finite number"
    (read,) = read_runs([path])
    assert f"line {place + 1} ({why})" in read.notices[0]
    assert why in report.page([read], "0")
    assert "left out 1 unreadable line of" in told("trace", tmp_path).err
    assert f"events.jsonl: line {place + 1} cannot be read ({why})" in told("watch", tmp_path).out
    error = refused("simulate", "--lengths", path)
    assert f"line {place + 1} " in error and why in error


@pytest.mark.parametrize("seconds", ["Infinity", "NaN", "9" * 400])
def test_an_infinite_time_of_the_learner_is_damage(tmp_path: Path, seconds: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(f'{{"event":"Streamed","at":1.0,"update":0,"seconds":{seconds},"rollouts":[1]}}\n')
    assert [line.why for line in read_intact(path).damage] == ["Streamed with seconds that are not a finite number"]


def test_a_log_without_its_start_is_refused_in_one_line(tmp_path: Path, told: Any, refused: Any) -> None:
    path = simulated_log(tmp_path / "events.jsonl")
    path.write_text("#" + path.read_text())
    assert "the start of a run is not in it, or cannot be read" in refused("report", path)
    told("trace", path)
    told("watch", tmp_path)
