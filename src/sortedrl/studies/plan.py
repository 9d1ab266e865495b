"""Which schedule for this workload? A search over mode, cohort size, oversubscription and slots, by simulation.

The rule: among schedules within the bounds on length bias and staleness, the fastest wins; within `CLOSE` of the
fastest, the one with the lowest staleness wins, then the simpler one. If a longest-first baseline is that close, you do
not need SortedRL. The effect of reusing stale KV cache is reported separately: it is an approximation, so it is your
choice. So is the effect of streaming, which is exact: on a device for the learner alone, or on the GPU of the engine.
Whether drafts (speculative decoding) pay, and from which acceptance on, is a question of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from pydantic import Field

from sortedrl.core.schedule import Schedule
from sortedrl.engines.step_time import StepTime, pays_up_to, with_drafts
from sortedrl.settings.slots import MANY_SLOTS
from sortedrl.studies.simulate import Case, compare, deciding_modes
from sortedrl.studies.workload import Workload, run, with_mode
from sortedrl.studies.workload_settings import (
    Expectation,
    SimulatedSettings,
    check_simulated,
    simulated_schedule,
    step_times_of,
)

CLOSE = 0.02  # of the faster one's speed, not of the limit: with slow environments or learners, all are far from that
LARGER_UPDATES = 1.1  # times the size that was asked for: worth a sentence
BASELINES = ("baseline", "baseline+longest-first")
SIZED = ("partial", "partial+lookahead", "cohort-at-once")  # gain from larger cohorts, and get staler with them
# A cap trades some empty slots for lower staleness, less waste and less re-prefill.
CAPPED = (("on-policy+planned", 1.15), ("partial+elevator", 1.3), ("partial+elevator", 1.5))
FEWER_SLOTS = (("partial+lookahead", None), ("partial+elevator", None), ("partial+elevator", 1.5))
LEAST_SLOTS = 0.4  # times the update size
PRECISION = 0.05  # of an acceptance of drafts, in tokens per step


@dataclass(frozen=True)
class Allowed:
    """The user's bounds. Staleness is the mean over tokens; the bound per token is `Schedule.max_staleness`."""

    length_bias: float = 0.02
    staleness_mean: float | None = None
    cohort_updates: int = 4


class PlanSettings(SimulatedSettings):
    """Recommend a mode, cohort size, oversubscription and slots for a workload, or none if you do not need one."""

    why_absent: ClassVar[Mapping[str, str]] = {"oversubscribe": "plan tries its own caps; simulate has it"}

    expectation: Expectation = "cold"
    """how well lengths are known in advance"""
    max_cohort_updates: Annotated[int, Field(ge=1)] = 4
    """largest cohort allowed, in updates; the paper found 8 harmful (not reproduced: docs/evidence.md)"""
    max_length_bias: Annotated[float, Field(ge=0)] = 0.02
    """largest relative bias allowed in trained lengths"""
    max_staleness_mean: Annotated[float | None, Field(ge=0)] = None
    """largest mean staleness of a token"""

    def check(self) -> None:
        simulated_schedule(self)
        check_simulated(self)


@dataclass(frozen=True)
class Option:
    """A candidate and its simulated metrics. `run_of_limit` covers the whole run, including the time of learner,
    weights and scores; `of_limit` is goodput over the limit, as everywhere."""

    name: str
    schedule: Schedule
    run_of_limit: float
    goodput: float
    staleness_mean: float
    staleness_max: int
    length_bias: float
    waste: float
    sortedness: float | None
    bubble: float
    rollouts_per_update_mean: float
    of_limit: float
    slots: int = 0  # of all engines
    goodput_error: float | None = None  # relative standard error

    @property
    def is_baseline(self) -> bool:
        return self.schedule.mode in BASELINES


@dataclass(frozen=True)
class Plan:
    choice: Option
    runner_up: Option | None
    with_kv_cache_reuse: Option  # the elevator on an engine that keeps the KV cache of aborted requests
    baseline: Option  # the best baseline
    streamed: Option | None  # the faster one of choice and best baseline with streaming; None: no learner time is set
    streamed_on_shared_gpu: Option | None  # the same with engine and learner on one GPU (`stream_sms`)
    needed: bool  # False: you do not need this
    reason: str
    options: tuple[Option, ...]
    staleness_frontier: tuple[Option, ...]
    bias_frontier: tuple[Option, ...]


def candidates(workload: Workload, schedule: Schedule, allowed: Allowed) -> list[Case]:
    """What `simulate` compares by default, with the largest cohort; some also with smaller ones (2, 4, ... updates), a
    cap or fewer slots."""
    per_update = -(-schedule.rollouts_per_update // schedule.rollouts_per_prompt)
    cohorts = [2**k for k in range(1, 10) if 2**k < allowed.cohort_updates] + [allowed.cohort_updates]
    found = [Case(mode, workload, with_mode(schedule, mode)) for mode in BASELINES]
    modes = [mode for mode in deciding_modes(schedule) if mode not in BASELINES]
    for updates in cohorts:
        sized = replace(schedule, prompts_per_cohort=updates * per_update)
        label = f"cohort {updates} x update"
        is_largest = updates == allowed.cohort_updates
        tried: list[tuple[str, float | None]] = [(mode, None) for mode in (modes if is_largest else SIZED)]
        tried += CAPPED if is_largest else ()
        found += [_case(workload, sized, mode, cap, label) for mode, cap in tried]
    for slots in fewer_slots(workload, schedule):
        few, named = replace(workload, slots=slots), f"{label}, {slots} slots"
        found += [_case(few, sized, mode, cap, named) for mode, cap in FEWER_SLOTS]
    return found


def _case(workload: Workload, schedule: Schedule, mode: str, cap: float | None, label: str) -> Case:
    suffix = "" if cap is None else f", oversubscribe {cap}"
    return Case(f"{mode}, {label}{suffix}", workload, replace(with_mode(schedule, mode), oversubscribe=cap))


def fewer_slots(workload: Workload, schedule: Schedule) -> list[int]:
    """A half, a quarter, ... of the slots of each engine, as long as an update has not many more rollouts; also as many
    as an update has, and the most without a notice (`too_many_slots`)."""
    engines, update = workload.engines, schedule.rollouts_needed
    each = {workload.slots // engines >> k for k in range(1, 8)}
    each |= {int(times * update) // engines for times in (1.0, MANY_SLOTS)}
    return sorted((engines * n for n in each if LEAST_SLOTS * update <= engines * n < workload.slots), reverse=True)


def plan(
    workload: Workload,
    schedule: Schedule,
    allowed: Allowed,
    seeds: Sequence[int] = (0,),
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Plan:
    rows = candidates(workload, schedule, allowed)
    keeping = _with_kv_cache_reuse([row for row in rows if row.workload.slots == workload.slots])
    run_metrics = compare([*rows, keeping], seeds, on_progress=on_progress)
    options = tuple(option(row.name, row.schedule, run_metrics[row.name]) for row in rows)
    choice, runner_up = choose(options, allowed)
    with_kv_cache_reuse = option(keeping.name, keeping.schedule, run_metrics[keeping.name])
    baseline = max((o for o in options if o.is_baseline), key=lambda o: o.run_of_limit)
    streamed, on_shared_gpu = _streamed(workload, (choice, baseline), seeds)
    needed, too_stale = not choice.is_baseline, _too_stale(options, choice, allowed)
    keys_matter = is_allowed(with_kv_cache_reuse, allowed) and is_faster(with_kv_cache_reuse, choice)
    why = reason_for_baseline(choice, too_stale)
    if needed:
        why = reason(choice, runner_up, with_kv_cache_reuse if keys_matter else None, baseline)
    return Plan(
        choice=choice,
        runner_up=runner_up,
        with_kv_cache_reuse=with_kv_cache_reuse,
        baseline=baseline,
        streamed=streamed,
        streamed_on_shared_gpu=on_shared_gpu,
        needed=needed,
        reason=why
        + excluded_by_staleness(too_stale, allowed)
        + larger_updates(choice)
        + streaming_advice(choice, streamed, "With more GPUs, for the learner alone, add --stream (exact)")
        + streaming_advice(choice, on_shared_gpu, "On one GPU with --engine vllm, set stream and stream_sms (exact)"),
        options=options,
        staleness_frontier=frontier(options, lambda o: o.staleness_mean),
        bias_frontier=frontier(options, lambda o: abs(o.length_bias)),
    )


def option(name: str, schedule: Schedule, run_metrics: dict[str, Any]) -> Option:
    names = Option.__dataclass_fields__.keys() & run_metrics.keys()
    run_of_limit = run_metrics["trained_tokens_per_hour"] / 3600 / run_metrics["limit"]
    return Option(name=name, schedule=schedule, run_of_limit=run_of_limit, **{key: run_metrics[key] for key in names})


def choose(options: Sequence[Option], allowed: Allowed) -> tuple[Option, Option | None]:
    """The choice and the best option of another mode. Baselines are always allowed: no cut and no stale responses."""
    fit = [o for o in options if o.is_baseline or is_allowed(o, allowed)]
    fastest = max(fit, key=lambda o: o.run_of_limit)
    close = [o for o in fit if not is_faster(fastest, o)]
    choice = min(close, key=lambda o: (not o.is_baseline, round(o.staleness_mean, 2), -o.run_of_limit))
    others = [o for o in fit if o.schedule.mode != choice.schedule.mode]
    return choice, max(others, key=lambda o: (o.run_of_limit, -o.staleness_mean), default=None)


def is_faster(one: Option, other: Option) -> bool:
    """By more than `CLOSE`."""
    return (1 - CLOSE) * one.run_of_limit > other.run_of_limit


def is_allowed(option: Option, allowed: Allowed) -> bool:
    young = allowed.staleness_mean is None or option.staleness_mean <= allowed.staleness_mean
    return young and abs(option.length_bias) <= allowed.length_bias


def frontier(options: Sequence[Option], cost: Callable[[Option], float]) -> tuple[Option, ...]:
    """The Pareto frontier of goodput and cost, lowest cost first."""
    kept: list[Option] = []
    for candidate in sorted(options, key=lambda o: (cost(o), -o.run_of_limit)):
        if not kept or candidate.run_of_limit > kept[-1].run_of_limit + 1e-9:
            kept.append(candidate)
    return tuple(kept)


def reason_for_baseline(choice: Option, too_stale: Option | None) -> str:
    """Whether you need SortedRL is open if only your bound on staleness excludes a faster mode."""
    if too_stale is not None:
        within = f"Within your bounds no mode is more than {CLOSE:.0%} faster than {choice.name}"
        return f"{within}, which reaches {choice.run_of_limit:.2f} of the limit."
    return (
        f"You do not need this: {choice.name} reaches {choice.run_of_limit:.2f} of the limit with on-policy, uncut "
        f"responses; no allowed mode is more than {CLOSE:.0%} faster."
    )


def excluded_by_staleness(option: Option | None, allowed: Allowed) -> str:
    """A line for `reason`, if a faster mode is too stale for the user's bound."""
    if option is None:
        return ""
    return (
        f"\n{option.name} would reach {option.run_of_limit:.2f} at token staleness {option.staleness_mean:.2f} "
        f"(max_staleness_mean = {allowed.staleness_mean:g})."
    )


def _too_stale(options: Sequence[Option], choice: Option, allowed: Allowed) -> Option | None:
    """The fastest option that only the bound on staleness excludes, if it is much faster than the choice."""
    fit = [o for o in options if is_allowed(o, replace(allowed, staleness_mean=None)) and not is_allowed(o, allowed)]
    fastest = max(fit, key=lambda o: o.run_of_limit, default=None)
    return fastest if fastest is not None and is_faster(fastest, choice) else None


def reason(choice: Option, runner_up: Option | None, with_kv_cache_reuse: Option | None, baseline: Option) -> str:
    text = f"{choice.name}: {choice.run_of_limit:.2f} of the limit"
    if takes_other_time(choice):
        text += f" over the whole run ({choice.of_limit:.2f} while it generates)"
    text += (
        f", {choice.run_of_limit / baseline.run_of_limit:.2f}x the best baseline ({baseline.name}, "
        f"{baseline.run_of_limit:.2f}), at token staleness {choice.staleness_mean:.2f} "
        f"and length bias {choice.length_bias:+z.1%}."
    )
    if runner_up is not None:
        text += (
            f"\nRunner-up {runner_up.name}: {runner_up.run_of_limit:.2f} at staleness {runner_up.staleness_mean:.2f}, "
            f"length bias {runner_up.length_bias:+z.1%}."
        )
    if with_kv_cache_reuse is not None:
        text += (
            "\nWith the KV cache kept across weight updates (reuse_kv_cache, an approximation), "
            f"{with_kv_cache_reuse.schedule.mode} "
            f"would reach {with_kv_cache_reuse.run_of_limit:.2f} at staleness {with_kv_cache_reuse.staleness_mean:.2f}."
        )
    return text


def takes_other_time(option: Option) -> bool:
    """Where the learner or scores take time, the two fractions of the limit differ."""
    return option.of_limit - option.run_of_limit > 0.005


def larger_updates(option: Option) -> str:
    """A line for `reason`, if harvests that wait for old rollouts make the updates larger."""
    asked, bound = option.schedule.rollouts_needed, option.schedule.max_staleness
    if bound is None or option.rollouts_per_update_mean <= LARGER_UPDATES * asked:
        return ""
    return (
        f"\nWith max_staleness = {bound}, updates of {option.schedule.mode} hold "
        f"{option.rollouts_per_update_mean:,.0f} rollouts instead of {asked:,}. Fewer, larger updates may need more "
        "rollouts for a score: use fewer slots or a higher bound."
    )


def _streamed(
    workload: Workload, options: Sequence[Option], seeds: Sequence[int]
) -> tuple[Option | None, Option | None]:
    """The fastest of the options with streaming, on a device of the learner's own and on that of the engine."""
    if workload.stream or workload.separate_learner or not workload.learner_seconds_per_token:
        return None, None
    devices = (False, True) if workload.engines == 1 else (False,)
    rows = []
    for shared in devices:
        for o in dict.fromkeys(options):
            streamed = replace(workload, slots=o.slots, stream=True, share_gpu=shared)
            rows.append(Case(f"{o.name}, streamed{' on its GPU' * shared}", streamed, o.schedule))
    found = compare(rows, seeds)
    tried = [option(row.name, row.schedule, found[row.name]) for row in rows]
    each = len(tried) // len(devices)
    alone, on_shared_gpu = tried[:each], tried[each:]
    best = [max(tried, key=lambda o: o.run_of_limit, default=None) for tried in (alone, on_shared_gpu)]
    return best[0], best[1]


def streaming_advice(choice: Option, streamed: Option | None, how: str) -> str:
    """A line for `reason`, if streaming pays."""
    if streamed is None or not is_faster(streamed, choice):
        return ""
    return (
        f"\n{how}: {streamed.name.partition(', streamed')[0]} then reaches {streamed.run_of_limit:.2f}, "
        f"{streamed.run_of_limit / choice.run_of_limit:.2f}x this choice, at staleness {streamed.staleness_mean:.2f}."
    )


def _with_kv_cache_reuse(rows: Sequence[Case]) -> Case:
    """The elevator with the largest cohort, on an engine that keeps the KV cache across weight updates."""
    uncapped = [row for row in rows if row.schedule.oversubscribe is None]
    elevator = [row for row in uncapped if row.schedule.mode == "partial+elevator"][-1]
    return Case(f"{elevator.name}, stale KV", replace(elevator.workload, reuse_kv_cache=True), elevator.schedule)


# Drafts


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
    without, drafted = step_times_of(settings)

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
    return DraftPlan(most, found, _drafts_reason(settings, most, found))


def _drafts_reason(settings: SimulatedSettings, most: int, options: Sequence[DraftedOption]) -> str:
    gains = "; ".join(
        f"{one.name} {one.gain:.2f}x, "
        + ("they never pay" if one.pays_from is None else f"they pay from {one.pays_from:.2f} on")
        for one in options
    )
    at = f"at {settings.draft_acceptance:g} tokens per request and step"
    if max(option.gain for option in options) <= 1 + CLOSE:
        return f"Leave speculative_config unset: drafts of {settings.draft_tokens} tokens do not pay {at} ({gains})."
    limit = f" with draft_up_to {most}" if most < settings.most_slots_per_engine() else ""
    return f"Drafts of {settings.draft_tokens} tokens{limit} (exact), {at}: {gains}."
