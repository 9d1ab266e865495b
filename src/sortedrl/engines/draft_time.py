"""What drafts do to step times in the simulator.

A simulated step yields one token per request. With drafts a step of the engine yields `acceptance` tokens per request
on average, so a simulated step takes 1 / acceptance of the engine's. That treats all requests alike; over a response of
hundreds of steps the difference averages out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from sortedrl.engines.step_time import StepTime

When = Literal["none", "tail", "always"]


@dataclass(frozen=True, kw_only=True)
class DraftedStepTime(StepTime):
    """The step time of an engine that drafts while at most `most_running` requests run."""

    drafted: StepTime  # of steps with drafts
    acceptance: float  # tokens per request and step with drafts, the policy's own included
    most_running: int

    def at(self, running: int) -> float:
        if running > self.most_running:
            return super().at(running)
        return self.drafted.at(running) / self.acceptance

    def per_cached(self, running: int) -> float:
        if running > self.most_running:
            return self.per_cached_token
        return self.drafted.per_cached_token / self.acceptance


def checking_drafts(step_time: StepTime, draft_tokens: int) -> StepTime:
    """The model where nothing was measured: a step that checks drafts takes as long as one of `draft_tokens` + 1 times
    as many requests, and reads each context once."""
    at_once = draft_tokens + 1
    steps = tuple((running / at_once, seconds) for running, seconds in step_time.steps)
    return replace(step_time, steps=steps, source=f"{step_time.source}, {at_once} tokens per request")


def with_drafts(
    plain: StepTime, drafted: StepTime, acceptance: float, when: When, slots: int, context: float = 0.0
) -> StepTime:
    """`plain`: the steps without drafts of the same engine; `context`: as in `pays_up_to`."""
    if when == "none":
        return plain
    most = slots if when == "always" else pays_up_to(plain, drafted, acceptance, slots, context)
    fields = {name: getattr(plain, name) for name, known in StepTime.__dataclass_fields__.items() if known.init}
    return DraftedStepTime(**fields, drafted=drafted, acceptance=acceptance, most_running=most)


def pays_up_to(plain: StepTime, drafted: StepTime, acceptance: float, slots: int, context: float = 0.0) -> int:
    """The most running requests, of `context` tokens each, with which drafts still make responses faster; 0: never."""

    def pays(running: int) -> bool:
        cached = running * context
        without = plain.at(running) + plain.per_cached(running) * cached
        return drafted.at(running) + drafted.per_cached(running) * cached < acceptance * without

    return next((running for running in range(slots, 0, -1) if pays(running)), 0)
