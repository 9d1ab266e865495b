"""The studies of dynamic sampling at equal generated rollouts: filtered ones cost as much as those trained on.

    python benchmarks/studies/equal_generation.py filter_groups filter_groups_searching

Scores between two evaluations are interpolated. Intervals are paired by seed, as those of `sortedrl compare`.
"""

from __future__ import annotations

import json
import sys
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

STUDENT_T = {8: 2.365, 12: 2.201, 16: 2.131}  # two-sided 95%, by seeds
CONTRASTS = (("filter", "off"), ("revisit-a-quarter", "filter"))


def generated(run: dict[str, Any]) -> list[float]:
    """Rollouts generated and complete at each evaluation."""
    trained = [0, *accumulate(run["rollouts_per_update"])]
    filtered = [0.0, *run["series"]["filtered_fraction"]]
    return [trained[update] / (1 - filtered[update]) for update in run["curve"]["update"]]


def score_at(run: dict[str, Any], rollouts: float) -> float:
    points = list(zip(generated(run), run["curve"]["score"], strict=True))
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= rollouts <= x1:
            return float(y0 + (y1 - y0) * (rollouts - x0) / (x1 - x0))
    raise ValueError(f"{rollouts} rollouts are beyond the run's {points[-1][0]}")


def main() -> None:
    for name in sys.argv[1:]:
        lines = (Path(__file__).parent / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        runs = {(run["arm"], run["seed"]): run for run in map(json.loads, lines) if "arm" in run}
        seeds = sorted({seed for _, seed in runs})
        for arm in dict.fromkeys(arm for arm, _ in runs):
            filtered = fmean(runs[arm, seed]["series"]["filtered_fraction"][-1] for seed in seeds)
            rollouts = fmean(generated(runs[arm, seed])[-1] for seed in seeds)
            print(f"{name} {arm}: {filtered:.1%} filtered, {rollouts:,.0f} rollouts generated")
        for arm, minus in CONTRASTS:
            gaps = []
            for seed in seeds:
                pair = runs[arm, seed], runs[minus, seed]
                shared = min(generated(run)[-1] for run in pair)
                gaps.append(score_at(pair[0], shared) - score_at(pair[1], shared))
            error = stdev(gaps) / len(gaps) ** 0.5
            low, high = (fmean(gaps) + sign * STUDENT_T[len(gaps)] * error for sign in (-1, 1))
            print(f"{name} {arm} minus {minus}, equal generated: {fmean(gaps):+.3f} [{low:+.3f}, {high:+.3f}]")


if __name__ == "__main__":
    main()
