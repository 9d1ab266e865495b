"""How often 95% intervals of held-out scores and gains cover the true value, if few problems differ from the others.

    python benchmarks/interval_coverage.py          # about 6 minutes on one core

Gains: one sample per problem; exact sums over all outcomes of 100 problems. The smallest coverage over six ratios of
better to worse problems, of the intervals as printed and of the bootstrap alone. Scores: 4 samples per problem, drawn;
most problems are never solved, the others with any probability.
"""

from __future__ import annotations

import argparse
import math
import random
from functools import cache
from statistics import fmean

from sortedrl.tasks.evaluation import Estimate, _resampled, bootstrap, paired_difference

PROBLEMS = 100
DIFFERING = (2, 4, 6, 8, 10, 15, 20, 30, 40)
BETTER = (1.0, 0.95, 0.9, 0.8, 0.65, 0.5)
SAMPLES = 4


@cache
def printed_gain(better: int, worse: int) -> Estimate:
    same = PROBLEMS - better - worse
    before = [[False]] * better + [[True]] * (worse + same)
    return paired_difference(before, [[True]] * better + [[False]] * worse + [[True]] * same)


@cache
def bootstrap_gain(better: int, worse: int) -> Estimate:
    if better + worse == 0:
        return printed_gain(0, 0)  # a bootstrap has no spread
    return _resampled([1.0] * better + [-1.0] * worse + [0.0] * (PROBLEMS - better - worse), 0.95)


def coverage_of_gains(differing: float, share_better: float) -> tuple[float, float]:
    """Of the printed interval and of the bootstrap, if so many problems differ on average."""
    up, down = differing * share_better / PROBLEMS, differing * (1 - share_better) / PROBLEMS
    covered = [0.0, 0.0]
    for better in range(PROBLEMS + 1):
        for worse in range(PROBLEMS + 1 - better):
            ways = math.comb(PROBLEMS, better) * math.comb(PROBLEMS - better, worse)
            probability = ways * up**better * down**worse * (1 - up - down) ** (PROBLEMS - better - worse)
            if probability > 1e-5:
                for kind, interval in enumerate((printed_gain(better, worse), bootstrap_gain(better, worse))):
                    covered[kind] += probability * _covers(interval, up - down)
    return covered[0], covered[1]


def coverage_of_scores(differing: float, draws: int) -> tuple[float, float]:
    """The mean score of so many problems of 100 on average is 1/2; the others have 0."""
    draw = random.Random(0)
    covered = [0, 0]
    for _ in range(draws):
        scores = []
        for _ in range(PROBLEMS):
            chance = draw.random() if draw.random() < differing / PROBLEMS else 0.0
            scores.append(fmean(draw.random() < chance for _ in range(SAMPLES)))
        for kind, interval in enumerate((bootstrap(scores), _bootstrap_alone(scores))):
            covered[kind] += _covers(interval, differing / PROBLEMS / 2)
    return covered[0] / draws, covered[1] / draws


def _bootstrap_alone(scores: list[float]) -> Estimate:
    return _resampled(scores) if max(scores) > min(scores) else bootstrap(scores)


def _covers(interval: Estimate, true: float) -> bool:
    return interval.low - 1e-12 <= true <= interval.high + 1e-12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--draws", type=int, default=1000, help="simulated evaluations per row of the scores")
    arguments = parser.parse_args()
    print("differing of 100 | gain: printed, bootstrap alone | score: printed, bootstrap alone")
    for differing in DIFFERING:
        gains = [coverage_of_gains(differing, share) for share in BETTER]
        scores = coverage_of_scores(differing, arguments.draws)
        smallest = [min(column) for column in zip(*gains, strict=True)]
        print(f"{differing:16} | {smallest[0]:.3f}, {smallest[1]:.3f} | {scores[0]:.3f}, {scores[1]:.3f}", flush=True)


if __name__ == "__main__":
    main()
