"""Weights in memory on their way to a server: who may read them, and what killed processes leave behind."""

import os
import signal
import stat
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from full_disk import small_file_system
from sortedrl.core import ConfigurationError
from sortedrl.engines.servers.weight_files import WeightFiles, remove_abandoned

WEIGHTS = {"norm": torch.zeros(4)}


def holder(parent: Path) -> tuple[int, Path]:
    """A process in the middle of a weight update, and the folder that it holds. SIGINT makes it go on."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        with suppress(KeyboardInterrupt), WeightFiles(parent).written(WEIGHTS, 7) as folder:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.write(writer, str(folder).encode())
            time.sleep(300)
        os._exit(0)
    folder = Path(os.read(reader, 4096).decode())
    os.close(reader)
    os.close(writer)
    return process, folder


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_weights_of_a_killed_process_are_removed_and_those_of_a_living_one_stay(tmp_path: Path) -> None:
    (killed, left), (living, held) = holder(tmp_path), holder(tmp_path)
    os.kill(killed, signal.SIGKILL)
    os.waitpid(killed, 0)
    try:
        assert (left / "model.safetensors").exists(), "SIGKILL leaves it behind"
        with WeightFiles(tmp_path).written(WEIGHTS, 8) as folder:
            assert not left.exists() and (held / "model.safetensors").exists()
            remove_abandoned(tmp_path)
            assert (folder / "model.safetensors").exists(), "our own is held, too"
    finally:
        os.kill(living, signal.SIGINT)
        os.waitpid(living, 0)
    assert list(tmp_path.iterdir()) == []


def test_only_what_is_ours_is_removed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").touch()
    shared = tmp_path / "shm"
    shared.mkdir()
    (shared / "sortedrl-weights-1-link").symlink_to(elsewhere)
    (shared / "sortedrl-weights-2-file").touch()
    (shared / "model-of-somebody").mkdir()
    (shared / ".sortedrl-new-fresh").mkdir()
    (shared / "sortedrl-weights-3-left").mkdir()
    remove_abandoned(shared)
    assert (elsewhere / "precious").exists()
    assert {path.name for path in shared.iterdir()} == {
        "sortedrl-weights-1-link",
        "sortedrl-weights-2-file",
        "model-of-somebody",
        ".sortedrl-new-fresh",
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of another user")
def test_the_folder_of_another_user_is_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "sortedrl-weights-3-other"
    other.mkdir()
    os.chown(other, 12345, 12345)
    remove_abandoned(tmp_path)
    assert other.exists()


@pytest.mark.parametrize("umask", [0o000, 0o077])
@pytest.mark.parametrize(("for_all", "folder_mode", "file_mode"), [(False, 0o700, 0o600), (True, 0o755, 0o644)])
def test_permissions_do_not_depend_on_the_umask(
    tmp_path: Path, umask: int, *, for_all: bool, folder_mode: int, file_mode: int
) -> None:
    before = os.umask(umask)
    try:
        with WeightFiles(tmp_path, readable_by_all=for_all).written(WEIGHTS, 1) as folder:
            assert mode(folder) == folder_mode and mode(folder / "model.safetensors") == file_mode
    finally:
        os.umask(before)
    assert list(tmp_path.iterdir()) == []


def test_a_full_folder_is_an_error_that_names_the_setting(tmp_path: Path) -> None:
    """As /dev/shm in a container, which has 64 MB unless it is started with more."""
    with small_file_system(tmp_path / "shm", "64k") as folder:
        too_large = WeightFiles(folder).written({"norm": torch.zeros(100_000)}, 1)
        with pytest.raises(ConfigurationError, match=r"weights_folder.*No space left"), too_large:
            pass
        assert list(folder.iterdir()) == []
