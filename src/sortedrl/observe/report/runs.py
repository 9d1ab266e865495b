"""Reads the input of a report: one `ReportedRun` per run folder or bare event log, even a damaged one.

The event log is enough. Data that only a run folder has (held-out scores, configuration) is empty for a bare
log. Damaged content never raises; `ReportedRun.notices` lists what is missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.events import Event, Phase, RunBegan, Updated
from sortedrl.core.wording import counted
from sortedrl.log.paused_gc import paused_gc
from sortedrl.log.reading import IntactLog, read_intact
from sortedrl.observe.metrics import Metrics
from sortedrl.observe.report import folds
from sortedrl.observe.run_metrics import RunMetrics
from sortedrl.observe.run_state import is_metrics_line, is_update
from sortedrl.observe.timeline import Slice, slices, slot_counts

EVENTS = "events.jsonl"
MOST_SLICES = 12_000  # that the slot timeline draws: of a larger run, those of its first updates
# Settings in which comparable runs may differ.
INCIDENTAL = frozenset({"seed", "out", "resume", "threads", "keep_checkpoints", "checkpoint_every", "save_rollouts"})
_FIX = "Name a run folder, as in runs/NAME, a folder of runs, or an events.jsonl."


class HeldOut(NamedTuple):
    mark: folds.Mark
    score: dict[str, float]  # value, low, high


@dataclass(frozen=True, slots=True)
class ReportedRun:
    name: str
    path: Path
    began: float
    ended: float
    run_metrics: RunMetrics
    slot_counts: tuple[int, ...]  # in order; more than one if it was resumed with others
    changes: tuple[folds.Change, ...]  # of settings, when it was resumed
    slot_time: dict[str, float]  # fractions, by outcome of the work or by why the slot was empty
    slices: tuple[Slice, ...]  # before `slices_until`, on the engine's clock
    slices_until: float
    points: tuple[folds.UpdatePoint, ...]
    update_times: tuple[float, ...]
    settings: dict[str, Any]
    has_configuration: bool
    held_out: tuple[HeldOut, ...]
    notices: tuple[str, ...]
    copies: tuple[str, ...] = ()  # names of runs with the same log and settings, which are left out

    @property
    def mode(self) -> str:
        return self.run_metrics.mode

    @property
    def seed(self) -> Any:
        return self.settings.get("seed", 0)

    @property
    def is_aggregated(self) -> bool:
        return self.slices_until < self.ended or any(point.pooled > 1 for point in self.points)

    def is_copy_of(self, other: ReportedRun) -> bool:
        """Same settings and same log; a run that only repeats the seed takes other times."""
        mine, others = ((run.settings.get("seed"), run.comparable_settings()) for run in (self, other))
        return mine == others and (self.run_metrics, self.points) == (other.run_metrics, other.points)

    def comparable_settings(self) -> dict[str, Any]:
        return {key: value for key, value in self.settings.items() if key not in INCIDENTAL}


def read_runs(
    paths: Sequence[Path], on_progress: Callable[[int, int], None] = lambda done, total: None
) -> list[ReportedRun]:
    """All runs under the given paths; a folder of run folders counts as all of them, several copies of a run as one."""
    logs = list(dict.fromkeys(log for path in paths for log in _logs_of(path)))
    short = [log.resolve().parent.name if log.name == EVENTS else log.stem for log in logs]
    names = [name if short.count(name) == 1 else str(log) for name, log in zip(short, logs, strict=True)]
    runs: list[ReportedRun] = []
    for log, name in zip(logs, names, strict=True):
        on_progress(len(runs), len(logs))
        with paused_gc():
            read = _read_run(log, name)
        same = next((place for place, run in enumerate(runs) if read.is_copy_of(run)), None)
        if same is None:
            runs.append(read)
        else:
            runs[same] = replace(runs[same], copies=(*runs[same].copies, name))
    return runs


def _logs_of(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if (path / EVENTS).is_file():
        return [path / EVENTS]
    inside = sorted(path.glob(f"*/{EVENTS}"))
    if not inside:
        why = f"no {EVENTS} in it or one folder below" if path.is_dir() else "no such file or folder"
        raise ConfigurationError("runs", str(path), why, _FIX)
    return inside


def _read_run(path: Path, name: str) -> ReportedRun:
    try:
        read = read_intact(path)
    except OSError as error:
        raise ConfigurationError("runs", str(path), f"{error.strerror}", _FIX) from None
    log = read.events
    if not any(isinstance(event, RunBegan) for event in log):
        raise ConfigurationError("runs", str(path), "the start of a run is not in it, or cannot be read", _FIX)
    folder = path.parent if path.name == EVENTS else None
    outline = folds.outline(log)
    stays = slices(log)
    run_metrics = Metrics().fold(log).run_metrics()
    update_times = tuple(event.at for event in outline if isinstance(event, Updated))
    until = _slices_until(stays, update_times, log[-1].at)
    lines, lost_metrics = _lines(folder, "metrics.jsonl", is_metrics_line)
    settings, configuration = _settings(folder, outline)
    notices = [
        *([f"Event log: {read.notice}."] if read.notice else []),
        *_damage(read),
        *_ending(log, folder),
        *([] if update_times else ["No update was made: this run is left out of means and comparisons."]),
        *([f"metrics.jsonl: skipped {counted(lost_metrics, 'unreadable line')}."] if lost_metrics else []),
    ]
    return ReportedRun(
        name=name,
        path=folder or path,
        began=log[0].at,
        ended=log[-1].at,
        run_metrics=run_metrics,
        slot_counts=slot_counts(outline),
        changes=tuple(folds.changes_on_resume(outline)),
        slot_time=folds.slot_time(run_metrics, stays),
        slices=tuple(stay for stay in stays[:MOST_SLICES] if stay.start < until),
        slices_until=until,
        points=tuple(folds.update_points(outline)),
        update_times=update_times,
        settings=settings,
        has_configuration=configuration,
        held_out=_held_out(lines, folds.evaluation_marks(outline)),
        notices=tuple(notices),
    )


def _slices_until(stays: Sequence[Slice], update_times: Sequence[float], ended: float) -> float:
    """All of a small run; of a large one, up to the last update whose slices can be drawn."""
    if len(stays) <= MOST_SLICES:
        return ended
    most = stays[MOST_SLICES].start
    return max((at for at in update_times if at <= most), default=most)


def _held_out(lines: Iterable[dict[str, Any]], marks: dict[int, folds.Mark]) -> tuple[HeldOut, ...]:
    """One per update that was followed by an evaluation; the last one if there were two."""
    scores = {line["update"]: line["held_out"] for line in lines if not is_update(line) and line["update"] in marks}
    return tuple(HeldOut(marks[update], score) for update, score in sorted(scores.items()))


def _settings(folder: Path | None, log: Sequence[Event]) -> tuple[dict[str, Any], bool]:
    """The configuration, or just the schedule's settings; and whether it is the full configuration."""
    try:
        saved = json.loads((folder / "config.json").read_text(encoding="utf-8")) if folder else None
    except (OSError, ValueError, RecursionError):
        saved = None
    if isinstance(saved, dict):
        return saved, True
    began = log[0]
    return (dict(began.settings) | {"slots": slot_counts(log)[-1]} if isinstance(began, RunBegan) else {}), False


def _lines(folder: Path | None, name: str, is_valid: Callable[[Any], bool]) -> tuple[list[dict[str, Any]], int]:
    """The valid lines, and the number of invalid ones."""
    if folder is None or not (folder / name).is_file():
        return [], 0
    found: list[dict[str, Any]] = []
    lost = 0
    with (folder / name).open(encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                line = None
            if is_valid(line):
                found.append(line)
            else:
                lost += 1
    return found, lost


def _damage(read: IntactLog) -> Iterable[str]:
    if read.damage or read.lost:
        shown = "".join(f", line {d.line} ({d.why})" for d in read.damage[:5]).replace(", ", ": ", 1)
        more = f", and {len(read.damage) - 5} more" if len(read.damage) > 5 else ""
        lines = counted(len(read.damage) + read.lost, "unreadable line")
        yield f"Event log: skipped {lines}{shown}{more}. Metrics lack them, and events that depend on them."


def _ending(log: Sequence[Event], folder: Path | None) -> Iterable[str]:
    """Evaluations and checkpoints follow an update or the end of the run: the latest of these two tells."""
    turns = (event for event in reversed(log) if isinstance(event, Updated | Phase))
    last = next((e for e in turns if isinstance(e, Updated) or e.phase == "end"), None)
    if isinstance(last, Updated | None) and not (folder is not None and (folder / "summary.json").is_file()):
        seconds = log[-1].at - log[0].at
        yield f"The log ends at {seconds:,.1f} s without an end event: the run was killed or is still running."
