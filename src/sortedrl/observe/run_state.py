"""The current state of a run: a fold over its event log and the lines of metrics.jsonl.

`RunState` is fed every event (after the `Metrics` that it reads) and every line of metrics.jsonl. `view()` is an
immutable snapshot of everything that a display shows, so another thread can draw it. A live console and one that
follows the files of a run in another process get the same input and show the same.

Invariant after every event: loaded = trained + rejected + filtered + the rollouts in all places.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from sortedrl.core import events
from sortedrl.core.events import Event
from sortedrl.core.wording import printable
from sortedrl.log.lines import is_number
from sortedrl.observe.metrics import Metrics
from sortedrl.observe.run_metrics import Snapshot

REWARDS_SHOWN = 60  # updates
_NUMBERS = ("reward", "correct", "length", "bubble", "goodput", "waste", "run_staleness_mean")  # of every update
_COUNTS = ("updates_in_all", "rejected", "scoring_backlog", "mismatch_kl")  # that a display shows if they are there


PLACES = (  # of rollouts that are neither trained nor rejected
    "waiting",  # no tokens yet: never started, or dropped
    "resumable",  # aborted with its tokens kept, or back from its environment
    "queued",  # in the engine, without a slot
    "running",
    "environment",  # between two turns, without a slot
    "finished",  # but not scored yet
    "ready",
)


@dataclass(frozen=True, slots=True)
class RunView:
    """What a display shows; its texts have no control characters. Times are on the clock of the process that feeds the
    state; the latest event was at `began_at + snapshot.wall_seconds`."""

    name: str
    updates_in_all: int | None
    snapshot: Snapshot
    mode: str = ""
    phase: str = "start"
    updates: int = 0  # done by the learner
    began_at: float = 0.0
    ends_at: float | None = None
    seen_at: float = 0.0  # when the latest event was seen
    rewards: tuple[float, ...] = ()  # means of the latest updates, latest last
    correct: float | None = None  # of the latest update
    mismatch: float | None = None
    lengths: dict[str, float] | None = None  # of the latest update, in tokens: mean, shortest, longest
    held_out: tuple[float, ...] = ()  # scores, latest last
    evaluated: tuple[int, int] | None = None  # samples done and total, of the current evaluation
    slots: int = 0
    places: dict[str, int] = field(default_factory=dict)  # rollouts, by PLACES


class RunState:
    def __init__(self, metrics: Metrics, name: str, updates_in_all: int | None) -> None:
        self.metrics = metrics
        self._view = RunView(printable(name), updates_in_all, metrics.snapshot())
        self._places = RolloutPlaces()
        self._handed_out = 0  # updates
        self._resumed_after = 0  # updates
        self._first: tuple[int, float] | None = None  # (update, seconds) of the first line since then
        self._last = (0, 0.0)
        self._line_seen_at = 0.0

    def __call__(self, event: Event) -> None:
        self._places(event)
        if isinstance(event, events.Phase):
            self._change(phase=printable(event.phase), evaluated=None)
        elif isinstance(event, events.Updated):
            self._handed_out = event.update + 1
            lengths = {"mean": fmean(event.lengths), "shortest": min(event.lengths), "longest": max(event.lengths)}
            self._change(rewards=(*self._view.rewards, fmean(event.rewards))[-REWARDS_SHOWN:], lengths=lengths)
        elif isinstance(event, events.Published):
            self._change(updates=self._handed_out)

    def _change(self, **seen: Any) -> None:
        self._view = replace(self._view, **seen)

    def evaluating(self, done: int, total: int) -> None:
        self._change(evaluated=(done, total))

    def add_line(self, line: dict[str, Any], seen_at: float) -> None:
        """A line of metrics.jsonl: an update or an evaluation."""
        self._line_seen_at = seen_at
        self._last = (line["update"], line["seconds"])
        if self._first is None or line["update"] <= self._resumed_after:
            self._first = self._last
        if is_update(line):
            self._change(correct=line.get("correct"), mismatch=line.get("mismatch_kl"))
        else:
            self._change(held_out=(*self._view.held_out, line["held_out"]["value"]))
        if "updates_in_all" in line:
            self._change(updates_in_all=line["updates_in_all"])

    def resumed(self, updates: int) -> None:
        """The run was resumed after this many updates. Call it before their lines are added."""
        self._resumed_after = updates

    def remaining_seconds(self) -> float | None:
        """Time until the last update, as of the latest line: at the mean pace of all updates so far, including
        evaluations and checkpoints; of a resumed run, since then: it may be on another machine."""
        if self._first is None or self._view.updates_in_all is None:
            return None
        done, seconds = self._last
        updates, span = done - self._first[0], seconds - self._first[1]
        return span / updates * max(0, self._view.updates_in_all - done) if updates else None

    def view(self, seen_at: float) -> RunView:
        snapshot, remaining = self.metrics.snapshot(), self.remaining_seconds()
        return replace(
            self._view,
            mode=printable(self.metrics.mode),
            began_at=seen_at - snapshot.wall_seconds,
            ends_at=None if remaining is None else self._line_seen_at + remaining,
            seen_at=seen_at,
            snapshot=replace(snapshot, rejected_most=printable(snapshot.rejected_most)),
            slots=self.metrics.slots,
            places=dict(self._places.count),
        )


def is_update(line: dict[str, Any]) -> bool:
    """The other lines of metrics.jsonl are evaluations."""
    return "reward" in line


def metrics_lines(texts: Iterable[str]) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that can be read. Of a torn one, the event log has the content."""
    return [line for line in map(_from_json, texts) if is_metrics_line(line)]


def read_object(path: Path) -> dict[str, Any] | None:
    """A JSON object; None if the file is missing or damaged."""
    try:
        content = _from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return None
    return content if isinstance(content, dict) else None


def _from_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def is_metrics_line(line: Any) -> bool:
    """Whether a line of a possibly damaged file has the numbers that displays and reports need."""
    if not isinstance(line, dict) or type(line.get("update")) is not int:
        return False
    score = line.get("held_out")
    if is_update(line):
        needed = [line.get(name) for name in _NUMBERS] + [line[name] for name in _COUNTS if name in line]
    else:
        needed = [score.get(name) for name in ("value", "low", "high")] if isinstance(score, dict) else [None]
    return all(map(is_number, (line["update"], line.get("seconds"), *needed)))


_PLACE_AFTER = {
    events.Submitted: "queued",
    events.Started: "running",
    events.Preempted: "queued",
    events.TurnEnded: "environment",
    events.Observed: "resumable",
    events.Finished: "finished",
    events.Regenerated: "waiting",
    events.Scored: "ready",
}


class RolloutPlaces:
    """The place of every loaded rollout that is not trained, rejected or filtered. Events of others, whose `Loaded`
    line is lost, are ignored."""

    def __init__(self) -> None:
        self._place: dict[int, str] = {}
        self._loaded = 0  # rollouts before this one were seen, or are lost
        self._kept: dict[int, int] = {}  # prefix tokens of submitted rollouts
        self.count = dict.fromkeys(PLACES, 0)

    def __call__(self, event: Any) -> None:
        place = _PLACE_AFTER.get(type(event))
        if place is not None:
            self._move(event.rollout, place)
            if isinstance(event, events.Submitted):
                self._kept[event.rollout] = event.prefix
        elif isinstance(event, events.Aborted | events.Failed):
            made = event.length if isinstance(event, events.Aborted) else self._kept.get(event.rollout, 0) + event.made
            self._move(event.rollout, "resumable" if made and not event.dropped else "waiting")
        elif isinstance(event, events.Loaded):
            new = range(max(event.first, self._loaded), event.first + event.rollouts)
            self._place.update(dict.fromkeys(new, "waiting"))
            self.count["waiting"] += len(new)
            self._loaded = max(self._loaded, new.stop)
        elif isinstance(event, events.Rejected):
            self._forget((event.rollout,))
        elif isinstance(event, events.Updated | events.Filtered):
            self._forget(event.rollouts)

    def _move(self, rollout: int, place: str) -> None:
        if rollout in self._place:
            self.count[self._place[rollout]] -= 1
            self.count[place] += 1
            self._place[rollout] = place

    def _forget(self, rollouts: Iterable[int]) -> None:
        """Rollouts that were trained on, rejected or filtered."""
        for rollout in rollouts:
            if rollout in self._place:
                self.count[self._place.pop(rollout)] -= 1
            self._kept.pop(rollout, None)
