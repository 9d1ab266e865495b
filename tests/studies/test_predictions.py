"""The simulator against what was measured on a GPU: 5 % of the goodput and 2 points of the bubble, in every run."""

from __future__ import annotations

import runpy
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "predictions.py"


def test_every_measured_run_is_predicted() -> None:
    rows = list(runpy.run_path(str(SCRIPT))["rows"]())
    assert len(rows) == 18
    for row in rows:
        assert abs(row.goodput_off) <= 0.05 and abs(row.bubble_off) <= 2.0, row
