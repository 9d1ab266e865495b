"""The event log of one run in a folder: one line in a loop of any kind.

    recorder = Recorder(controller, "my_run")                  # a new run, in my_run/events.jsonl
    recorder = Recorder(controller, "my_run", saved=state)     # goes on from what `recorder.state()` returned

Guarantees:
- a log is never overwritten: that of an earlier run is set aside as `events.earlier-1.jsonl` and so on, and a log that
  a run is still writing to is refused. A run that ended before its first update leaves nothing worth keeping;
- a run goes on in its own log, also if a later run set it aside. Events after the checkpoint stay in it behind a mark,
  and neither `folds` nor any later reader counts them.
"""

import json
import logging
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from sortedrl.core.checkpoint import check_state
from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.controller import Controller
from sortedrl.core.events import Event, SettingsChanged, Sink, Updated
from sortedrl.log.file import EventFile, free_name
from sortedrl.log.process_lock import lock_of_log, process_is_there
from sortedrl.log.reading import last_run, lines_of
from sortedrl.log.recovery import CheckpointMark, RecoveredLog, recover

_logger = logging.getLogger(__name__)


class Recorder:
    """A sink, which it adds to the controller's log. With `saved`, it restores the controller: the engine must have the
    weights of the checkpoint before.

    folds     sinks that get the events so far, too; the recorder is added to them instead of the controller's log
    settings  JSON-ready, by name: those that are not the checkpoint's are recorded as changed
    warn      gets a line if a part of the log was lost
    open_file opens the log to append to it
    """

    def __init__(
        self,
        controller: Controller,
        path: Path | str,
        *,
        saved: dict[str, Any] | None = None,
        folds: list[Sink] | None = None,
        settings: Mapping[str, Any] | None = None,
        warn: Callable[[str], None] = _logger.warning,
        open_file: Callable[[], EventFile] | None = None,
    ) -> None:
        path = Path(path)
        self.path = path if path.suffix == ".jsonl" else path / "events.jsonl"
        self.count = 0
        self._controller = controller
        self._settings: dict[str, Any] = json.loads(json.dumps(settings or {}))
        # Marked with the first event: a checkpoint that does not fit changes nothing.
        self._to_mark: RecoveredLog | None = None
        if saved is None:
            make_room(self.path)
        else:
            check_state(saved, controller.strategy.name, controller.schedule)
            self._to_mark = recovered = self._recovered(saved, warn)
            self.count = saved["events"]
            for event in recovered.events:
                for sink in folds or ():
                    sink(event)
        self._file = open_file() if open_file else EventFile.open(self.path, must_be_new=saved is None)
        sinks = controller.log.sinks if folds is None else folds
        # In the controller's log first: an event is in the file before another sink can stop the run.
        sinks.insert(0 if folds is None else len(sinks), self)
        if saved is not None:
            try:
                controller.restore(saved, last_time=recovered.last_time)
            except BaseException:
                sinks.remove(self)
                self._file.close()
                raise
            if changes := changed(saved.get("settings", {}), self._settings):
                controller.mark(SettingsChanged, changes)

    def __call__(self, event: Event) -> None:
        if self._to_mark is not None:
            self._file.roll_back(self._to_mark)
            self._to_mark = None
        self.count += 1
        self._file(event)

    def state(self) -> dict[str, Any]:
        """The controller's state, JSON-ready, for `saved`. All events before it are on the disk when this returns."""
        self._controller.mark_phase("checkpoint")
        self._file.sync()
        return self._controller.state() | {"events": self.count, "settings": self._settings}

    def flush(self) -> None:
        """Readers see all events when this returns."""
        self._file.flush()

    def close(self) -> None:
        """All events are on the disk when this returns, and another run may use the folder."""
        with closing(self._file):
            self._file.sync()

    def _recovered(self, saved: dict[str, Any], warn: Callable[[str], None]) -> RecoveredLog:
        mark = CheckpointMark.of(saved)
        bring_back(self.path, mark)
        recovered = recover(self.path, mark, self._controller.first_event())
        if recovered.lost:
            lost = f"{recovered.lost:,} of {mark.events:,} events up to the checkpoint are lost, metrics lack them"
            warn(f"{self.path}: {lost}")
        return recovered


def changed(saved: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, list[Any]]:
    """`[old, new]` by name, of settings that both have."""
    return {key: [saved[key], new] for key, new in settings.items() if key in saved and saved[key] != new}


def make_room(path: Path) -> None:
    """For the log of a new run."""
    if not path.exists():
        return
    is_there = process_is_there(lock_of_log(path))
    if is_there:
        fix = "Use another folder, or end that run first (its process, or close its Recorder)."
        raise ConfigurationError("log", str(path), "a run is still writing to it, and a log has one run", fix)
    if is_there is False and not _has_update(path):
        path.unlink()
    else:
        path.rename(free_name(path, "earlier"))


def bring_back(path: Path, mark: CheckpointMark) -> None:
    """Make the log of a checkpoint's run the current one, if a later run set it aside."""
    logs = [path] if path.exists() else []
    for log in (*logs, *path.parent.glob(f"{path.stem}.earlier-*{path.suffix}")):
        if mark.fits(last_run(lines_of(log))[0]):
            if log != path:
                if logs:
                    path.rename(free_name(path, "earlier"))
                log.rename(path)
            return


def _has_update(log: Path) -> bool:
    with log.open(encoding="utf-8", errors="replace") as lines:
        return any(f'"event":"{Updated.__name__}"' in line for line in lines)
