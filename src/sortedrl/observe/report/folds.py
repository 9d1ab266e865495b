"""The data of the report's charts: folds over the event log, besides the metrics of metrics.py.

Slot-time is read from `Metrics` at the edges of equal time bins and split by outcome with the slices of timeline.py,
so a chart always adds up to the metrics beside it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from sortedrl.core.events import Event, Phase, RunBegan, SettingsChanged, SlotsChanged, Updated
from sortedrl.core.rollout import ENVIRONMENT
from sortedrl.observe.metrics import Metrics
from sortedrl.observe.run_metrics import RunMetrics
from sortedrl.observe.timeline import Slice

BINS = 240  # time bins of the occupancy chart
MOST_POINTS = 600  # of per-update curves; beyond that, neighboring updates are pooled
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_OUTLINE = frozenset({RunBegan, SlotsChanged, SettingsChanged, Phase, Updated})  # few, and the first event of every run


class Occupancy(NamedTuple):
    """Mean number of slots in each part per time bin. `edges` (seconds since the run started) has one more entry."""

    edges: tuple[float, ...]
    parts: dict[str, tuple[float, ...]]


class UpdatePoint(NamedTuple):
    """One update, or `pooled` consecutive ones. `updates`, `rollouts` and `seconds` count from the start of the run."""

    updates: int
    pooled: int
    rollouts: int
    seconds: float
    reward: float
    length_quantiles: tuple[float, ...]
    staleness: float  # mean over its tokens


class Mark(NamedTuple):
    """The state of the run when an evaluation started."""

    updates: int
    rollouts: int
    seconds: float


class Change(NamedTuple):
    """A setting that was changed when the run was resumed after this many updates."""

    updates: int
    setting: str
    old: Any
    new: Any


def outline(log: Iterable[Event]) -> list[Event]:
    """What curves per update need. Where the mark of a rollback is lost, an update is there twice: the first counts."""
    found: list[Event] = []
    updates = 0
    for event in log:
        if type(event) in _OUTLINE and not (isinstance(event, Updated) and event.update < updates):
            found.append(event)
            updates = event.update + 1 if isinstance(event, Updated) else updates
    return found


def slot_time(log: Sequence[Event], slices: Iterable[Slice], bins: int = BINS) -> tuple[RunMetrics, Occupancy]:
    """The metrics of a run, and its slot occupancy over time. The log must not be empty."""
    metrics = Metrics()
    began, ended = log[0].at, log[-1].at
    edges = [began + (ended - began) * i / bins for i in range(bins)] + [ended]
    totals: list[dict[str, float]] = []
    take = metrics.__call__  # looked up once
    next_edge = began
    for event in log:
        while next_edge < event.at and len(totals) < bins:
            totals.append(metrics.slot_seconds_at(next_edge))
            next_edge = edges[len(totals)]
        take(event)
    totals += [metrics.slot_seconds()] * (bins + 1 - len(totals))
    width = (ended - began) / bins or 1.0
    parts = {
        part: tuple((after.get(part, 0.0) - before.get(part, 0.0)) / width for before, after in pairwise(totals))
        for part, total in totals[-1].items()
        if part != "busy" and total > 0
    }
    parts |= _slots_by_outcome(slices, began, width, bins)
    return metrics.run_metrics(), Occupancy(tuple(edge - began for edge in edges), parts)


def _slots_by_outcome(slices: Iterable[Slice], began: float, width: float, bins: int) -> dict[str, tuple[float, ...]]:
    found: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * bins)
    for piece in slices:
        column, low = found[piece.outcome], piece.start
        place, last = (min(bins - 1, int((at - began) / width)) for at in (piece.start, piece.end))
        while place < last:
            high = began + (place + 1) * width
            column[place] += max(0.0, high - low) / width
            place, low = place + 1, high
        column[place] += max(0.0, piece.end - low) / width
    return {outcome: tuple(column) for outcome, column in found.items()}


def update_points(log: Sequence[Event], most: int = MOST_POINTS) -> list[UpdatePoint]:
    updates = [event for event in log if isinstance(event, Updated)]
    pooled = max(1, math.ceil(len(updates) / most))
    points: list[UpdatePoint] = []
    rollouts = 0
    for first in range(0, len(updates), pooled):
        group = updates[first : first + pooled]
        lengths = sorted(length for update in group for length in update.lengths)
        rewards = [reward for update in group for reward in update.rewards]
        ages = [
            (tokens, update.version - version)
            for update in group
            for segments in update.segments
            for version, tokens in segments
            if version != ENVIRONMENT
        ]
        rollouts += len(lengths)
        points.append(
            UpdatePoint(
                updates=first + len(group),
                pooled=len(group),
                rollouts=rollouts,
                seconds=group[-1].at - log[0].at,
                reward=math.fsum(rewards) / len(rewards),
                length_quantiles=tuple(quantile(lengths, share) for share in QUANTILES),
                staleness=sum(tokens * age for tokens, age in ages) / max(1, sum(tokens for tokens, _ in ages)),
            )
        )
    return points


def quantile(ordered: Sequence[float], share: float) -> float:
    """Quantile of sorted values, linearly interpolated."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def evaluation_marks(log: Sequence[Event]) -> dict[int, Mark]:
    """When each evaluation ran, by the number of updates done; the last one if there were two."""
    marks: dict[int, Mark] = {}
    updates = rollouts = 0
    for event in log:
        if isinstance(event, Updated):
            updates += 1
            rollouts += len(event.rollouts)
        elif isinstance(event, Phase) and event.phase == "evaluation":
            marks[updates] = Mark(updates, rollouts, event.at - log[0].at)
    return marks


def changes_on_resume(log: Iterable[Event]) -> list[Change]:
    """What each resume changed, as far as the log has it: older ones have only the slots."""
    changes: list[Change] = []
    updates = slots = 0
    for event in log:
        if isinstance(event, Updated):
            updates += 1
        elif isinstance(event, RunBegan):
            slots = event.slots
        elif isinstance(event, SlotsChanged):
            changes.append(Change(updates, "slots", slots, event.slots))
            slots = event.slots
        elif isinstance(event, SettingsChanged):
            pairs = [(name, pair) for name, pair in event.changes.items() if isinstance(pair, list) and len(pair) == 2]
            changes += [Change(updates, name, *pair) for name, pair in pairs]
    return changes
