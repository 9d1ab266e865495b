"""Takes in the changes that an engine reports. They are checked before (engine_checks.py)."""

from collections.abc import Callable, Sequence

from sortedrl.core.engine_protocol import (
    Change,
    RequestBroken,
    RequestFinished,
    RequestPreempted,
    RequestStarted,
    Tokens,
)
from sortedrl.core.ledger import Ledger
from sortedrl.core.rollout import Rollout


def apply(changes: Sequence[Change], ledger: Ledger, ended: Callable[[Rollout, float, bool], None]) -> None:
    """To the running rollouts. `ended(rollout, at, truncated)` takes those that ended by themselves or at a limit."""
    running, stamp = ledger.state.buffer.running, ledger.clock.stamp
    for change in changes:
        rollout, at = running[change.id], stamp(change.at)
        if isinstance(change, Tokens):
            rollout.append(change.segment)
        elif isinstance(change, RequestStarted):
            ledger.take_slot(rollout, at)
        elif isinstance(change, RequestFinished):
            ended(rollout, at, change.truncated)
        elif isinstance(change, RequestPreempted):
            ledger.lose_slot(rollout, at, change.recompute)
        else:
            ledger.fail(rollout, at, change.reason, keep=not isinstance(change, RequestBroken))
