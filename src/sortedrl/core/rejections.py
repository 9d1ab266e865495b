"""Stops a run in which too many rollouts are rejected: a reward function that always fails must not go unnoticed.

    Controller(engine, prompts, scorer, schedule, log=EventLog(RejectionWatch(schedule.rollouts_needed, log=print)))

It logs the first rejection at once and new reasons as they occur, at most one line per `SECONDS_BETWEEN_LINES`.
"""

import re
import time
from collections import Counter, deque
from collections.abc import Callable

from sortedrl.core.configuration import checked_fraction, checked_int
from sortedrl.core.errors import UserError
from sortedrl.core.events import NO_REWARD, EnvironmentFailed, Event, Failed, Finished, Regenerated, Rejected, Scored
from sortedrl.core.wording import counted

MIN_FIRST = 8  # a few rejections are no reason to stop, even with tiny updates
MIN_WINDOW = 32
WINDOW_UPDATES = 4
SECONDS_BETWEEN_LINES = 5.0
MAX_KINDS = 1000  # of distinct reasons that are counted


class TooManyRejected(UserError, RuntimeError):
    """So many rollouts were rejected that training on the rest would be misleading."""


class Reasons:
    """Counts reasons. Those that differ only in numbers are of one kind."""

    def __init__(self) -> None:
        self._count: Counter[str] = Counter()
        self._examples: dict[str, str] = {}

    def add(self, reason: str) -> bool:
        """Count the reason; returns whether it is the first of its kind."""
        kind = re.sub(r"\d+(\.\d+)?", "#", reason)[:80]
        if kind not in self._count and len(self._count) >= MAX_KINDS:
            kind = "other"
        self._count[kind] += 1
        self._examples.setdefault(kind, reason.removeprefix(NO_REWARD))
        return self._count[kind] == 1

    def counts(self) -> dict[str, int]:
        """How often each kind occurred, most frequent first, under its first example."""
        found: Counter[str] = Counter()
        for kind, count in self._count.items():
            found[self._examples[kind]] += count
        return dict(found.most_common())

    def most_frequent(self) -> str:
        """The most frequent reason, with its first example."""
        if not self._count:
            return "no reason is known"
        kind, count = self._count.most_common(1)[0]
        others = len(self._count) - 1
        more = f" ({counted(others, 'other reason')})" if others else ""
        return f"{counted(count, 'time')}: {self._examples[kind]}{more}"


class RejectionWatch:
    """A sink of the event log. Raises `TooManyRejected` when

    - the first update's worth of rollouts (at least `MIN_FIRST`) is rejected, every one of them;
    - among the last four updates' worth (at least `MIN_WINDOW`) more than `max_fraction` were rejected.

    Only generated rollouts count: a prompt that is too long is logged but does not count."""

    def __init__(
        self,
        update_size: int,
        *,
        max_fraction: float = 0.5,
        log: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        update_size = checked_int("update_size", update_size, 1)
        self._first = max(update_size, MIN_FIRST)
        self._outcomes: deque[bool] = deque(maxlen=max(WINDOW_UPDATES * update_size, MIN_WINDOW))  # was it rejected?
        self._max_fraction = checked_fraction("max_fraction", max_fraction)
        self._log = log
        self._clock = clock
        self._ended: set[int] = set()  # generated rollouts without an outcome yet
        self._reasons = Reasons()
        self._quiet_until = -1.0
        self.scored = 0
        self.rejected = 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Finished | Failed | EnvironmentFailed):
            self._ended.add(event.rollout)
        elif isinstance(event, Regenerated):
            self._ended.discard(event.rollout)
        elif isinstance(event, Scored):
            self._ended.discard(event.rollout)
            self.count_scored()
        elif isinstance(event, Rejected):
            counts = event.rollout in self._ended
            self._ended.discard(event.rollout)
            self.count_rejected(event.reason, f"rollout {event.rollout}", counts=counts)

    def count_scored(self) -> None:
        self.scored += 1
        self._outcomes.append(False)

    def count_rejected(self, reason: str, what: str, *, counts: bool = True) -> None:
        """`what` was rejected: log it if the reason is new, raise an error if it is one too many."""
        if self._reasons.add(reason) and self._clock() >= self._quiet_until:
            self._quiet_until = self._clock() + SECONDS_BETWEEN_LINES
            self._log(f"rejected {what}: {reason}")
        if not counts:
            return
        self.rejected += 1
        self._outcomes.append(True)
        if self.scored == 0 and self.rejected >= self._first:
            raise TooManyRejected(f"the first {self.rejected} rollouts were all rejected; {self.most_frequent()}")
        window = self._outcomes.maxlen or 0
        rejected = sum(self._outcomes)
        if rejected > self._max_fraction * window:
            found = f"{rejected} of the last {len(self._outcomes)} rollouts were rejected"
            bound = f"more than the fraction of {self._max_fraction:g} that is allowed (max_rejected_fraction)"
            raise TooManyRejected(f"{found}, {bound}; {self.most_frequent()}")

    def require_some_scored(self) -> None:
        """For a run that ends before its first update."""
        if self.rejected and not self.scored:
            raise TooManyRejected(f"all {self.rejected} responses were rejected; {self.most_frequent()}")

    def most_frequent(self) -> str:
        """The most frequent reason, with its first example."""
        return self._reasons.most_frequent()
