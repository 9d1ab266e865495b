"""What a harvest does if it can only wait for scores that do not come."""

from __future__ import annotations

from sortedrl.core.ledger import Ledger
from sortedrl.core.rollout import Rollout
from sortedrl.core.strategies.base import is_overdue


class LateScores:
    """The last resort of a harvest that can only wait for scores, because nothing runs, or because only rollouts that
    the staleness bound requires in this update are missing.

    If none of these scores arrives within `score_wait_seconds`, the rollouts are regenerated. A rollout that was
    regenerated for this reason before is rejected."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._state = ledger.state
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
            self._late, self._since = ids, self._ledger.clock.now()
        if not late or self._ledger.clock.now() < self._since + s.schedule.score_wait_seconds:
            return False
        for rollout in late:
            self._regenerate_or_reject(rollout)
        s.buffer.rekey(self._ledger.key)
        return True

    def _holding_up(self) -> list[Rollout]:
        """Finished rollouts whose scores alone the harvest waits for."""
        s, buffer = self._state, self._state.buffer
        if s.ready >= self._ledger.strategy.wanted(s):
            return [r for r in buffer.unscored() if self._ledger.strategy.waits_for(buffer.group_of(r), s)]
        if not (buffer.running or buffer.in_environment):
            return [r for r in buffer.unscored() if buffer.group_of(r).gate == buffer.gate]
        return []

    def _regenerate_or_reject(self, rollout: Rollout) -> None:
        s = self._state
        if rollout.forced_regenerations:
            self._ledger.reject(rollout, "no score in time, twice")
            return
        group = s.buffer.group_of(rollout)
        rollout.forced_regenerations += 1
        self._ledger.regenerate(rollout, "no score in time, and the harvest cannot end without it")
        if not is_overdue(group, s):
            s.must_finish.discard(group.id)
