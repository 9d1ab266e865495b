"""The settings of drafts (speculative decoding) in a simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import BaseModel, Field

from sortedrl.core.configuration import ConfigurationError
from sortedrl.engines.draft_time import When, checking_drafts, pays_up_to, with_drafts
from sortedrl.engines.step_time import StepTime
from sortedrl.settings.base import plain_reason
from sortedrl.studies import profile_file


class SimulatedDraftSettings(BaseModel):
    help_group: ClassVar[str] = "drafts"

    drafts: Annotated[
        When, Field(description="speculative decoding: none, only while few requests run (tail), or always")
    ] = "none"
    draft_tokens: Annotated[int, Field(ge=1, le=128, description="drafted tokens per request and step")] = 3
    draft_acceptance: Annotated[
        float, Field(ge=1, description="mean tokens per request and step, from 1 (none accepted) to draft_tokens + 1")
    ] = 2.0
    draft_step_time: Annotated[
        str,
        Field(
            description="profile of an engine with drafts; default: a step takes as long as one of draft_tokens + 1 "
            "times as many requests"
        ),
    ] = ""


def step_times_of(settings: SimulatedDraftSettings, plain: StepTime) -> tuple[StepTime, StepTime]:
    """Of an engine with drafts: its steps without and with them. `plain`: of an engine that has none."""
    if not settings.draft_step_time:
        return plain, checking_drafts(plain, settings.draft_tokens)
    profile = _profile(settings.draft_step_time)
    if profile.draft_tokens != settings.draft_tokens:
        why = f"{settings.draft_step_time} was measured with {profile.draft_tokens or 'no'} drafted tokens"
        fix = f"Set it to {profile.draft_tokens}." if profile.draft_tokens else "Profile an engine with drafts."
        raise ConfigurationError("draft_tokens", settings.draft_tokens, why, fix)
    return profile.step_time(), profile.drafted_step_time()


def with_settings_of(settings: SimulatedDraftSettings, plain: StepTime, slots: int, context: float) -> StepTime:
    """`slots`: of one engine; `context`: tokens of a running request."""
    if settings.drafts == "none":
        return plain
    return with_drafts(*step_times_of(settings, plain), settings.draft_acceptance, settings.drafts, slots, context)


def check_drafts(settings: SimulatedDraftSettings, plain: StepTime) -> None:
    most = settings.draft_tokens + 1
    if settings.drafts == "none":
        for key in settings.model_fields_set & {"draft_tokens", "draft_acceptance", "draft_step_time"}:
            why, fix = "nothing is drafted", "Add --drafts tail, or leave it out."
            raise ConfigurationError(key, getattr(settings, key), why, fix)
    elif settings.draft_acceptance > most:
        why = f"a step yields at most draft_tokens + 1 = {most} tokens per request"
        raise ConfigurationError("draft_acceptance", settings.draft_acceptance, why, f"Use {most} or less.")
    step_times_of(settings, plain)


def drafts_line(settings: SimulatedDraftSettings, plain: StepTime, slots: int, context: float) -> str:
    """How drafts are simulated; empty without."""
    if settings.drafts == "none":
        return ""
    without, drafted = step_times_of(settings, plain)
    most = pays_up_to(without, drafted, settings.draft_acceptance, slots, context)
    cost = settings.draft_step_time or f"a step costs that of {settings.draft_tokens + 1} x the requests (not measured)"
    rule = f"while at most {most} of {slots} requests run" if settings.drafts == "tail" else "always"
    pays = f"; they pay with up to {most} running requests" if settings.drafts == "always" else ""
    steps = f"{settings.draft_acceptance:g} tokens per request and step"
    return f"\ndrafts of {settings.draft_tokens} tokens, {rule}; {steps}; {cost}{pays}"


def _profile(file: str) -> profile_file.Profile:
    try:
        return profile_file.read(Path(file))
    except (OSError, ValueError) as error:
        fix = "Make one with sortedrl profile on an engine with drafts (docs/drafts.md)."
        raise ConfigurationError("draft_step_time", file, plain_reason(error), fix) from None
