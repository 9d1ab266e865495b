"""What the commands print: dry runs, progress, and the consoles that follow a run."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sortedrl.cli.streams import stdout_goes_to_stderr
from sortedrl.observe.console import RunConsole, run_console
from sortedrl.settings.base import Settings

SECONDS_BETWEEN_LINES = 5.0


def print_settings(resolved: dict[str, Any], derived: dict[str, Any], *, as_object: bool) -> int:
    """The output of `--dry-run`. Returns the exit code."""
    if as_object:
        print(json.dumps({"settings": resolved, "derived": derived}))
        return 0
    for key, value in resolved.items():
        print(f"{key} = {json.dumps(value)}")
    print("\n# derived")
    for key, value in derived.items():
        print(f"# {key} = {json.dumps(value)}")
    return 0


def line_log(settings: Settings) -> Callable[[str], None]:
    """Progress lines: to stdout, or to stderr if stdout is JSON."""
    stream = sys.stderr if settings.json_output else sys.stdout
    return lambda line: print(line, file=stream, flush=True)


def console_of_run(settings: Settings, *, ends_with_reader: bool = True) -> RunConsole:
    """The panel on a terminal, else lines; on stderr if stdout is JSON."""
    return run_console(sys.stderr if settings.json_output else sys.stdout, ends_with_reader=ends_with_reader)


def around_code_of_others(settings: Settings) -> AbstractContextManager[None]:
    """What engines, tasks and their libraries print to stdout goes to stderr if stdout is JSON."""
    return stdout_goes_to_stderr() if settings.json_output else nullcontext()


def table_console() -> Console:
    """For tables and sentences. Text in brackets, as in error messages and paths, is no markup."""
    console = Console(markup=False, emoji=False)
    return console if console.is_terminal else Console(markup=False, emoji=False, width=160)


class ProgressBar:
    """A bar with an ETA on a terminal's stderr. When piped: nothing, or a line every few seconds."""

    def __init__(self, what: str, *, quiet: bool, when_piped: bool = False) -> None:
        console = Console(stderr=True)
        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)
        self._what, self._task = what, self._bar.add_task(what, total=None)
        self._has_lines = when_piped and not (quiet or console.is_terminal)
        self._next_line = 0.0

    def __enter__(self) -> Callable[[int, int], None]:
        self._bar.start()
        return self._show

    def _show(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total)
        if self._has_lines and (now := time.monotonic()) >= self._next_line:
            self._next_line = now + SECONDS_BETWEEN_LINES
            print(f"{self._what}: {done} of {total} simulations", file=sys.stderr, flush=True)

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()
