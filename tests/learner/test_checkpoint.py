"""Checkpoints: whole or not there, never without a good one, and damage is found."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from full_disk import fill, small_file_system
from sortedrl.learner import checkpoint

WEIGHTS = {"weight": torch.arange(50_000.0)}


def save(folder: Path, update: int, note: str = "") -> Path:
    return checkpoint.save(folder, update, WEIGHTS, {"updates": update}, {"note": note})


def newest(folder: Path) -> checkpoint.Checkpoint:
    return checkpoint.load_newest_intact(folder, lambda line: None)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_full_disk_leaves_the_older_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    """PyTorch raises RuntimeError there, not OSError."""
    with small_file_system(tmp_path / "disk", "512k") as disk:
        folder = disk / "checkpoints"
        save(folder, 1)
        filler = None
        for free_kilobytes in (150, 1, 0):  # it fills up within the weights, within the state, at the first byte
            if filler:
                filler.unlink()
            filler = fill(disk)
            os.truncate(filler, filler.stat().st_size - (free_kilobytes << 10))
            for update in (1, 2):
                with pytest.raises(checkpoint.CheckpointError, match=r"No space left on device.*Older.*--resume"):
                    save(folder, update)
                assert names(folder) == ["update-000001"]
            assert newest(folder).controller == {"updates": 1}
        assert filler is not None
        filler.unlink()
        save(folder, 2)
        assert newest(folder).controller == {"updates": 2}


def test_a_state_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(TypeError):
        checkpoint.save(tmp_path, 2, WEIGHTS, {"updates": object()}, {})
    assert names(tmp_path) == ["update-000001"]


@pytest.mark.parametrize(("found", "age"), [(1, "an older"), (99, "a newer")])
def test_a_checkpoint_of_another_format_is_refused_and_stays(
    found: int, age: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    monkeypatch.setattr(checkpoint, "FORMAT", found)
    save(tmp_path, 2)
    monkeypatch.undo()
    with pytest.raises(checkpoint.CheckpointError, match=rf"format {found}, .*{age} sortedrl; .*or start a new run"):
        newest(tmp_path)
    assert names(tmp_path) == ["update-000001", "update-000002"], "nothing is set aside"


@pytest.mark.parametrize("part", ["controller", "notes", "random"])
def test_a_checkpoint_that_lacks_a_part_is_refused_in_one_line(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path, 1)
    state = json.loads((path / "state.json").read_text())
    del state[part]
    (path / "state.json").write_text(json.dumps(state))
    monkeypatch.setattr(checkpoint, "damage_of", lambda path: None)
    with pytest.raises(checkpoint.CheckpointError, match=f"cannot be used: it lacks '{part}'. Move it out of"):
        newest(tmp_path)


@pytest.mark.parametrize("manifest", ["", "{}", "[]", "null", '{"learner.pt": {}}', '{"learner.pt": 3}', "{\x00"])
def test_a_checkpoint_with_a_damaged_manifest_is_not_intact(manifest: str, tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (path / "manifest.json").write_text(manifest)
    assert "manifest" in (checkpoint.damage_of(path) or "")


@pytest.mark.parametrize("name", ["manifest.json", "learner.pt", "state.json"])
@pytest.mark.parametrize("damage", ["removed", "truncated", "emptied", "one bit"])
def test_the_newest_intact_checkpoint_is_used_and_the_damaged_one_is_set_aside(
    name: str, damage: str, tmp_path: Path
) -> None:
    save(tmp_path, 2)
    file = save(tmp_path, 4) / name
    content = bytearray(file.read_bytes())
    if damage == "removed":
        file.unlink()
    elif damage == "one bit":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    else:
        file.write_bytes(content[: len(content) // 2] if damage == "truncated" else b"")
    said: list[str] = []
    assert checkpoint.load_newest_intact(tmp_path, said.append).controller == {"updates": 2}
    assert len(said) == 1
    assert "update-000004 is damaged" in said[0] and "continues from update-000002" in said[0]
    assert names(tmp_path) == ["damaged-update-000004", "update-000002"]


def test_without_an_intact_checkpoint_one_line_says_so(tmp_path: Path) -> None:
    with pytest.raises(checkpoint.CheckpointError, match="no checkpoint"):
        newest(tmp_path)
    for update in (1, 2):
        (save(tmp_path, update) / "learner.pt").write_bytes(b"")
    with pytest.raises(checkpoint.CheckpointError, match=r"update-000002 is damaged.*and so are the 1 before it"):
        newest(tmp_path)


def test_checkpoints_are_ordered_by_number(tmp_path: Path) -> None:
    for update in (999_999, 1_000_000):
        save(tmp_path, update)
    (tmp_path / "update-mine").mkdir()
    assert newest(tmp_path).controller == {"updates": 1_000_000}


def test_a_kill_before_any_file_operation_of_a_replacement_leaves_a_good_one(tmp_path: Path) -> None:
    """The child kills itself before its first, second, ... operation until it survives."""
    save(tmp_path, 3, "old")
    operation, found = 1, set()
    while _killed_in_replacement(tmp_path, operation):
        checkpoint.clean_up(tmp_path)
        assert names(tmp_path) == ["update-000003"], f"operation {operation}"
        found.add(newest(tmp_path).notes["note"])
        shutil.rmtree(tmp_path / "update-000003")
        save(tmp_path, 3, "old")
        operation += 1
    assert operation > 15
    assert found == {"old", "new"}
    assert newest(tmp_path).notes["note"] == "new"


def _killed_in_replacement(folder: Path, operation: int) -> bool:
    import forked

    child = os.fork()
    if child == 0:
        forked._arm(forked.Fault(folder, operation))
        save(folder, 3, "new")
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def test_leftovers_of_killed_runs_are_removed_and_nothing_else(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for leftover in (".writing-update-000002", ".replaced-update-000001"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "learner.pt").write_bytes(b"x")
    (tmp_path / "notes-of-mine").mkdir()
    checkpoint.clean_up(tmp_path)
    assert names(tmp_path) == ["notes-of-mine", "update-000001"]
    assert json.loads((tmp_path / "update-000001" / "state.json").read_text())["controller"] == {"updates": 1}
