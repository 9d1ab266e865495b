"""Small simulated runs for the tests of the scheduler: the whole training loop, every knob of it as plain data."""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sortedrl.core import (
    STRATEGIES,
    Answer,
    Batch,
    Controller,
    Event,
    EventLog,
    Expectation,
    Prompt,
    Prompts,
    Request,
    Rollout,
    Schedule,
    Strategy,
)
from sortedrl.core.group_filter import Keeps
from sortedrl.core.seeds import derive_seed
from sortedrl.engines.episodes import place_of
from sortedrl.engines.pool_members import even_split
from sortedrl.engines.simulated import SimulatedEngine
from sortedrl.engines.simulated_loop import SimulatedEnvironments, SimulatedLearner, SimulatedScorer, Step
from sortedrl.engines.simulated_pool import SimulatedPool
from sortedrl.engines.step_time import StepTime, linear
from sortedrl.engines.virtual_time import VirtualTimeEngine
from sortedrl.observe.metrics import Metrics
from sortedrl.observe.run_metrics import RunMetrics

ONE_SECOND_STEPS = linear(1.0, 0.0)
STEP_TIMES = (ONE_SECOND_STEPS, linear(0.25, 0.125), linear(0.5, 0.125, per_cached_token=0.01, per_prefill_token=0.1))
FILTER_ROUNDS = ["filter-rounds", "filter-rounds+refill"]  # without a filter the same as the baseline
MODES = sorted(STRATEGIES.keys() - set(FILTER_ROUNDS))
STREAMABLE = [mode for mode in MODES if not mode.startswith("cohort-at-once")]
NEVER = float("inf")
E = TypeVar("E")
PATIENCE = 5_000  # waits and events after which a small run counts as endless


EQUAL_REWARD = {"right": 1.0, "wrong": 0.0, "half": 0.5}


def keeps_two_of_three(group: Sequence[Rollout]) -> bool:
    """A filter of one's own, which may decide on groups of one."""
    return bool(group[0].prompt.payload % 3)


class Endless(AssertionError):
    """The schedule makes no progress."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentCall:
    """How an environment handles a call."""

    seconds: float = 0.0  # NEVER: it hangs
    fails: bool = False
    rewards: bool = True  # at the end of the episode; otherwise the scorer does


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A run: its schedule, and how engine, scorer and learner behave. Tuples are read in turn, again and again."""

    schedule: Schedule
    lengths: tuple[int, ...]  # prompt i answers with the i-th
    redraws: bool = False  # another seed gives another length
    slots: int = 4
    epochs: int = 1
    shuffle: bool = False
    prompt_tokens: tuple[int, ...] = (1,)
    step_time: StepTime = ONE_SECOND_STEPS
    kv_tokens: int | None = None
    weight_update_seconds: float = 0.0
    learner_seconds: float = 0.0
    score_seconds: tuple[float, ...] = (0.0,)  # of rollout i; NEVER: no score comes
    unscorable: frozenset[int] = frozenset()  # rollouts whose reward raises
    lost_after: tuple[int | None, ...] = (None,)  # tokens after which the engine loses a request
    max_updates: int | None = None
    streams: bool = False  # the learner works during the harvest, on what is certain to be in the coming update
    silent_updates: frozenset[int] = frozenset()  # after these the learner publishes nothing
    turns: tuple[int, ...] = ()  # of prompt i; empty: no environments
    observations: tuple[int, ...] = (2,)  # tokens of an environment's answer to turn i
    calls: tuple[EnvironmentCall, ...] = (EnvironmentCall(),)
    bring_back: str = "replay"  # the turns of a closed instance; or "state", from a checkpoint only; or "never"
    group_rewards: tuple[str, ...] = ()  # of prompt i: right, wrong, half, or mixed; empty: each reward is the length

    def length_of(self, prompt: Prompt, seed: int) -> int:
        number: int = prompt.payload
        return self.lengths[(number + (derive_seed(seed) if self.redraws else 0)) % len(self.lengths)]

    def final_length(self, rollout: Rollout) -> int:
        """What the rollout's present attempt must end at."""
        return sum(tokens for _, tokens in self.shape(rollout))

    def seed_of(self, rollout: Rollout) -> int:
        return rollout.seed if self.schedule.keep_seed else derive_seed(rollout.seed, rollout.attempt)

    def reward_of(self, rollout: Rollout) -> float:
        if not self.group_rewards:
            return float(len(rollout))
        kind = self.group_rewards[rollout.prompt.payload % len(self.group_rewards)]
        return EQUAL_REWARD[kind] if kind in EQUAL_REWARD else float(rollout.index_in_group % 2)

    def turns_of(self, prompt: Prompt) -> int:
        return self.turns[prompt.payload % len(self.turns)] if self.turns else 1

    def turn_length(self, prompt: Prompt, seed: int, turn: int) -> int:
        return self.length_of(prompt, seed + turn)

    def observation_of(self, turn: int) -> int:
        return self.observations[turn % len(self.observations)]

    def shape(self, rollout: Rollout) -> list[tuple[bool, int]]:
        """The runs of policy (True) and environment tokens that the rollout's present attempt must consist of."""
        schedule, seed, prompt = self.schedule, self.seed_of(rollout), rollout.prompt
        left = schedule.max_response_tokens
        context = (schedule.max_context_tokens or 10**9) - len(prompt.tokens)
        runs: list[tuple[bool, int]] = []
        for turn in range(self.turns_of(prompt)):
            wanted, room = self.turn_length(prompt, seed, turn), min(left, context)
            runs.append((True, min(wanted, room)))
            left, context = left - runs[-1][1], context - runs[-1][1]
            observed = self.observation_of(turn)
            is_last = turn + 1 >= min(self.turns_of(prompt), schedule.max_turns or 10**9)
            if wanted >= room or is_last or context <= observed:
                break
            runs.append((False, observed))
            context -= observed
        return runs

    def end_of_turn(self, request: Request) -> int:
        turn, start = place_of(request.prefix)
        return start + self.turn_length(request.prompt, request.seed, turn)

    def loss_of(self, request: Request) -> int | None:
        """A request that would end by then is not lost."""
        lost = self.lost_after[derive_seed(request.seed, request.prefix_length) % len(self.lost_after)]
        left = min(self.end_of_turn(request) - request.prefix_length, request.max_new_tokens)
        return lost if lost is not None and lost < left else None

    def dataset(self) -> list[Prompt]:
        sizes = self.prompt_tokens
        return [Prompt(f"p{i}", range(sizes[i % len(sizes)]), i) for i in range(len(self.lengths))]


class Watched(VirtualTimeEngine):
    """Remembers the requests that it got."""

    requests: list[Request]

    def submit(self, requests: Any) -> None:
        self.requests = [*getattr(self, "requests", []), *requests]
        super().submit(requests)  # type: ignore[safe-super]

    def holds(self, id: int) -> bool: ...  # type: ignore[empty-body]


class WatchedEngine(Watched, SimulatedEngine):
    def holds(self, id: int) -> bool:
        return id in self._running or any(id == run.request.id for run in self._queue)


class WatchedPool(Watched, SimulatedPool):
    """The slots of an engine, on several of them."""

    engines = 3

    def __init__(self, *, slots: int, **options: Any) -> None:
        sizes = even_split(slots, min(slots, self.engines))
        SimulatedPool.__init__(self, [SimulatedEngine(slots=size, **options) for size in sizes])

    def holds(self, id: int) -> bool:
        return id in self._replica_of or any(id == request.id for request in self._queue)


class WatchedEnvironments(SimulatedEnvironments):
    """Instances that see each turn once, of rollouts that have no slot. An answer to a canceled call still arrives."""

    def __init__(self, engine: VirtualTimeEngine, scenario: Scenario) -> None:
        super().__init__(engine, self._step)
        self._scenario = scenario
        self.instances: dict[int, int] = {}  # turns that they have seen, by rollout id
        self.waits = 0

    def submit(self, rollout: Rollout, call: int) -> None:
        id, before = rollout.id, rollout.observations
        assert isinstance(self._engine, Watched) and not self._engine.holds(id)
        assert id not in self._call_of, "asked twice at a time"
        if id not in self.instances and before and self._scenario.bring_back != "replay":
            self._call_of[id] = call
            heapq.heappush(self._due, (self._engine.now(), call, Answer(id, call, is_lost=True)))
            return
        seen = self.instances.setdefault(id, before)
        assert seen == before, f"an instance saw {seen} turns, and the rollout has {before} answers"
        self.instances[id] = seen + 1
        super().submit(rollout, call)

    def collect(self) -> list[Answer]:
        done = []
        while self._due and self._due[0][0] <= self._engine.now():
            done.append(heapq.heappop(self._due)[2])
            if self._call_of.get(done[-1].rollout_id) == done[-1].call:
                del self._call_of[done[-1].rollout_id]
        return done

    def cancel(self, rollout_id: int) -> None:
        self.instances.pop(rollout_id, None)
        super().cancel(rollout_id)

    def wait(self, timeout_seconds: float) -> None:
        self.waits += 1
        if self.waits > PATIENCE:
            raise Endless("the controller waits for environments and nothing else happens")
        super().wait(timeout_seconds)

    def state(self, rollout_id: int) -> Any:
        if self._scenario.bring_back != "state" or rollout_id not in self.instances:
            return None
        return {"id": rollout_id, "turns": self.instances[rollout_id] - (rollout_id in self._call_of)}  # answered ones

    def restore(self, rollout: Rollout, state: Any) -> bool:
        if state is not None:
            assert state["id"] == rollout.id
            self.instances[rollout.id] = state["turns"]
        return state is not None or self._scenario.bring_back == "replay"

    def _step(self, rollout: Rollout) -> Step:
        scenario, turn = self._scenario, rollout.observations
        draw = derive_seed(scenario.seed_of(rollout), turn, rollout.failures)
        call = scenario.calls[draw % len(scenario.calls)]
        is_last = turn + 1 >= scenario.turns_of(rollout.prompt)
        return Step(
            call.seconds,
            None if is_last else scenario.observation_of(turn),
            "the tool broke" if call.fails else None,
            scenario.reward_of(rollout) if is_last and call.rewards else None,
        )


class WatchedScorer(SimulatedScorer):
    waits = 0

    def wait(self, timeout_seconds: float) -> None:
        self.waits += 1
        if self.waits > PATIENCE:
            raise Endless("the controller waits for scores and nothing else happens")
        super().wait(timeout_seconds)


class WatchedLearner(SimulatedLearner):
    """Checks what is streamed to it: whole groups, each once, all of them in the next batch, of its version."""

    def __init__(self, engine: VirtualTimeEngine, scenario: Scenario) -> None:
        super().__init__(engine, lambda rollouts: len(rollouts) * scenario.learner_seconds / 4)
        self._whole_groups = scenario.schedule.whole_groups
        self._streamed: dict[int, tuple[Rollout, int, int]] = {}  # with version and length
        self.parts = 0

    def start(self, rollouts: Sequence[Rollout], version: int) -> None:
        assert not self.is_working and rollouts
        self.parts += 1
        for rollout in rollouts:
            assert rollout.id not in self._streamed and rollout.reward is not None
            self._streamed[rollout.id] = (rollout, version, len(rollout))
        super().start(rollouts, version)

    def check(self, batch: Batch) -> None:
        assert not self.is_working
        for rollout, version, length in self._streamed.values():
            assert rollout in batch.rollouts, f"rollout {rollout.id} was streamed for update {batch.update}"
            assert version == batch.version and len(rollout) == length
        if self._whole_groups:
            groups = {rollout.group for rollout, _, _ in self._streamed.values()}
            assert all((rollout.id in self._streamed) == (rollout.group in groups) for rollout in batch)
        self._streamed.clear()


class Run:
    """A scenario while it runs, and what it left behind. `state` starts it from a checkpoint, in a log that ended at
    `last_time`."""

    def __init__(
        self,
        scenario: Scenario,
        *,
        state: dict[str, Any] | None = None,
        last_time: float = 0.0,
        expectation: Expectation | None = None,
        strategy: Strategy | None = None,
        filter_groups: Keeps | None = None,
        engine_type: type[Watched] = WatchedEngine,
    ) -> None:
        self.scenario = scenario
        self.events: list[Event] = []
        self.batches: list[Batch] = []
        self.metrics = Metrics()
        make: Callable[..., Watched] = engine_type
        self.engine = make(
            slots=scenario.slots,
            step_time=scenario.step_time,
            length_of=scenario.end_of_turn,
            kv_tokens=scenario.kv_tokens,
            weight_update_seconds=scenario.weight_update_seconds,
            lost_after=scenario.loss_of,
            prefix_cache=bool(scenario.turns),
        )
        self.environments = WatchedEnvironments(self.engine, scenario) if scenario.turns else None
        self.scorer = WatchedScorer(self.engine, seconds_of=self._score_seconds, reward_of=self._reward)
        self.learner = WatchedLearner(self.engine, scenario) if scenario.streams else None
        self.controller = Controller(
            self.engine,
            Prompts(scenario.dataset(), epochs=scenario.epochs, seed=scenario.schedule.seed, shuffle=scenario.shuffle),
            self.scorer,
            scenario.schedule,
            environments=self.environments,
            strategy=strategy,
            filter_groups=filter_groups,
            expectation=expectation,
            log=EventLog(self._keep, self.metrics),
            max_updates=scenario.max_updates,
            stream_to=self.learner,
        )
        if state is not None:
            self.engine.update_weights(None, state["version"])
            self.controller.restore(state, last_time=last_time)

    def batches_in_turn(self) -> Iterator[Batch]:
        """The loop of a training run; yields each batch before the learner steps."""
        for batch in self.controller:
            self.batches.append(batch)
            yield batch
            self.learn(batch)

    def to_end(self) -> Run:
        for _ in self.batches_in_turn():
            pass
        return self

    def updates(self, count: int) -> Run:
        """Until `count` batches were learned from, or the end."""
        if count:
            for batch in self.controller:
                self.batches.append(batch)
                self.learn(batch)
                if len(self.batches) == count:
                    break
        return self

    def checkpoint(self) -> dict[str, Any]:
        """The controller's state as it comes back from a file."""
        state: dict[str, Any] = json.loads(json.dumps(self.controller.state()))
        return state

    @property
    def run_metrics(self) -> RunMetrics:
        return self.metrics.run_metrics()

    @property
    def sizes(self) -> list[int]:
        return [len(batch) for batch in self.batches]

    @property
    def ids(self) -> list[list[int]]:
        """Batches as sorted rollout ids."""
        return [sorted(rollout.id for rollout in batch) for batch in self.batches]

    @property
    def lengths(self) -> list[list[int]]:
        return [[len(rollout) for rollout in batch] for batch in self.batches]

    def all(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    def learn(self, batch: Batch) -> None:
        seconds = self.scenario.learner_seconds
        if self.learner is not None:
            self.learner.check(batch)
        if self.scenario.schedule.overlap:
            self.controller.carry_on(until=self.engine.now() + seconds)
        else:
            self.engine.pass_time(seconds)
        if batch.update not in self.scenario.silent_updates:
            self.controller.publish()

    def _keep(self, event: Event) -> None:
        self.events.append(event)
        if len(self.events) > PATIENCE * (10 if self.scenario.turns else 1):
            raise Endless("more events than a small run can need")

    def _score_seconds(self, rollout: Rollout) -> float:
        return self.scenario.score_seconds[rollout.id % len(self.scenario.score_seconds)]

    def _reward(self, rollout: Rollout) -> float:
        if rollout.id in self.scenario.unscorable:
            raise ValueError("the judge cannot read this")
        return self.scenario.reward_of(rollout)


def run(mode: str, lengths: list[int], *, slots: int = 4, **knobs: Any) -> Run:
    """A whole run from a few words: knobs of the schedule and of the scenario together."""
    return Run(scenario(mode, lengths, slots=slots, **knobs)).to_end()


def scenario(mode: str, lengths: list[int], *, slots: int = 4, **knobs: Any) -> Scenario:
    of_schedule = {name: knobs.pop(name) for name in list(knobs) if name in Schedule.__slots__}
    of_schedule.setdefault("prompts_per_cohort", None)
    of_schedule.setdefault("max_response_tokens", 100)
    return Scenario(schedule=Schedule(mode=mode, **of_schedule), lengths=tuple(lengths), slots=slots, **knobs)
