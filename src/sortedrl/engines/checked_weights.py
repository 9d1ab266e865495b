"""Any engine, with a check after every weight update: does it sample from the weights that the learner holds?

An engine can go silently wrong at a weight update: a tied output layer that stays behind, cached keys of the old
weights, a shard that was not sent. Each shows as log-probabilities that differ from the learner's. So after every
weight update the engine samples a few tokens behind each probe, the learner scores the same tokens, and a run whose two
sides differ stops.

The check fails closed: a probe without an answer, with fewer or more tokens than were asked for, or with a
log-probability that is not a finite number is a failure, never agreement. EOS does not end a probe, and each probe is
judged by itself: in a pool one server with old weights does not hide behind the others.

In bfloat16 a few unlikely tokens, such as those behind EOS, can be a nat apart with equal weights. So a probe is judged
by the median over its tokens; its mean may be ten times as far off.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from numbers import Real
from statistics import fmean, median
from typing import Any

from sortedrl.core.engine import Change, Engine, Failed, Finished, Request, Sampling, Tokens
from sortedrl.core.rollout import Prompt

LogprobsOf = Callable[[Sequence[int], Sequence[int]], Sequence[float]]  # context, response -> of each response token
_FIRST_PROBE_ID = -1
_ATTEMPTS = 4  # of one probe whose request fails
_MEAN_PER_MEDIAN = 10.0  # how much further apart the mean over a probe may be than its median
_RETRY_SECONDS = 0.5  # before the second attempt; doubled for each further one


class WeightsDiffer(RuntimeError):
    """Engine and learner do not hold the same weights, or the engine gave no answer that shows it."""


class _Answer:
    """What the engine has made behind one probe."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.attempts = 1
        self.tokens: list[int] = []
        self.logprobs: list[float] = []

    def forget(self) -> None:
        self.attempts += 1
        self.tokens, self.logprobs = [], []


class CheckedWeights:
    """`inner` with the check.

    tolerance         median absolute difference over a probe, in nats per token, that is still rounding
    tokens_per_probe  must fit behind every probe in the engine's context
    probe_seconds     for all probes together, retries included, by the engine's clock
    """

    def __init__(
        self,
        inner: Engine,
        logprobs_of: LogprobsOf,
        probes: Sequence[Sequence[int]],
        *,
        tolerance: float = 0.1,
        tokens_per_probe: int = 16,
        probe_seconds: float = 300.0,
    ) -> None:
        if not probes or tokens_per_probe < 1:
            raise ValueError(
                f"{len(probes)} probes of {tokens_per_probe} tokens check nothing: give at least 1 of each"
            )
        self.inner = inner
        self.slots = inner.slots
        self.last_difference = 0.0
        self._logprobs_of = logprobs_of
        self._probes = probes
        self._tolerance = tolerance
        self._tokens_per_probe = tokens_per_probe
        self._probe_seconds = probe_seconds

    def now(self) -> float:
        return self.inner.now()

    def submit(self, requests: Sequence[Request]) -> None:
        self.inner.submit(requests)

    def poll(self, until: float | None = None) -> list[Change]:
        return self.inner.poll(until)

    def abort(self, ids: Sequence[int]) -> list[Change]:
        return self.inner.abort(ids)

    def update_weights(self, weights: Any, version: int) -> None:
        self.inner.update_weights(weights, version)
        self.check(f"after the weight update to version {version}")

    def check(self, when: str) -> None:
        """Raise WeightsDiffer unless engine and learner agree; `when` begins the message."""
        try:
            self.last_difference = self.difference()
        except WeightsDiffer as error:
            raise WeightsDiffer(f"{when} the check of the engine's weights failed: {error}") from None
        if self.last_difference > self._tolerance:
            raise WeightsDiffer(
                f"{when} the engine's log-probabilities are {self.last_difference:.3g} nats per token away from the "
                f"learner's (allowed: {self._tolerance:g}): the engine does not sample from the weights that are "
                "trained"
            )

    @property
    def weight_update_seconds(self) -> float:
        """Of the last load, the check not counted."""
        return float(getattr(self.inner, "weight_update_seconds", 0.0))

    def sleep(self) -> None:
        """Lets an engine that can rest give its memory away until it is needed again."""
        if hasattr(self.inner, "sleep"):
            self.inner.sleep()

    def close(self) -> None:
        if hasattr(self.inner, "close"):
            self.inner.close()

    def difference(self) -> float:
        """Difference between engine and learner, in nats per token, of the probe that differs most.

        A finite number, always: raises WeightsDiffer where an answer does not allow to tell.
        """
        return max(
            self._difference_of(place, probe, answer)
            for place, (probe, answer) in enumerate(zip(self._probes, self._answers(), strict=True))
        )

    def _difference_of(self, place: int, probe: Sequence[int], answer: _Answer) -> float:
        wanted = self._tokens_per_probe
        if len(answer.tokens) != wanted:
            raise WeightsDiffer(
                f"the answer to probe {place} has {len(answer.tokens)} tokens, {wanted} were asked for behind a prompt "
                f"of {len(probe)}"
            )
        expected = self._logprobs_of(probe, answer.tokens)
        for side, logprobs in (("engine", answer.logprobs), ("learner", expected)):
            odd = [logprob for logprob in logprobs if not _is_finite(logprob)]
            if odd:
                raise WeightsDiffer(
                    f"{len(odd)} of {wanted} log-probabilities of the {side} for probe {place} are not finite numbers "
                    f"(the first: {odd[0]})"
                )
        differences = [abs(a - b) for a, b in zip(answer.logprobs, expected, strict=True)]
        return max(median(differences), fmean(differences) / _MEAN_PER_MEDIAN)

    def _answers(self) -> list[_Answer]:
        """One for each probe, when all have come. Nothing of the probes is left in the engine, whatever happens."""
        sampling = Sampling(ignore_eos=True)
        answers = [
            _Answer(Request(_FIRST_PROBE_ID - i, Prompt(f"probe {i}", probe), (), self._tokens_per_probe, i, sampling))
            for i, probe in enumerate(self._probes)
        ]
        awaited = {answer.request.id: answer for answer in answers}
        deadline = self.inner.now() + self._probe_seconds
        self.inner.submit([answer.request for answer in answers])
        try:
            while awaited:
                if self.inner.now() >= deadline:
                    raise WeightsDiffer(
                        f"{len(awaited)} of {len(answers)} probes were not answered within {self._probe_seconds:g} s"
                    )
                for change in self.inner.poll(deadline):
                    self._take(change, awaited)
        except WeightsDiffer:
            self.inner.abort(list(awaited))
            raise
        return answers

    def _take(self, change: Change, awaited: dict[int, _Answer]) -> None:
        answer = awaited.get(change.id)
        if answer is None:
            return
        if isinstance(change, Tokens):
            answer.tokens += change.segment.tokens
            answer.logprobs += change.segment.logprobs
        elif isinstance(change, Finished):
            del awaited[change.id]
        elif isinstance(change, Failed):
            if answer.attempts == _ATTEMPTS:
                del awaited[change.id]
                raise WeightsDiffer(f"a probe failed {_ATTEMPTS} times, the last time: {change.reason}")
            time.sleep(_RETRY_SECONDS * 2 ** (answer.attempts - 1))
            answer.forget()
            self.inner.submit([answer.request])


def _is_finite(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)
