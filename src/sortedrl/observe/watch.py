"""Follows a run from another process by reading events.jsonl and metrics.jsonl as they grow.

The log shows how a run ended. The phase `end` is followed by an evaluation, unless the last update was evaluated
already, and by a summary. If the run was interrupted, only a checkpoint follows. A killed run writes nothing more, and
neither does a run that is busy without an event. The lock of the process that writes the log tells the two apart. If it
does not, as on another machine, watching continues until the silence is long.

Both files are read again as a whole when they have changed, for at most a tenth of the time: a fold cannot undo an
event that a resume rolled back. Nothing is written.
"""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.events import Phase, Updated
from sortedrl.log.paused_gc import paused_gc
from sortedrl.log.process_lock import RUN_LOCK, lock_of_log, process_is_there
from sortedrl.log.reading import IntactLog, read_intact
from sortedrl.observe.console import PlainConsole
from sortedrl.observe.metrics import Metrics
from sortedrl.observe.run_state import is_update, metrics_lines, read_object, text_lines
from sortedrl.observe.wall_clock import bottleneck_line

POLL_SECONDS = 0.25
NOTED_SILENCE_SECONDS = 10.0
LAST_LINES_SECONDS = 5.0  # after its process has ended, a run's last lines have been read
STOPPED_AFTER_SECONDS = 600.0  # without an event, if it is not known whether its process is there

RUNS, ENDED, INTERRUPTED, STOPPED, REMOVED = "runs", "ended", "interrupted", "stopped growing", "removed"
FAILED = (STOPPED, REMOVED)


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


def follow(folder: Path, console: PlainConsole, stopped_after_seconds: float = STOPPED_AFTER_SECONDS) -> Watched:
    """Show the run until it ends or has probably been killed."""
    follower = Follower(folder, console, stopped_after_seconds)
    while True:
        began = time.monotonic()
        follower.catch_up()
        watched = follower.watched()
        is_silent = watched.outcome == RUNS and watched.silent_seconds >= NOTED_SILENCE_SECONDS
        console.note = f"no event for {watched.silent_seconds:.0f} s" if is_silent else ""
        if watched.outcome != RUNS:
            return watched
        time.sleep(max(POLL_SECONDS, 9 * (time.monotonic() - began)))


def state(folder: Path, stopped_after_seconds: float = STOPPED_AFTER_SECONDS) -> dict[str, Any]:
    """The current state of the run as plain data."""
    console = PlainConsole(lambda line: None)
    watched = Follower(folder, console, stopped_after_seconds).watched()
    moments = ("began_at", "ends_at", "seen_at")  # only meaningful to a display
    plain = {key: value for key, value in asdict(console.state.view(0.0)).items() if key not in moments}
    return {**watched._asdict(), **plain, "remaining_seconds": console.state.remaining_seconds()}


def outcome_line(folder: Path, watched: Watched) -> str:
    """How the run ended, and its bottleneck."""
    is_of_train = _is_of_train(folder)
    if watched.outcome == STOPPED:
        last = f"last event is {watched.silent_seconds:.0f} s old, in phase {watched.phase}"
        resume = f"continue with: sortedrl train --resume {folder}" if is_of_train else "resume it in its own loop"
        if is_of_train and not any(folder.glob("checkpoints/update-*")):
            resume = f"it has no checkpoint yet: remove {folder} and start it again"
        if watched.process_is_there is None:
            return f"stopped growing: the {last}. If it was killed, {resume}"
        return f"stopped: its process has ended. The {last}. If it was killed, {resume}"
    if watched.outcome == REMOVED:
        return f"{folder} was removed, or its files were"
    if watched.outcome == INTERRUPTED:
        return f"interrupted and saved. Continue with: sortedrl train --resume {folder}"
    try:
        return _result(read_object(folder / "summary.json") or {})
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError):  # of another loop, or damaged
        is_of_trl = any(folder.glob("checkpoint-*/sortedrl-0.json"))
        resume = ". If it was interrupted, trainer.train(resume_from_checkpoint=True) continues it" if is_of_trl else ""
        return f"ended. For its metrics: sortedrl report {folder}{resume}"


def _result(summary: dict[str, Any]) -> str:
    before, after, gain = (summary[key] for key in ("score_before", "score_after", "gain"))
    parts = summary["metrics"].get("wall_parts")
    return (f"{bottleneck_line(parts)}\n" if parts else "") + (
        f"ended: score {before['value']:.3f} -> {after['value']:.3f}, "
        f"gain {gain['value']:+.3f} [{gain['low']:+.3f}, {gain['high']:+.3f}] in {summary['seconds']:.0f} s"
    )


class Follower:
    """Feeds a console from a run folder."""

    def __init__(
        self, folder: Path, console: PlainConsole, stopped_after_seconds: float = STOPPED_AFTER_SECONDS
    ) -> None:
        self._folder = folder
        self._stopped_after_seconds = stopped_after_seconds
        self._console = console
        self._log, self._metrics = folder / "events.jsonl", folder / "metrics.jsonl"
        self._read_at: list[tuple[int, int] | None] = []  # size and time of the files when they were read
        self._phases = ["start"]  # since the latest harvest started
        self._updates = 0
        self._shown: set[tuple[int, float]] | None = None  # lines of metrics.jsonl, by update and seconds
        self._notices: set[str] = set()
        self.catch_up()

    def catch_up(self) -> None:
        """Read the files if they have changed, and show them. At first, only the latest update is printed."""
        now = [_stamp(self._log), _stamp(self._metrics)]
        if now == self._read_at:
            return
        self._read_at = now
        updates_in_all = (read_object(self._folder / "config.json") or {}).get("updates")
        metrics = Metrics()
        self._console.begin(metrics, str(self._folder), updates_in_all)
        with paused_gc():
            try:
                read = read_intact(self._log)
            except FileNotFoundError:
                read = IntactLog([], [], 0)
            self._tell(read._replace(damage=[damage for damage in read.damage if not damage.is_torn]))
            self._phases = ["start"]
            for event in read.events:
                metrics(event)
                if isinstance(event, Phase):
                    self._phases = [event.phase] if event.phase == "harvest" else [*self._phases, event.phase]
                elif isinstance(event, Updated):
                    self._updates = event.update + 1
        self._show_lines()
        self._console.look(self._seen_at())

    def _show_lines(self) -> None:
        lines = metrics_lines(text_lines(self._metrics))
        newest = next((line for line in reversed(lines) if is_update(line)), None)
        for line in lines:
            key = line["update"], line["seconds"]
            is_old = line is not newest if self._shown is None else key in self._shown
            self._console.line(line, seen_at=self._seen_at(), old=is_old)
        self._shown = {(line["update"], line["seconds"]) for line in lines}

    def _tell(self, read: IntactLog) -> None:
        """Each notice once, of unreadable lines about the first one. The last line of a growing log may be torn."""
        unreadable = [f"line {one.line} cannot be read ({one.why}): metrics lack it" for one in read.damage[:1]]
        for notice in {read.notice, *unreadable} - {"", *self._notices}:
            self._console.log(f"{self._log}: {notice}")
            self._notices.add(notice)

    def watched(self) -> Watched:
        silent, process = _silence_of(self._folder), _process_is_there(self._folder)
        return Watched(self._outcome(silent, process), self._phases[-1], silent, process)

    def _outcome(self, silent: float, process_is_there: bool | None) -> str:
        if not is_run(self._folder):
            return REMOVED
        if "end" in self._phases and not _is_of_train(self._folder):
            return ENDED
        if process_is_there:
            return RUNS
        if "end" in self._phases:
            if (read_object(self._folder / "summary.json") or {}).get("updates") == self._updates:
                return ENDED
            if process_is_there is False:
                return INTERRUPTED
        patience = self._stopped_after_seconds if process_is_there is None else LAST_LINES_SECONDS
        return STOPPED if silent > patience else RUNS

    def _seen_at(self) -> float:
        """When the run last wrote, on this process's clock."""
        return time.monotonic() - _silence_of(self._folder)


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_size, status.st_mtime_ns


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
