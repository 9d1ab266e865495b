"""What several commands do: print dry runs, show progress, follow a run, and import what needs PyTorch."""

import importlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sortedrl import __version__
from sortedrl.core.errors import UserError
from sortedrl.core.schedule import Schedule
from sortedrl.core.strategies.base import updates_left
from sortedrl.observe.console import PlainConsole, run_console
from sortedrl.settings.base import Settings, as_json
from sortedrl.settings.install_hint import install_hint
from sortedrl.settings.schedule import prompts_per_cohort
from sortedrl.training.cpu_threads import set_passive_waiting

SECONDS_BETWEEN_LINES = 5.0


def print_settings(settings: Settings, derived: dict[str, Any], **resolved: Any) -> int:
    """The output of `--dry-run`, with the values of settings that were left open. Returns the exit code."""
    values = as_json(settings) | resolved
    if settings.json_output:
        print(json.dumps({"settings": values, "derived": derived}))
        return 0
    for key, value in values.items():
        print(f"{key} = {json.dumps(value)}")
    print("\n# derived")
    for key, value in derived.items():
        print(f"# {key} = {json.dumps(value)}")
    return 0


def print_schedule(settings: Any, schedule: Schedule, tokens_of_slots: int, **more: Any) -> int:
    """The output of `--dry-run` of a command with a schedule. `tokens_of_slots`: if all are at the limit."""
    prompts = prompts_per_cohort(settings)
    per_cohort, per_update = prompts * settings.rollouts_per_prompt, schedule.rollouts_needed
    derived = {
        "rollouts_per_cohort": per_cohort,
        "updates_per_cohort": updates_left(per_cohort, per_update),
        "update_size_over_slots": per_update / settings.slots,
        "staleness_bound_versions": schedule.max_staleness,
        **more,
        "kv_tokens_if_all_slots_are_at_the_limit": tokens_of_slots,
    }
    return print_settings(settings, derived, prompts_per_cohort=prompts)


def print_json(settings: Settings, found: Mapping[str, Any]) -> int:
    """With the settings that led to it. Returns the exit code."""
    print(json.dumps({**found, "settings": as_json(settings), "version": __version__}))
    return 0


def line_log(settings: Settings) -> Callable[[str], None]:
    """Progress lines: to stdout, or to stderr if stdout is JSON."""
    stream = sys.stderr if settings.json_output else sys.stdout
    return lambda line: print(line, file=stream, flush=True)


def console_of_run(settings: Settings, *, ends_with_reader: bool = True) -> PlainConsole:
    """The panel on a terminal, else lines; on stderr if stdout is JSON."""
    return run_console(sys.stderr if settings.json_output else sys.stdout, ends_with_reader=ends_with_reader)


@contextmanager
def stdout_reserved_for_json(settings: Settings) -> Iterator[None]:
    """What engines, tasks and their libraries print to stdout goes to stderr if stdout is JSON: vLLM prints its log
    there, and so may a task of the user. The descriptor is redirected, too, for C code and child processes."""
    if not settings.json_output:
        yield
        return
    ours = sys.stdout
    ours.flush()
    try:
        kept = os.dup(1)
        os.dup2(2, 1)
    except OSError:  # the command runs without one of the two
        with redirect_stdout(sys.stderr):
            yield
        return
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        with suppress(OSError, ValueError):
            ours.flush()  # code that kept the stream may have written to it
        os.dup2(kept, 1)
        os.close(kept)


def table_console() -> Console:
    """For tables and sentences. Text in brackets, as in error messages and paths, is no markup."""
    console = Console(markup=False, emoji=False, highlight=False)
    return console if console.is_terminal else Console(markup=False, emoji=False, highlight=False, width=160)


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


class MissingPackage(UserError):
    """A package of an extra is not installed."""


def require_train_extra() -> None:
    """Refuse to start if a package is missing; imports nothing."""
    for name in ("torch", "transformers", "safetensors"):
        if importlib.util.find_spec(name) is None:
            raise MissingPackage(f"{name} is not installed: {install_hint('train')}")


def training_module(name: str) -> Any:
    """A module of `training`. PyTorch is imported here, with threads that sleep while they wait."""
    set_passive_waiting()
    try:
        return importlib.import_module(f"sortedrl.training.{name}")
    except ImportError as error:
        raise MissingPackage(f"{error.name} is not installed: {install_hint('train')}") from None
