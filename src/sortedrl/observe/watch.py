"""Follows a run from another process by reading events.jsonl and metrics.jsonl as they grow.

    run --kept_readable--> files --Follower.catch_up--> console

The log shows how a run ended. The phase `end` is followed by an evaluation, unless the last update was evaluated
already, and by a summary. If the run was interrupted, only a checkpoint follows, and updates are left. If its data
ended before its updates, the same may follow, and then a summary. A killed run writes nothing more, and neither does a
run that is busy without an event. The lock of the process that writes the log tells the two apart. If it does not, as
on another machine, watching continues until the silence is unusually long.

Invariants: only complete lines are read; rolled-back lines are dropped, in both files, and so are events of earlier
runs in the same log; nothing is written.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.events import Event, Lost, Phase, RolledBack, RunBegan, Sink, Updated
from sortedrl.log.lines import Damage, decoded_text
from sortedrl.log.paused_gc import paused_gc
from sortedrl.log.process_lock import RUN_LOCK, lock_of_log, process_is_there
from sortedrl.log.reading import IntactLog, VoidTime, last_run, require_known_format, without_rolled_back
from sortedrl.observe.console import PlainConsole, RunConsole
from sortedrl.observe.metrics import Metrics
from sortedrl.observe.run_state import is_update, metrics_lines, read_object
from sortedrl.observe.wall_clock import bottleneck_line

POLL_SECONDS = 0.25
NOTED_SILENCE_SECONDS = 10.0
END_SILENCE_SECONDS = 5.0  # after the phase `end`, if nothing follows
UNUSUAL_SILENCE = 3  # times the longest silence so far

RUNS, ENDED, INTERRUPTED, STOPPED, REMOVED = "runs", "ended", "interrupted", "stopped growing", "removed"
FAILED = (STOPPED, REMOVED)


def kept_readable(stream: TextIO, seconds: float = 1.0) -> Sink:
    """A sink that flushes the log at every phase change, and otherwise at this interval, so that others can read it."""
    due = 0.0

    def sink(event: Event) -> None:
        nonlocal due
        if event.at >= due or type(event) is Phase:
            stream.flush()
            due = event.at + seconds

    return sink


class Watched(NamedTuple):
    """How watching ended. `silent_seconds`: time since the run last wrote something."""

    outcome: str
    phase: str
    silent_seconds: float
    process_is_there: bool | None  # None: unknown


def is_run(folder: Path) -> bool:
    return (folder / "config.json").is_file() or (folder / "events.jsonl").is_file()


def newest_run(runs: Path) -> Path:
    """The most recently written run folder in `runs`."""
    folders = [folder for folder in runs.iterdir() if is_run(folder)] if runs.is_dir() else []
    if not folders:
        raise ConfigurationError("run", str(runs), "there is no run", "Name a run folder, as in runs/NAME.")
    return min(folders, key=_silence_of)


def follow(folder: Path, console: RunConsole, *, stopped_after_seconds: float) -> Watched:
    """Show the run until it ends or has probably been killed."""
    follower = Follower(folder, console)
    while True:
        follower.catch_up()
        watched = follower.watched(stopped_after_seconds)
        is_silent = watched.outcome == RUNS and watched.silent_seconds >= NOTED_SILENCE_SECONDS
        console.note = f"no event for {watched.silent_seconds:.0f} s" if is_silent else ""
        if watched.outcome != RUNS:
            return watched
        time.sleep(POLL_SECONDS)


def state(folder: Path, stopped_after_seconds: float) -> dict[str, Any]:
    """The current state of the run as plain data."""
    console = PlainConsole(lambda line: None)
    watched = Follower(folder, console).watched(stopped_after_seconds)
    moments = ("began_at", "ends_at", "seen_at")  # only meaningful to a display
    plain = {key: value for key, value in asdict(console.state.view(0.0)).items() if key not in moments}
    return {**watched._asdict(), **plain, "remaining_seconds": console.state.remaining_seconds()}


def outcome_line(folder: Path, watched: Watched) -> str:
    """How the run ended, and its bottleneck."""
    is_of_train = _is_of_train(folder)
    if watched.outcome == STOPPED:
        last = f"last event is {watched.silent_seconds:.0f} s old, in phase {watched.phase}"
        if watched.process_is_there:
            return f"stopped growing: the {last}. Its process is still there: it may hang"
        resume = f"continue with: sortedrl train --resume {folder}" if is_of_train else "resume it in its own loop"
        if is_of_train and not any(folder.glob("checkpoints/update-*")):
            resume = f"it has no checkpoint yet: remove {folder} and start it again"
        if watched.process_is_there is None:
            return f"stopped growing: the {last}. If it was killed, {resume}"
        return f"stopped: its process has ended. The {last}. If it was killed, {resume}"
    if watched.outcome == REMOVED:
        return f"{folder} was removed, or its files were"
    if watched.outcome == INTERRUPTED and is_of_train:
        return f"interrupted and saved. Continue with: sortedrl train --resume {folder}"
    try:
        return _result(read_object(folder / "summary.json") or {})
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError):  # of another loop, or damaged
        return f"ended. For its metrics: sortedrl report {folder}"


def _result(summary: dict[str, Any]) -> str:
    before, after, gain = (summary[key] for key in ("score_before", "score_after", "gain"))
    parts = summary["metrics"].get("wall_parts")
    return (f"{bottleneck_line(parts)}\n" if parts else "") + (
        f"ended: score {before['value']:.3f} -> {after['value']:.3f}, "
        f"gain {gain['value']:+.3f} [{gain['low']:+.3f}, {gain['high']:+.3f}] in {summary['seconds']:.0f} s"
    )


class Follower:
    """Feeds a console from a run folder."""

    def __init__(self, folder: Path, console: RunConsole) -> None:
        self._folder = folder
        self._console = console
        self._event_file = GrowingFile(folder / "events.jsonl")
        self._metrics_file = GrowingFile(folder / "metrics.jsonl")
        self._earlier_runs = 0
        self._is_damaged = False
        self._read_all(announce_newest=True)

    def catch_up(self) -> None:
        """Read new lines and show them."""
        first_line = self._event_file.lines_read + 1
        new_events, new_lines = self._event_file.new(), self._metrics_file.new()
        if new_events is None or new_lines is None:
            self._read_all()
            return
        log = self._decoded(new_events, first_line)
        runs = (self._last_at is not None) + sum(isinstance(event, RunBegan) for event in log)
        if runs > 1 or any(isinstance(event, RolledBack) for event in log):
            self._read_all()
            return
        self._feed(log)
        for line in metrics_lines(new_lines):
            self._show(line)
        self._console.look(self._seen_at())

    def watched(self, stopped_after_seconds: float) -> Watched:
        silent, process = _silence_of(self._folder), _process_is_there(self._folder)
        return Watched(self._outcome(silent, stopped_after_seconds, process), self._phases[-1], silent, process)

    def _read_all(self, *, announce_newest: bool = False) -> None:
        """Read from the beginning, as after a roll-back: a fold cannot undo an event."""
        require_known_format(self._event_file.path)
        self._metrics = Metrics()
        updates_in_all = (read_object(self._folder / "config.json") or {}).get("updates")
        self._sink = self._console.begin(self._metrics, str(self._folder), updates_in_all)
        self._phases = ["start"]  # since the latest harvest started or the run was resumed
        self._updates = 0
        self._updates_in_all: int | None = None
        self._last_at: float | None = None
        self._longest_silence = 0.0
        self._void_time = VoidTime()  # of the latest roll-back
        with paused_gc():
            self._feed_last_run(self._decoded(self._event_file.all(), 1))
        lines = metrics_lines(self._metrics_file.all())
        newest = max((place for place, line in enumerate(lines) if is_update(line)), default=None)
        for place, line in enumerate(lines):
            self._show(line, old=place != newest or not announce_newest)
        self._console.look(self._seen_at())

    def _feed_last_run(self, log: list[Event]) -> None:
        """Other loops may append a run to the log of another one, whose events do not count."""
        _, earlier_runs = last_run(log)
        if earlier_runs > self._earlier_runs:
            self._console.log(f"{self._event_file.path}: {IntactLog([], [], earlier_runs).notice}")
        self._earlier_runs = earlier_runs
        began = max((place for place, event in enumerate(log) if isinstance(event, RunBegan)), default=0)
        resumed = max((place for place, event in enumerate(log) if isinstance(event, RolledBack)), default=-1)
        self._feed(counted := without_rolled_back(log[began : resumed + 1]))
        if resumed > began:
            self._phases = ["start"]
            self._void_time = VoidTime.between(counted, log[resumed])
            self._console.state.resumed(sum(isinstance(event, Updated) for event in counted))
        self._feed(log[max(began, resumed + 1) :])

    def _feed(self, log: Sequence[Event]) -> None:
        for event in map(self._void_time.taken_from, log):
            self._metrics(event)
            self._sink(event)
            if self._last_at is not None:
                self._longest_silence = max(self._longest_silence, event.at - self._last_at)
            self._last_at = event.at
            if isinstance(event, Phase):
                self._phases = [event.phase] if event.phase == "harvest" else [*self._phases, event.phase]
            elif isinstance(event, Updated):
                self._updates = event.update + 1

    def _decoded(self, lines: Sequence[str], first_line: int) -> list[Event]:
        """With `Lost` for each line that cannot be read, and a notice about the first one."""
        found = decoded_text("".join([f"{line}\n" for line in lines]), first_line)
        damage = next((line for line in found if isinstance(line, Damage)), None)
        if damage is not None and not self._is_damaged:
            self._is_damaged = True
            why = f"line {damage.line} cannot be read ({damage.why}): metrics lack it"
            self._console.log(f"{self._event_file.path}: {why}")
        return [Lost(self._last_at or 0.0) if isinstance(line, Damage) else line for line in found]

    def _seen_at(self) -> float:
        """When the run last wrote, on this process's clock."""
        return time.monotonic() - _silence_of(self._folder)

    def _outcome(self, silent: float, stopped_after_seconds: float, process_is_there: bool | None) -> str:
        if not is_run(self._folder):
            return REMOVED
        if "end" in self._phases:
            after = self._phases[self._phases.index("end") + 1 :]
            summarized = (read_object(self._folder / "summary.json") or {}).get("updates") == self._updates
            if (after and (summarized or not _is_of_train(self._folder))) or (
                not after and silent > END_SILENCE_SECONDS
            ):
                return ENDED
            # A summary is to come if it evaluates at its end or has made all updates. If its data ended before, its
            # process is still there after the checkpoint.
            all_done = self._updates_in_all is not None and self._updates >= self._updates_in_all
            if after and not ("evaluation" in after or all_done or process_is_there):
                return INTERRUPTED
        too_long = max(stopped_after_seconds, UNUSUAL_SILENCE * self._longest_silence)
        if process_is_there is False:
            too_long = END_SILENCE_SECONDS  # by now its last lines have been read
        return STOPPED if silent > too_long else RUNS

    def _show(self, line: dict[str, Any], *, old: bool = False) -> None:
        self._updates_in_all = line.get("updates_in_all", self._updates_in_all)
        self._console.line(line, seen_at=self._seen_at(), old=old)


class GrowingFile:
    """The complete lines of a file that another process appends to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines_read = 0
        self._position = 0
        self._identity: tuple[int, int] | None = None

    def all(self) -> list[str]:
        """The lines from the beginning."""
        self._position = self.lines_read = 0
        return self.new() or []

    def new(self) -> list[str] | None:
        """The lines since the last call; None if the file has been replaced or truncated."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                identity = (status.st_dev, status.st_ino)
                if self._position and (identity != self._identity or status.st_size < self._position):
                    return None
                self._identity = identity
                file.seek(self._position)
                content = file.read()
        except FileNotFoundError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        lines = whole.decode(errors="replace").split("\n")[:-1]
        self._position += len(whole)
        self.lines_read += len(lines)
        return lines


def _silence_of(folder: Path) -> float:
    """Seconds since the run last wrote to its log, or since it was created."""
    for name in ("events.jsonl", "config.json"):
        try:
            return max(0.0, time.time() - (folder / name).stat().st_mtime)
        except FileNotFoundError:
            continue
    return 0.0


def _process_is_there(folder: Path) -> bool | None:
    """Whether a process writes the log, of `sortedrl train` or of another loop; None if that is unknown."""
    known = [process_is_there(folder / RUN_LOCK), process_is_there(lock_of_log(folder / "events.jsonl"))]
    return True if True in known else False if False in known else None


def _is_of_train(folder: Path) -> bool:
    """Else of TRL, verl or a loop of its own, whose log does not show whether its end is an interrupt."""
    return "updates" in (read_object(folder / "config.json") or {})
