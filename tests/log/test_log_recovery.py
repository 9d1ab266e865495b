"""A damaged event log: what is recovered always fits the checkpoint, and every fold can read it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from scenarios import Run, scenario
from sortedrl.core import events
from sortedrl.core.events import Event, Lost, RolledBack, RunBegan
from sortedrl.log.lines import written
from sortedrl.log.reading import read_events, read_intact
from sortedrl.log.recovery import CheckpointMark, recover
from sortedrl.log.repair import consistent
from sortedrl.observe.metrics import Metrics
from sortedrl.observe.run_state import RunState

FIRST = RunBegan(0.0, 8, "partial", {})


def log_with_checkpoints(mode: str = "partial") -> tuple[list[Event], list[CheckpointMark]]:
    """A simulated run that saves behind every update, and what each checkpoint knows."""
    draw = random.Random(0)
    lengths = [draw.randint(3, 60) for _ in range(64)]
    running = Run(scenario(mode, lengths, rollouts_per_update=4, prompts_per_cohort=16))
    marks: list[CheckpointMark] = []
    while len(running.updates(len(marks) + 1).batches) > len(marks):
        marks.append(_saved(running))
    return running.events, marks


def _saved(running: Run) -> CheckpointMark:
    running.controller.mark_phase("checkpoint")
    return CheckpointMark.of(running.checkpoint())


@pytest.fixture(scope="module")
def whole() -> tuple[list[Event], list[CheckpointMark]]:
    return log_with_checkpoints()


def fold(log: list[Event]) -> Metrics:
    metrics = Metrics()
    state = RunState(metrics, "run", None)
    for event in log:
        metrics(event)
        state(event)
    metrics.run_metrics()
    state.view(0.0)
    return metrics


def test_an_intact_log_is_cut_at_the_checkpoint(
    whole: tuple[list[Event], list[CheckpointMark]], tmp_path: Path
) -> None:
    log, marks = whole
    path = tmp_path / "events.jsonl"
    path.write_text(written(log) + '{"event":"Torn')
    for mark in marks:
        found = recover(path, mark, FIRST)
        assert not found.is_damaged
        assert found.events == log[: mark.events]
        assert found.void == len(log) - mark.events


def damaged(content: bytes, draw: random.Random) -> bytes:
    start = draw.randrange(len(content))
    end = min(len(content), start + draw.choice((1, 30, 500, 5000, len(content))))
    kind = draw.randrange(6)
    if kind == 0:
        return content[:start]
    if kind == 1:
        return content[:start] + content[end:]
    if kind == 2:
        return content[:start] + bytes(end - start) + content[end:]
    if kind == 3:
        return content[:start] + draw.randbytes(end - start) + content[end:]
    if kind == 4:
        return content[:start] + b"\n[]\n7\n" + content[start:]
    lines = content.splitlines(keepends=True)
    draw.shuffle(lines)
    return b"".join(lines[: max(1, len(lines) // draw.randint(1, 9))]) if draw.random() < 0.1 else content[end:]


@pytest.mark.parametrize("seed", range(100))
def test_whatever_the_damage_a_run_can_go_on(
    seed: int, whole: tuple[list[Event], list[CheckpointMark]], tmp_path: Path
) -> None:
    """The rest of the run's events follow the recovered ones, live and when the file is read again."""
    log, marks = whole
    draw = random.Random(seed)
    mark = draw.choice(marks)
    path = tmp_path / "events.jsonl"
    content = written(log).encode()
    for _ in range(draw.choice((1, 1, 2, 5))):
        content = damaged(content or b"\n", draw)
    path.write_bytes(content)
    found = recover(path, mark, FIRST)
    assert len(found.events) == mark.events
    assert isinstance(found.events[0], RunBegan)
    tail = log[mark.events :]
    fold([*consistent(found.events), *tail])
    path.write_text(written([*found.events, RolledBack(found.last_time, found.void), *tail]))
    again = recover(path, mark, FIRST)
    assert again.events == found.events or not found.is_damaged
    intact, damage, earlier_runs = read_intact(path)
    assert not earlier_runs
    assert not damage or not found.is_damaged
    assert not any(isinstance(event, Lost) for event in intact)


def test_a_garbled_line_costs_one_event(whole: tuple[list[Event], list[CheckpointMark]], tmp_path: Path) -> None:
    log, marks = whole
    lines = written(log).splitlines(keepends=True)
    lines[20] = "\x00\n"
    path = tmp_path / "events.jsonl"
    path.write_text("".join(lines))
    found = recover(path, marks[-1], FIRST)
    expected = [*log[:20], Lost(log[19].at), *log[21:]]
    assert found.lost == 1
    assert found.events == expected[: marks[-1].events]


def test_a_block_that_swallowed_lines_does_not_shift_the_checkpoint(
    whole: tuple[list[Event], list[CheckpointMark]], tmp_path: Path
) -> None:
    """What follows the checkpoint is void: it must not slip into the place of what is lost."""
    log, marks = whole
    mark = marks[len(marks) // 2]
    lines = written(log).splitlines(keepends=True)
    lines[20:30] = ["\x00" * 512 + "\n"]
    path = tmp_path / "events.jsonl"
    path.write_text("".join(lines))
    found = recover(path, mark, FIRST)
    assert found.lost == 10
    assert found.events[30:] == log[30 : mark.events]


def test_a_mark_of_a_roll_back_that_cannot_be_read_is_inferred(
    whole: tuple[list[Event], list[CheckpointMark]], tmp_path: Path
) -> None:
    """The run went back from update 3 to 2 and repeated it: no update may be there twice."""
    log, marks = whole
    void = log[marks[1].events : marks[2].events - 5]
    lines = written(
        [*log[: marks[1].events], *void, RolledBack(log[marks[1].events - 1].at, len(void)), *log[marks[1].events :]]
    )
    path = tmp_path / "events.jsonl"
    path.write_text(lines)
    assert recover(path, marks[3], FIRST).events == log[: marks[3].events]
    garbled = [("\x00\n" if "RolledBack" in line else line) for line in lines.splitlines(keepends=True)]
    path.write_text("".join(garbled))
    found = recover(path, marks[3], FIRST)
    assert found.events == log[: marks[3].events]
    assert found.lost == 0


def test_a_missing_log_is_all_lost_but_the_beginning_and_the_load(
    whole: tuple[list[Event], list[CheckpointMark]], tmp_path: Path
) -> None:
    _, marks = whole
    found = recover(tmp_path / "events.jsonl", marks[-1], FIRST)
    assert found.is_damaged
    assert [type(event) for event in found.events if not isinstance(event, Lost)] == [
        RunBegan,
        events.Loaded,
        events.Phase,
    ]
    (tmp_path / "events.jsonl").write_text(written(found.events))
    assert list(read_events(tmp_path / "events.jsonl")) == found.events
