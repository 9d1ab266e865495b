"""The event log on disk and the atomic write: what a kill, damage or a full disk leaves behind."""

from pathlib import Path

import pytest

from full_disk import fill, small_file_system
from sortedrl.core.events import Event, Lost, Phase, RolledBack, RunBegan, Updated
from sortedrl.log.atomic_write import atomic_writer, write_atomically
from sortedrl.log.file import EventFile
from sortedrl.log.lines import written
from sortedrl.log.reading import read_events, read_intact, without_rolled_back
from sortedrl.log.recovery import CheckpointMark, recover

FIRST = RunBegan(0.0, 2, "partial", {})
SAVED: list[Event] = [
    FIRST,
    Phase(0.0, "start"),
    Updated(1.0, 0, 0, 0, (0,), (3,), (1.0,), (((0, 3),),), (0,)),
    Phase(2.0, "checkpoint"),
]
LATER: list[Event] = [Phase(3.0, "harvest"), Phase(4.0, "learner")]
MARK = CheckpointMark(events=len(SAVED), harvests=1)


def resume(path: Path) -> int:
    """How many events are lost."""
    recovered = recover(path, MARK, FIRST)
    file = EventFile.open(path)
    file.roll_back(recovered)
    file(Phase(5.0, "end"))
    file.close()
    return recovered.lost


@pytest.mark.parametrize("torn", ["", '{"event":"Pha'])
def test_a_resumed_file_counts_what_the_checkpoint_counts(torn: str, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(written([*SAVED, *LATER]) + torn)
    assert resume(path) == 0
    assert list(read_events(path)) == [*SAVED, *LATER, RolledBack(2.0, 2), Phase(5.0, "end")]
    assert without_rolled_back(read_events(path)) == [*SAVED, Phase(5.0, "end")]


def test_a_line_that_cannot_be_read_becomes_a_lost_event_and_is_reported_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(written([*SAVED, *LATER]).replace('"phase":"start"', '"phase":"st', 1))
    assert resume(path) == 1
    log = [SAVED[0], Lost(0.0), *SAVED[2:], *LATER, RolledBack(2.0, 2), Phase(5.0, "end")]
    assert list(read_events(path)) == log
    assert resume(path) == 0
    assert list(read_events(path)) == [*log, RolledBack(2.0, 1), Phase(5.0, "end")]


@pytest.mark.parametrize("content", [None, "", "#\n" + written([*SAVED[1:], *LATER])])
def test_without_its_start_a_log_starts_again(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    if content is not None:
        path.write_text(content)
    assert resume(path) > 0
    at = 1.0 if content else 0.0
    log = [FIRST._replace(at=at), Phase(at, "checkpoint"), Phase(5.0, "end")]
    assert read_intact(path) == (log, [], 0, 2)


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_damage_is_reported_once_even_if_no_checkpoint_follows(kept: int, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(written(SAVED[:kept]))
    assert resume(path) > 0
    assert resume(path) == resume(path) == 0
    assert len(list(read_events(path))) == kept + (1 + 4 - kept + 1) + 2 + 2


def test_an_error_while_writing_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_atomically(path, "old")
    with pytest.raises(ValueError, match="in the middle"), atomic_writer(path) as file:
        file.write("new")
        raise ValueError("in the middle")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    with small_file_system(tmp_path / "disk", "64k") as disk:
        path = disk / "state.json"
        write_atomically(path, "old")
        filler = fill(disk)
        with pytest.raises(OSError, match="No space left"):
            write_atomically(path, "n" * 100_000)
        assert path.read_text() == "old"
        assert sorted(disk.iterdir()) == sorted([filler, path])
