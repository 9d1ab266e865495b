"""How long would the trained responses have been if none had been cut? An estimate from every attempt of a run.

A schedule that drops aborted responses sees some of them only up to the cut, and those are the long ones. Regenerating
does not fix that: a new attempt is trained on only if it finishes in time (with whole groups, only if the group does).

So the estimate uses all attempts, finished and cut, of all groups. It extends the Kaplan-Meier estimator to prompts
that differ: every group belongs to one of a few latent kinds, and each kind has its own probability to end at each
length. A cut attempt contributes only "longer than this". That is unbiased for any schedule that decides on the basis
of what it has seen so far. The kinds are fitted by expectation maximization; a cut response then counts with its
expected length beyond the cut, averaged over the kinds of its group.
"""

import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import accumulate, chain, pairwise

KINDS = 4
KINDS_APART = 1.2  # initial spread: survival of all attempts, raised to powers from exp(-this) to exp(this)
MOST_STEPS = 300  # lengths at which a response can end; if there are more, neighbors are merged
MOST_ATTEMPTS = 10_000  # for the fit; a longer run uses every n-th group
ROUNDS = 40
PRIOR_ATTEMPTS = 0.5  # per length, with the overall probability: keeps kinds with little data defined
LEAST_CHANCE = 1e-6


class Attempts:
    """All attempts of a run. Feed it every attempt that ended and every rollout that was trained on. Rollouts of a
    group have consecutive numbers."""

    def __init__(self) -> None:
        self.group_size = 1
        self._ended: list[tuple[int, int, bool]] = []  # group, length, and whether it finished
        self._first: dict[int, tuple[int, bool]] = {}  # untrained rollouts: first attempt's length, and was it finished
        self._complete: set[int] = set()  # untrained rollouts whose present attempt has finished
        self._trained = 0
        self._finished_tokens = 0  # of first attempts of trained rollouts
        self._cut: list[tuple[int, int]] = []  # group and length of the other trained rollouts' first attempts

    def ended(self, rollout: int, length: int, *, finished: bool) -> None:
        self._ended.append((rollout // self.group_size, length, finished))
        self._first.setdefault(rollout, (length, finished))
        if finished:
            self._complete.add(rollout)

    def dropped(self, rollout: int, length: int) -> None:
        """Its tokens were discarded: its attempt was cut, unless it had finished."""
        if rollout in self._complete:
            self._complete.remove(rollout)
        else:
            self.ended(rollout, length, finished=False)

    def trained(self, rollout: int, length: int) -> None:
        self._complete.discard(rollout)
        first, finished = self._first.pop(rollout, (length, True))
        self._trained += 1
        if finished:
            self._finished_tokens += first
        else:
            self._cut.append((rollout // self.group_size, first))

    def forget(self, rollout: int) -> None:
        """Forget a rejected rollout."""
        self._complete.discard(rollout)
        self._first.pop(rollout, None)

    @property
    def was_any_cut(self) -> bool:
        """Whether the first attempt of any trained rollout was cut."""
        return bool(self._cut)

    def mean_if_uncut(self) -> float:
        """Mean length of the first attempts of trained rollouts; exact if none was cut."""
        total = float(self._finished_tokens)
        if self._cut:
            total += sum(self._expected_beyond_cuts())
        return total / self._trained if self._trained else 0.0

    def _expected_beyond_cuts(self) -> Iterator[float]:
        steps = _Steps([length for _, length, finished in self._ended if finished])
        seen: defaultdict[int, list[int]] = defaultdict(list)  # group -> codes of its attempts
        for group, length, finished in self._ended:
            seen[group].append(steps.code(length, finished=finished))
        every = -(-len(self._ended) // MOST_ATTEMPTS)
        kinds = _fitted(steps.count, [tuple(codes) for codes in list(seen.values())[::every]])
        beyond = [kind.expected_beyond(steps.means) for kind in kinds]
        for group, cut in self._cut:
            place, posterior = steps.passed(cut), _posterior(kinds, seen[group])
            expected = sum(p * lengths[place] for p, lengths in zip(posterior, beyond, strict=True))
            yield max(cut + 1, expected)  # no response that long has finished: at least one more token


class _Steps:
    """The lengths at which responses ended; neighbors are merged if there are too many."""

    def __init__(self, finished: Sequence[int]) -> None:
        ordered = sorted(finished)
        size = max(1, -(-len(ordered) // MOST_STEPS))
        ends = range(size, len(ordered) + size, size)
        self._last = sorted({ordered[min(end, len(ordered)) - 1] for end in ends})  # greatest length of each step
        places = [0, *(bisect_right(ordered, n) for n in self._last)]
        totals = [0, *accumulate(ordered)]
        self.means = [(totals[b] - totals[a]) / (b - a) for a, b in pairwise(places)]
        self.count = len(self._last)

    def passed(self, length: int) -> int:
        """Number of steps that a response longer than this has passed."""
        return bisect_right(self._last, length)

    def code(self, length: int, *, finished: bool) -> int:
        """An attempt as a number: the step it ended at, or `count` plus the steps it passed before it was cut."""
        return bisect_left(self._last, length) if finished else self.count + self.passed(length)


class _Kind:
    """A kind of group: how common it is, and the probability that a response that reaches a step ends there."""

    def __init__(self, share: float, chances: list[float]) -> None:
        self.log_share, self.chances = math.log(share), chances
        clipped = [min(1 - LEAST_CHANCE, max(LEAST_CHANCE, chance)) for chance in chances]
        passed = [0.0, *accumulate(math.log1p(-chance) for chance in clipped)]
        ended = [before + math.log(chance) for before, chance in zip(passed, clipped, strict=False)]
        self.log_likelihoods = ended + passed  # by an attempt's code

    def expected_beyond(self, means: Sequence[float]) -> list[float]:
        """Mean length of a response by the steps that it has passed; every response ends at the last step."""
        expected = [0.0, means[-1]] if means else [0.0]
        for chance, mean in zip(self.chances[-2::-1], means[-2::-1], strict=True):
            expected.append(chance * mean + (1 - chance) * expected[-1])
        return expected[::-1]


def _fitted(steps: int, groups: Sequence[tuple[int, ...]]) -> list[_Kind]:
    """Kinds fitted by expectation maximization to the codes of each group's attempts."""
    by_code = Counter(chain.from_iterable(groups))
    of_all = _chances(steps, [by_code[code] for code in range(2 * steps + 1)], prior=[0.0] * steps, weight=0.0)
    powers = [math.exp(KINDS_APART * (1 - 2 * kind / (KINDS - 1))) for kind in range(KINDS)]
    kinds = [_Kind(1 / KINDS, [1 - (1 - chance) ** power for chance in of_all]) for power in powers]
    for _ in range(ROUNDS):
        posterior = cache(partial(_posterior, kinds))  # groups of one attempt have few codes
        shares, counts = [1e-3] * KINDS, [[0.0] * (2 * steps + 1) for _ in range(KINDS)]
        for codes in groups:
            for kind, p in enumerate(posterior(codes)):
                shares[kind] += p
                for code in codes:
                    counts[kind][code] += p
        kinds = [
            _Kind(share / sum(shares), _chances(steps, count, of_all, PRIOR_ATTEMPTS))
            for share, count in zip(shares, counts, strict=True)
        ]
    return kinds


def _posterior(kinds: Sequence[_Kind], codes: Sequence[int]) -> list[float]:
    """Posterior probability of each kind for a group with these attempts."""
    logs = [kind.log_share + sum(map(kind.log_likelihoods.__getitem__, codes)) for kind in kinds]
    top = max(logs)
    weights = [math.exp(log - top) for log in logs]
    return [weight / sum(weights) for weight in weights]


def _chances(steps: int, count: Sequence[float], prior: Sequence[float], weight: float) -> list[float]:
    """The probability to end at each step, from attempts counted by code plus `weight` pseudo-attempts of `prior`."""
    ended, cut = count[:steps], count[steps:]
    reached = sum(count) - cut[0]  # cut before the first step: never reached it
    chances = []
    for step in range(steps):
        chances.append((ended[step] + weight * prior[step]) / (reached + weight) if reached + weight > 0 else 0.0)
        reached -= ended[step] + cut[step + 1]
    return chances
