"""What a strategy decides, checked: a mode of your own may be wrong."""

from collections import Counter

from sortedrl.core.buffer import Group
from sortedrl.core.errors import UserError
from sortedrl.core.strategies.base import SchedulerState, Strategy


class StrategyError(UserError, RuntimeError):
    """A strategy decided something that cannot be done, or nothing at all."""


def batches_of(strategy: Strategy, s: SchedulerState) -> list[list[Group]]:
    """The batches of this harvest: none is empty, and no group is in two of them or not ready."""
    batches = strategy.take(s)
    returned = f"mode {strategy.name}: take() returned"
    if not batches or not all(batches):
        what = "an empty batch" if batches else "no batch"
        raise StrategyError(f"{returned} {what}; enough() was true with {s.ready} rollouts ready")
    taken = Counter(group.id for batch in batches for group in batch)
    ready = {group.id for group in s.buffer.ready_here()}
    for group, times in taken.items():
        if times > 1:
            raise StrategyError(f"{returned} group {group} {times} times")
        if group not in ready:
            raise StrategyError(f"{returned} group {group}, which is not ready in this cohort")
    return batches


def require_loading(strategy: Strategy, s: SchedulerState) -> None:
    """Raises a StrategyError if there is nothing to train on and the strategy loads nothing."""
    if not s.buffer.untrained and s.prompts.remaining:
        left = f"with no rollout loaded and {s.prompts.remaining:,} prompts left"
        raise StrategyError(f"mode {strategy.name}: to_load() returned 0 {left}")
