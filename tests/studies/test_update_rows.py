"""Rows per update: their parts add up to the time of the run, and their sums to the metrics of the same log."""

from __future__ import annotations

import json
import runpy
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

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


def _mode_of_a_file(mode: str, rows: Sequence[Any], **more: int) -> list[str]:
    """As end_to_end.py writes it, with its own figures as the prediction."""
    found = ROWS["summary"](rows)
    last = {"kind": "mode", "mode": mode, **more, **found, "predicted": found, "peak_tensors_gib": 1.0}
    lines = [{"kind": "update", "mode": mode, **more, **asdict(row)} for row in rows]
    return [json.dumps(line) for line in [*lines, last]]


def test_the_table_compares_with_as_many_updates_of_the_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    table = runpy.run_path(str(BENCHMARKS / "end_to_end_table.py"))
    rows = ROWS["UpdateRows"](PREFILL_SECONDS)
    workload.run(WORK, with_mode(SCHEDULE, "baseline"), rows, max_updates=6)
    path = tmp_path / "end_to_end.jsonl"

    path.write_text(
        "\n".join(
            _mode_of_a_file("baseline", rows.rows)
            + _mode_of_a_file("shorter", rows.rows[:3])
            + _mode_of_a_file("first", rows.rows[:1])
        )
    )
    modes = table["read"](path)
    _, baseline, shorter, first = table["table"](modes).splitlines()
    assert "+0.0%" in baseline and "+0.0%" in shorter  # the prediction is its own summary
    assert all("1.00 x" in line for line in (baseline, shorter, first))  # the same updates on both sides
    assert "first" in first.split()[1] and "%" not in first[: first.index("1.00 x")]  # no prediction for the first
    cut = table["table"](modes, 2).splitlines()
    assert "+0.0%" not in cut[1] and "+0.0%" in cut[2]


def test_the_table_compares_within_a_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is twice as slow in the second round: every mode there takes twice its time."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    table = runpy.run_path(str(BENCHMARKS / "end_to_end_table.py"))
    rows = ROWS["UpdateRows"](PREFILL_SECONDS)
    workload.run(WORK, with_mode(SCHEDULE, "baseline"), rows, max_updates=3)
    slow = [replace(row, seconds=2 * row.seconds) for row in rows.rows]
    path, said = tmp_path / "end_to_end.jsonl", tmp_path / "predictions.jsonl"
    path.write_text(
        "\n".join(
            _mode_of_a_file("baseline", rows.rows, round=1)
            + _mode_of_a_file("same", rows.rows, round=1)
            + _mode_of_a_file("baseline", slow, round=2)
            + _mode_of_a_file("same", slow, round=2)
        )
    )
    modes = table["read"](path)
    *_, second, last = table["table"](modes).splitlines()
    assert second.startswith("baseline (2) ") and last.startswith("same (2) ")
    assert "1.00 x" in last and f"{ROWS['summary'](slow)['updates_per_hour']:.1f}" in last

    per_hour = 2 * ROWS["summary"](rows.rows)["updates_per_hour"]
    known = [{"kind": "prediction", "mode": "same", "updates": n, "updates_per_hour": per_hour} for n in (2, 5)]
    said.write_text("\n".join(map(json.dumps, known)))
    other = [table["predicted_otherwise"](mode, said) for mode in modes]
    assert [mode.predicted for mode in other] == [None, per_hour, None, per_hour]
