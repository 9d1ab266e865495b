"""Whether processes that a test started have ended, and how long they have computed."""

import os
import subprocess
import time
from collections.abc import Callable

PATIENCE_SECONDS = 60.0


def is_running(process_id: int) -> bool:
    """Whether the process computes: a zombie that its new parent has not reaped yet does not."""
    try:
        with open(f"/proc/{process_id}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def cpu_seconds(process_id: int) -> float:
    """Of the process alone; 0 if it has ended."""
    try:
        with open(f"/proc/{process_id}/stat") as stat:
            user, system = stat.read().rsplit(")", 1)[1].split()[11:13]
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def descendants_of(process: int) -> list[int]:
    """The processes that it started, and those that they started."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process)], capture_output=True, text=True)
    children = [int(word) for word in found.stdout.split()]
    return [*children, *(one for child in children for one in descendants_of(child))]


def wait_for_end(*process_ids: int, seconds: float = PATIENCE_SECONDS) -> None:
    wait_until(lambda: not any(map(is_running, process_ids)), seconds)


def wait_until(holds: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, f"not within {seconds:g} s"
        time.sleep(0.01)
