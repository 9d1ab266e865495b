"""What a strategy decides, checked: a mode of your own may be wrong."""

from __future__ import annotations

from collections import Counter

from sortedrl.core.buffer import Group
from sortedrl.core.errors import UserError
from sortedrl.core.strategies.base import SchedulerState, Strategy


class StrategyError(UserError, RuntimeError):
    """A strategy decided something that cannot be done, or nothing at all."""

    def __init__(self, mode: str, why: str) -> None:
        super().__init__(f"mode {mode}: {why}")
        self.mode, self.why = mode, why

    def __reduce__(self) -> tuple[type[StrategyError], tuple[str, str]]:
        return type(self), (self.mode, self.why)


def batches_of(strategy: Strategy, s: SchedulerState) -> list[list[Group]]:
    """The batches of this harvest: none is empty, and no group is in two of them or not ready."""
    batches = strategy.take(s)
    if not batches or not all(batches):
        what = "an empty batch" if batches else "no batch"
        raise StrategyError(strategy.name, f"take() returned {what}; enough() was true with {s.ready} rollouts ready")
    taken = Counter(group.id for batch in batches for group in batch)
    ready = {group.id for group in s.buffer.ready_here()}
    for group, times in taken.items():
        if times > 1:
            raise StrategyError(strategy.name, f"take() returned group {group} {times} times")
        if group not in ready:
            raise StrategyError(strategy.name, f"take() returned group {group}, which is not ready in this cohort")
    return batches


def require_loading(strategy: Strategy, s: SchedulerState) -> None:
    """Raises a StrategyError if there is nothing to train on and the strategy loads nothing."""
    if not s.buffer.untrained and s.prompts.remaining:
        raise StrategyError(
            strategy.name, f"to_load() returned 0 with no rollout loaded and {s.prompts.remaining:,} prompts left"
        )
