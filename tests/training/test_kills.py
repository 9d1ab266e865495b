"""Runs that are killed at random and inside checkpoint replacement. The whole campaign: benchmarks/kill_campaign.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).parents[2] / "benchmarks" / "kill_campaign.py"


@pytest.mark.slow
def test_forty_kills_leave_runs_equal_to_uninterrupted_ones() -> None:
    words = [sys.executable, str(CAMPAIGN), "--kills", "40", "--seed", "7", "--modes", "partial+elevator", "on-policy"]
    words += ["--tasks", "one-turn", "slow-turns"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=880)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "seed 7: 40 kills" in done.stdout
