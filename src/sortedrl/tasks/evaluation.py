"""Held-out scores with intervals: mean@k, pass@k, and the difference of two evaluations of the same problems.

All functions are pure and work on `correct[problem][sample]`. Intervals are two-sided, 95%: Wilson's if
every problem was sampled once, otherwise a bootstrap over problems (samples of one problem are not independent, but
problems are). If all problems have the same score or the same difference, a bootstrap has no spread, and Wilson's
interval over the problems is used: 20 of 20 correct is not certainty.

If fewer than 20 problems differ from the others, a percentile bootstrap is too narrow (it covers 84% at worst). Then
the interval is the normal one of the mean with a few problems added: for a difference, one with the largest and one
with its opposite (for right and wrong: Bonett and Price 2012); for scores, two right and two wrong ones (Agresti and
Coull 1998). `benchmarks/interval_coverage.py` measures both.
"""

import math
import random
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, fmean, pstdev
from typing import NamedTuple

Correct = Sequence[Sequence[bool]]

RESAMPLES = 2000
TAIL = 0.025  # on either side of an interval
NORMAL_QUANTILE = NormalDist().inv_cdf(1 - TAIL)
FEW = 20  # with fewer problems that differ from the others, a bootstrap is too narrow


class Estimate(NamedTuple):
    """A value and its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Which samples of which problems are correct. All problems have the same number of samples, at least one.

    `rewards` are those of the samples with a score, in no particular order; `parts` are the means of their parts.
    """

    problem_ids: tuple[str, ...]
    correct: tuple[tuple[bool, ...], ...]
    rewards: tuple[float, ...] = ()
    parts: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        samples_per_problem(self.correct)


def mean_parts(rewards: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each part of a reward, over the rewards that have it."""
    found: dict[str, list[float]] = {}
    for parts in rewards:
        for name, value in parts.items():
            found.setdefault(name, []).append(value)
    return {name: fmean(values) for name, values in found.items()}


def mean_at_k(correct: Correct) -> Estimate:
    """The fraction of correct samples."""
    if samples_per_problem(correct) == 1:
        return wilson(sum(row[0] for row in correct), len(correct))
    return bootstrap([fmean(row) for row in correct])


def pass_at_k(correct: Correct, k: int) -> Estimate:
    """The probability that at least one of k samples is correct: the unbiased estimator from n >= k samples."""
    if not 1 <= k <= (samples := samples_per_problem(correct)):
        raise ValueError(f"pass@{k}: k must be between 1 and the number of samples per problem, {samples}")
    if samples == 1:
        return mean_at_k(correct)
    return bootstrap([pass_probability(samples, sum(row), k) for row in correct])


def pass_probability(samples: int, right: int, k: int) -> float:
    """1 - C(samples - right, k) / C(samples, k): the probability that k draws without replacement are not all wrong."""
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def paired_difference(before: Correct, after: Correct) -> Estimate:
    """Mean of `after` minus mean of `before`, problems paired by position; a bootstrap if enough pairs differ."""
    if len(before) != len(after):
        raise ValueError(f"{len(before)} problems before and {len(after)} after cannot be paired")
    samples_per_problem(before)
    samples_per_problem(after)
    differences = [fmean(new) - fmean(old) for old, new in zip(before, after, strict=True)]
    if min(differences) == max(differences):
        return _equal_difference(differences[0], len(differences))
    if _differing(differences) < FEW:
        largest = max(map(abs, differences))
        return _normal(differences, (-largest, largest), (-1.0, 1.0))
    return _resampled(differences)


def _equal_difference(difference: float, problems: int) -> Estimate:
    """The mean difference if all problems have the same one. Wilson's interval bounds the fraction of problems with
    another one, which can be anything from -1 to 1."""
    others = wilson(0, problems).high
    middle = difference * (1 - others)
    return Estimate(difference, max(-1.0, middle - others), min(1.0, middle + others))


def wilson(right: float, trials: int) -> Estimate:
    """A proportion and Wilson's score interval."""
    share = right / trials
    z = NORMAL_QUANTILE
    scale = 1 + z * z / trials
    middle = (share + z * z / (2 * trials)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return Estimate(share, min(max(middle - half, 0.0), share), max(min(middle + half, 1.0), share))


def bootstrap(scores: Sequence[float]) -> Estimate:
    """The mean of scores in [0, 1] with a percentile bootstrap over them, if enough of them differ."""
    if min(scores) == max(scores):
        return wilson(scores[0] * len(scores), len(scores))
    if _differing(scores) < FEW:
        return _normal(scores, (0.0, 0.0, 1.0, 1.0), (0.0, 1.0))
    return _resampled(scores)


def samples_per_problem(correct: Correct) -> int:
    """The number of samples, checked to be the same for every problem."""
    counts = sorted({len(row) for row in correct})
    if not counts or counts[0] == 0:
        raise ValueError("nothing to evaluate: at least one problem with at least one sample is needed")
    if len(counts) > 1:
        raise ValueError(
            f"problems have between {counts[0]} and {counts[-1]} samples, but all need the same number: "
            "count a lost sample as wrong"
        )
    return counts[0]


def _differing(scores: Sequence[float]) -> int:
    """How many differ from the most frequent one."""
    return len(scores) - max(Counter(scores).values())


def _normal(scores: Sequence[float], added: Sequence[float], possible: tuple[float, float]) -> Estimate:
    """The mean, and the normal interval of the mean of `scores` and `added`, within the possible values."""
    padded = [*scores, *added]
    half = NORMAL_QUANTILE * pstdev(padded) / math.sqrt(len(padded))
    middle = fmean(padded)
    return Estimate(fmean(scores), max(middle - half, possible[0]), min(middle + half, possible[1]))


def _resampled(scores: Sequence[float]) -> Estimate:
    """The mean, and quantiles of the means of resamples. The seed is fixed: the same data give the same interval."""
    draw = random.Random(0)
    means = sorted(fmean(draw.choices(scores, k=len(scores))) for _ in range(RESAMPLES))
    quantiles = statistics.quantiles(means, n=round(1 / TAIL), method="inclusive")
    return Estimate(fmean(scores), quantiles[0], quantiles[-1])
