"""Any engine, with a check after every load: does it sample from the weights that the learner holds?

An engine can go silently wrong at a weight load: a tied output layer that stays behind, cached keys of the old
weights, a shard that was not sent. Each shows as log-probabilities that part from the learner's. So after every load
the engine samples a few tokens, the learner scores the same tokens, and a run whose two sides differ stops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from sortedrl.core.engine import Change, Engine, Failed, Finished, Request, Sampling, Tokens
from sortedrl.core.rollout import Prompt, Segment

LogprobsOf = Callable[[Sequence[int], Sequence[int]], Sequence[float]]  # context, response -> of each response token
_FIRST_PROBE_ID = -1


class WeightsDiffer(RuntimeError):
    """Engine and learner do not hold the same weights."""


class CheckedWeights:
    """`inner` with the check; `tolerance` is the mean absolute difference, in nats a token, that is still rounding."""

    def __init__(
        self,
        inner: Engine,
        logprobs_of: LogprobsOf,
        probes: Sequence[Sequence[int]],
        *,
        tolerance: float = 0.1,
        tokens_per_probe: int = 16,
    ) -> None:
        self.inner = inner
        self.slots = inner.slots
        self.last_difference = 0.0
        self._logprobs_of = logprobs_of
        self._probes = probes
        self._tolerance = tolerance
        self._tokens_per_probe = tokens_per_probe

    def now(self) -> float:
        return self.inner.now()

    def submit(self, requests: Sequence[Request]) -> None:
        self.inner.submit(requests)

    def poll(self, until: float | None = None) -> list[Change]:
        return self.inner.poll(until)

    def stop(self, ids: Sequence[int]) -> list[Change]:
        return self.inner.stop(ids)

    def load(self, weights: Any, version: int) -> None:
        self.inner.load(weights, version)
        self.last_difference = self.difference()
        if self.last_difference > self._tolerance:
            raise WeightsDiffer(
                f"after loading version {version} the engine's log-probabilities are {self.last_difference:.3g} nats a "
                f"token away from the learner's (allowed: {self._tolerance:g}): the engine does not sample from the "
                "weights that are trained"
            )

    @property
    def load_seconds(self) -> float:
        """Of the last load, the check not counted."""
        return float(getattr(self.inner, "load_seconds", 0.0))

    def rest(self) -> None:
        """Lets an engine that can rest give its memory away until it is needed again."""
        if hasattr(self.inner, "rest"):
            self.inner.rest()

    def close(self) -> None:
        if hasattr(self.inner, "close"):
            self.inner.close()

    def difference(self) -> float:
        """Mean absolute difference of log-probabilities between engine and learner over the probes' responses."""
        differences: list[float] = []
        for probe, segment in zip(self._probes, self._sampled(), strict=True):
            expected = self._logprobs_of(probe, segment.tokens)
            differences += [abs(a - b) for a, b in zip(segment.logprobs, expected, strict=True)]
        return fmean(differences) if differences else 0.0

    def _sampled(self) -> list[Segment]:
        requests = [
            Request(_FIRST_PROBE_ID - i, Prompt(f"probe {i}", probe), (), self._tokens_per_probe, i, Sampling())
            for i, probe in enumerate(self._probes)
        ]
        made = {request.id: Segment([], [], 0) for request in requests}
        left = len(requests)
        self.inner.submit(requests)
        while left:
            for change in self.inner.poll():
                if isinstance(change, Tokens):
                    made[change.id].tokens = [*made[change.id].tokens, *change.segment.tokens]
                    made[change.id].logprobs = [*made[change.id].logprobs, *change.segment.logprobs]
                elif isinstance(change, Finished):
                    left -= 1
                elif isinstance(change, Failed):
                    raise WeightsDiffer(f"a probe of the weights failed: {change.reason}")
        return [made[request.id] for request in requests]
