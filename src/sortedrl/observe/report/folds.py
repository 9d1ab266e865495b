"""The data of the report's charts: folds over the event log, besides the metrics of metrics.py.

Slot-time is read from `Metrics` at the edges of equal time bins and split by outcome with the slices of timeline.py,
so a chart always adds up to the metrics beside it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from sortedrl.core import events
from sortedrl.core.events import Event
from sortedrl.core.rollout import ENVIRONMENT
from sortedrl.observe.metrics import Metrics, RunMetrics
from sortedrl.observe.timeline import Slice

BINS = 240  # time bins of the occupancy chart
MOST_POINTS = 600  # of per-update curves; beyond that, neighboring updates are pooled
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
EMPTY = " "  # a cell of the slot grid in which no slice took a quarter of the time


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Mean number of slots in each part per time bin. `edges` (seconds since the run started) has one more entry.
    `slots` is the mean over the run."""

    slots: float
    edges: tuple[float, ...]
    parts: dict[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class UpdatePoint:
    """One update, or `pooled` consecutive ones. `updates`, `rollouts` and `seconds` count from the start of the run."""

    updates: int
    pooled: int
    rollouts: int
    seconds: float
    reward: float
    length_quantiles: tuple[float, ...]
    staleness: float  # mean over its tokens


@dataclass(frozen=True, slots=True)
class Mark:
    """The state of the run when an evaluation started."""

    updates: int
    rollouts: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Change:
    """A setting that was changed when the run was resumed after this many updates."""

    updates: int
    setting: str
    old: Any
    new: Any


def slot_time(log: Sequence[Event], slices: Sequence[Slice], bins: int = BINS) -> tuple[RunMetrics, Occupancy]:
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
    parts = {part for part in totals[-1] if part != "busy" and totals[-1][part] > 0}
    width = (ended - began) / bins or 1.0
    found = {
        part: tuple((after.get(part, 0.0) - before.get(part, 0.0)) / width for before, after in pairwise(totals))
        for part in sorted(parts)
    }
    found |= _slots_by_outcome(slices, began, width, bins)
    slots = math.fsum(totals[-1].values()) / (ended - began) if ended > began else float(metrics.slots)
    return metrics.run_metrics(), Occupancy(slots, tuple(edge - began for edge in edges), found)


def _slots_by_outcome(slices: Iterable[Slice], began: float, width: float, bins: int) -> dict[str, tuple[float, ...]]:
    found: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * bins)
    for piece, place, seconds in _over_bins(slices, began, width, bins):
        found[piece.outcome][place] += seconds / width
    return {outcome: tuple(column) for outcome, column in found.items()}


def _over_bins(slices: Iterable[Slice], began: float, width: float, bins: int) -> Iterator[tuple[Slice, int, float]]:
    """Each slice with the bins that it touches, and its seconds in them."""
    for piece in slices:
        start, end = piece.start, piece.end
        place, last = int((start - began) / width), int((end - began) / width)
        if last >= bins:
            place, last = min(place, bins - 1), bins - 1
        while place < last:
            low = began + place * width
            yield piece, place, max(0.0, low + width - (start if start > low else low))
            place += 1
        low = began + place * width
        yield piece, place, max(0.0, end - (start if start > low else low))


def slot_grid(slices: Iterable[Slice], slots: int, began: float, ended: float, bins: int) -> list[str]:
    """One row of `bins` cells per slot: the first letter of the outcome of the longest slice in the cell."""
    width = (ended - began) / bins or 1.0
    least = width / 4
    most = [[0.0] * bins for _ in range(slots)]
    rows = [[EMPTY] * bins for _ in range(slots)]
    for piece in slices:
        slot, start, end = piece[:3]
        first, last = int((start - began) / width), int((end - began) / width)
        if last >= bins:
            first, last = min(first, bins - 1), bins - 1
        if last > first + 1:  # it fills the cells between them
            rows[slot][first + 1 : last] = piece.outcome[0] * (last - first - 1)
        for place in (first, last) if last > first else (last,):
            low = began + place * width
            seconds = (end if place == last else low + width) - (start if start > low else low)
            if seconds >= least and seconds > most[slot][place]:
                most[slot][place], rows[slot][place] = seconds, piece.outcome[0]
    return ["".join(row) for row in rows]


def update_points(log: Sequence[Event], most: int = MOST_POINTS) -> list[UpdatePoint]:
    updates = [event for event in log if isinstance(event, events.Updated)]
    pooled = max(1, math.ceil(len(updates) / most))
    points: list[UpdatePoint] = []
    done = rollouts = 0
    for first in range(0, len(updates), pooled):
        group = updates[first : first + pooled]
        lengths = sorted(length for update in group for length in update.lengths)
        rewards = [reward for update in group for reward in update.rewards]
        ages = [
            ((update.version - version) * tokens, tokens)
            for update in group
            for segments in update.segments
            for version, tokens in segments
            if version != ENVIRONMENT
        ]
        done += len(group)
        rollouts += len(lengths)
        points.append(
            UpdatePoint(
                updates=done,
                pooled=len(group),
                rollouts=rollouts,
                seconds=group[-1].at - log[0].at,
                reward=math.fsum(rewards) / len(rewards),
                length_quantiles=tuple(quantile(lengths, share) for share in QUANTILES),
                staleness=sum(age for age, _ in ages) / max(1, sum(tokens for _, tokens in ages)),
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
        if isinstance(event, events.Updated):
            updates += 1
            rollouts += len(event.rollouts)
        elif isinstance(event, events.Phase) and event.phase == "evaluation":
            marks[updates] = Mark(updates, rollouts, event.at - log[0].at)
    return marks


def changes_on_resume(log: Iterable[Event]) -> list[Change]:
    """What each resume changed, as far as the log has it: older ones have only the slots."""
    changes: list[Change] = []
    updates = slots = 0
    for event in log:
        if isinstance(event, events.Updated):
            updates += 1
        elif isinstance(event, events.RunBegan):
            slots = event.slots
        elif isinstance(event, events.SlotsChanged):
            changes.append(Change(updates, "slots", slots, event.slots))
            slots = event.slots
        elif isinstance(event, events.SettingsChanged):
            pairs = [(name, pair) for name, pair in event.changes.items() if isinstance(pair, list) and len(pair) == 2]
            changes += [Change(updates, name, *pair) for name, pair in pairs]
    return changes


def staleness_floor(log: Iterable[Event]) -> tuple[float, float] | None:
    """Lower bounds of the mean token staleness with full slots where tokens are kept: unsorted, and sorted.

    With Q slots, updates of U rollouts and lengths L: (Q / U) E[L^2] / (2 E[L]^2), and Q / 2U.
    """
    count = slots = slots_of_updates = total = squares = 0
    for event in log:
        if isinstance(event, (events.RunBegan, events.SlotsChanged)):
            slots = event.slots
        elif isinstance(event, events.Updated):
            slots_of_updates += slots
            count += len(event.lengths)
            total += sum(event.lengths)
            squares += sum(length * length for length in event.lengths)
    if not total:
        return None
    slots_per_rollout = slots_of_updates / count
    return slots_per_rollout * squares * count / (2 * total * total), slots_per_rollout / 2
