"""Rows per update: their parts add up to the time of the run, and their sums to the metrics of the same log."""

import runpy
from pathlib import Path

import pytest

from sortedrl.core.schedule import Schedule
from sortedrl.engines.lengths import LognormalLengths
from sortedrl.engines.step_time import PRESETS
from sortedrl.studies import workload
from sortedrl.studies.workload import Workload, with_mode

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ROWS = runpy.run_path(str(BENCHMARKS / "update_rows.py"))
PREFILL_SECONDS = 2e-5
WORK = Workload(
    lengths=LognormalLengths(mu=5.0, limit=800),
    step_time=PRESETS["h200-8b"],
    slots=16,
    prompts=32,
    weight_update_seconds=0.5,
    learner_seconds_per_update=2.0,
    learner_seconds_per_token=1e-3,
)
SCHEDULE = Schedule(
    rollouts_per_update=16, prompts_per_cohort=8, rollouts_per_prompt=4, whole_groups=True, max_response_tokens=800
)


@pytest.mark.parametrize("mode", ["baseline", "on-policy", "partial", "partial+elevator"])
def test_rows_add_up_to_the_run(mode: str) -> None:
    rows = ROWS["UpdateRows"](PREFILL_SECONDS)
    found = workload.run(WORK, with_mode(SCHEDULE, mode), rows, max_updates=6)
    assert len(rows.rows) == found.updates == 6
    for place, row in enumerate(rows.rows):
        assert sum(getattr(row, part) for part in ROWS["PARTS"]) == pytest.approx(row.seconds)
        assert row.learner == pytest.approx(2.0 + 1e-3 * row.trained_tokens)
        assert row.weights == pytest.approx(0.5 if place else 0.0)
        assert row.re_prefill == pytest.approx(PREFILL_SECONDS * row.re_prefill_tokens)
    total = {key: sum(getattr(row, key) for row in rows.rows) for key in ("generate", "re_prefill", "busy", "seconds")}
    harvest = total["generate"] + total["re_prefill"]
    assert harvest == pytest.approx(found.seconds)
    assert 1 - total["busy"] / harvest == pytest.approx(found.bubble)
    assert 1 - total["busy"] / total["seconds"] == pytest.approx(found.idle)
    stale = sum(row.staleness_sum for row in rows.rows) / found.trained_tokens
    assert stale == pytest.approx(found.staleness_mean)
    if mode.startswith("partial"):
        assert sum(row.re_prefill_tokens for row in rows.rows) == found.re_prefill_tokens > 0


def test_the_summary_leaves_out_the_first_update() -> None:
    rows = ROWS["UpdateRows"](PREFILL_SECONDS)
    workload.run(WORK, with_mode(SCHEDULE, "baseline"), rows, max_updates=3)
    counted = rows.rows[1:]
    found = ROWS["summary"](rows.rows)
    assert found["updates"] == 2
    assert found["updates_per_hour"] == pytest.approx(3600 * 2 / sum(row.seconds for row in counted))
    assert found["learner"] == pytest.approx(sum(row.learner for row in counted) / 2)
