"""The worker processes of `simulate` end with it: after Ctrl-C, and when it is killed."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from processes import wait_until

SECONDS = 60.0  # on a busy machine; the simulation would take far longer


@contextmanager
def simulating() -> Iterator[subprocess.Popen[str]]:
    """A long `sortedrl simulate` in a process group of its own, as in a terminal, from its first worker on."""
    words = [sys.executable, "-m", "sortedrl", "simulate", "--cohorts", "5000", "--modes", "baseline", "partial"]
    with subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as command:
        try:
            wait_until(lambda: len(group_of(command.pid)) > 1)
            yield command
        finally:
            with suppress(ProcessLookupError):
                os.killpg(command.pid, signal.SIGKILL)


def group_of(leader: int) -> list[int]:
    """Processes of a group that have not ended."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            state, _, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(group) == leader and state != "Z":
                found.append(int(entry.name))
    return found


def test_ctrl_c_ends_a_simulation_at_once_in_one_line() -> None:
    with simulating() as command:
        os.killpg(command.pid, signal.SIGINT)
        _, printed = command.communicate(timeout=SECONDS)
        notice, *rest = printed.splitlines()
        assert "each mode is simulated with" in notice, "before it starts"
        assert (command.returncode, rest) == (130, ["interrupted"])
        wait_until(lambda: not group_of(command.pid))


def test_no_worker_outlives_a_simulation_that_was_killed() -> None:
    with simulating() as command:
        command.kill()
        command.wait()
        wait_until(lambda: not group_of(command.pid))
