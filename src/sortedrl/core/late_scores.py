"""Gives up on missing scores when they alone keep a harvest from ending."""

from __future__ import annotations

from sortedrl.core.moves import RolloutMoves
from sortedrl.core.rollout import Rollout
from sortedrl.core.slot_clock import SlotClock
from sortedrl.core.strategies.base import Strategy, is_overdue


class LateScores:
    """The last resort of a harvest that can only wait for scores, because nothing runs, or because only rollouts that
    the staleness bound requires in this update are missing.

    If none of these scores arrives within `score_wait_seconds`, the rollouts are regenerated. A rollout that was
    regenerated for this reason before is rejected.
    """

    def __init__(self, moves: RolloutMoves, strategy: Strategy, clock: SlotClock) -> None:
        self._moves = moves
        self._strategy = strategy
        self._state = moves.state
        self._clock = clock
        self._late: list[int] = []  # ids of the rollouts whose scores the harvest waits for
        self._since = 0.0

    def give_up(self) -> bool:
        """Whether the wait is over and the late rollouts were regenerated or rejected."""
        s = self._state
        if not (s.buffer.finished or self._late):
            return False
        late = self._holding_up()
        ids = [rollout.id for rollout in late]
        if ids != self._late:
            self._late, self._since = ids, self._clock.now()
        if not late or self._clock.now() < self._since + s.schedule.score_wait_seconds:
            return False
        for rollout in late:
            self._regenerate_or_reject(rollout)
        s.buffer.rekey(self._moves.key)
        return True

    def _holding_up(self) -> list[Rollout]:
        """Finished rollouts whose scores alone the harvest waits for."""
        s, buffer = self._state, self._state.buffer
        if s.ready >= self._strategy.wanted(s):
            return [r for r in buffer.unscored() if buffer.group_of(r).id in s.must_finish]
        if not (buffer.running or buffer.in_environment):
            return [r for r in buffer.unscored() if buffer.group_of(r).gate == buffer.gate]
        return []

    def _regenerate_or_reject(self, rollout: Rollout) -> None:
        s = self._state
        if rollout.forced_regenerations:
            self._moves.reject(rollout, "no score in time, twice")
            return
        group = s.buffer.group_of(rollout)
        rollout.forced_regenerations += 1
        self._moves.regenerate(rollout, "no score in time, and the harvest cannot end without it")
        if not is_overdue(group, s):
            s.must_finish.discard(group.id)
