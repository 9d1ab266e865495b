"""Numbers that README.md and docs/concepts.md state: measured ones are those of the raw files, simulated ones what the
simulator gives today."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sortedrl.core.events import Event, Updated
from sortedrl.core.schedule import Schedule
from sortedrl.observe.run_metrics import RunMetrics
from sortedrl.studies.simulate import SimulateSettings
from sortedrl.studies.workload import run, with_mode
from sortedrl.studies.workload_settings import simulated_schedule, simulated_workload

ROOT = Path(__file__).parents[2]


def rows_under(page: str, header: str) -> list[list[str]]:
    """The cells of the Markdown table with this header."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    first = lines.index(header) + 2
    table = lines[first : next(place for place in range(first, len(lines)) if not lines[place].startswith("|"))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_the_readme_s_measured_table_is_that_of_the_raw_files() -> None:
    files = sorted((ROOT / "benchmarks" / "measured" / "h200-8b").glob("end_to_end_nine*.jsonl"))
    command = [sys.executable, str(ROOT / "benchmarks" / "end_to_end_table.py"), *map(str, files)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    header = "| schedule | trained tokens/s | gain | bubble | mean staleness |"
    modes = ("baseline", "partial", "partial+elevator", "partial+elevator:reuse")
    for mode, (_, *stated) in zip(modes, rows_under("README.md", header), strict=True):
        (row,) = [line for line in printed.splitlines() if line.split()[0] == mode]
        found = re.search(r"(\d+) +([\d.]+x).* ([\d.]+)% +[\d.]+% +([\d.]+) +[\d.]+$", row)
        assert found is not None
        tokens, gain, bubble, staleness = found.groups()
        assert stated == [
            f"{int(tokens):,}",
            gain,
            f"{float(bubble):.0f}%",
            f"{float(staleness):.1f}".replace("0.0", "0"),
        ]


def reference(mode: str, *, expectation: str = "cold", reuse_kv_cache: bool = False) -> RunMetrics:
    """A row of `sortedrl simulate`."""
    settings = SimulateSettings(reuse_kv_cache=reuse_kv_cache)
    workload = replace(simulated_workload(settings), expectation=expectation)
    return run(workload, with_mode(simulated_schedule(settings), mode))


def test_the_page_of_modes_states_the_gains_and_staleness_that_simulate_prints() -> None:
    base = reference("baseline").trained_tokens_per_hour
    for wanted, use, gain, staleness in rows_under("docs/concepts.md", "| you want | use | gain | staleness |"):
        found = reference(
            use.split("`")[1],
            expectation="warm" if "second epoch" in use else "cold",
            reuse_kv_cache="reuse_kv_cache" in use,
        )
        printed = f"{found.trained_tokens_per_hour / base:.2f}x", f"{found.staleness_mean:.2f}"
        assert printed == (gain, staleness), wanted
        if "discards" in use:
            assert f"discards {100 * found.waste:.0f}%" in use


def test_how_sorted_the_updates_are() -> None:
    elevator = [reference("partial+elevator", expectation=known).sortedness for known in ("cold", "warm", "oracle")]
    cold, warm, oracle, partial = (f"{value:.2f}" for value in (*elevator, reference("partial").sortedness))
    page = " ".join((ROOT / "docs/concepts.md").read_text(encoding="utf-8").split())
    assert f"is {cold} in a first epoch, {warm} after one epoch and {oracle} with nearly known lengths" in page
    assert f"`partial` reaches {partial} without lengths," in page


def trained_lengths(mode: str) -> list[tuple[int, ...]]:
    """Of each update, on twenty cohorts of the reference workload."""
    found: list[tuple[int, ...]] = []

    def collect(event: Event) -> None:
        if isinstance(event, Updated):
            found.append(event.lengths)

    run(simulated_workload(SimulateSettings(cohorts=20)), Schedule(mode=mode), collect)
    return found


def mean_of(updates: list[tuple[int, ...]]) -> float:
    return sum(map(sum, updates)) / sum(map(len, updates))


@pytest.mark.slow
def test_how_much_shorter_the_first_updates_are() -> None:
    of_mode = {mode: trained_lengths(mode) for mode in ("baseline", "partial", "partial+lookahead", "partial+elevator")}
    of_dataset = mean_of(of_mode["baseline"])
    after = [1, 4, 8, 20, 40, 60]
    header = f"| after updates | {' | '.join(map(str, after))} |"
    for modes, *stated in rows_under("docs/concepts.md", header):
        for mode in modes.split("`")[1::2]:
            shorter = [f"{100 * (1 - mean_of(of_mode[mode][:updates]) / of_dataset):z.0f}%" for updates in after]
            assert shorter == stated, mode
