"""Wraps any engine and checks after every weight update that it samples from the learner's weights.

A weight update can fail silently: a tied output layer is not updated, stale KV stays in the prefix cache, a shard is
not sent. So after every weight update the engine samples a few tokens for each probe prompt, the learner scores the
same tokens, and the run stops if they differ. The check fails closed: a probe without a response, with the wrong number
of tokens, or with a log-probability that is not finite is a failure. EOS does not end a probe, and each probe is
checked separately, so one server with old weights is not averaged away in a pool.

In bfloat16 a few unlikely tokens, such as those after EOS, can differ by a nat with equal weights. So the criterion is
the median over a probe's tokens; the mean may be ten times as large.
"""

import math
from collections.abc import Callable, Sequence
from numbers import Real
from statistics import fmean, median
from typing import Any

from sortedrl.core.engine import Engine, EngineBase, EngineInfo, ForwardingEngine, Request, Sampling, with_defaults
from sortedrl.core.errors import UserError
from sortedrl.core.rollout import Prompt
from sortedrl.engines.generate import ATTEMPTS, NotInTime, Response, generate

LogprobsOf = Callable[[Sequence[int], Sequence[int]], Sequence[float]]  # context, response -> one per response token
_FIRST_PROBE_ID = -1
_MEAN_PER_MEDIAN = 10.0  # the limit of a probe's mean difference, in units of the limit of its median


class WeightsDiffer(UserError, RuntimeError):
    """Engine and learner do not hold the same weights, or the check could not confirm that they do."""


class CheckedWeights(ForwardingEngine):
    """Wraps `inner` with the check.

    tolerance         largest median absolute difference over a probe, in nats per token, that counts as rounding
    tokens_per_probe  must fit in the engine's context after every probe
    probe_seconds     time limit for all probes together, including retries, on the engine's clock
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
            raise ValueError(f"{len(probes)} probes of {tokens_per_probe} tokens check nothing: give at least 1")
        super().__init__(inner)
        self.inner: EngineBase = with_defaults(inner)
        self.last_difference = 0.0
        self.weight_update_seconds = 0.0  # of the last one, without the check
        self._logprobs_of = logprobs_of
        self._probes = probes
        self._tolerance = tolerance
        self._tokens_per_probe = tokens_per_probe
        self._probe_seconds = probe_seconds

    def update_weights(self, weights: Any, version: int) -> None:
        began = self.inner.now()
        self.inner.update_weights(weights, version)
        self.weight_update_seconds = self.inner.now() - began
        self.check(f"after the weight update to version {version}")

    def check(self, when: str) -> None:
        """Raise WeightsDiffer unless engine and learner agree; the message starts with `when`."""
        try:
            self.last_difference = self.difference()
        except WeightsDiffer as error:
            raise WeightsDiffer(f"{when}, the check of the engine's weights failed: {error}") from None
        if self.last_difference > self._tolerance:
            raise WeightsDiffer(
                f"{when}, the engine's log-probabilities are {self.last_difference:.3g} nats per token away from the "
                f"learner's (allowed: {self._tolerance:g}): the engine does not sample from the weights that are "
                "trained"
            )

    @property
    def is_available(self) -> bool:
        return self.inner.is_available

    def info(self) -> EngineInfo:
        return self.inner.info()

    def sleep(self) -> None:
        self.inner.sleep()

    def sleep_until_update(self) -> None:
        self.inner.sleep_until_update()

    def close(self) -> None:
        self.inner.close()

    def difference(self) -> float:
        """The largest difference between engine and learner over the probes, in nats per token.

        Always finite: raises WeightsDiffer if a response is unusable.
        """
        return max(
            self._difference_of(place, probe, answer)
            for place, (probe, answer) in enumerate(zip(self._probes, self._answers(), strict=True))
        )

    def _difference_of(self, place: int, probe: Sequence[int], answer: Response) -> float:
        wanted, found = self._tokens_per_probe, len(answer.tokens)
        if found != wanted:
            what = f"{found} tokens instead of {wanted}, after a prompt of {len(probe)}, though it set ignore_eos"
            raise WeightsDiffer(f"the response to probe {place} has {what}")
        expected = self._logprobs_of(probe, answer.tokens)
        for side, logprobs in (("engine", answer.logprobs), ("learner", expected)):
            odd = [logprob for logprob in logprobs if not (isinstance(logprob, Real) and math.isfinite(logprob))]
            if odd:
                what = f"{len(odd)} of {wanted} log-probabilities of the {side} for probe {place}"
                raise WeightsDiffer(f"{what} are not finite (first: {odd[0]})")
        differences = [abs(a - b) for a, b in zip(answer.logprobs, expected, strict=True)]
        return max(median(differences), fmean(differences) / _MEAN_PER_MEDIAN)

    def _answers(self) -> list[Response]:
        """Wait for one response per probe. No probe is left in the engine, even on error."""
        sampling = Sampling(ignore_eos=True)
        requests = [
            Request(_FIRST_PROBE_ID - i, Prompt(f"probe {i}", probe), (), self._tokens_per_probe, i, sampling)
            for i, probe in enumerate(self._probes)
        ]
        try:
            answers = generate(self.inner, requests, limit_seconds=self._probe_seconds)
        except NotInTime as error:
            late = f"{error.unfinished} of {len(requests)} probes"
            raise WeightsDiffer(f"{late} did not finish within {self._probe_seconds:g} s") from None
        for answer in answers:
            if answer.failure is not None:
                raise WeightsDiffer(f"a probe failed {ATTEMPTS} times, most recently because: {answer.failure}")
        return answers
