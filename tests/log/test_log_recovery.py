"""A damaged event log: a run continues from its checkpoint, and every fold can read what is left."""

import random
from pathlib import Path

import pytest

from scenarios import Run, scenario
from sortedrl.core.events import Event, RolledBack, RunBegan
from sortedrl.log.file import EventFile
from sortedrl.log.lines import written
from sortedrl.log.reading import read_events, read_intact
from sortedrl.log.recovery import CheckpointMark, recover
from sortedrl.observe.metrics import Metrics
from sortedrl.observe.run_state import RunState
from sortedrl.observe.trace import trace_events

FIRST = RunBegan(0.0, 8, "partial", {})


@pytest.fixture(scope="module")
def whole() -> tuple[list[Event], list[CheckpointMark]]:
    """A simulated run that saves behind every update, and what each checkpoint knows."""
    draw = random.Random(0)
    lengths = [draw.randint(3, 60) for _ in range(64)]
    running = Run(scenario("partial", lengths, rollouts_per_update=4, prompts_per_cohort=16))
    marks: list[CheckpointMark] = []
    while len(running.updates(len(marks) + 1).batches) > len(marks):
        running.controller.mark_phase("checkpoint")
        marks.append(CheckpointMark.of(running.checkpoint()))
    return running.events, marks


def fold(log: list[Event]) -> Metrics:
    metrics = Metrics()
    for event in log:
        metrics(event)
    metrics.run_metrics()
    RunState(metrics, "run", None).view(0.0)
    return metrics


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
    assert isinstance(found.events[0], RunBegan)
    assert len(found.events) == mark.events
    tail = log[mark.events :]
    fold([*found.events, *tail])
    file = EventFile.open(path)
    file.roll_back(found)
    for event in tail:
        file(event)
    file.close()
    list(read_events(path))  # each line is an event
    intact, damage, _, _ = read_intact(path)
    assert not damage
    fold(intact)
    trace_events(intact)
    if tail:  # earlier by the time that a rollback made void, which is more if the damage has mixed the lines
        assert intact[-1]._replace(at=0.0) == tail[-1]._replace(at=0.0) and intact[-1].at <= tail[-1].at
    again = recover(path, mark, FIRST)
    assert list(map(type, again.events)) == list(map(type, found.events)) and again.lost == 0


@pytest.mark.parametrize("swallowed", [0, 1, 10])
def test_lines_that_vanish_or_come_twice_do_not_shift_the_checkpoint(
    swallowed: int, whole: tuple[list[Event], list[CheckpointMark]], tmp_path: Path
) -> None:
    """What follows the checkpoint is void: it must not slip into the place of what is lost."""
    log, marks = whole
    mark = marks[len(marks) // 2]
    lines = written(log).splitlines(keepends=True)
    lines[20 : 20 + swallowed] = ["\x00" * 512 + "\n"] if swallowed else lines[19:22]
    path = tmp_path / "events.jsonl"
    path.write_text("".join(lines))
    found = recover(path, mark, FIRST)
    place, original = {0: (23, 20), 1: (21, 21), 10: (21, 30)}[swallowed]
    assert found.kept[place:] == log[original : mark.events][: mark.events - 1 - place + (swallowed == 1)]
    assert len(found.events) == mark.events and found.lost == {0: 1, 1: 1, 10: 10}[swallowed]


def test_an_update_counts_once_where_the_mark_of_a_roll_back_cannot_be_read(
    whole: tuple[list[Event], list[CheckpointMark]], tmp_path: Path
) -> None:
    """The run went back from update 3 to 2 and repeated it."""
    log, marks = whole
    void = log[marks[1].events : marks[2].events - 5]
    mark = RolledBack(log[marks[1].events - 1].at, len(void))
    path = tmp_path / "events.jsonl"
    path.write_text(written([*log[: marks[1].events], *void, mark, *log[marks[1].events :]]))
    assert recover(path, marks[3], FIRST).events == log[: marks[3].events]
    path.write_text(path.read_text().replace("RolledBack", "#"))
    intact = read_intact(path).events
    assert [event.at for event in intact] == sorted(event.at for event in intact)
    found, expected = fold(intact).run_metrics(), fold(log).run_metrics()
    assert (found.trained, found.trained_tokens, found.updates) == (
        expected.trained, expected.trained_tokens, expected.updates,
    )  # fmt: skip
    assert found.loaded == expected.loaded and found.bubble == pytest.approx(expected.bubble, abs=0.05)
