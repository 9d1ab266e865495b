"""Dynamic sampling, simulated: the elevator that refills slots beside rounds, with 30 and 60% of the groups filtered.

    python benchmarks/dynamic_sampling.py                        # the table of docs/dynamic_sampling.md
    python benchmarks/dynamic_sampling.py --out FILE.csv

8B on one H200 (preset h200-8b), groups of 8, 128 slots, updates of 128, expected lengths cold, the KV cache kept across
weight updates.
"""

from __future__ import annotations

import argparse
import csv
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from sortedrl.core.group_filter import EQUAL_REWARDS
from sortedrl.core.schedule import Schedule
from sortedrl.engines.lengths import DrawnEqual
from sortedrl.engines.step_time import PRESETS
from sortedrl.studies.simulate import Case, compare
from sortedrl.studies.workload import Workload

MODES = ("baseline", "filter-rounds", "filter-rounds+refill", "on-policy+planned", "partial+elevator")
COLUMNS = ("filtered", "mode", "trained tok/s", "generated tok/s", "bubble", "staleness")


def cases(filtered: float, cohorts: int) -> list[Case]:
    schedule = Schedule(
        rollouts_per_prompt=8,
        whole_groups=True,
        rollouts_per_update=128,
        prompts_per_cohort=64,
        max_filtered_fraction=1,
    )
    workload = Workload(step_time=PRESETS["h200-8b"], slots=128, prompts=64 * cohorts, reuse_kv_cache=True)
    if filtered:
        schedule = replace(schedule, filter_groups=EQUAL_REWARDS)
        workload = replace(workload, equal_groups=DrawnEqual(filtered))
    modes = MODES if filtered else ("baseline", "partial+elevator")
    return [Case(mode, workload, replace(schedule, mode=mode)) for mode in modes]


def rows(filtered: float, seeds: int = 5, cohorts: int = 12) -> list[dict[str, Any]]:
    found = compare(cases(filtered, cohorts), range(seeds))
    return [
        {
            "filtered": f"{filtered:.0%}",
            "mode": mode,
            "trained tok/s": round(metrics["goodput"]),
            "generated tok/s": round(metrics["generated_tokens"] / metrics["seconds"]),
            "bubble": f"{metrics['bubble']:.1%}",
            "staleness": f"{metrics['staleness_mean']:.2f}",
        }
        for mode, metrics in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    table = [row for filtered in (0.0, 0.3, 0.6) for row in rows(filtered)]
    with arguments.out.open("w", newline="") if arguments.out else sys.stdout as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(table)


if __name__ == "__main__":
    main()
