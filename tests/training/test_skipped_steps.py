"""When a run whose optimizer steps are skipped is stopped."""

from __future__ import annotations

import pytest

from sortedrl.training.build import MOST_IN_A_ROW, NotFinite, SkippedSteps


def test_one_line_per_row_of_skipped_updates_and_a_step_between_starts_a_new_count() -> None:
    lines: list[str] = []
    watch = SkippedSteps(1, 1e-3, lines.append)
    updates = iter(range(1, 1000))
    for _ in range(3):
        for _ in range(MOST_IN_A_ROW - 1):
            watch.check(next(updates), {"skipped_steps": 1.0})
        watch.check(next(updates), {})  # no rollout was trained on
        watch.check(next(updates), {"skipped_steps": 0.0})
    assert len(lines) == 3 and lines[0].startswith("update 1: 1 of 1 optimizer steps skipped")
    with pytest.raises(NotFinite, match=f"last {MOST_IN_A_ROW} updates"):
        for _ in range(MOST_IN_A_ROW):
            watch.check(next(updates), {"skipped_steps": 1.0})


def test_an_update_of_which_some_steps_were_made_does_not_count() -> None:
    lines: list[str] = []
    watch = SkippedSteps(4, 1e-3, lines.append)
    for update in range(100):
        watch.check(update, {"skipped_steps": 3.0})
    assert lines == ["update 0: 3 of 4 optimizer steps skipped, because the gradient is not finite"]
