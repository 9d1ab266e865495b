"""Rollouts of several turns in the event log: how many are in their environments, for how long, with which tokens."""

from __future__ import annotations

from collections.abc import Sequence

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
        self._since: dict[int, float] = {}  # by rollout in its environment
        self._tokens: dict[int, int] = {}  # of the environment, by rollout
        self._unseen: dict[int, int] = {}  # of them, those that the engine has not prefilled yet

    @property
    def in_environment(self) -> int:
        return len(self._since)

    def seconds_at(self, now: float) -> float:
        return self.seconds + sum(now - since for since in self._since.values())

    def tokens_of(self, rollout: int) -> int:
        """Tokens of the environment that it has."""
        return self._tokens.get(rollout, 0)

    def end_turn(self, event: events.TurnEnded) -> None:
        self.in_use = True
        self._since[event.rollout] = event.at

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
        since = self._since.pop(rollout, None)
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
