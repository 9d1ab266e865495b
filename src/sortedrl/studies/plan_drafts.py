"""Whether drafts (speculative decoding) pay for a plan, and from which acceptance on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sortedrl.engines.draft_time import pays_up_to, with_drafts
from sortedrl.engines.step_time import StepTime
from sortedrl.studies.draft_settings import step_times_of
from sortedrl.studies.plan import CLOSE, Option
from sortedrl.studies.workload import Workload, run
from sortedrl.studies.workload_settings import SimulatedSettings

PRECISION = 0.05  # of an acceptance, in tokens per step


@dataclass(frozen=True)
class DraftedOption:
    """`gain`: speed with drafts over speed without, at the acceptance that was set. `pays_from`: the least acceptance
    with a gain of more than `CLOSE`; None: not even if every draft is accepted."""

    name: str
    gain: float
    pays_from: float | None


@dataclass(frozen=True)
class DraftPlan:
    draft_up_to: int  # running requests
    options: tuple[DraftedOption, ...]
    reason: str


def plan_drafts(settings: SimulatedSettings, workload: Workload, options: Sequence[Option]) -> DraftPlan:
    """`workload`: without drafts."""
    slots, context = settings.most_slots_per_engine(), settings.usual_context()
    without, drafted = step_times_of(settings, workload.step_time)

    def speed(option: Option, step_time: StepTime) -> float:
        timed = replace(workload, slots=option.slots, step_time=step_time)
        return run(timed, option.schedule).trained_tokens_per_hour

    def tried(option: Option) -> DraftedOption:
        plain = speed(option, workload.step_time)

        def gain(acceptance: float) -> float:
            with_them = with_drafts(without, drafted, acceptance, settings.drafts, slots, context)
            return speed(option, with_them) / plain

        low, high = 1.0, settings.draft_tokens + 1.0
        pays = gain(high) > 1 + CLOSE
        while pays and high - low > PRECISION:
            middle = (low + high) / 2
            low, high = (low, middle) if gain(middle) > 1 + CLOSE else (middle, high)
        return DraftedOption(option.name, gain(settings.draft_acceptance), high if pays else None)

    found = tuple(tried(option) for option in dict.fromkeys(options))
    most = slots
    if settings.drafts == "tail":
        most = pays_up_to(without, drafted, settings.draft_acceptance, slots, context)
    return DraftPlan(most, found, _reason(settings, most, found))


def _reason(settings: SimulatedSettings, most: int, options: Sequence[DraftedOption]) -> str:
    gains = "; ".join(f"{option.name} {option.gain:.2f} x, {_threshold(option)}" for option in options)
    at = f"at {settings.draft_acceptance:g} tokens per request and step"
    if max(option.gain for option in options) <= 1 + CLOSE:
        return f"Leave speculative_config unset: drafts of {settings.draft_tokens} tokens do not pay {at} ({gains})."
    return f"Drafts of {settings.draft_tokens} tokens with draft_up_to {most} (exact), {at}: {gains}."


def _threshold(option: DraftedOption) -> str:
    return "they never pay" if option.pays_from is None else f"they pay from {option.pays_from:.2f} on"
