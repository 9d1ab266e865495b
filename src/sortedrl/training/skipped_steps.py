"""Stops a run whose gradients are no longer finite: its steps are skipped, so it would go on without learning."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from sortedrl.core.errors import UserError

MOST_IN_A_ROW = 8  # updates without a step: after that, no rollout is to blame


class NotFinite(UserError, RuntimeError):
    """The gradients of many updates in a row were not finite."""


class SkippedSteps:
    """Logs an update with a skipped step, the first one in a row; raises `NotFinite` after `MOST_IN_A_ROW` updates of
    which no step was made."""

    def __init__(self, steps_per_update: int, learning_rate: float, log: Callable[[str], None]) -> None:
        self._steps_per_update = steps_per_update
        self._fix = f"Start again with a lower learning_rate than {learning_rate:g}; in bfloat16 try --dtype float32"
        self._log = log
        self._in_a_row = 0
        self._was_skipped = False

    def check(self, update: int, stats: Mapping[str, float]) -> None:
        """`stats` are the learner's metrics of this update; without a trained rollout they have no `skipped_steps`."""
        skipped = stats.get("skipped_steps", math.nan)
        if math.isnan(skipped):
            return
        if skipped and not self._was_skipped:
            self._log(
                f"update {update}: {skipped:g} of {self._steps_per_update} optimizer steps skipped, because the "
                "gradient is not finite"
            )
        self._was_skipped = skipped > 0
        self._in_a_row = self._in_a_row + 1 if skipped >= self._steps_per_update else 0
        if self._in_a_row >= MOST_IN_A_ROW:
            raise NotFinite(
                f"the gradients of the last {self._in_a_row} updates, up to {update}, were not finite, so their steps "
                f"were skipped. {self._fix}"
            )
