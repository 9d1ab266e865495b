"""The paper's throughput experiment on a real engine: every schedule on the same forced lengths, next to the limit.

The engine computes every token of a real batch; there is no learner, and weights do not change. Aborted and resumed
rollouts are prefilled again, as they would be after an update.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.controller import Controller
from sortedrl.core.engine import UNCHANGED, Engine, Request, with_defaults
from sortedrl.core.events import EventLog, Sink
from sortedrl.core.prompts import Prompts
from sortedrl.core.schedule import Schedule
from sortedrl.core.seeds import derive_seed
from sortedrl.core.strategies.base import updates_left
from sortedrl.core.strategies.registry import strategy_named
from sortedrl.core.wording import counted
from sortedrl.engines.lengths import ForcedLengths, length_of_request
from sortedrl.engines.settings import EngineSettings, Slots, check_engine
from sortedrl.engines.step_time import PRESETS
from sortedrl.log.atomic_write import write_atomically
from sortedrl.log.lines import JsonLines
from sortedrl.models import model_named
from sortedrl.observe.console import clock
from sortedrl.observe.metrics import Metrics
from sortedrl.settings.base import as_json
from sortedrl.settings.schedule import Oversubscribe, RolloutsPerUpdate, prompts_per_cohort, schedule_from
from sortedrl.studies import workload as simulated
from sortedrl.studies import workload_settings as described
from sortedrl.studies.measurements import Log, check_is_no_folder, machine, make_folder, random_prompts, warm_up
from sortedrl.studies.simulate import Case
from sortedrl.studies.steady_state import SteadyState
from sortedrl.studies.workload import EXPECTATIONS, UncutLengths, Workload, expectation_for, with_mode
from sortedrl.studies.workload_settings import MedianLength, PromptTokens, SimulatedLearnerSettings, WorkloadSettings
from sortedrl.tasks.scoring import DirectScorer
from sortedrl.tasks.task import Reward
from sortedrl.training.engine import bare_engine


def case_of(text: str, workload: Workload, schedule: Schedule) -> Case:
    """A row, from `mode[@expectation][*oversubscribe]`: a mode, its expectation and its oversubscription cap."""
    rest, _, factor = text.partition("*")
    mode, _, expectation = rest.partition("@")
    try:
        cap = float(factor) if factor else schedule.oversubscribe
    except ValueError:
        why, fix = f"{factor!r} is not a number", "Use for example on-policy*1.15."
        raise ConfigurationError("modes", text, why, fix) from None
    if expectation and expectation not in EXPECTATIONS:
        fix = f"Use one of {', '.join(EXPECTATIONS)}."
        raise ConfigurationError("modes", text, f"no such expectation: {expectation}", fix)
    known = replace(workload, expectation=expectation or "cold")
    return Case(text, known, replace(with_mode(schedule, mode), oversubscribe=cap))


class BenchSettings(WorkloadSettings, EngineSettings):
    """Measure the throughput of each schedule on a real engine, with the same forced lengths for all.

    The default sizes suit the built-in model. Set them for your own model.
    """

    default_response_limit: ClassVar[int] = 800
    why_absent: ClassVar[Mapping[str, str]] = {
        "reuse_kv_cache": "in a bench it is an option of the engine: use --engine-options reuse_kv_cache True",
        "seeds": "a bench runs each mode once: use --seed",
    } | dict.fromkeys(
        (*SimulatedLearnerSettings.model_fields, "score_seconds"),
        "a bench has no learner, no rewards and no weight updates; simulate has them",
    )

    model: str = "built-in"
    """folder or hub name, or built-in; a config.json is enough for vllm with --engine-options load_format dummy"""
    modes: Annotated[tuple[str, ...], Field(min_length=1)] = (
        "baseline",
        "on-policy",
        "on-policy+planned",
        "partial",
        "partial+elevator",
    )
    """schedules to run, each as mode[@cold|warm|oracle][*OVERSUBSCRIBE]"""
    slots: Slots = 32
    rollouts_per_update: RolloutsPerUpdate = 32
    oversubscribe: Oversubscribe = None
    prompt_tokens: PromptTokens = 32
    median_length: MedianLength = 100.0
    cohorts: Annotated[int, Field(ge=1)] = 1
    """length of each run, in cohorts"""
    updates: Annotated[int | None, Field(ge=1)] = None
    """stop each mode after this many updates"""
    limit: Literal["simulated", "measured", "none"] = "none"
    """upper limit of throughput; simulated: from the step time; measured: on the engine"""
    step_time: str = ""
    """profile or preset to predict each mode with; default: no prediction"""
    seed: int = 0
    """seed of lengths and data order"""
    out: Path | None = None
    """JSON file, written after every mode"""
    events: Path | None = None
    """folder for event logs, one per mode"""

    def check(self) -> None:
        for mode in self.modes:
            schedule = case_of(mode, Workload(), bench_schedule(self)).schedule
            strategy_named(schedule.mode).check(schedule)
            if self.modes.count(mode) > 1:
                raise ConfigurationError("modes", mode, "it is there twice", "A bench runs each mode once.")
        check_engine(self)
        described.check_lengths(self)
        described.check_context_fits(self)
        check_is_no_folder("out", self.out, "bench.json")
        if self.replayed_episodes is not None:
            why = "a bench has responses of one turn, and those of this run have several"
            raise ConfigurationError("lengths", str(self.lengths), why, "Use simulate, or a file of lengths.")
        if self.prompt_tokens < 1:
            raise ConfigurationError("prompt_tokens", 0, "an engine needs at least one prompt token", "Use 1.")
        if self.limit == "simulated" and not self.step_time:
            why = "there is no step time to simulate with"
            raise ConfigurationError("limit", "simulated", why, "Set --step-time FILE.")


def bench_schedule(settings: BenchSettings) -> Schedule:
    return schedule_from(settings, max_response_tokens=settings.response_limit())


def bench_workload(settings: BenchSettings, cohorts: int | None = None) -> Workload:
    """What the simulator predicts with. The KV cache follows the option of the engine."""
    return Workload(
        lengths=described.length_of(settings),
        step_time=described.step_time_of(settings) if settings.step_time else PRESETS["memory-bound"],
        slots=settings.slots,
        prompts=(cohorts or settings.cohorts) * prompts_per_cohort(settings),
        prompt_tokens=settings.prompt_tokens,
        kv_tokens=described.kv_tokens_of(settings),
        reuse_kv_cache=bool(settings.resolved_engine_options().get("reuse_kv_cache")),
    )


def run_bench(settings: BenchSettings, log: Log) -> dict[str, Any]:
    workload, schedule = bench_workload(settings), bench_schedule(settings)
    cases = [case_of(text, workload, schedule) for text in settings.modes]
    max_length = settings.prompt_tokens + settings.response_limit()
    # Output folders are made, and a model folder without a model is refused, before anything is printed.
    if settings.out is not None:
        make_folder("out", settings.out.parent)
    if settings.events is not None:
        make_folder("events", settings.events)
    if Path(settings.model).is_dir():
        model_named(settings.model)
    per_case = updates_per_case(workload, schedule, settings.updates)
    updates = len(cases) * per_case
    runs = f"{counted(updates, 'update')} in {counted(len(cases), 'mode')}"
    log(f"{runs}; loading engine {settings.engine}, model {settings.model}")
    engine, vocabulary = bare_engine(settings, settings.model, max_length)
    log(f"{counted(engine.slots, 'slot')} on {machine()}; warming up")
    rate = warm_up(engine, vocabulary, max_length)
    seconds = updates * schedule.rollouts_needed * simulated.mean_response_tokens(workload, schedule) / rate
    log(f"{rate:,.0f} tok/s in the warm-up: all modes take about {clock(seconds)}")
    limit = None
    if settings.limit == "measured":
        log("measuring the limit: every slot full")
        limit = measured_limit(engine, workload, schedule, vocabulary)
    elif settings.limit == "simulated":
        limit = simulated.limit(workload, schedule)
    found: dict[str, Any] = {"machine": machine(), "engine": settings.engine, "limit": limit, "modes": {}}
    found["kv_tokens"] = engine.info().kv_tokens
    progress = Progress(len(cases), per_case, log)
    for case in cases:
        with ExitStack() as files:
            sinks = []
            if settings.events is not None:
                path = settings.events / f"{case.name}.jsonl"
                sinks.append(JsonLines(files.enter_context(path.open("w", encoding="utf-8"))))
            measured = run(
                engine, case.workload, case.schedule, vocabulary, *sinks,
                max_updates=settings.updates, on_update=partial(progress.update, case.name),
            )  # fmt: skip
        for name, key in (("of_limit", "goodput"), ("kept_of_limit", "kept")):
            measured |= {"limit": limit, name: measured[key] / limit if limit else None}
        if settings.step_time:
            measured["predicted"] = predicted(case, settings.updates)
        found["modes"][case.name] = measured
        progress.cases_ended += 1
        if settings.out is not None:
            write_atomically(settings.out, json.dumps({**found, "settings": as_json(settings)}, indent=1) + "\n")
        log(f"{case.name}: kept {measured['kept']:,.0f} tok/s, bubble {measured['bubble']:.1%}")
    return found


class Progress:
    """One line per update, with the time that is left at the pace so far. A case may end early."""

    def __init__(self, cases: int, updates_per_case: int, log: Log, now: Callable[[], float] = time.monotonic) -> None:
        self.total, self.cases_ended = cases * updates_per_case, 0
        self._per_case, self._log, self._now = updates_per_case, log, now
        self._began = now()

    def update(self, case: str, done: int) -> None:
        made, seconds = self.cases_ended * self._per_case + done, self._now() - self._began
        eta = clock(seconds / made * max(0, self.total - made))
        self._log(f"{case}: update {done}/{self._per_case}  elapsed {clock(seconds)}  ETA {eta}")


def updates_per_case(workload: Workload, schedule: Schedule, max_updates: int | None) -> int:
    rollouts = workload.prompts * schedule.rollouts_per_prompt
    possible = updates_left(rollouts, schedule.rollouts_needed)
    return possible if max_updates is None else min(possible, max_updates)


def run(
    engine: Engine,
    workload: Workload,
    schedule: Schedule,
    vocabulary: int,
    *sinks: Sink,
    max_updates: int | None = None,
    on_update: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:
    """Run one mode on the engine from first to last update: its metrics, and the overhead of the scheduler."""
    engine.update_weights(None, 0)  # a run counts versions from 0
    prompts = random_prompts(range(workload.prompts), workload.prompt_tokens, vocabulary)  # before timing starts
    metrics, uncut = Metrics(), UncutLengths(workload, schedule)
    controller = Controller(
        ForcedLengths(engine, length_of_request(workload.lengths)),
        Prompts(prompts, epochs=1, seed=schedule.seed),
        DirectScorer(lambda rollout: Reward(0.0, correct=False)),
        schedule,
        expectation=expectation_for(workload, schedule),
        log=EventLog(metrics, *sinks),
        max_updates=max_updates,
    )
    known = with_defaults(engine)
    inside_before, began = known.inside_seconds, time.perf_counter()
    for batch in controller:
        uncut.add(batch)
        controller.publish(UNCHANGED)
        on_update(batch.update + 1)
    seconds = time.perf_counter() - began
    found = asdict(metrics.run_metrics(uncut.mean()))
    if inside_before is not None and known.inside_seconds is not None:
        found["own_fraction"] = 1 - (known.inside_seconds - inside_before) / seconds
    return found


def measured_limit(
    engine: Engine, workload: Workload, schedule: Schedule, vocabulary: int, turnovers: int = 2
) -> float:
    """The limit on a real engine: `turnovers` requests per slot after the first."""

    def request_of(id: int) -> Request:
        words = random_prompts([id], workload.prompt_tokens, vocabulary)[0]  # unique: each pays for its prefill
        prompt = replace(words, payload=id % workload.prompts)  # determines the length
        return Request(id, prompt, (), schedule.max_response_tokens, derive_seed(derive_seed(schedule.seed, id), 0))

    forced = ForcedLengths(engine, length_of_request(workload.lengths))
    return SteadyState(forced, request_of).tokens_per_second(turnovers=turnovers)


def predicted(case: Case, max_updates: int | None) -> dict[str, Any]:
    """By the simulator, with the step time of the workload."""
    return asdict(simulated.run(case.workload, case.schedule, max_updates=max_updates))
