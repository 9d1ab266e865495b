"""Locks that show whether a process is there, in real processes."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sortedrl.log import process_lock
from sortedrl.log.file import EventFile
from sortedrl.log.process_lock import FolderLock, HeldByAnother, ProcessLock, holder_of, lock_of_log, process_is_there


def test_a_lock_shows_its_process_until_it_is_released(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert process_is_there(path) is None
    lock = ProcessLock(path)
    assert process_is_there(path) is True
    assert f"process {os.getpid()} on" in holder_of(path)
    with pytest.raises(HeldByAnother, match=f"process {os.getpid()} on"):
        ProcessLock(path)
    lock.release()
    assert process_is_there(path) is False
    ProcessLock(path).release()


def test_a_lock_of_another_machine_says_nothing(tmp_path: Path) -> None:
    """Its locks may not reach this one, as with NFS and `nolock`."""
    path = tmp_path / "lock"
    ProcessLock(path).release()
    description = json.loads(path.read_text())
    for content in (json.dumps(description | {"machine": "another"}), '{"pid": 1}', "[1]", "half a l", ""):
        path.write_text(content)
        assert process_is_there(path) is None


def test_a_file_system_without_locks_says_nothing_and_its_folders_are_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some network file systems have none. This one cannot be had here: the call is made to fail as theirs does."""

    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    path = tmp_path / "lock"
    ProcessLock(path).release()
    monkeypatch.setattr(process_lock.fcntl, "flock", unsupported)
    assert ProcessLock(path).why_not == os.strerror(errno.ENOLCK)
    assert process_is_there(path) is None
    warnings: list[str] = []
    lock = FolderLock(tmp_path, warnings.append)
    assert len(warnings) == 1 and "cannot be locked" in warnings[0] and "second process" in warnings[0]
    assert lock.is_in_place()
    lock.release()


def test_the_scheduler_needs_no_locks(tmp_path: Path) -> None:
    """Windows has neither module nor function."""
    script = (
        "import os, sys\n"
        "sys.modules['fcntl'] = None\n"
        "del os.fork, os.register_at_fork, os.O_CLOEXEC\n"
        "from pathlib import Path\n"
        "from sortedrl.log.file import EventFile\n"
        "from sortedrl.log.process_lock import lock_of_log, process_is_there\n"
        "file = EventFile.open(Path(sys.argv[1]))\n"
        "assert process_is_there(lock_of_log(Path(sys.argv[1]))) is None\n"
        "file.close()\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "events.jsonl")], check=True)


def test_a_log_that_is_open_twice_has_a_writer_until_both_are_closed(tmp_path: Path) -> None:
    """As in a notebook that resumes a run without closing the first file."""
    log = tmp_path / "events.jsonl"
    first, second = EventFile.open(log), EventFile.open(log)
    first.close()
    assert process_is_there(lock_of_log(log)) is True
    second.close()
    assert process_is_there(lock_of_log(log)) is False
