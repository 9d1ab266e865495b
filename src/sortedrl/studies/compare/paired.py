"""Paired differences with intervals, for runs that share their seeds.

Two arms with the same seed see the same prompts in the same order, so the effect of the seed cancels in their
difference. The t interval is the one to quote. The percentile bootstrap over seeds assumes no distribution, but it is
too narrow for few seeds.

A run that never reaches the threshold is censored: its time is known to be longer than the run, and no more. Leaving
such runs out would favor the worse arm. Here they count in three ways, none of which needs the missing time:

- the median of an arm, with censored runs above all others; unknown if half of the runs or more are censored;
- the restricted mean: every time counts up to the horizon, the shortest censored run. It understates the difference
  between an arm that reaches the threshold late and one that never does;
- the sign test: in how many pairs was one arm first? A pair in which neither run is known to be first does not count.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, stdev

from sortedrl.studies.compare.results import Reached

CONFIDENCE = 0.95
POWER = 0.80
RESAMPLES = 4000
ENOUGH_SEEDS = 8  # fewer are an anecdote


@dataclass(frozen=True, slots=True)
class Interval:
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Difference:
    """One arm minus the other. One pair has a mean and nothing else, and so have pairs with the same difference: as
    with few problems and few seeds, they show no spread, but are no certainty."""

    pairs: int
    arm_mean: float
    minus_mean: float
    mean: float
    standard_error: float | None = None
    t_interval: Interval | None = None
    bootstrap_interval: Interval | None = None
    smallest_visible: float | None = None  # true difference that so many seeds show with 80% probability
    relative: float | None = None  # to the mean of the other arm, if that is positive


@dataclass(frozen=True, slots=True)
class Censoring:
    """What the threshold adds to the restricted means in `Difference`."""

    arm_censored: int
    minus_censored: int
    horizon: float | None  # None: all runs reached the threshold, and the means are not restricted
    arm_median: float | None
    minus_median: float | None
    arm_first: int  # pairs
    minus_first: int
    sign_test_p: float


def difference(arm: Sequence[float], minus: Sequence[float]) -> Difference:
    """Values of the same seeds, in the same order; at least one."""
    differences = [a - b for a, b in zip(arm, minus, strict=True)]
    count, mean, minus_mean = len(differences), fmean(differences), fmean(minus)
    found = Difference(count, fmean(arm), minus_mean, mean, relative=mean / minus_mean if minus_mean > 0 else None)
    if count < 2 or max(differences) - min(differences) <= 1e-12 * max(map(abs, (*arm, *minus))):
        return found
    error, half = stdev(differences) / math.sqrt(count), half_width(differences)
    return replace(
        found,
        standard_error=error,
        t_interval=Interval(mean - half, mean + half),
        bootstrap_interval=_bootstrap(differences),
        smallest_visible=half + t_quantile(POWER, count - 1) * error,
    )


def half_width(values: Sequence[float]) -> float:
    """Of the t interval of their mean."""
    return t_quantile((1 + CONFIDENCE) / 2, len(values) - 1) * (stdev(values) / math.sqrt(len(values)))


def threshold_difference(arm: Sequence[Reached], minus: Sequence[Reached]) -> tuple[Difference, Censoring]:
    """The difference of restricted means, and what is known beside it."""
    horizon = min((run.at for run in (*arm, *minus) if run.censored), default=None)
    restricted = [[run.at if horizon is None else min(run.at, horizon) for run in runs] for runs in (arm, minus)]
    # Known to be first: it reached the threshold, and the other had not yet.
    arm_first = sum(not a.censored and a.at < b.at for a, b in zip(arm, minus, strict=True))
    minus_first = sum(not b.censored and b.at < a.at for a, b in zip(arm, minus, strict=True))
    return difference(*restricted), Censoring(
        arm_censored=sum(run.censored for run in arm),
        minus_censored=sum(run.censored for run in minus),
        horizon=horizon,
        arm_median=median_time(arm),
        minus_median=median_time(minus),
        arm_first=arm_first,
        minus_first=minus_first,
        sign_test_p=sign_test(arm_first, minus_first),
    )


def median_time(runs: Sequence[Reached]) -> float | None:
    """Censored runs are above all others. None if the median is among them, or next to one."""
    found: float = median(math.inf if run.censored else run.at for run in runs)
    return found if math.isfinite(found) else None


def sign_test(wins: int, losses: int) -> float:
    """Two-sided probability of a result at least as uneven if both arms were equal."""
    count = wins + losses
    tail = sum(math.comb(count, k) for k in range(min(wins, losses) + 1)) / math.ldexp(1.0, count)
    return min(1.0, 2 * tail)


def t_quantile(probability: float, degrees: int) -> float:
    """The value below which a variable with Student's t distribution lies with this probability, of 0.5 or more; by
    bisection."""
    within, low, high = 2 * probability - 1, 0.0, 1.0
    while t_within(high, degrees) < within:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_within(middle, degrees) < within else (low, middle)
    return (low + high) / 2


def t_within(limit: float, degrees: int) -> float:
    """The probability that a t variable lies between -limit and limit: the finite series for whole degrees."""
    angle = math.atan2(limit, math.sqrt(degrees))
    sine, cosine, is_odd = math.sin(angle), math.cos(angle), degrees % 2
    term, total = cosine if is_odd else 1.0, 0.0
    for k in range(1 + is_odd, degrees, 2):
        total += term
        term *= k / (k + 1) * cosine * cosine
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total


def _bootstrap(differences: Sequence[float]) -> Interval:
    """Percentiles of the mean over resampled seeds. The seed of the resampling is fixed: the same data give the same
    interval."""
    draw, count = random.Random(0), len(differences)
    found = sorted(sum(draw.choices(differences, k=count)) / count for _ in range(RESAMPLES))
    tail = (1 - CONFIDENCE) / 2
    return Interval(found[round(tail * (RESAMPLES - 1))], found[round((1 - tail) * (RESAMPLES - 1))])
