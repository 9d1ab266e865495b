"""A study at equal time: the score of two runs of a seed when the faster one ends, and the area under both until then.

    python benchmarks/studies/equal_time.py headline_pretrained

Every arm against `baseline`. Scores between two evaluations are interpolated over the seconds of training, which leave
out evaluations. Intervals are paired by seed, as those of `sortedrl compare`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from sortedrl.studies.compare.paired import difference

TIMES = 400  # at which the area samples a curve


def until(run: dict[str, Any], seconds: float) -> tuple[float, float]:
    """The score at that time, and the mean score until then."""
    curve = run["curve"]
    scores = np.interp(np.linspace(0, seconds, TIMES), curve["seconds"], curve["score"])
    return float(scores[-1]), float(np.trapezoid(scores) / (TIMES - 1))


def main() -> None:
    for name in sys.argv[1:]:
        lines = (Path(__file__).parent / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        runs = {(run["arm"], run["seed"]): run for run in map(json.loads, lines) if "curve" in run}
        for arm in dict.fromkeys(arm for arm, _ in runs if arm != "baseline"):
            seeds = sorted(seed for other, seed in runs if other == arm and ("baseline", seed) in runs)
            both: list[tuple[float, ...]] = []
            for seed in seeds:
                pair = runs[arm, seed], runs["baseline", seed]
                end = min(run["curve"]["seconds"][-1] for run in pair)
                both.append((*until(pair[0], end), *until(pair[1], end)))
            score, area, minus_score, minus_area = zip(*both, strict=True)
            for what, gap in (("score", difference(score, minus_score)), ("area", difference(area, minus_area))):
                interval = f" [{gap.t_interval.low:+.3f}, {gap.t_interval.high:+.3f}]" if gap.t_interval else ""
                print(
                    f"{name} {arm} minus baseline, {what} at equal time, {len(seeds)} seeds: {gap.mean:+.3f}{interval}"
                )


if __name__ == "__main__":
    main()
