"""The data of the report's charts: folds over the event log, besides the metrics of metrics.py."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from sortedrl.core.events import Event, Phase, RunBegan, SettingsChanged, SlotsChanged, Updated
from sortedrl.core.rollout import ENVIRONMENT
from sortedrl.observe.run_metrics import RunMetrics
from sortedrl.observe.timeline import Slice

MOST_POINTS = 600  # of per-update curves; beyond that, neighboring updates are pooled
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_OUTLINE = frozenset({RunBegan, SlotsChanged, SettingsChanged, Phase, Updated})  # few, and the first event of every run


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


def slot_time(run_metrics: RunMetrics, slices: Iterable[Slice]) -> dict[str, float]:
    """Fractions of wall-clock slot-time: work by outcome, the parts of the bubble, other phases. They add up to 1."""
    work: defaultdict[str, float] = defaultdict(float)
    for piece in slices:
        work[piece.outcome] += piece.end - piece.start
    busy = (1 - run_metrics.idle) / (math.fsum(work.values()) or 1.0)
    parts = {outcome: seconds * busy for outcome, seconds in work.items()} | run_metrics.idle_parts
    return {part: share for part, share in parts.items() if share > 0}


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
