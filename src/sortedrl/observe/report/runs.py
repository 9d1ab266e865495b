"""Reads the input of a report: one `Run` per run folder or bare event log, even a damaged one.

The event log is enough. Data that only a run folder has (learner metrics, held-out scores, responses, configuration)
is empty for a bare log. Damaged content never raises; `Run.notices` lists what is missing.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.events import Event, Phase, RunBegan, SettingsChanged, SlotsChanged, Updated
from sortedrl.core.wording import counted
from sortedrl.log.lines import is_number
from sortedrl.log.paused_gc import paused_gc
from sortedrl.log.reading import IntactLog, read_intact
from sortedrl.observe.metrics import RunMetrics
from sortedrl.observe.report.folds import (
    Change,
    Mark,
    Occupancy,
    UpdatePoint,
    changes_on_resume,
    evaluation_marks,
    slot_grid,
    slot_time,
    staleness_floor,
    update_points,
)
from sortedrl.observe.run_state import is_metrics_line, is_update
from sortedrl.observe.slot_totals import slot_counts
from sortedrl.observe.timeline import Slice, slices

EVENTS = "events.jsonl"
MOST_SLICES = 12_000  # that a slot timeline draws one by one; larger runs are drawn as a grid
EXCERPT_SLICES = 5_000  # drawn one by one for a larger run, besides the grid
GRID_CELLS = 200_000  # of the grid
MOST_GRID_BINS = 2_000
# Settings in which comparable runs may differ.
INCIDENTAL = frozenset({"seed", "out", "resume", "threads", "keep_checkpoints", "checkpoint_every", "save_rollouts"})
_OUTLINE = frozenset({RunBegan, SlotsChanged, SettingsChanged, Phase, Updated})  # few, and the first event of every run
_FIX = "Name a run folder, as in runs/NAME, a folder of runs, or an events.jsonl."


@dataclass(frozen=True, slots=True)
class Timeline:
    """Which rollout was in which slot: every slice; for large runs, the slices before `until` and a grid of all."""

    slices: tuple[Slice, ...]
    until: float  # seconds on the engine's clock
    grid: tuple[str, ...]
    slice_count: int
    updates: tuple[float, ...]  # times


@dataclass(frozen=True, slots=True)
class HeldOut:
    mark: Mark
    score: dict[str, float]  # value, low, high


@dataclass(frozen=True, slots=True)
class Run:
    name: str
    path: Path
    began: float
    ended: float
    run_metrics: RunMetrics
    slot_counts: tuple[int, ...]  # in order; more than one if it was resumed with others
    changes: tuple[Change, ...]  # of settings, when it was resumed
    occupancy: Occupancy
    timeline: Timeline
    points: tuple[UpdatePoint, ...]
    floor: tuple[float, float] | None
    settings: dict[str, Any]
    has_configuration: bool
    learner: tuple[dict[str, Any], ...]  # lines of metrics.jsonl, one per update
    held_out: tuple[HeldOut, ...]
    responses: tuple[dict[str, Any], ...]
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
        return bool(self.timeline.grid) or any(point.pooled > 1 for point in self.points)

    def is_copy_of(self, other: Run) -> bool:
        """Same settings and same log; a run that only repeats the seed takes other times."""
        mine, others = ((run.settings.get("seed"), run.comparable_settings()) for run in (self, other))
        return mine == others and (self.run_metrics, self.points) == (other.run_metrics, other.points)

    def comparable_settings(self) -> dict[str, Any]:
        return {key: value for key, value in self.settings.items() if key not in INCIDENTAL}


def read_runs(paths: Sequence[Path], on_progress: Callable[[int, int], None] = lambda done, total: None) -> list[Run]:
    """All runs under the given paths; a folder of run folders counts as all of them, several copies of a run as one."""
    logs = list(dict.fromkeys(log for path in paths for log in _logs_of(path)))
    runs: list[Run] = []
    for log, name in zip(logs, _names(logs), strict=True):
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


def _names(logs: Sequence[Path]) -> list[str]:
    short = [log.resolve().parent.name if log.name == EVENTS else log.stem for log in logs]
    return [name if short.count(name) == 1 else str(log) for name, log in zip(short, logs, strict=True)]


def _read_run(path: Path, name: str) -> Run:
    try:
        read = read_intact(path)
    except OSError as error:
        raise ConfigurationError("runs", str(path), f"{error.strerror}", _FIX) from None
    log = read.events
    if not any(isinstance(event, RunBegan) for event in log):
        raise ConfigurationError("runs", str(path), "the start of a run is not in it, or cannot be read", _FIX)
    folder = path.parent if path.name == EVENTS else None
    outline = _outline(log)
    stays = slices(log)
    counts = slot_counts(outline)
    run_metrics, occupancy = slot_time(log, stays)
    lines, lost_metrics = _lines(folder, "metrics.jsonl", is_metrics_line)
    responses, lost_responses = _lines(folder, "rollouts.jsonl", _is_response)
    settings, configuration = _settings(folder, outline)
    notices = [
        *([f"Event log: {read.notice}."] if read.notice else []),
        *_damage_notices(read),
        *_ending_notices(log, folder),
        *_no_update(run_metrics),
        *_lost_lines("metrics.jsonl", lost_metrics),
        *_lost_lines("rollouts.jsonl", lost_responses),
    ]
    return Run(
        name=name,
        path=folder or path,
        began=log[0].at,
        ended=log[-1].at,
        run_metrics=run_metrics,
        slot_counts=counts,
        changes=tuple(changes_on_resume(outline)),
        occupancy=occupancy,
        timeline=_timeline(stays, max(counts), outline, log[-1].at),
        points=tuple(update_points(outline)),
        floor=staleness_floor(outline),
        settings=settings,
        has_configuration=configuration,
        learner=tuple(filter(is_update, lines)),
        held_out=_held_out(lines, evaluation_marks(outline)),
        responses=tuple(responses),
        notices=tuple(notices),
    )


def _outline(log: Sequence[Event]) -> list[Event]:
    """What charts per update need. Where the mark of a rollback is lost, an update is there twice: the first counts."""
    found: list[Event] = []
    updates = 0
    for event in log:
        if type(event) in _OUTLINE and not (isinstance(event, Updated) and event.update < updates):
            found.append(event)
            updates = event.update + 1 if isinstance(event, Updated) else updates
    return found


def _held_out(lines: Iterable[dict[str, Any]], marks: dict[int, Mark]) -> tuple[HeldOut, ...]:
    """One per update that was followed by an evaluation; the last one if there were two."""
    scores = {line["update"]: line["held_out"] for line in lines if not is_update(line) and line["update"] in marks}
    return tuple(HeldOut(marks[update], score) for update, score in sorted(scores.items()))


def _timeline(stays: Sequence[Slice], slots: int, outline: Sequence[Event], ended: float) -> Timeline:
    updates = tuple(event.at for event in outline if isinstance(event, Updated))
    if len(stays) <= MOST_SLICES:
        return Timeline(tuple(stays), ended, (), len(stays), updates)
    bins = min(MOST_GRID_BINS, GRID_CELLS // slots)
    grid = slot_grid(stays, slots, outline[0].at, ended, bins)
    most = stays[EXCERPT_SLICES].start
    until = max((at for at in updates if at <= most), default=most)
    excerpt = tuple(stay for stay in stays[:EXCERPT_SLICES] if stay.start < until)
    return Timeline(excerpt, until, tuple(grid), len(stays), updates)


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


def _is_response(line: Any) -> bool:
    """Whether a line of a possibly damaged file has all that the page shows of a response."""
    if not isinstance(line, dict) or not all(isinstance(line.get(key), str) for key in ("response", "question")):
        return False
    segments, ends = line.get("segments"), line.get("segment_ends", [])
    if not isinstance(segments, list) or not all(isinstance(one, list) and len(one) == 2 for one in segments):
        return False
    numbers = [line.get("update"), line.get("rollout"), *itertools.chain.from_iterable(segments)]
    numbers += ends if isinstance(ends, list) else [None]
    return all(type(number) is int for number in numbers) and is_number(line.get("reward"))


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


def _lost_lines(name: str, lost: int) -> Iterable[str]:
    if lost:
        yield f"{name}: skipped {counted(lost, 'unreadable line')}."


def _damage_notices(read: IntactLog) -> Iterable[str]:
    if read.damage or read.lost:
        shown = "".join(f", line {d.line} ({d.why})" for d in read.damage[:5]).replace(", ", ": ", 1)
        more = f", and {len(read.damage) - 5} more" if len(read.damage) > 5 else ""
        lines = counted(len(read.damage) + read.lost, "unreadable line")
        yield f"Event log: skipped {lines}{shown}{more}. Metrics lack them, and events that depend on them."


def _ending_notices(log: Sequence[Event], folder: Path | None) -> Iterable[str]:
    last = next((event for event in reversed(log) if isinstance(event, Updated | Phase) and _is_turn(event)), None)
    if isinstance(last, Updated | None) and not (folder is not None and (folder / "summary.json").is_file()):
        seconds = log[-1].at - log[0].at
        yield f"The log ends at {seconds:,.1f} s without an end event: the run was killed or is still running."


def _no_update(run_metrics: RunMetrics) -> Iterable[str]:
    if not run_metrics.updates:
        yield "No update was made: this run is left out of means and comparisons."


def _is_turn(event: Updated | Phase) -> bool:
    """Whether it is an update or the end of the run: evaluations and checkpoints follow one or the other."""
    return isinstance(event, Updated) or event.phase == "end"
