"""A workload (lengths, slots, batch sizes, step time), and one simulated run of a mode on it."""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from statistics import fmean
from typing import Any

from sortedrl.core.controller import Batch, Controller
from sortedrl.core.engine import Request
from sortedrl.core.events import EventLog, Sink
from sortedrl.core.expectation import Expectation, SensedLengths
from sortedrl.core.prompts import Prompts
from sortedrl.core.rollout import ENVIRONMENT, Prompt, Rollout, Segment
from sortedrl.core.schedule import Schedule
from sortedrl.core.seeds import derive_seed, mixing
from sortedrl.core.strategies.registry import strategy_named
from sortedrl.core.turns import Environments
from sortedrl.engines.episodes import EpisodeOf, end_of_turn, place_of
from sortedrl.engines.lengths import (
    EqualGroups,
    LengthOf,
    LognormalLengths,
    cached,
    length_of_request,
    normal,
    simulated_reward,
    with_shared_cache,
)
from sortedrl.engines.pool_members import even_split
from sortedrl.engines.simulated import SimulatedEngine
from sortedrl.engines.simulated_chunked_prefill import ChunkedPrefillEngine
from sortedrl.engines.simulated_loop import SimulatedLearner, SimulatedScorer, simulated_environments
from sortedrl.engines.simulated_pool import SimulatedPool
from sortedrl.engines.step_time import PRESETS, StepTime
from sortedrl.engines.virtual_time import VirtualTimeEngine
from sortedrl.log.paused_gc import paused_gc
from sortedrl.observe.metrics import Metrics
from sortedrl.observe.run_metrics import RunMetrics
from sortedrl.studies.steady_state import SteadyState

EXPECTATIONS = ("cold", "warm", "oracle")
ORACLE_LOG_NOISE = 0.4
MEAN_OF_PROMPTS = 20_000  # for the mean length
# The limit is measured with at least so many rollouts per slot, but not more than these for this reason alone.
STEADY_TURNOVERS, STEADY_ROLLOUTS = 40, 160_000
REFERENCE_LENGTHS = LognormalLengths()
MAXIMA = ("slots", "staleness_max", "longest_wait_updates")
OF_EACH_CONTROLLER = ("updates", "harvests", *MAXIMA[1:])  # whole numbers that do not add up
RATES = ("goodput", "kept", "rollouts_per_update_mean", "trained_rollouts_per_hour", "trained_tokens_per_hour")
KV_BLOCK_TOKENS = 16  # vLLM's default: a returning rollout computes 8.5 tokens again on average


class SimulatedPrompts(Sequence[Prompt]):
    """`count` prompts of `tokens` tokens each, created lazily. `first`: the number of the first one."""

    def __init__(self, count: int, tokens: int, first: int = 0) -> None:
        self._count = count
        self._tokens = range(tokens)
        self._first = first

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._count:
            raise IndexError(index)
        number = self._first + index
        return Prompt(str(number), self._tokens, number)


@dataclass(frozen=True, kw_only=True)
class Workload:
    lengths: LengthOf = REFERENCE_LENGTHS  # of responses of one turn
    episodes: EpisodeOf | None = None  # of responses of several turns, in place of `lengths`
    step_time: StepTime = PRESETS["memory-bound"]
    slots: int = 128  # of all engines together
    engines: int = 1  # each with its own step time, KV cache and prefill
    controllers: int = 1  # each with its part of the engines, slots, prompts and of every update
    prompts: int = 20 * 512
    first_prompt: int = 0
    prompt_tokens: int = 128
    epochs: int = 1
    kv_tokens: int | None = None  # of one engine
    reuse_kv_cache: bool = False  # a resumed request finds the KV cache of its prefix
    weight_update_seconds: float = 0.0  # duration of a weight update
    learner_seconds_per_update: float = 0.0
    learner_seconds_per_token: float = 0.0
    stream: bool = False  # the learner works during the harvest, in modes that can be streamed
    share_gpu: bool = False  # with `stream`: on the engine's GPU, which slows both down
    separate_learner: bool = False  # on its own devices: it streams unless the engine generates while it steps
    score_seconds: float = 0.0
    equal_groups: EqualGroups | None = None  # groups that a filter of equal rewards filters
    expectation: str = "cold"

    def learner_seconds(self, tokens: int) -> float:
        return self.learner_seconds_per_update + self.learner_seconds_per_token * tokens

    def response_length(self, prompt: Prompt, seed: int) -> int:
        """Policy tokens of a whole response."""
        return self.lengths(prompt, seed) if self.episodes is None else self.episodes(prompt, seed).length


def mean_response_tokens(workload: Workload, schedule: Schedule) -> float:
    prompts = SimulatedPrompts(MEAN_OF_PROMPTS, 0)
    lengths = (workload.response_length(prompt, derive_seed(place)) for place, prompt in enumerate(prompts))
    return fmean(min(length, schedule.max_response_tokens) for length in lengths)


class NoisyOracle(SensedLengths):
    """Expects the true length times log-normal noise: an expectation of known quality."""

    def __init__(self, lengths: LengthOf, schedule: Schedule) -> None:
        super().__init__()
        self._lengths = cached(lengths)
        self._schedule = schedule

    def estimate(self, rollout: Rollout) -> float:
        seed = rollout.seed if self._schedule.keep_seed else derive_seed(rollout.seed, rollout.attempt)
        length = min(self._lengths(rollout.prompt, seed), self._schedule.max_response_tokens)
        return length * math.exp(ORACLE_LOG_NOISE * normal(derive_seed(rollout.seed, 7)))

    def observe(self, rollout: Rollout) -> None:
        """There is nothing to learn."""


def expectation_for(workload: Workload, schedule: Schedule) -> Expectation:
    """Cold: learns only from this run. Warm: starts with one observed length per prompt, as after an epoch."""
    guess = schedule.max_response_tokens / 4
    if workload.expectation == "cold":
        return SensedLengths(first_guess=guess)
    if workload.expectation == "oracle":
        return NoisyOracle(workload.response_length, schedule)
    if workload.expectation != "warm":
        raise ValueError(f"expectation {workload.expectation!r}: use one of {', '.join(EXPECTATIONS)}")
    last_epoch = {
        prompt.id: float(
            min(workload.response_length(prompt, derive_seed(schedule.seed, 99, i)), schedule.max_response_tokens)
        )
        for i, prompt in enumerate(SimulatedPrompts(workload.prompts, 0, workload.first_prompt))
    }
    return SensedLengths(last_epoch, first_guess=guess)


def simulated_engine(workload: Workload, *, ideal: bool = False) -> SimulatedEngine | SimulatedPool:
    """With several turns a slot changes hands so often that it shows what each change costs: one step in which it is
    empty, and the last tokens of a context, which no whole block of the prefix cache holds. `ideal`: neither."""
    episodes = workload.episodes
    counts_changes = episodes is not None and not ideal
    kind = ChunkedPrefillEngine if workload.step_time.has_chunked_prefill else SimulatedEngine
    engines = [
        kind(
            slots=slots,
            step_time=workload.step_time,
            length_of=length_of_request(workload.lengths) if episodes is None else end_of_turn(episodes),
            kv_tokens=workload.kv_tokens,
            weight_update_seconds=workload.weight_update_seconds,
            reuse_kv_cache=workload.reuse_kv_cache,
            prefix_cache=episodes is not None,
            kv_block_tokens=KV_BLOCK_TOKENS if counts_changes else None,
            schedules_ahead=counts_changes,
        )
        for slots in even_split(workload.slots, workload.engines)
    ]
    return engines[0] if len(engines) == 1 else SimulatedPool(engines)


def environments_of(workload: Workload, schedule: Schedule, engine: VirtualTimeEngine) -> Environments | None:
    if workload.episodes is None:
        return None

    def seed_of(rollout: Rollout) -> int:
        return rollout.seed if schedule.keep_seed else derive_seed(rollout.seed, rollout.attempt)

    return simulated_environments(engine, workload.episodes, seed_of)


class UncutLengths:
    """Computes what the log does not contain: the uncut length of the first attempt of each trained rollout."""

    def __init__(self, workload: Workload, schedule: Schedule) -> None:
        self._workload = workload
        self._schedule = schedule
        self._total = self._count = 0

    def add(self, batch: Batch) -> None:
        self._count += len(batch)
        self._total += sum(rollout.policy_length if rollout.attempt == 0 else self._uncut(rollout) for rollout in batch)

    def mean(self) -> float:
        return self._total / self._count if self._count else 0.0

    def _uncut(self, rollout: Rollout) -> int:
        seed = rollout.seed if self._schedule.keep_seed else derive_seed(rollout.seed, 0)
        return min(self._workload.response_length(rollout.prompt, seed), self._schedule.max_response_tokens)


class ControllerRun:
    """A controller with its engines, and the learner's part of the loop."""

    def __init__(self, workload: Workload, schedule: Schedule, sinks: Sequence[Sink], max_updates: int | None) -> None:
        self._metrics, self._uncut = Metrics(), UncutLengths(workload, schedule)
        self.engine, self._streamed_tokens = simulated_engine(workload), 0  # of the coming update
        strategy = strategy_named(schedule.mode)
        wants_stream = workload.stream or (workload.separate_learner and not schedule.overlap)
        prompts = SimulatedPrompts(workload.prompts, workload.prompt_tokens, workload.first_prompt)
        self.controller = Controller(
            self.engine,
            Prompts(prompts, epochs=workload.epochs, seed=schedule.seed),
            SimulatedScorer(
                self.engine,
                seconds_of=lambda rollout: workload.score_seconds,
                reward_of=simulated_reward(workload.equal_groups),
            ),
            schedule,
            environments=environments_of(workload, schedule, self.engine),
            expectation=expectation_for(workload, schedule),
            # A bound method: Python calls it three times as fast as an object.
            log=EventLog(self._metrics.__call__, *sinks),
            max_updates=max_updates,
            stream_to=SimulatedLearner(self.engine, self._streamed_seconds, shares_gpu=workload.share_gpu)
            if wants_stream and strategy.can_stream
            else None,
        )
        self._seconds_per_token = workload.learner_seconds_per_token

    def _streamed_seconds(self, rollouts: Sequence[Rollout]) -> float:
        """Of the work on these rollouts, which the learner starts during the harvest."""
        tokens = sum(map(len, rollouts))
        self._streamed_tokens += tokens
        return self._seconds_per_token * tokens

    def take(self, batch: Batch) -> int:
        """Tokens that the learner has yet to work on."""
        self._uncut.add(batch)
        left, self._streamed_tokens = batch.tokens - self._streamed_tokens, 0
        return left

    def publish_after(self, seconds: float) -> None:
        if self.controller.schedule.overlap:
            self.controller.carry_on(until=self.engine.now() + seconds)
        else:
            self.engine.pass_time(seconds)
        self.controller.publish()

    def run_metrics(self) -> RunMetrics:
        return self._metrics.run_metrics(self._uncut.mean())


def run(workload: Workload, schedule: Schedule, *sinks: Sink, max_updates: int | None = None) -> RunMetrics:
    """One simulated run, from the first prompt to the last update. Several controllers meet at every update: the
    learner starts when all have their batch, and its processes, one per controller, wait for the one with the most
    tokens. `sinks` get the events of the first controller."""
    workload = replace(workload, lengths=with_shared_cache(workload.lengths))
    count = workload.controllers
    runs = [
        ControllerRun(*part, () if place else sinks, max_updates)
        for place, part in enumerate(parts_of(workload, schedule))
    ]
    with paused_gc():
        for batches in zip_longest(*(part.controller for part in runs)):
            present = [(part, batch) for part, batch in zip(runs, batches, strict=True) if batch is not None]
            tokens = max(part.take(batch) for part, batch in present)
            seconds, last = workload.learner_seconds(count * tokens), max(part.engine.now() for part, _ in present)
            for part, _ in present:
                part.publish_after(last - part.engine.now() + seconds)
    return of_controllers([part.run_metrics() for part in runs])


def parts_of(workload: Workload, schedule: Schedule) -> list[tuple[Workload, Schedule]]:
    """What each controller has."""
    count = workload.controllers
    if count == 1:
        return [(workload, schedule)]
    prompts, cohort = -(-workload.prompts // count), schedule.prompts_per_cohort
    part = replace(
        schedule,
        rollouts_per_update=schedule.rollouts_per_update // count,
        prompts_per_cohort=None if cohort is None else -(-cohort // count),
    )
    slots, engines = even_split(workload.slots, count), even_split(workload.engines, count)
    return [
        (
            replace(workload, slots=slots[i], engines=engines[i], prompts=prompts, first_prompt=i * prompts),
            replace(part, seed=derive_seed(schedule.seed, i) if i else schedule.seed),
        )
        for i in range(count)
    ]


def limit(workload: Workload, schedule: Schedule) -> float:
    """The workload's upper bound in tokens per second: all slots full in steady state, each prompt prefilled once.

    With several turns: every token of prompt and environment is prefilled once, environments answer immediately, and
    only tokens of the policy count. Several engines reach the sum of what each of them reaches alone.
    """
    if workload.engines > 1:
        alone = replace(workload, engines=1, prompts=-(-workload.prompts // workload.engines))
        sizes = Counter(even_split(workload.slots, workload.engines))
        return sum(count * limit(replace(alone, slots=slots), schedule) for slots, count in sizes.items())
    engine, seed_state = simulated_engine(workload, ideal=True), mixing(0, schedule.seed)
    assert isinstance(engine, SimulatedEngine)

    def request_of(id: int) -> Request:
        prompt = Prompt(str(id), range(workload.prompt_tokens), id % workload.prompts)
        rollout_seed = mixing(seed_state, id) >> 1
        return Request(id, prompt, (), schedule.max_response_tokens, mixing(mixing(0, rollout_seed), 0) >> 1)

    def next_turn(request: Request, made: int) -> Request | None:
        if workload.episodes is None:
            return None
        place, episode = place_of(request.prefix)[0], workload.episodes(request.prompt, request.seed)
        if place + 1 >= len(episode.turns):
            return None
        first, observed = request.prefix_length + made, episode.observations[place]
        turn = Segment(range(made), range(made), 0)
        answer = Segment(range(first, first + observed), [0.0] * observed, ENVIRONMENT)
        return request._replace(prefix=(*request.prefix, turn, answer), max_new_tokens=request.max_new_tokens - made)

    steady = min(STEADY_TURNOVERS * workload.slots, STEADY_ROLLOUTS)
    return SteadyState(engine, request_of, next_turn).tokens_per_second(
        turnovers=2,
        rollouts=max(workload.prompts * schedule.rollouts_per_prompt, steady),
        tokens_made=lambda: engine.tokens_made,
    )


def with_mode(schedule: Schedule, mode: str) -> Schedule:
    """The same settings in another mode, without those that the mode does not support."""
    strategy = strategy_named(mode)
    return replace(
        schedule,
        mode=mode,
        max_staleness=schedule.max_staleness if strategy.keeps_tokens else None,
        overlap=schedule.overlap and strategy.keeps_tokens,
    )


# The metrics of several runs as those of one: over seeds, or over controllers that train together


def merged(runs: Sequence[RunMetrics], add: Collection[str] = ()) -> dict[str, Any]:
    """Sums of histograms and of the metrics in `add`, maxima of maxima, else means. Unknown values do not count."""
    result: dict[str, Any] = {}
    for field in fields(RunMetrics):
        name, values = field.name, [getattr(run_metrics, field.name) for run_metrics in runs]
        first, known = values[0], [value for value in values if value is not None]
        if isinstance(first, dict):
            result[name] = _merged_counts(values, add=name in add or name.endswith("histogram"))
        elif name == "bubble_per_harvest":
            result[name] = first if len(runs) == 1 else [fmean(column) for column in zip(*values, strict=False)]
        elif isinstance(first, bool | str):
            result[name] = first
        elif name in add:
            result[name] = sum(known)
        else:
            result[name] = max(values) if name in MAXIMA else fmean(known) if known else None
    return result


def of_controllers(runs: Sequence[RunMetrics]) -> RunMetrics:
    """Counts, and rates of tokens and rollouts, add up; fractions are means, since all have as many slots. The run ends
    with the last controller."""
    if len(runs) == 1:
        return runs[0]
    longest = max(run.wall_seconds for run in runs)
    hourly = [name for name in RATES if name.endswith("hour")]
    runs = [replace(run, **{name: getattr(run, name) * run.wall_seconds / longest for name in hourly}) for run in runs]
    counts = [field.name for field in fields(RunMetrics) if field.type is int]
    add = {*counts, *RATES, "rejected_reasons", "filtered_reasons"} - {*OF_EACH_CONTROLLER}
    return RunMetrics(**merged(runs, add) | {"wall_seconds": longest})


def _merged_counts(values: Sequence[dict[Any, float]], *, add: bool) -> dict[Any, float]:
    total: Counter[Any] = Counter()
    for value in values:
        total.update(value)
    return {key: number if add else number / len(values) for key, number in sorted(total.items())}
