"""Does the effective sample size predict a collapse? From the results of studies whose metrics include it.

    python benchmarks/studies/ess_alarm.py benchmarks/studies/partial_collapse.jsonl MORE.jsonl ...

A run *falls* at the first cohort whose training responses are correct less often, by more than `FALL`, than those of
its best cohort before; small cohorts are joined. A run is *steady* if it never falls and its held-out score ends at
most `FALL` below its best. Runs that are neither are only counted: the training responses of a cohort that is sampled
at once do not show a fall while it is trained on.

For the falls, the smallest ess_rollout_fraction of the `WINDOW` updates before that cohort is compared with that of
steady runs of the same study, in the same updates:

- AUC: the probability that it is smaller in the falling run; 0.5 is chance. Over all pairs, which also compares
  settings, and over pairs of the same arm.
- The alarm "below `ALARM`": how many falls it precedes, by how many updates (median), and how many of the steady runs
  it hits at any time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

FALL, WINDOW, ALARM = 0.1, 16, 0.3
ESS = "ess_rollout_fraction"
ROLLOUTS_PER_PROMPT, ROLLOUTS_PER_UPDATE, PROMPTS_PER_COHORT = 8, 128, 64  # the defaults, used by all studies here
# Smaller cohorts are joined, because the best of many small ones is mostly luck. Larger ones are cut.
LEAST_UPDATES, MOST_UPDATES = 4, 8


def part_updates(settings: Mapping[str, Any]) -> int:
    """Updates of a cohort: batches within a cohort may be sorted, so only whole cohorts are alike."""
    prompts = int(settings.get("prompts_per_cohort", PROMPTS_PER_COHORT))
    updates = max(1, prompts * ROLLOUTS_PER_PROMPT // ROLLOUTS_PER_UPDATE)
    return min(MOST_UPDATES, updates * -(-LEAST_UPDATES // updates))


def fall(correct: Sequence[float], updates: int) -> int | None:
    """The first update of the cohort in which the run falls; None: it never does."""
    best = -1.0
    for start in range(0, len(correct) - updates + 1, updates):
        mean = fmean(correct[start : start + updates])
        if mean < best - FALL:
            return start
        best = max(best, mean)
    return None


def sizes(run: Mapping[str, Any]) -> list[float]:
    """The effective sample size per update. An update without one, a skipped step, counts as 0."""
    return [0.0 if value is None else value for value in run["series"][ESS]]


def lowest(run: Mapping[str, Any], before: int) -> float:
    """In the window that ends before this update."""
    return min(sizes(run)[max(0, before - WINDOW) : before], default=1.0)


def lead(run: Mapping[str, Any], before: int) -> int | None:
    """Updates from the first alarm in the window to the fall."""
    window = range(max(0, before - WINDOW), before)
    return next((before - place for place in window if sizes(run)[place] < ALARM), None)


def ends_below_its_best(run: Mapping[str, Any]) -> bool:
    scores = run["curve"]["score"]
    return bool(scores[-1] < max(scores) - FALL)


def auc(pairs: Sequence[tuple[float, float]]) -> float | None:
    """The probability that the first of a pair is smaller; ties count as half."""
    return fmean((low < other) + 0.5 * (low == other) for low, other in pairs) if pairs else None


def answer(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """For the runs of one study."""
    falls = [(run, fall(run["series"]["correct"], part_updates(run["settings"]))) for run in runs]
    fallen = [(run, at) for run, at in falls if at is not None]
    never = [run for run, at in falls if at is None]
    steady = [run for run in never if not ends_below_its_best(run)]
    compared = [(run, other, (lowest(run, at), lowest(other, at))) for run, at in fallen for other in steady]
    leads = [found for found in (lead(run, at) for run, at in fallen) if found is not None]
    return {
        "runs": len(runs),
        "falls": len(fallen),
        "falls_in_held_out_score_too": sum(ends_below_its_best(run) for run, _ in fallen),
        "falls_in_held_out_score_only": len(never) - len(steady),
        "auc": auc([pair for _, _, pair in compared]),
        "auc_same_arm": auc([pair for run, other, pair in compared if run["arm"] == other["arm"]]),
        "falls_after_an_alarm": len(leads),
        "lead_in_updates": median(leads) if leads else None,
        "steady": len(steady),
        "steady_runs_with_an_alarm": sum(min(sizes(run)) < ALARM for run in steady),
    }


def main() -> None:
    for name in sys.argv[1:]:
        lines = Path(name).read_text(encoding="utf-8").splitlines()
        runs = [run for run in map(json.loads, lines) if ESS in run.get("series", {})]
        print(Path(name).stem, json.dumps(answer(runs)))


if __name__ == "__main__":
    main()
