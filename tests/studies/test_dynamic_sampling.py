"""Simulated dynamic sampling: what the elevator gains over rounds, and rewards from files and runs."""

import json
import runpy
from pathlib import Path

import pytest

from scenarios import run
from sortedrl.core.configuration import ConfigurationError
from sortedrl.engines.episodes import read_episodes
from sortedrl.engines.lengths import read_lengths
from sortedrl.log.lines import written
from sortedrl.studies.simulate import SimulateSettings
from sortedrl.studies.workload_settings import simulated_workload

TABLE = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "dynamic_sampling.py"))["rows"]
GROUPS = {"rollouts_per_prompt": 8, "whole_groups": True}


@pytest.mark.parametrize("filtered, over_sized, over_rounds", [(0.3, 1.5, 2.3), (0.6, 1.25, 2.1)])
def test_the_elevator_gains_over_sized_and_over_fixed_rounds(
    filtered: float, over_sized: float, over_rounds: float
) -> None:
    """Shorter runs than those of the table in docs/dynamic_sampling.md, so a lower bound at 60 %."""
    of_mode = {row["mode"]: row for row in TABLE(filtered, seeds=1, cohorts=6)}
    unfiltered = {row["mode"]: row for row in TABLE(0.0, seeds=1, cohorts=6)}
    elevator = of_mode["partial+elevator"]
    assert elevator["generated tok/s"] >= 0.97 * unfiltered["partial+elevator"]["generated tok/s"]
    assert elevator["trained tok/s"] >= over_sized * of_mode["baseline"]["trained tok/s"]
    assert elevator["trained tok/s"] >= over_rounds * of_mode["filter-rounds"]["trained tok/s"]


def test_groups_are_filtered_by_the_rewards_in_a_file(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i}", "length": 10 + i, "reward": k * (i % 2)} for i in range(6) for k in range(2)]
    file = tmp_path / "lengths.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    assert read_lengths(file).rewards == ((0.0, 0.0), (0.0, 1.0)) * 3
    csv = tmp_path / "lengths.csv"
    csv.write_text("prompt,length,score\n" + "\n".join(f"{r['prompt']},{r['length']},{r['reward']}" for r in rows))
    assert read_lengths(csv) == read_lengths(file)
    workload = simulated_workload(SimulateSettings(lengths=file, filtered="file", **GROUPS))
    assert workload.equal_groups is not None and workload.equal_groups.by_prompt == (True, False) * 3  # type: ignore[attr-defined]


def test_the_rewards_of_a_run_are_those_of_each_prompts_first_group(tmp_path: Path) -> None:
    sizes = {"epochs": 2, "rollouts_per_prompt": 2, "rollouts_per_update": 2}
    done = run("partial", [2, 3, 4], group_rewards=("right", "mixed"), **sizes)
    (tmp_path / "events.jsonl").write_text(written(done.events))
    assert read_episodes(tmp_path / "events.jsonl").rewards == ((1.0, 1.0), (0.0, 1.0), (1.0, 1.0))


def test_a_filter_by_rewards_needs_them(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("10\n20\n")
    with pytest.raises(ConfigurationError, match="not every response"):
        SimulateSettings(filtered="file", lengths=tmp_path / "lengths.txt", **GROUPS).check()
