"""Whether the servers sample from the weights that are trained: weights that did not arrive must stop the run.

A server reports the version of its tokens, not their weights: a shard or an adapter that was never delivered looks like
staleness. verl computes the learner's log-probabilities of each update before it trains on it. For tokens of the
current version, server and learner must agree but for rounding. As in `engines.checked_weights`, the criterion is a
median: here over uncertain tokens, since most tokens of a trained model are certain under old weights, too. A long
response has a median of its own, so that one server of several with old weights is found by its responses.

With overlap, a batch of a slow learner may have no such token: it was complete before the weights were sent. Then other
finished rollouts are checked (`OtherRollouts`), which the learner scores in addition.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

from sortedrl.core.rollout import Rollout
from sortedrl.engines.checked_weights import WeightsDiffer

_log = logging.getLogger(__name__)
CERTAIN = -0.1  # nats: a token is uncertain if server or learner gives it less
LEAST_TOKENS = 16  # uncertain ones, for a median
MOST_RESPONSES = 64  # checked per update
MOST_OTHERS = 16  # of those that the learner scores in addition
TOLERANCE = 0.1  # nats per token
MAX_FRACTION = 0.1  # of the medians: a few may differ by rounding
MOST_UNCHECKED = 3  # updates, before a check is waited for
MOST_SECONDS, POLL_SECONDS = 60.0, 0.2


class Fresh(NamedTuple):
    """A response with tokens of the current version. `places`: where they are."""

    key: str
    tokens: list[int]
    logprobs: list[float]
    places: list[int]


class OtherRollouts:
    """Finished rollouts that are not in the batch. After a few updates without a check, it waits for some.

    find     those that have tokens of the current version now
    compare  as `check_weights`, by log-probabilities that the learner computes for them
    """

    def __init__(self, find: Callable[[], list[Fresh]], compare: Callable[[list[Fresh]], float | None]) -> None:
        self._find = find
        self._compare = compare
        self._unchecked = 0  # updates in a row

    def check(self, in_batch: float | None) -> float | None:
        """Needed only if nothing in the batch could be compared (None)."""
        difference = in_batch
        deadline = time.monotonic() + (MOST_SECONDS if self._unchecked >= MOST_UNCHECKED else 0.0)
        while difference is None:
            if fresh := self._find():
                difference = self._compare(fresh)
            if difference is None:  # none, or too few tokens
                if time.monotonic() >= deadline:
                    break
                time.sleep(POLL_SECONDS)
        self._unchecked = 0 if difference is not None else self._unchecked + 1
        if self._unchecked > MOST_UNCHECKED:
            _log.warning(
                "the servers' weights were not checked in the last %d updates: no response with tokens of the current "
                "weights ended in time",
                self._unchecked,
            )
        return difference


def fresh_responses(
    rollouts: Sequence[tuple[Rollout, Sequence[str]]], version: int, most: int = MOST_RESPONSES
) -> list[Fresh]:
    """Of rollouts with one trajectory each; if there are many, of some of all lengths."""
    rollouts = [(rollout, keys) for rollout, keys in rollouts if any(s.version == version for s in rollout.segments)]
    step = math.ceil(len(rollouts) / most)
    found: list[Fresh] = []
    for rollout, keys in rollouts[::step] if step else ():
        of_policy = zip(rollout.versions, rollout.mask, strict=True)
        places = [place for place, (made_by, bit) in enumerate(of_policy) if bit and made_by == version]
        if len(keys) == 1 and places:
            found.append(Fresh(keys[0], rollout.tokens, rollout.logprobs, places))
    return found


def check_weights(
    responses: Sequence[Fresh], trained_on: Sequence[list[int]], of_learner: Sequence[list[float]]
) -> float | None:
    """The median difference in nats per token; None if too little can be compared. Raises WeightsDiffer.

    `trained_on` and `of_learner`: each response's tokens as the learner has them, and their log-probabilities. A
    response that its agent loop has edited is not compared.
    """
    medians: list[float] = []
    rest: list[float] = []  # of short responses
    for response, tokens, expected in zip(responses, trained_on, of_learner, strict=True):
        if tokens == response.tokens:
            differences = _differences(response, expected)
            if len(differences) >= LEAST_TOKENS:
                medians.append(median(differences))
            else:
                rest += differences
    if len(rest) >= LEAST_TOKENS:
        medians.append(median(rest))
    apart = [difference for difference in medians if not difference <= TOLERANCE]
    if len(apart) > MAX_FRACTION * len(medians):
        raise WeightsDiffer(
            f"the log-probabilities of the servers are {median(apart):.3g} nats per token away from the learner's "
            f"(allowed: {TOLERANCE:g}), for uncertain tokens of the current version in {len(apart)} of {len(medians)} "
            "samples: the servers do not sample from the weights that are trained"
        )
    return median(medians) if medians else None


def _differences(response: Fresh, expected: Sequence[float]) -> list[float]:
    pairs = [(response.logprobs[place], expected[place]) for place in response.places]
    return [abs(a - b) for a, b in pairs if not (a >= CERTAIN and b >= CERTAIN)]  # also if one is not a number
