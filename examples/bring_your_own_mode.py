"""A schedule of your own in ten lines: the paper's partial mode, but long responses start first.

    python examples/bring_your_own_mode.py        # what it gains, simulated: the same as the next two lines
    cd examples
    sortedrl simulate --modes baseline partial bring_your_own_mode:LongestFirst --expectations cold oracle
    sortedrl train --mode bring_your_own_mode:LongestFirst --updates 4

A drain at the end of a cohort is shorter if the longest responses do not start last. How well that works depends on how
well lengths are known: `cold` is a first epoch, `oracle` knows them up to noise.

`bench`, `compare`, `Schedule(mode=...)` in your own loop, TRL and verl take the same import path. docs/design.md lists
what else a mode decides; src/sortedrl/core/strategies/paper.py has the paper's modes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import ClassVar

from sortedrl.cli.main import main
from sortedrl.core import Rollout, SchedulerState
from sortedrl.core.buffer import Group, Key
from sortedrl.core.strategies.paper import NEW, Partial


@dataclass(frozen=True)
class LongestFirst(Partial):
    """Of the rollouts that were never started, those with the longest expected response first."""

    reorders: ClassVar[bool] = True  # expected lengths change, so the queue is sorted again for each harvest

    @property
    def uses_expectation(self) -> bool:
        return True

    def key_of_new(self, rollout: Rollout, group: Group, s: SchedulerState) -> Key:
        return (group.gate, NEW, -s.expected(rollout))


if __name__ == "__main__":
    modes = ["baseline", "partial", "bring_your_own_mode:LongestFirst"]
    sys.exit(main(["simulate", "--modes", *modes, "--expectations", "cold", "oracle"]))
