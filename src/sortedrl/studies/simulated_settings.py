"""Settings of a simulated run besides lengths and schedule: its learner, which groups are filtered, and drafts."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.group_filter import are_equal
from sortedrl.core.schedule import Schedule
from sortedrl.core.strategies.registry import group_filter
from sortedrl.engines.lengths import DrawnEqual, EqualGroups, RecordedEqual, ReplayedLengths
from sortedrl.engines.step_time import StepTime, When, checking_drafts, pays_up_to, with_drafts
from sortedrl.settings.base import SettingsGroup, plain_reason
from sortedrl.studies import profile_file


class SimulatedLearnerSettings(SettingsGroup):
    help_group: ClassVar[str] = "simulated learner"

    learner_seconds: Annotated[float | None, Field(ge=0)] = None
    """learner time for an update of --rollouts-per-update responses of mean length; larger updates take longer in
    proportion to their tokens"""
    learner_seconds_per_update: Annotated[float, Field(ge=0)] = 0.0
    """fixed part of a learner step"""
    learner_seconds_per_token: Annotated[float, Field(ge=0)] = 0.0
    """learner time per trained token"""
    separate_learner: bool = False
    """the learner has GPUs of its own: modes that keep tokens generate while it steps (--overlap), in the others it
    works on the coming update during the harvest (--stream)"""
    stream: bool = False
    """the learner works on the coming update during the harvest, on its own device"""
    share_gpu: bool = False
    """with --stream: on the engine's GPU, at the speeds measured on an H200"""
    weight_update_seconds: Annotated[float | None, Field(ge=0)] = None
    """seconds per weight update; default: as measured by the profile, or 0"""
    weights_gb: Annotated[float | None, Field(gt=0)] = None
    """size of the weights in GB: with --weights-gb-per-second, the time of a weight update"""
    weights_gb_per_second: Annotated[float | None, Field(gt=0)] = None
    """bandwidth from the learner to each engine, all engines at once"""


def weight_transfer_seconds(settings: SimulatedLearnerSettings) -> float | None:
    """As set, or by size and bandwidth."""
    size, bandwidth = settings.weights_gb, settings.weights_gb_per_second
    return settings.weight_update_seconds if size is None or bandwidth is None else size / bandwidth


def check_learner(settings: SimulatedLearnerSettings) -> None:
    per_token, size = settings.learner_seconds_per_token, settings.weights_gb
    is_set, is_separate = settings.learner_seconds is not None, settings.separate_learner
    rules = (  # key, whether its value is wrong, why, and the fix
        ("learner_seconds", is_set and (per_token or settings.learner_seconds_per_update),
         "it is the whole time of the learner, and a part of it is set, too",
         "Leave it out, or leave out --learner-seconds-per-token and --learner-seconds-per-update."),
        ("share_gpu", settings.share_gpu and is_separate, "with --separate-learner, no GPU is shared", "Leave it out."),
        ("share_gpu", settings.share_gpu and not settings.stream, "without --stream, engine and learner take turns",
         "Set --stream too, or leave it out."),
        ("stream", settings.stream and not (per_token or settings.learner_seconds),
         "the learner's work per token is not set, so there is nothing to do during the harvest",
         "Set --learner-seconds, for example 60."),
        ("weights_gb", (size is None) != (settings.weights_gb_per_second is None),
         "it takes both a size and a bandwidth", "Set both, or leave out both."),
        ("weight_update_seconds", size is not None and settings.weight_update_seconds is not None,
         "size and bandwidth of the weights give another time", "Leave it out, or leave out --weights-gb."),
    )  # fmt: skip
    for key, is_wrong, why, fix in rules:
        if is_wrong:
            raise ConfigurationError(key, getattr(settings, key), why, fix)


class SimulatedFilterSettings(SettingsGroup):
    help_group: ClassVar[str] = "dynamic sampling"

    filtered: Annotated[float, Field(ge=0, lt=1)] | Literal["file"] | None = None
    """this fraction of the groups has equal rewards and is not trained on; file: those whose rewards in --lengths are
    equal"""


def equal_groups_of(settings: SimulatedFilterSettings, replayed: ReplayedLengths | None) -> EqualGroups | None:
    """The groups to filter; None without a filter. `replayed`: the lengths of a file or a run, if there is one."""
    if settings.filtered != "file":
        return None if settings.filtered is None else DrawnEqual(settings.filtered)
    if replayed is None or replayed.rewards is None:
        why = "there is no --lengths" if replayed is None else "not every response in --lengths has a reward"
        fix = 'Give a run folder, or a file with rows such as {"prompt": "p0", "length": 812, "reward": 1}.'
        raise ConfigurationError("filtered", "file", why, fix)
    return RecordedEqual(tuple(map(are_equal, replayed.rewards)))


def check_filter(settings: SimulatedFilterSettings, replayed: ReplayedLengths | None, schedule: Schedule) -> None:
    equal_groups_of(settings, replayed)
    group_filter(schedule)


class SimulatedDraftSettings(SettingsGroup):
    help_group: ClassVar[str] = "drafts"

    drafts: When = "none"
    """speculative decoding: none, only while few requests run (tail), or always"""
    draft_tokens: Annotated[int, Field(ge=1, le=128)] = 3
    """drafted tokens per request and step"""
    draft_acceptance: Annotated[float, Field(ge=1)] = 2.0
    """mean tokens per request and step, from 1 (none accepted) to draft_tokens + 1"""
    draft_step_time: str = ""
    """profile of an engine with drafts; default: a step takes as long as one of draft_tokens + 1 times as many
    requests"""


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
