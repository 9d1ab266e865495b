"""The settings of a workload and the schedules to try on it, for simulate, plan and bench."""

import difflib
import math
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, Field

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.group_filter import EQUAL_REWARDS, are_equal
from sortedrl.core.schedule import Schedule
from sortedrl.core.strategies.registry import group_filter
from sortedrl.engines.episodes import DrawnEpisodes, EpisodeOf, ReplayedEpisodes, event_log_at, read_episodes
from sortedrl.engines.lengths import (
    DrawnEqual,
    EqualGroups,
    LengthOf,
    LognormalLengths,
    RecordedEqual,
    ReplayedLengths,
    read_lengths,
)
from sortedrl.engines.pool_members import even_split
from sortedrl.engines.settings import Slots
from sortedrl.engines.step_time import PRESETS, StepTime, When, checking_drafts, fit, read_points, with_drafts
from sortedrl.settings.base import Settings, SettingsGroup, plain_reason, values_for
from sortedrl.settings.schedule import MOST, ScheduleSettings, prompts_per_cohort, schedule_from, score_wait_seconds
from sortedrl.studies import profile_file
from sortedrl.studies.workload import Workload, mean_response_tokens

Expectation = Literal["cold", "warm", "oracle"]
_LENGTHS_FIX = (
    'Name a run folder, or a file with one number per line, objects such as {"prompt": "id", "length": 812}, or CSV '
    "with a column `length`. Logs with text instead: see docs/my_lengths.md."
)
_PRESETS = f"Presets: {', '.join(PRESETS)}."
MedianLength = Annotated[
    float, Field(gt=0, le=1e9, description="median of the drawn lengths in tokens; none is below 16")
]
PromptTokens = Annotated[int, Field(ge=0, le=MOST, description="tokens per prompt")]


class LengthSettings(SettingsGroup):
    """How long prompts and responses are."""

    help_group: ClassVar[str] = "prompts and responses"
    default_response_limit: ClassVar[int] = 8192

    lengths: Path | None = None
    """your response lengths: a JSONL or CSV file, or a run folder; without prompts, each response draws one of them
    independently; default: drawn from a lognormal"""
    median_length: MedianLength = 1273.7
    length_sd_between: Annotated[float, Field(ge=0, le=10)] = 0.8
    """standard deviation of log length between prompts"""
    length_sd_within: Annotated[float, Field(ge=0, le=10)] = 0.6
    """standard deviation of log length within a prompt"""
    prompt_tokens: PromptTokens = 128
    max_response_tokens: Annotated[int | None, Field(ge=1)] = None
    """cut responses here; default: as the run in --lengths did, or the longest in a file; else 8192 (bench: 800)"""

    @cached_property
    def _replayed(self) -> ReplayedLengths | ReplayedEpisodes | None:
        if self.lengths is None:
            return None
        try:
            log = event_log_at(self.lengths)
            return read_lengths(self.lengths) if log is None else read_episodes(log)
        except (OSError, ValueError) as error:
            raise ConfigurationError("lengths", str(self.lengths), plain_reason(error), _LENGTHS_FIX) from None

    @property
    def replayed_episodes(self) -> ReplayedEpisodes | None:
        """Those of a run with environments."""
        found = self._replayed
        return found if isinstance(found, ReplayedEpisodes) and found.has_environment else None

    @cached_property
    def replayed_lengths(self) -> ReplayedLengths | None:
        found = self._replayed
        return found.lengths() if isinstance(found, ReplayedEpisodes) else found

    def response_limit(self) -> int:
        """As set, or that of the run, or the longest response in the file of lengths: by default none is cut."""
        if self.max_response_tokens is not None:
            return self.max_response_tokens
        replayed = self.replayed_lengths
        return self.default_response_limit if replayed is None else max(replayed.run_limit, replayed.longest)

    def most_observed(self) -> int:
        """Tokens of the environment in one response, at most."""
        return 0


class StepTimeSettings(SettingsGroup):
    """How fast the engine is, and how much it can cache."""

    help_group: ClassVar[str] = "engine"

    step_time: Annotated[
        str,
        Field(
            description=f"{', '.join(PRESETS)}, a file from sortedrl profile, or a CSV of running,cached_tokens,seconds"
        ),
    ] = "h200-8b"
    prefill_seconds_per_token: Annotated[float | None, Field(ge=0)] = None
    """seconds of prefill per token; default: as in the step time"""
    kv_tokens: Annotated[int | None, Field(ge=1)] = None
    """KV cache capacity in tokens; requests beyond it are preempted"""

    @cached_property
    def profile(self) -> profile_file.Profile | None:
        """Of --step-time, if that is one."""
        return profile_at("step_time", self.step_time, _PRESETS) if self.step_time.endswith(".json") else None


def profile_at(key: str, file: str, fix: str) -> profile_file.Profile:
    try:
        return profile_file.read(Path(file))
    except (OSError, ValueError) as error:
        raise ConfigurationError(key, file, plain_reason(error), fix) from None


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


class SimulatedFilterSettings(SettingsGroup):
    help_group: ClassVar[str] = "dynamic sampling"

    filtered: Annotated[float, Field(ge=0, lt=1)] | Literal["file"] | None = None
    """this fraction of the groups has equal rewards and is not trained on; file: those whose rewards in --lengths are
    equal"""


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


class WorkloadSettings(Settings, LengthSettings, ScheduleSettings, StepTimeSettings):
    """A workload and the schedules to try on it."""

    help_group: ClassVar[str] = "schedule"

    slots: Slots = 128
    whole_groups: bool = False
    """update on whole groups, as GRPO and RLOO need"""
    keep_seed: bool = False
    """a regenerated rollout draws the same length as the attempt that was aborted"""

    def most_slots_per_engine(self) -> int:
        return self.slots


class SimulatedSettings(WorkloadSettings, SimulatedLearnerSettings, SimulatedFilterSettings, SimulatedDraftSettings):
    """A simulated workload: also what environments, the learner, the rewards and the weight updates cost."""

    help_group: ClassVar[str] = "simulated run"

    engines: Annotated[int, Field(ge=1, le=100_000)] = 1
    """engines that share the slots evenly, each as fast as --step-time"""
    controllers: Annotated[int, Field(ge=1, le=100_000)] = 1
    """schedulers with a part of the engines and of every update each, as TRL has one per process"""
    turns: Annotated[int, Field(ge=1, le=MOST)] = 1
    """turns per response; with several, lengths are those of one turn"""
    observation_tokens: Annotated[int, Field(ge=1, le=MOST)] = 128
    """tokens of an environment's answer between two turns"""
    environment_seconds: Annotated[float, Field(ge=0)] = 5.0
    """mean time until an environment answers; lognormal, sd 1 of the logarithm"""
    reuse_kv_cache: bool = False
    """keep the KV cache across weight updates (stale KV): resumed rollouts need no prefill"""
    score_seconds: Annotated[float, Field(ge=0)] = 0.0
    """seconds from the end of a rollout to its reward"""
    cohorts: Annotated[int, Field(ge=1, le=MOST)] = 6
    """length of each simulated run, in cohorts"""
    seeds: Annotated[tuple[int, ...], Field(min_length=1)] = (0,)
    """one simulated run per seed"""

    def response_limit(self) -> int:
        """By default no response is cut, if the lengths in a file are those of one turn."""
        limit = super().response_limit()
        each_turn = self.turns > 1 and self.max_response_tokens is None and self.replayed_lengths is not None
        return self.turns * limit if each_turn else limit

    def most_observed(self) -> int:
        if self.replayed_episodes is not None:
            return self.replayed_episodes.most_observed
        return (self.turns - 1) * self.observation_tokens

    def slots_of_engines(self) -> list[int]:
        return even_split(self.slots, self.engines)

    def most_slots_per_engine(self) -> int:
        return max(self.slots_of_engines())

    def usual_context(self) -> float:
        """Tokens of a running request, roughly, if all slots are in use."""
        replayed = self.replayed_lengths
        return self.prompt_tokens + (self.median_length if replayed is None else replayed.longest / 4)

    def resolved_weight_update_seconds(self) -> float:
        """By size and bandwidth, as set, or as measured by the profile."""
        if self.weights_gb is not None and self.weights_gb_per_second is not None:
            return self.weights_gb / self.weights_gb_per_second
        if self.weight_update_seconds is not None:
            return self.weight_update_seconds
        return (self.profile and self.profile.weight_update_seconds) or 0.0


def simulated_schedule(settings: SimulatedSettings) -> Schedule:
    """The schedule as set; `with_mode` adapts it to another mode and drops what that mode cannot honor."""
    return schedule_from(
        settings,
        max_response_tokens=settings.response_limit(),
        overlap=settings.overlap or settings.separate_learner,
        score_wait_seconds=score_wait_seconds(settings.score_seconds),
        filter_groups=None if settings.filtered is None else EQUAL_REWARDS,
        max_filtered_fraction=1.0,
        seed=settings.seeds[0],
    )


def simulated_workload(settings: SimulatedSettings) -> Workload:
    acceptance, when, slots = settings.draft_acceptance, settings.drafts, settings.most_slots_per_engine()
    step_time = step_time_of(settings)
    if when != "none":
        step_time = with_drafts(*step_times_of(settings), acceptance, when, slots, settings.usual_context())
    derived = {
        "lengths": length_of(settings),
        "episodes": episodes_of(settings),
        "step_time": step_time,
        "prompts": settings.cohorts * prompts_per_cohort(settings),
        "kv_tokens": kv_tokens_of(settings),
        "weight_update_seconds": settings.resolved_weight_update_seconds(),
        "equal_groups": equal_groups_of(settings),
    }
    workload = Workload(**values_for(Workload, settings, **derived))
    if settings.learner_seconds is None:
        return workload
    schedule = simulated_schedule(settings)
    tokens = schedule.rollouts_needed * mean_response_tokens(workload, schedule)
    return replace(workload, learner_seconds_per_token=settings.learner_seconds / tokens)


def episodes_of(settings: SimulatedSettings) -> EpisodeOf | None:
    """As recorded in the log of a run, or drawn; None for responses of one turn."""
    if settings.replayed_episodes is not None:
        return settings.replayed_episodes
    if settings.turns == 1:
        return None
    return DrawnEpisodes(
        lengths=length_of(settings),
        turns=settings.turns,
        observation_tokens=settings.observation_tokens,
        seconds_mean=settings.environment_seconds,
    )


def length_of(settings: LengthSettings) -> LengthOf:
    if settings.replayed_lengths is not None:
        return settings.replayed_lengths
    return LognormalLengths(
        mu=math.log(settings.median_length),
        between=settings.length_sd_between,
        within=settings.length_sd_within,
        limit=settings.response_limit(),
    )


def step_time_of(settings: StepTimeSettings) -> StepTime:
    """Of an engine without drafts."""
    name, seconds = settings.step_time, settings.prefill_seconds_per_token
    try:
        found = settings.profile.step_time() if settings.profile else PRESETS.get(name)
        found = found or fit(read_points(Path(name)), source=f"fit to {name}")
    except (OSError, ValueError) as error:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        fix = f"{f'Did you mean {near[0]}? ' if near else ''}{_PRESETS}"
        raise ConfigurationError("step_time", name, plain_reason(error), fix) from None
    return found if seconds is None else found.scaled(per_prefill_token=seconds)


def kv_tokens_of(settings: StepTimeSettings) -> int | None:
    """As set, or as measured by the profile."""
    return settings.profile.kv_tokens if settings.kv_tokens is None and settings.profile else settings.kv_tokens


def check_simulated(settings: SimulatedSettings) -> None:
    for check in (check_seeds, check_lengths, check_turns, check_context_fits, check_learner, check_engines):
        check(settings)
    equal_groups_of(settings)
    group_filter(simulated_schedule(settings))
    check_drafts(settings)


def check_context_fits(settings: WorkloadSettings) -> None:
    parts = [settings.prompt_tokens, settings.response_limit(), settings.most_observed()]
    longest, kv_tokens = sum(parts), kv_tokens_of(settings)
    if kv_tokens is not None and longest + 1 > kv_tokens:
        why = f"one response at the limit needs {' + '.join(str(part) for part in parts if part)} tokens"
        fix = f"Set kv_tokens to {longest + 1} or more, or lower max_response_tokens."
        raise ConfigurationError("kv_tokens", kv_tokens, why, fix)


def check_lengths(settings: LengthSettings) -> None:
    """Refuse settings of drawn lengths that a file of lengths would silently replace."""
    if settings.lengths is not None:
        why, fix = f"no length is drawn: all are those of {settings.lengths}", "Leave it out, or leave out --lengths."
        _refuse_ignored(settings, ("median_length", "length_sd_between", "length_sd_within"), why, fix)


def check_turns(settings: SimulatedSettings) -> None:
    environment = ("observation_tokens", "environment_seconds")
    if settings.replayed_episodes is not None:
        why = f"the responses of {settings.lengths} have turns of their own, which are replayed"
        if settings.turns > 1:
            raise ConfigurationError("turns", settings.turns, why, "Leave out --turns.")
        _refuse_ignored(settings, environment, why, "Leave it out.")
    elif settings.turns == 1:
        why = "responses have one turn, so no environment answers"
        _refuse_ignored(settings, environment, why, "Set --turns, for example 5, or leave it out.")


def _refuse_ignored(settings: BaseModel, keys: Iterable[str], why: str, fix: str) -> None:
    for key in keys:
        value = getattr(settings, key)
        if value != type(settings).model_fields[key].default:
            raise ConfigurationError(key, value, why, fix)


def check_seeds(settings: SimulatedSettings) -> None:
    """The same run twice would count as two, and the error of the gains would be too small."""
    if len(set(settings.seeds)) < len(settings.seeds):
        raise ConfigurationError("seeds", settings.seeds, "one is named twice", "Name each one once.")


def check_engines(settings: SimulatedSettings) -> None:
    if settings.slots < (engines := settings.engines):
        why = f"they are the slots of all {engines} engines together"
        raise ConfigurationError("slots", settings.slots, why, f"Use --slots {engines} or more.")
    count = settings.controllers
    if count == 1:
        return
    unit = count * (settings.rollouts_per_prompt if settings.whole_groups else 1)
    for key, multiple in (("engines", count), ("slots", count), ("rollouts_per_update", unit)):
        if (value := getattr(settings, key)) % multiple:
            why = f"{count} controllers get equal parts of it"
            raise ConfigurationError(key, value, why, f"Use a multiple of {multiple}.")
    for key in ("overlap", "stream", "separate_learner"):
        if getattr(settings, key):
            why = "with one controller per training process, engine and learner take turns"
            raise ConfigurationError(key, True, why, "Leave it out, or use one controller.")


def check_learner(settings: SimulatedSettings) -> None:
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
        ("separate_learner", is_separate and not (is_set or per_token or settings.learner_seconds_per_update),
         "the learner takes no time, so GPUs of its own gain nothing", "Set --learner-seconds, for example 60."),
        ("weights_gb", (size is None) != (settings.weights_gb_per_second is None),
         "it takes both a size and a bandwidth", "Set both, or leave out both."),
        ("weight_update_seconds", size is not None and settings.weight_update_seconds is not None,
         "size and bandwidth of the weights give another time", "Leave it out, or leave out --weights-gb."),
    )  # fmt: skip
    for key, is_wrong, why, fix in rules:
        if is_wrong:
            raise ConfigurationError(key, getattr(settings, key), why, fix)


def equal_groups_of(settings: SimulatedSettings) -> EqualGroups | None:
    """The groups to filter; None without a filter."""
    if settings.filtered != "file":
        return None if settings.filtered is None else DrawnEqual(settings.filtered)
    replayed = settings.replayed_lengths
    if replayed is None or replayed.rewards is None:
        why = "there is no --lengths" if replayed is None else "not every response in --lengths has a reward"
        fix = 'Give a run folder, or a file with rows such as {"prompt": "p0", "length": 812, "reward": 1}.'
        raise ConfigurationError("filtered", "file", why, fix)
    return RecordedEqual(tuple(map(are_equal, replayed.rewards)))


def step_times_of(settings: SimulatedSettings) -> tuple[StepTime, StepTime]:
    """Of an engine with drafts: its steps without and with them."""
    if not settings.draft_step_time:
        plain = step_time_of(settings)
        return plain, checking_drafts(plain, settings.draft_tokens)
    fix = "Make one with sortedrl profile on an engine with drafts (docs/drafts.md)."
    profile = profile_at("draft_step_time", settings.draft_step_time, fix)
    if profile.draft_tokens != settings.draft_tokens:
        why = f"{settings.draft_step_time} was measured with {profile.draft_tokens or 'no'} drafted tokens"
        fix = f"Set it to {profile.draft_tokens}." if profile.draft_tokens else "Profile an engine with drafts."
        raise ConfigurationError("draft_tokens", settings.draft_tokens, why, fix)
    return profile.step_time(), profile.drafted_step_time()


def check_drafts(settings: SimulatedSettings) -> None:
    most = settings.draft_tokens + 1
    if settings.drafts == "none":
        for key in settings.model_fields_set & {"draft_tokens", "draft_acceptance", "draft_step_time"}:
            why, fix = "nothing is drafted", "Add --drafts tail, or leave it out."
            raise ConfigurationError(key, getattr(settings, key), why, fix)
    elif settings.draft_acceptance > most:
        why = f"a step yields at most draft_tokens + 1 = {most} tokens per request"
        raise ConfigurationError("draft_acceptance", settings.draft_acceptance, why, f"Use {most} or less.")
    step_times_of(settings)
