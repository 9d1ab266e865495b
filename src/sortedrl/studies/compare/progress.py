"""The progress of a study, with the time left: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from sortedrl.core.wording import printable
from sortedrl.studies.compare.outcomes import IncompleteRun, read_run
from sortedrl.studies.compare.runs import Ended, StudyRun

LINE_SECONDS, LIVE_SECONDS = 60.0, 1.0  # between plain lines if no run ends; between changes of the bar


class StudyProgress:
    """`stream` gets one line per run that ends; in between a bar, or a line per minute."""

    def __init__(self, runs: Sequence[StudyRun], stream: TextIO, *, finished_before: int = 0) -> None:
        self._console = Console(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._total, self._ended, self._failed = len(runs) + finished_before, finished_before, 0
        self._running: list[StudyRun] = []
        self._at_start = {run.name: run.fraction_done() for run in runs}
        self._done = dict(self._at_start)  # without runs that failed: they are neither left nor done
        self._began = self._last = time.monotonic()
        self._is_live = self._console.is_terminal
        columns = (MofNCompleteColumn(), TextColumn("runs"), BarColumn(30), TextColumn("{task.description}"))
        self._bar = Progress(
            *columns, console=self._console, transient=True, auto_refresh=False, disable=not self._is_live
        )
        self._task = self._bar.add_task("", total=self._total)
        self._bar.start()

    def close(self) -> None:
        self._bar.stop()

    def started(self, run: StudyRun) -> None:
        self._running.append(run)

    def ended(self, ended: Ended) -> None:
        self._running.remove(ended.run)
        self._ended += 1
        self._done[ended.run.name] = 1.0
        if ended.error is not None:
            self._failed += 1
            del self._done[ended.run.name]
        self._line(f"{ended.run.name}: {_outcome(ended)}")

    def note(self, text: str) -> None:
        self._console.print(text)

    def tick(self) -> None:
        if time.monotonic() - self._last >= (LIVE_SECONDS if self._is_live else LINE_SECONDS):
            self._done |= {run.name: run.fraction_done() for run in self._running}
            self._line("" if self._is_live else "running")

    def seconds_left(self) -> float | None:
        """From the work of this call; None before anything was done."""
        done = sum(fraction - self._at_start[name] for name, fraction in self._done.items())
        left = len(self._done) - sum(self._done.values())
        return (time.monotonic() - self._began) * left / done if done > 0 else None

    def _line(self, text: str) -> None:
        """The bar, and a line above it if there is a text."""
        self._last = time.monotonic()
        parts = [f"{len(self._running)} running"] + [f"{self._failed} failed"] * bool(self._failed)
        if self._ended < self._total and (seconds := self.seconds_left()) is not None:
            parts.append(f"{duration(seconds)} left")
        state = ", ".join(parts)
        if text:
            self._console.print(f"[{self._ended:{len(str(self._total))}}/{self._total}] {printable(text)}; {state}")
        self._bar.update(self._task, completed=self._ended, description=state, refresh=True)


def _outcome(ended: Ended) -> str:
    if ended.error is not None:
        return f"FAILED: {ended.error}"
    try:
        found = read_run(ended.run.folder, ())
    except IncompleteRun as error:
        return f"FAILED: {error}"
    first, last = found["curve"]["score"][0], found["curve"]["score"][-1]
    return f"held-out score {first:.3f} -> {last:.3f} in {duration(found['wall_seconds'])}"


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
