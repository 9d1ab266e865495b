"""For comparison: the slot of a rollout stays reserved while its environment works, as in agent loops that
run one request per slot from the first turn to the last."""

from __future__ import annotations

from dataclasses import asdict

from sortedrl.core.rollout import Rollout
from sortedrl.core.strategies.base import SchedulerState, Strategy


def holding_slots(strategy: Strategy) -> Strategy:
    """The same strategy, but no rollout is started in the slot of one that is between two turns."""
    kind = type(strategy)

    def may_start(self: Strategy, rollout: Rollout, s: SchedulerState) -> bool:
        between_turns = len(s.buffer.in_environment) + len(s.buffer.returning)
        return between_turns < s.free_slots and kind.may_start(self, rollout, s)

    holding: type[Strategy] = type(f"Holding{kind.__name__}", (kind,), {"may_start": may_start})
    return holding(**asdict(strategy))
