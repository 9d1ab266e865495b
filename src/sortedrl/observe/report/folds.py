"""The data of the report's charts: folds over the event log, besides the metrics of metrics.py.

Slot-time is read from `Metrics` at the edges of equal time bins and split by outcome with the slices of timeline.py,
so a chart always adds up to the metrics beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

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


def slot_time(log: Sequence[Event], slices: Sequence[Slice], bins: int = BINS) -> tuple[RunMetrics, Occupancy]:
    """The metrics of a run, and its slot occupancy over time. The log must not be empty."""
    metrics = Metrics()
    began, ended = log[0].at, log[-1].at
    edges = [began + (ended - began) * i / bins for i in range(bins)] + [ended]
    totals: list[dict[str, float]] = []
    for event in log:
        while len(totals) < bins and edges[len(totals)] < event.at:
            totals.append(metrics.slot_seconds_at(edges[len(totals)]))
        metrics(event)
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
    found: dict[str, list[float]] = {}
    for piece in slices:
        column = found.setdefault(piece.outcome, [0.0] * bins)
        for place, seconds in _over_bins(piece, began, width, bins):
            column[place] += seconds / width
    return {outcome: tuple(column) for outcome, column in found.items()}


def _over_bins(piece: Slice, began: float, width: float, bins: int) -> Iterable[tuple[int, float]]:
    first = min(bins - 1, int((piece.start - began) / width))
    last = min(bins - 1, int((piece.end - began) / width))
    for place in range(first, last + 1):
        low = began + place * width
        high = piece.end if place == last else low + width
        yield place, max(0.0, high - max(piece.start, low))


def slot_grid(slices: Iterable[Slice], slots: int, began: float, ended: float, bins: int) -> list[str]:
    """One row of `bins` cells per slot: the first letter of the outcome of the longest slice in the cell."""
    width = (ended - began) / bins or 1.0
    most = [[0.0] * bins for _ in range(slots)]
    rows = [[EMPTY] * bins for _ in range(slots)]
    for piece in slices:
        for place, seconds in _over_bins(piece, began, width, bins):
            if seconds > most[piece.slot][place] and seconds >= width / 4:
                most[piece.slot][place], rows[piece.slot][place] = seconds, piece.outcome[0]
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
