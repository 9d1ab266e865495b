"""The current state of a run: its metrics, and the lines of metrics.jsonl.

`RunState` reads the `Metrics` of the run, and is fed every line of metrics.jsonl. `view()` is an immutable snapshot of
everything that a display shows, so another thread can draw it. A live console and one that follows the files of a run
in another process get the same input and show the same.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from sortedrl.core.wording import printable
from sortedrl.log.lines import is_number
from sortedrl.observe.metrics import Metrics
from sortedrl.observe.run_metrics import Snapshot

_NUMBERS = ("reward", "correct", "length", "bubble", "goodput", "waste", "run_staleness_mean")  # of every update
_COUNTS = ("updates_in_all", "rejected", "scoring_backlog", "mismatch_kl")  # that a display shows if they are there


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
    places: dict[str, int] = field(default_factory=dict)  # rollouts: `Metrics.places`


class RunState:
    def __init__(self, metrics: Metrics, name: str, updates_in_all: int | None) -> None:
        self.metrics = metrics
        self._view = RunView(printable(name), updates_in_all, metrics.snapshot())
        self._evaluated_in = ""  # phase
        self._resumed_after = 0  # updates
        self._first: tuple[int, float] | None = None  # (update, seconds) of the first line since then
        self._last = (0, 0.0)
        self._line_seen_at = 0.0

    def _change(self, **seen: Any) -> None:
        self._view = replace(self._view, **seen)

    def evaluating(self, done: int, total: int) -> None:
        self._evaluated_in = self.metrics.phase
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
            self._change(held_out=(*self._view.held_out, line["held_out"]["value"]), evaluated=None)
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
        metrics, remaining = self.metrics, self.remaining_seconds()
        snapshot, lengths = metrics.snapshot(), metrics.last_lengths
        return replace(
            self._view,
            mode=printable(metrics.mode),
            phase=printable(metrics.phase or "start"),
            updates=metrics.published,
            rewards=tuple(metrics.rewards),
            lengths={"mean": fmean(lengths), "shortest": min(lengths), "longest": max(lengths)} if lengths else None,
            evaluated=self._view.evaluated if self._evaluated_in == metrics.phase else None,
            began_at=seen_at - snapshot.wall_seconds,
            ends_at=None if remaining is None else self._line_seen_at + remaining,
            seen_at=seen_at,
            snapshot=replace(snapshot, rejected_most=printable(snapshot.rejected_most)),
            slots=metrics.slots,
            places=metrics.places(),
        )


def is_update(line: dict[str, Any]) -> bool:
    """The other lines of metrics.jsonl are evaluations."""
    return "reward" in line


def text_lines(path: Path) -> list[str]:
    """The lines of a file, split at line feeds alone: a response may hold other separators. The last may be torn."""
    try:
        content = path.read_bytes().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return []
    return content.removesuffix("\n").split("\n") if content else []


def metrics_lines(texts: Iterable[str]) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that can be read. Of a torn one, the event log has the content."""
    return [line for line in map(from_json, texts) if is_metrics_line(line)]


def read_object(path: Path) -> dict[str, Any] | None:
    """A JSON object; None if the file is missing or damaged."""
    try:
        content = from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return None
    return content if isinstance(content, dict) else None


def from_json(text: str) -> Any:
    """None if it is none."""
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
