"""Measures the cost of logging and the console in a training run, with timers around our code.

python benchmarks/observe_overhead.py --updates 20

Trains like `make train`, with the panel drawn into a pseudo-terminal, and times every place where the run logs or shows
something: the event log with all its sinks, the line of each update, the progress of evaluations, and the drawing
thread. The results include the cost of the timers.

There are two clocks: wall-clock time, and the CPU time of the working thread. On a quiet machine they agree; on a busy
one, wall-clock time includes other processes. So the criterion (exit code 1 above 1%) uses CPU time: over the CPU time
of the training thread or, for drawing, which is paced by the wall clock, over wall-clock time.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import struct
import sys
import tempfile
import termios
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console as Terminal
from rich.live import Live

from sortedrl.core.events import EventLog
from sortedrl.observe.console import PanelConsole
from sortedrl.training import trainer as app
from sortedrl.training.run_record import RunRecord
from sortedrl.training.settings import TrainSettings

LIMIT = 0.01
DRAWING = "drawing"
PARTS: tuple[tuple[type, str, str], ...] = (
    (EventLog, "append", "event log: metrics, state, file"),
    (RunRecord, "update", "lines of updates, sample of rollouts"),
    (PanelConsole, "evaluating", "progress of evaluations"),
    (PanelConsole, "_print", "log lines"),
    (Live, "refresh", DRAWING),
)


class Clocks:
    """Seconds and calls by part. Only the outermost of nested parts is timed, per thread."""

    def __init__(self) -> None:
        self.wall: Counter[str] = Counter()
        self.cpu: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._inside = threading.local()

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._inside, "now", False):
                return function(*args, **kwargs)
            self._inside.now = True
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.cpu[part] += time.thread_time() - cpu
                self.wall[part] += time.perf_counter() - wall
                self.calls[part] += 1
                self._inside.now = False

        return timed


def terminal(columns: int) -> Terminal:
    """One end of a pseudo-terminal; output at the other end is discarded."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))

    def swallow() -> None:
        while os.read(master, 65536):
            pass

    threading.Thread(target=swallow, daemon=True).start()
    return Terminal(file=os.fdopen(slave, "w"), force_terminal=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--threads", type=int, default=0)
    arguments = parser.parse_args()
    clocks = Clocks()
    for owner, name, part in PARTS:
        setattr(owner, name, clocks.around(part, getattr(owner, name)))
    console = PanelConsole(terminal(100))
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainSettings(updates=arguments.updates, threads=arguments.threads, out=Path(folder) / "run")
        wall, cpu = time.perf_counter(), time.thread_time()
        app.train(settings, console.log, console)
        wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
    print(f"{'':<40} {'calls':>8} {'wall':>9} {'share':>8} {'CPU':>9} {'share':>8}")
    whole = 0.0
    for part, spent in clocks.cpu.most_common():
        share = spent / (wall if part == DRAWING else cpu)
        whole += share
        print(
            f"{part:<40} {clocks.calls[part]:>8,} {clocks.wall[part]:>7.3f} s {clocks.wall[part] / wall:>8.3%} "
            f"{spent:>7.3f} s {share:>8.3%}"
        )
    print(f"total: {whole:.2%} of a run of {wall:.1f} s, {cpu:.1f} s of CPU time in the training thread")
    return int(whole > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
