"""What the commands about a workload print alike: simulate, plan and bench."""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from statistics import NormalDist, fmean
from typing import Any

from sortedrl.cli.output import print_schedule
from sortedrl.core.schedule import Schedule
from sortedrl.core.wording import counted
from sortedrl.engines.episodes import DrawnEpisodes, ReplayedEpisodes
from sortedrl.engines.step_time import PRESETS, pays_up_to
from sortedrl.settings.schedule import prompts_per_cohort
from sortedrl.settings.slots import too_many_slots
from sortedrl.studies.plan import Option
from sortedrl.studies.simulate import Case
from sortedrl.studies.workload_settings import (
    SimulatedSettings,
    WorkloadSettings,
    simulated_schedule,
    step_time_of,
    step_times_of,
)

PRECISE_COHORTS, PRECISE_SEEDS = 20, 3
MANY_ROLLOUTS = 100_000  # take about ten seconds to simulate
MANY_CUT = 0.2  # fraction of the drawn lengths
MANY_LATE = 0.05  # fraction of the drawn answers of environments
BEYOND = 1.1  # times the largest measured batch
INDEPENDENT = " (it tells no prompts apart: each response draws its length independently)"


def print_dry_run(settings: WorkloadSettings, schedule: Schedule, prompts: int) -> int:
    context_tokens = settings.prompt_tokens + settings.response_limit() + settings.most_observed()
    in_all = {"rollouts_in_all": prompts * schedule.rollouts_per_prompt}
    return print_schedule(settings, schedule, settings.most_slots_per_engine() * context_tokens, **in_all)


def print_notices(settings: SimulatedSettings, *more: str) -> None:
    """What a user should see before the answer."""
    for notice in (*_notices_of_responses(settings), *_notices_of_sizes(settings), *more):
        print(f"sortedrl: {notice}", file=sys.stderr)


def _notices_of_responses(settings: SimulatedSettings) -> Iterator[str]:
    """Cut or few responses, and late answers of environments, which fail and waste the tokens before them."""
    replayed, limit = settings.replayed_lengths, settings.response_limit()
    cohort = prompts_per_cohort(settings) * settings.rollouts_per_prompt
    if replayed is not None and (cut := replayed.longer_than(limit)):
        yield (
            f"max_response_tokens = {limit} cuts {cut:,} of {replayed.count:,} responses ({cut / replayed.count:.1%}) "
            f"in {settings.lengths}; the longest has {replayed.longest:,} tokens. Leave it out to cut none."
        )
    if replayed is not None and replayed.count < cohort:
        yield (
            f"{settings.lengths} has {counted(replayed.count, 'response')}, fewer than a cohort of {cohort:,}: they "
            "are repeated. The gains depend on its longest responses, and their standard error does not cover that. "
            "Give more responses."
        )
    drawn_cut = _fraction_above(
        limit, settings.median_length, math.hypot(settings.length_sd_between, settings.length_sd_within)
    )
    if settings.lengths is None and settings.turns == 1 and drawn_cut >= MANY_CUT:
        yield (
            f"max_response_tokens = {limit} cuts about {drawn_cut:.0%} of the drawn responses, whose median is "
            f"{settings.median_length:g} tokens. Set --median-length to that of your responses."
        )
    deadline, sd = simulated_schedule(settings).max_environment_seconds, DrawnEpisodes.sigma
    late = _fraction_above(deadline, settings.environment_seconds * math.exp(-(sd**2) / 2), sd)
    if settings.replayed_episodes is None and settings.turns > 1 and late >= MANY_LATE:
        yield (
            f"environment_seconds = {settings.environment_seconds:g}: about {late:.0%} of the answers take longer than "
            f"max_environment_seconds = {deadline:g} and fail, as in a run with this limit."
        )


def _fraction_above(limit: float, median: float, sd: float) -> float:
    """Of a lognormal distribution."""
    if not median or not sd:
        return float(median > limit)
    return NormalDist(0, sd).cdf(math.log(median / limit))


def _notices_of_sizes(settings: SimulatedSettings) -> Iterator[str]:
    """Split groups, updates that cannot fill slots or make tokens stale, slots beyond the measured step times, and what
    takes long."""
    update, slots = simulated_schedule(settings).rollouts_needed, settings.slots
    per_engine, measured = settings.most_slots_per_engine(), step_time_of(settings).measured_to
    rollouts = settings.cohorts * prompts_per_cohort(settings) * settings.rollouts_per_prompt
    if settings.rollouts_per_prompt > 1 and not settings.whole_groups:
        yield (
            f"rollouts_per_prompt = {settings.rollouts_per_prompt} without whole_groups: responses to one prompt may "
            "be in different updates. For GRPO or RLOO add --whole-groups."
        )
    if update < slots:
        yield (
            f"rollouts_per_update = {settings.rollouts_per_update} is less than slots = {slots}: the baseline leaves "
            f"at least {int(100 * (1 - update / slots))}% of the slots empty, which makes the gains large. Set "
            "--rollouts-per-update to your real update size."
        )
    if notice := too_many_slots(slots, update):
        yield notice
    if measured is not None and per_engine > BEYOND * measured:
        yield (
            f"{per_engine} slots per engine, but {settings.step_time} was measured with up to {measured:g} running "
            "requests. Beyond that, step times are a straight line. --slots is the total: set --engines to your "
            "number of engines."
        )
    if rollouts >= MANY_ROLLOUTS:
        yield (
            f"each mode is simulated with {rollouts:,} rollouts per seed (cohorts = {settings.cohorts}), which takes "
            "seconds to minutes. With fewer --cohorts it is faster."
        )


def accuracy_line(settings: SimulatedSettings) -> str:
    """How far predictions were from measurements: docs/results.md, "How close are the predictions?"."""
    error = (
        "up to 9% off with five turns if returns were timed (sortedrl profile --observation-tokens), else up to 31%"
        if settings.turns > 1 or settings.replayed_episodes is not None
        else "within 5% of the tokens per second of 18 runs of vLLM and 7% of the updates per hour of 40 of 46 with "
        "a learner, 8 to 14% off in the other six"
    )
    preset = f" {settings.step_time} is a preset: before you rely on a few percent, run sortedrl profile."
    return (
        f"On an H200, calibrated by sortedrl profile, the simulator was {error} (docs/results.md)."
        f"{preset * (settings.step_time in PRESETS)}"
    )


def spread(
    rows: Sequence[Case | Option],
    modes: Mapping[str, Mapping[str, Any]],
    seeds: int,
    cohorts: int,
    max_updates: int | None = None,
) -> str:
    """The uncertainty of the gains, and how to reduce it. All modes generate responses to the same prompts, so the
    largest error stands for those of modes where one run is too little for an estimate. Not with updates of one
    rollout: the baseline then generates one at a time, at a rate that depends on no length."""
    ended_early = max_updates is not None and any(modes[row.name]["updates"] >= max_updates for row in rows)
    base, *errors = [modes[row.name]["goodput_error"] for row in rows]
    many = counted(cohorts, "cohort") if max_updates is None or not ended_early else counted(max_updates, "update")
    run = f"{counted(seeds, 'seed')} of {many}"
    if base is None:
        text = f"Standard error unknown with {run}."
    elif None in errors and rows[0].schedule.rollouts_needed == 1:
        text = f"Standard error unknown with {run}: for updates of one rollout it takes {PRECISE_SEEDS} seeds."
    else:
        widest = math.hypot(base, max(error for error in (base, *errors) if error is not None))
        shown = f"{widest:.0%}" if widest >= 0.01 else f"{max(widest, 0.001):.1%}"
        text = f"Gains are ± {shown} (standard error, {run})."
    if cohorts >= PRECISE_COHORTS and seeds >= PRECISE_SEEDS and not ended_early:
        return text
    without, seeds_named = "leave out --updates, " if ended_early else "", " ".join(map(str, range(PRECISE_SEEDS)))
    return f"{text} For more precision: {without}--cohorts {PRECISE_COHORTS} --seeds {seeds_named}"


def _replayed_turns(replayed: ReplayedEpisodes) -> str:
    episodes = [episode for of_prompt in replayed.by_prompt for episode in of_prompt]
    turns = [turn for episode in episodes for turn in episode.turns]
    answers = [tokens for episode in episodes for tokens in episode.observations]
    seconds = [seconds for episode in episodes for seconds in episode.seconds]
    return (
        f"{len(turns) / len(episodes):.3g} per response, {fmean(turns):.5g} tokens per turn, "
        f"{fmean(answers) if answers else 0:.5g} per answer, after {fmean(seconds):.3g} s, "
        f"as in {len(episodes):,} responses of this run"
    )


def workload_line(settings: SimulatedSettings) -> str:
    limit, replayed = settings.response_limit(), settings.replayed_lengths
    one_for_all = replayed is not None and len(replayed.by_prompt) == 1
    lengths = (
        f"{settings.lengths}{INDEPENDENT * one_for_all}, limit {limit:,} tokens"
        if settings.lengths
        else f"lognormal, median {settings.median_length:.5g}, sd {settings.length_sd_between:g} between"
        f" and {settings.length_sd_within:g} within prompts, limit {limit:,}"
    )
    if settings.replayed_episodes is not None:
        lengths += f"\nturns: {_replayed_turns(settings.replayed_episodes)}"
    elif settings.turns > 1:
        lengths = (
            f"{settings.turns} turns per response; each {lengths}\nenvironments: {settings.observation_tokens} tokens "
            f"per answer, after {settings.environment_seconds:g} s on average"
        )
    seconds = settings.resolved_weight_update_seconds()
    more = (f", {seconds:.3g} s per weight update" if seconds else "") + (
        ", KV cache kept across weight updates" * settings.reuse_kv_cache
        + ", learner on GPUs of its own" * settings.separate_learner
        + ", learner streamed" * settings.stream
        + " on the engine's GPU" * settings.share_gpu
    )
    sizes = " or ".join(map(str, sorted(set(settings.slots_of_engines()))))
    share = f" ({settings.engines} engines of {sizes})" if settings.engines > 1 else ""
    share += f", {settings.controllers} controllers" if settings.controllers > 1 else ""
    return (
        f"lengths: {lengths}\nslots {settings.slots}{share}, "
        f"updates of {simulated_schedule(settings).rollouts_needed}, "
        f"cohorts of {prompts_per_cohort(settings)} x {settings.rollouts_per_prompt}, step time {settings.step_time}, "
        f"seeds {' '.join(map(str, settings.seeds))}{more}"
        f"{_drafts_line(settings)}"
    )


def _drafts_line(settings: SimulatedSettings) -> str:
    """How drafts are simulated; empty without."""
    if settings.drafts == "none":
        return ""
    tokens, slots = settings.draft_tokens, settings.most_slots_per_engine()
    most = pays_up_to(*step_times_of(settings), settings.draft_acceptance, slots, settings.usual_context())
    cost = settings.draft_step_time or f"a step costs that of {tokens + 1}x the requests (not measured)"
    rule = f"while at most {most} of {slots} requests run" if settings.drafts == "tail" else "always"
    pays = f"; they pay with up to {most} running requests" if settings.drafts == "always" else ""
    steps = f"{settings.draft_acceptance:g} tokens per request and step"
    return f"\ndrafts of {tokens} tokens, {rule}; {steps}; {cost}{pays}"
