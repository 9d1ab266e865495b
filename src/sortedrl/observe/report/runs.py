"""Reads the input of a report: one `ReportedRun` per run folder or bare event log, even a damaged one. Runs that differ
only in their seed are a series, with one name and one color across the report.

The event log is enough. Data that only a run folder has (held-out scores, configuration) is empty for a bare
log. Damaged content never raises; `ReportedRun.notices` lists what is missing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any, NamedTuple

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.events import Event, Phase, RunBegan, SettingsChanged, SlotsChanged, Updated
from sortedrl.core.rollout import ENVIRONMENT
from sortedrl.core.wording import counted
from sortedrl.log.paused_gc import paused_gc
from sortedrl.log.reading import IntactLog, read_intact
from sortedrl.observe.metrics import Metrics
from sortedrl.observe.run_metrics import RunMetrics
from sortedrl.observe.run_state import is_update, metrics_lines, read_object, text_lines
from sortedrl.observe.timeline import Slice, slices

EVENTS = "events.jsonl"
MOST_SLICES = 4_000  # that the slot timeline draws: of a larger run, those of its first updates
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
# Settings in which comparable runs may differ.
INCIDENTAL = frozenset({"seed", "out", "resume", "threads", "keep_checkpoints", "checkpoint_every", "save_rollouts"})
_FIX = "Name a run folder, as in runs/NAME, a folder of runs, or an events.jsonl."
MODE_COLORS = {
    "baseline": "#d9772b",
    "on-policy": "#b5477f",
    "on-policy+planned": "#8b5fbf",
    "partial": "#2f9e8f",
    "partial+elevator": "#2b7fb8",
}
OTHER_COLORS = ("#6a8f2f", "#a0522d", "#4c6fd1", "#c25450", "#66788a", "#b8912a", "#3f8f63", "#9a4fb0")
_OUTLINE = frozenset({RunBegan, SlotsChanged, SettingsChanged, Phase, Updated})  # few, and the first event of every run


class UpdatePoint(NamedTuple):
    """One update. `updates`, `rollouts` and `seconds` count from the start of the run."""

    updates: int
    rollouts: int
    seconds: float
    reward: float
    length_quantiles: tuple[float, ...]
    staleness: float  # mean over its tokens


class HeldOut(NamedTuple):
    """An evaluation, and the state of the run when it started."""

    updates: int
    rollouts: int
    seconds: float
    score: dict[str, float]  # value, low, high


class Change(NamedTuple):
    """A setting that was changed when the run was resumed after this many updates."""

    updates: int
    setting: str
    old: Any
    new: Any


@dataclass(frozen=True, slots=True)
class ReportedRun:
    name: str
    path: Path
    began: float
    ended: float
    run_metrics: RunMetrics
    slot_counts: tuple[int, ...]  # in order; more than one if it was resumed with others
    changes: tuple[Change, ...]  # of settings, when it was resumed
    slot_time: dict[str, float]  # fractions, by outcome of the work or by why the slot was empty
    slices: tuple[Slice, ...]  # before `slices_until`, on the engine's clock
    slices_until: float
    points: tuple[UpdatePoint, ...]
    settings: dict[str, Any]
    held_out: tuple[HeldOut, ...]
    notices: tuple[str, ...]

    @property
    def mode(self) -> str:
        return self.run_metrics.mode

    @property
    def seed(self) -> Any:
        return self.settings.get("seed", 0)

    def comparable_settings(self) -> dict[str, Any]:
        return {key: value for key, value in self.settings.items() if key not in INCIDENTAL}


def read_runs(
    paths: Sequence[Path], on_progress: Callable[[int, int], None] = lambda done, total: None
) -> list[ReportedRun]:
    """All runs under the given paths; a folder of run folders counts as all of them."""
    logs = list(dict.fromkeys(log for path in paths for log in _logs_of(path)))
    short = [log.resolve().parent.name if log.name == EVENTS else log.stem for log in logs]
    names = [name if short.count(name) == 1 else str(log) for name, log in zip(short, logs, strict=True)]
    runs: list[ReportedRun] = []
    for log, name in zip(logs, names, strict=True):
        on_progress(len(runs), len(logs))
        with paused_gc():
            runs.append(_read_run(log, name))
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
    folder = path.parent if path.name == EVENTS else None
    try:
        read, texts = read_intact(path), text_lines(folder / "metrics.jsonl") if folder else []
    except OSError as error:
        raise ConfigurationError("runs", str(error.filename or path), f"{error.strerror}", _FIX) from None
    log = read.events
    if not any(isinstance(event, RunBegan) for event in log):
        raise ConfigurationError("runs", str(path), "the start of a run is not in it, or cannot be read", _FIX)
    outline, stays = Outline.of(log), slices(log)
    run_metrics = Metrics().fold(log).run_metrics()
    until = _slices_until(stays, [log[0].at + point.seconds for point in outline.points], log[-1].at)
    lines = metrics_lines(texts)
    scores = {line["update"]: line["held_out"] for line in lines if not is_update(line)}
    configuration = read_object(folder / "config.json") if folder else None
    notices = [
        *([f"Event log: {read.notice}."] if read.notice else []),
        *_damage(read),
        *_ending(log, folder),
        *([] if outline.points else ["No update was made: this run is left out of means and comparisons."]),
        *([f"metrics.jsonl: skipped {counted(lost, 'unreadable line')}."] if (lost := len(texts) - len(lines)) else []),
    ]
    return ReportedRun(
        name=name,
        path=folder or path,
        began=log[0].at,
        ended=log[-1].at,
        run_metrics=run_metrics,
        slot_counts=tuple(outline.slots),
        changes=tuple(outline.changes),
        slot_time=slot_time(run_metrics, stays),
        slices=tuple(stay for stay in stays[:MOST_SLICES] if stay.start < until),
        slices_until=until,
        points=tuple(outline.points),
        settings=outline.settings if configuration is None else configuration,
        held_out=tuple(mark._replace(score=scores[n]) for n, mark in outline.marks.items() if n in scores),
        notices=tuple(notices),
    )


@dataclass(slots=True)
class Outline:
    """What curves per update and the configuration need: a fold over the few events that are about the whole run."""

    slots: list[int] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)  # of the schedule
    points: list[UpdatePoint] = field(default_factory=list)
    marks: dict[int, HeldOut] = field(default_factory=dict)  # by updates done; of two evaluations, the last one
    changes: list[Change] = field(default_factory=list)

    @classmethod
    def of(cls, log: Iterable[Event]) -> Outline:
        found = cls()
        next_update = rollouts = 0
        began: float | None = None
        for event in log:
            if type(event) not in _OUTLINE:
                continue
            began = event.at if began is None else began
            updates = len(found.points)
            if isinstance(event, Updated):
                if event.update >= next_update:  # else the mark of a rollback is lost, and the first one counts
                    next_update, rollouts = event.update + 1, rollouts + len(event.rollouts)
                    found.points.append(_point(event, updates + 1, rollouts, event.at - began))
            elif isinstance(event, Phase):
                if event.phase == "evaluation":
                    found.marks[updates] = HeldOut(updates, rollouts, event.at - began, {})
            elif isinstance(event, SettingsChanged):
                pairs = {name: pair for name, pair in event.changes.items() if isinstance(pair, list)}
                found.changes += [Change(updates, name, *pair) for name, pair in pairs.items() if len(pair) == 2]
            elif isinstance(event, RunBegan | SlotsChanged):
                if isinstance(event, RunBegan):
                    found.settings |= event.settings
                elif found.slots:
                    found.changes.append(Change(updates, "slots", found.slots[-1], event.slots))
                found.slots.append(event.slots)
                found.settings["slots"] = event.slots
        return found


def _point(event: Updated, updates: int, rollouts: int, seconds: float) -> UpdatePoint:
    twentieths = quantiles(event.lengths, n=20, method="inclusive") if len(event.lengths) > 1 else event.lengths * 19
    segments = [segment for of_rollout in event.segments for segment in of_rollout if segment[0] != ENVIRONMENT]
    ages = sum(tokens * (event.version - version) for version, tokens in segments)
    return UpdatePoint(
        updates=updates,
        rollouts=rollouts,
        seconds=seconds,
        reward=math.fsum(event.rewards) / len(event.rewards),
        length_quantiles=tuple(twentieths[round(20 * share) - 1] for share in QUANTILES),
        staleness=ages / max(1, sum(tokens for _, tokens in segments)),
    )


def slot_time(run_metrics: RunMetrics, slices: Iterable[Slice]) -> dict[str, float]:
    """Fractions of wall-clock slot-time: work by outcome, the parts of the bubble, other phases. They add up to 1."""
    work: defaultdict[str, float] = defaultdict(float)
    for piece in slices:
        work[piece.outcome] += piece.end - piece.start
    busy = (1 - run_metrics.idle) / (math.fsum(work.values()) or 1.0)
    parts = {outcome: seconds * busy for outcome, seconds in work.items()} | run_metrics.idle_parts
    return {part: share for part, share in parts.items() if share > 0}


def _slices_until(stays: Sequence[Slice], update_times: Sequence[float], ended: float) -> float:
    """All of a small run; of a large one, up to the last update whose slices can be drawn."""
    if len(stays) <= MOST_SLICES:
        return ended
    most = stays[MOST_SLICES].start
    return max((at for at in update_times if at <= most), default=most)


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


# Series


@dataclass(frozen=True, slots=True)
class Series:
    """Runs that differ only in their seed."""

    label: str
    color: str
    runs: tuple[ReportedRun, ...]

    @property
    def measured(self) -> tuple[ReportedRun, ...]:
        """The runs with an update; all runs if none has one. One that ended before has no goodput to average."""
        return tuple(run for run in self.runs if run.run_metrics.updates) or self.runs

    @property
    def has_updates(self) -> bool:
        return any(run.run_metrics.updates for run in self.runs)

    def mean(self, field: str) -> float:
        """The mean over the measured runs of a metric that every run has."""
        return fmean(getattr(run.run_metrics, field) for run in self.measured)


def series_of(runs: Sequence[ReportedRun]) -> list[Series]:
    groups: list[list[ReportedRun]] = []
    for run in runs:
        for group in groups:
            if run.mode == group[0].mode and run.comparable_settings() == group[0].comparable_settings():
                group.append(run)
                break
        else:
            groups.append([run])
    labels, colors = _labels([group[0] for group in groups]), colors_of([group[0].mode for group in groups])
    return [Series(*one) for one in zip(labels, colors, map(tuple, groups), strict=True)]


def colors_of(modes: Sequence[str]) -> list[str]:
    """The color of each mode; another one for a mode without a color, and for each that has the same mode again."""
    spare = iter(OTHER_COLORS * (1 + len(modes) // len(OTHER_COLORS)))
    is_new = [mode in MODE_COLORS and mode not in modes[:place] for place, mode in enumerate(modes)]
    return [MODE_COLORS[mode] if new else next(spare) for mode, new in zip(modes, is_new, strict=True)]


def _labels(firsts: Sequence[ReportedRun]) -> list[str]:
    """The mode, plus the settings that distinguish series of the same mode."""
    labels = []
    for run in firsts:
        others = [other for other in firsts if other.mode == run.mode and other is not run]
        apart = [
            f"{key} {value}"
            for key, value in run.comparable_settings().items()
            if any(other.settings.get(key) != value for other in others)
        ]
        labels.append(f"{run.mode} ({', '.join(apart[:2])})" if apart else run.mode)
    return [
        label if labels.count(label) == 1 else f"{label}: {run.name}" for label, run in zip(labels, firsts, strict=True)
    ]


def run_names(series: Sequence[Series]) -> dict[str, str]:
    """A run's name on the page: its series, plus its seed or its own name if the series has several runs."""
    found = {}
    for one in series:
        seeds = [run.seed for run in one.runs]
        for run in one.runs:
            own = f"seed {run.seed}" if seeds.count(run.seed) == 1 else run.name
            found[run.name] = one.label if len(one.runs) == 1 else f"{one.label}, {own}"
    return found
