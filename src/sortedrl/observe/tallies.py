"""What `Metrics` tallies besides its counts: rollouts of several turns, and the order of lengths: how well updates are
sorted, and how well expected lengths predict real ones."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain
from statistics import StatisticsError, correlation, fmean

from sortedrl.core import events
from sortedrl.core.rollout import ENVIRONMENT


class TurnTally:
    """Counts for `Metrics`. A rollout of one turn without an environment leaves no trace here."""

    def __init__(self) -> None:
        self.in_use = False  # a turn has ended in this log
        self.seconds = 0.0  # of all rollouts in their environments, added up; of those still there, up to `now`
        self.failures = 0
        self.trained_tokens = 0  # of environments, in rollouts that were trained on
        self.trained_turns = 0  # of the policy, in rollouts that were trained on
        self.since: dict[int, float] = {}  # by rollout in its environment
        self._tokens: dict[int, int] = {}  # of the environment, by rollout
        self._unseen: dict[int, int] = {}  # of them, those that the engine has not prefilled yet

    def seconds_at(self, now: float) -> float:
        return self.seconds + sum(now - since for since in self.since.values())

    def tokens_of(self, rollout: int) -> int:
        """Tokens of the environment that it has."""
        return self._tokens.get(rollout, 0)

    def end_turn(self, event: events.TurnEnded) -> None:
        self.in_use = True
        self.since[event.rollout] = event.at

    def observe(self, event: events.Observed) -> None:
        self.leave(event.rollout, event.at)
        self._tokens[event.rollout] = self.tokens_of(event.rollout) + event.tokens
        self._unseen[event.rollout] = self._unseen.get(event.rollout, 0) + event.tokens

    def submit(self, rollout: int, at: float) -> int:
        """How many of its tokens the engine prefills for the first time."""
        self.leave(rollout, at)
        return self._unseen.pop(rollout, 0)

    def leave(self, rollout: int, at: float) -> bool:
        """Whether it was in its environment, which it leaves now."""
        since = self.since.pop(rollout, None)
        if since is not None:
            self.seconds += at - since
        return since is not None

    def drop(self, rollout: int, at: float) -> None:
        """Its tokens are discarded."""
        self._tokens.pop(rollout, None)
        self._unseen.pop(rollout, None)
        self.leave(rollout, at)

    def train(self, event: events.Updated) -> Sequence[int]:
        """The policy tokens of each rollout of an update."""
        if not self.in_use:
            self.trained_turns += len(event.rollouts)
            return event.lengths
        lengths = []
        for rollout, length, segments in zip(event.rollouts, event.lengths, event.segments, strict=True):
            observed = [tokens for version, tokens in segments if version == ENVIRONMENT]
            self.trained_turns += 1 + len(observed)
            self.trained_tokens += sum(observed)
            lengths.append(length - sum(observed))
            self._tokens.pop(rollout, None)
        return lengths


def rank_correlation(first: Iterable[float], second: Iterable[float]) -> float | None:
    """Spearman's rank correlation, ties at their mean rank; None if one side is constant."""
    try:
        return correlation(_ranks(list(first)), _ranks(list(second)))
    except StatisticsError:
        return None


def _ranks(values: list[float]) -> list[float]:
    rank_of: dict[float, float] = {}
    below = 0
    for value, count in sorted(Counter(values).items()):
        rank_of[value] = below + (count - 1) / 2
        below += count
    return [rank_of[value] for value in values]


def log_lengths(event: events.Updated, group: int) -> list[list[float]]:
    """Of an update, by unit: what is trained on as a whole, a rollout or a group. Rollouts of a group have consecutive
    numbers."""
    units: defaultdict[int, list[float]] = defaultdict(list)
    for rollout, length in zip(event.rollouts, event.lengths, strict=True):
        units[rollout // group].append(math.log(max(1, length)))
    return list(units.values())


def sortedness(updates: Sequence[Sequence[Sequence[float]]]) -> float | None:
    """1 minus the ratio of the variance of log length within updates to its expected value with random updates.

    Randomly assigning units to updates of the same sizes leaves (units - updates) / (units - 1) of the variance between
    units within the updates; the variance within units stays. So random updates score 0 on average for any update size
    (units of one size), and a single result may be below 0. None if each update is one unit: every order would score
    the same.
    """
    units = [unit for update in updates for unit in update]
    if len(units) < 2 or len(units) == len(updates):
        return None
    mean = fmean(chain.from_iterable(units))
    whole = sum((x - mean) ** 2 for unit in units for x in unit)
    between_units, between_updates = (
        sum(len(part) * (fmean(part) - mean) ** 2 for part in parts)
        for parts in (units, [list(chain.from_iterable(update)) for update in updates])
    )
    at_random = whole - between_units + between_units * (len(units) - len(updates)) / (len(units) - 1)
    return 1 - (whole - between_updates) / at_random if at_random > 1e-9 else 0.0
