"""A run made of one seed: a random schedule with random faults, killed and resumed at random, and what it left behind.

    outcome = play(case_of(seed))
    check_outcome(outcome)          # schedule_rules.py

The same seed gives the same run, on any machine: `case_of` uses `random.Random(seed)` and nothing else.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from hypothesis import strategies as st

from multi_token import MultiTokenEngine
from scenarios import (
    FILTER_ROUNDS,
    MODES,
    NEVER,
    STEP_TIMES,
    STREAMABLE,
    EnvironmentCall,
    Run,
    Scenario,
    Watched,
    WatchedEngine,
    WatchedPool,
)
from sortedrl.core import STRATEGIES, Batch, Event, Schedule, events
from sortedrl.core.engine import EngineDied, RequestPreempted
from sortedrl.engines.simulated_pool import Replica

T = TypeVar("T")
_MAY_CHANGE = ("rollouts_per_update", "oversubscribe", "max_staleness", "max_response_tokens", "max_wait_updates")
_MAY_CHANGE += ("max_retries", "score_wait_seconds", "overlap")  # in a resumed run, and more


@dataclass(frozen=True)
class Ending:
    """After so many calls the engine dies (all since the checkpoint is lost), or the run is interrupted and saved."""

    calls: float
    dies: bool


@dataclass(frozen=True, kw_only=True)
class Case:
    """A scenario, when it is saved, and what ends it before its end."""

    seed: int
    scenario: Scenario
    saves: tuple[bool, ...]  # after update i, read in turn
    endings: tuple[Ending, ...]  # of each life; the one after the last ending goes on to its end
    slots_of_later_lives: tuple[int, ...] = ()  # by turns; empty: those of the scenario
    settings_of_later_lives: tuple[dict[str, Any], ...] = ()  # by turns, what is different from the scenario's schedule
    deaths_in_pool: tuple[int, ...] | None = None  # calls after which an engine of a pool dies; None: one engine
    tokens_per_step: int = 1  # of one engine, for each request

    @property
    def kinds(self) -> list[str]:
        """What this case has of all that may go wrong or differ."""
        scenario, schedule = self.scenario, self.scenario.schedule
        has = {
            "whole groups": schedule.whole_groups,
            "single rollouts": schedule.rollouts_per_prompt == 1,
            "several epochs": scenario.epochs > 1,
            "max_staleness": schedule.max_staleness is not None,
            "oversubscribe": schedule.oversubscribe is not None,
            "overlap": schedule.overlap,
            "streams": scenario.streams,
            "publishes not every update": bool(scenario.silent_updates),
            "ends early": scenario.max_updates is not None,
            "several turns": bool(scenario.turns),
            "filter": schedule.filter_groups is not None,
        }
        return [kind for kind, holds in has.items() if holds]


@dataclass
class Outcome:
    """What a run left behind: all its events, those that count, the batches that count, and its last controller."""

    case: Case
    raw: list[Event] = field(default_factory=list)  # with what was rolled back, and the marks
    log: list[Event] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    live: set[int] = field(default_factory=set)  # rollouts that are left at the end


class Mortal(Watched):
    """Counts its calls, and ends the run as it was told to."""

    ending = Ending(NEVER, dies=True)
    interrupt: Callable[[], None]
    calls = 0

    def _live(self) -> None:
        self.calls += 1
        if self.calls > self.ending.calls:
            if self.ending.dies:
                raise EngineDied("the engine's process ended")
            self.interrupt()

    def submit(self, requests: Any) -> None:
        self._live()
        super().submit(requests)

    def poll(self, until: float | None = None) -> Any:
        self._live()
        return super().poll(until)

    def abort(self, ids: Sequence[int]) -> Any:
        self._live()
        return super().abort(ids)  # type: ignore[safe-super]

    def update_weights(self, weights: Any, version: int) -> None:
        self._live()
        super().update_weights(weights, version)  # type: ignore[safe-super]


class MortalEngine(Mortal, WatchedEngine):
    """One engine."""


class Drafting(Mortal, MultiTokenEngine):
    """One engine with several tokens per step."""


class MortalPool(Mortal, WatchedPool):
    """Engines that die one by one, after so many calls; the last one stays."""

    deaths: tuple[int, ...] = ()
    died = 0

    def _live(self) -> None:
        super()._live()
        if self.died < min(len(self.deaths), self.replicas - 1) and self.calls >= self.deaths[self.died]:
            self.lose(self._replicas[self.died])
            self.died += 1

    def lose(self, replica: Replica) -> None:
        """Its requests return to the head of the queue, as in the real pool; their undelivered tokens are lost."""
        self._synchronize(replica)
        self._note(replica, replica.engine.take_changes())
        moved, running = list(replica.entries.values()), set(replica.engine._running)
        ahead = {change.id for change in self._undelivered if change.at > self._now and change.id in replica.entries}
        self._undelivered = [change for change in self._undelivered if change.id not in ahead]
        replica.engine.abort(list(replica.entries))
        for request in moved:
            if request.id in running - ahead:
                context = len(request.prompt.tokens) + request.prefix_length
                self._undelivered.append(RequestPreempted(request.id, self._now, context))
            self._remove(replica, request.id)
        replica.slots = 0  # it gets no more
        self._touched[replica] = None
        self._queue.extendleft(reversed(moved))


def peaceful(modes: Sequence[str] = MODES) -> st.SearchStrategy[Scenario]:
    """A random schedule in which everything arrives and nothing is lost: lengths with ties, ones and limit hits."""
    return st.randoms(use_true_random=False).map(lambda rng: _drawn(rng, modes, troubled=False))


def troubled(modes: Sequence[str] = MODES) -> st.SearchStrategy[Scenario]:
    """A random schedule with late and missing scores, raising rewards, lost requests, prompts that are too long, full
    memory, a learner that does not always publish, a run that ends early."""
    return st.randoms(use_true_random=False).map(lambda rng: _drawn(rng, modes, troubled=True))


def _drawn(rng: random.Random, modes: Sequence[str], *, troubled: bool) -> Scenario:
    return _scenario(rng, _schedule(rng, rng.choice(modes)), troubled)


def case_of(seed: int, *, with_turns: bool = False, with_filter: bool = False) -> Case:
    rng = random.Random(seed)
    mode = rng.choice(MODES)
    troubled = rng.random() < 0.8
    scenario = _scenario(rng, _schedule(rng, mode), troubled)
    if with_turns:
        scenario = _with_turns(rng, scenario, troubled)
        if seed % 4 == 0:
            scenario = _with_slow_environments(scenario)
    if with_filter:
        scenario = _with_filter(rng, scenario)
        mode = scenario.schedule.mode
    lives = rng.choice((0, 1, 1, 2, 3)) if troubled else 0
    endings = tuple(
        Ending(rng.choice((rng.randint(1, 30), rng.randint(20, 200))), dies=rng.random() < 0.7) for _ in range(lives)
    )
    saves = tuple(rng.random() < 0.8 for _ in range(rng.randint(1, 5)))
    scenario = replace(scenario, streams=mode in STREAMABLE and rng.random() < 0.4)
    return Case(seed=seed, scenario=scenario, saves=saves, endings=endings)


def resumed_with_other_settings(case: Case) -> Case:
    """It is resumed three times, each time with other values of settings that may change."""
    rng, schedule = random.Random(case.seed), case.scenario.schedule

    def others() -> dict[str, Any]:
        more = {"max_prompt_tokens": rng.choice((None, 1, 2)), "prompts_per_cohort": rng.choice((None, 8, 12))}
        more |= {"max_context_tokens": rng.randint(1, 30), "max_turns": rng.randint(1, 3), "count_observations": True}
        new = asdict(_schedule(rng, schedule.mode)) | more
        return {name: new[name] for name in (*_MAY_CHANGE, *more) if rng.random() < 0.6 or name == "prompts_per_cohort"}

    endings = tuple(Ending(rng.randint(5, 60), dies=rng.random() < 0.3) for _ in range(3))
    return replace(case, saves=(True,), endings=endings, settings_of_later_lives=tuple(others() for _ in range(3)))


def _schedule(rng: random.Random, mode: str) -> Schedule:
    keeps_tokens = STRATEGIES[mode].keeps_tokens
    per_prompt, per_update = rng.randint(1, 4), rng.randint(1, 8)
    fewest = -(-per_update // per_prompt)
    needs_bound = mode == "async-pool"
    return Schedule(
        mode=mode,
        rollouts_per_update=per_update,
        rollouts_per_prompt=per_prompt,
        whole_groups=per_prompt > 1 and rng.random() < 0.6,
        prompts_per_cohort=rng.choice((None, rng.randint(fewest, fewest + 8))),
        oversubscribe=rng.choice((None, None, 1.0, 1.3, 2.0)),
        max_staleness=rng.randint(1, 3) if needs_bound or (keeps_tokens and rng.random() < 0.6) else None,
        max_response_tokens=rng.randint(1, 14),
        max_prompt_tokens=3,
        max_wait_updates=rng.choice((None, 1, 2, 3)),
        max_retries=rng.randint(0, 2),
        score_wait_seconds=rng.choice((0.0, 1.0, 6.0)),
        keep_seed=rng.random() < 0.5,
        overlap=needs_bound or (keeps_tokens and rng.random() < 0.4),
        seed=rng.randint(0, 1000),
    )


def _scenario(rng: random.Random, schedule: Schedule, troubled: bool) -> Scenario:
    def some(choices: Sequence[T], most: int = 4) -> tuple[T, ...]:
        return tuple(rng.choice(choices) for _ in range(rng.randint(1, most)))

    longest = rng.choice((1, 3, 16))
    scenario: dict[str, Any] = {
        "schedule": schedule,
        "lengths": some(range(1, longest + 1), most=20),
        "redraws": rng.random() < 0.5,
        "slots": rng.randint(1, 6),
        "epochs": rng.randint(1, 3),
        "shuffle": rng.random() < 0.5,
        "step_time": rng.choice(STEP_TIMES),
        "weight_update_seconds": rng.choice((0.0, 1.5)),
        "learner_seconds": rng.choice((0.0, 0.7, 5.0)),
    }
    if troubled:
        scenario |= {
            "prompt_tokens": some(range(5)),
            "kv_tokens": rng.choice((None, rng.randint(8, 24), rng.randint(8, 60))),
            "score_seconds": some((0.0, 0.0, 0.5, 4.0, 30.0, NEVER)),
            "unscorable": frozenset(rng.sample(range(60), rng.randint(0, 6))),
            "lost_after": some((None, None, None, 0, 1, 3)),
            "max_updates": rng.choice((None, None, rng.randint(1, 8))),
            "silent_updates": frozenset(rng.sample(range(9), rng.choice((0, 0, 2, 4)))),
        }
    return Scenario(**scenario)


def _with_turns(rng: random.Random, scenario: Scenario, troubled: bool) -> Scenario:
    def some(choices: Sequence[T]) -> tuple[T, ...]:
        return tuple(rng.choice(choices) for _ in range(rng.randint(1, 4)))

    schedule = replace(
        scenario.schedule,
        max_turns=rng.choice((None, None, 1, 2, 3)),
        max_context_tokens=rng.choice((None, rng.randint(1, 30))),
        max_environment_seconds=rng.choice((3.0, 20.0)),
    )
    seconds = (0.0, 0.3, 2.0, 9.0, *((NEVER, 25.0) if troubled else ()))  # 25.0: later than every deadline
    calls = [
        EnvironmentCall(seconds=rng.choice(seconds), fails=troubled and rng.random() < 0.2, rewards=rng.random() < 0.7)
        for _ in range(rng.randint(1, 5))
    ]
    return replace(
        scenario,
        schedule=schedule,
        epochs=min(scenario.epochs, 2),
        lengths=scenario.lengths[:9],
        turns=some((1, 2, 3, 5)),
        observations=some((1, 2, 4)),
        calls=tuple(calls),
        bring_back=rng.choice(("replay", "replay", "state", "never")),
    )


def _with_filter(rng: random.Random, scenario: Scenario) -> Scenario:
    schedule = scenario.schedule
    compares = schedule.whole_groups and rng.random() < 0.8
    kinds = rng.choice((("mixed",), ("right", "wrong", "mixed"), ("right", "wrong", "half", "mixed", "mixed", "mixed")))
    mode = schedule.mode
    if mode == "tail-batching" or mode.startswith("baseline"):  # the first one refuses filters
        mode = rng.choice((*FILTER_ROUNDS, "baseline", "on-policy+planned"))
    schedule = replace(
        schedule,
        mode=mode,
        filter_groups="equal_rewards" if compares else "scenarios:keeps_two_of_three",
        max_filtered_fraction=1.0,
        revisit_filtered=rng.choice((1.0, 1.0, 0.4)),
    )
    return replace(
        scenario, schedule=schedule, group_rewards=tuple(rng.choice(kinds) for _ in range(rng.randint(1, 7)))
    )


def _with_slow_environments(scenario: Scenario) -> Scenario:
    """Updates of one rollout and answers that are late, but in time: partial modes reach their bound on rollouts in
    environments."""
    schedule = replace(scenario.schedule, rollouts_per_update=1, oversubscribe=None, max_environment_seconds=20.0)
    return replace(scenario, schedule=schedule, calls=(EnvironmentCall(seconds=18.0), *scenario.calls))


class Player:
    """Plays a case life by life. A life after a death goes on from the last checkpoint, or starts again."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.outcome = Outcome(case)
        self.state: dict[str, Any] | None = None
        self.saved_events = self.saved_batches = 0

    def play(self) -> Outcome:
        for place, ending in enumerate((*self.case.endings, Ending(NEVER, dies=True))):
            raw = self.outcome.raw
            deaths = self.case.deaths_in_pool
            more: dict[str, Any] = (
                {"tokens_per_step": self.case.tokens_per_step} if deaths is None else {"deaths": deaths}
            )
            kind = MortalPool if deaths is not None else MortalEngine if self.case.tokens_per_step == 1 else Drafting
            engine_type = type("EndingEngine", (kind,), {"ending": ending, **more})
            life = Run(
                self._scenario(place), state=self.state, last_time=raw[-1].at if raw else 0.0, engine_type=engine_type
            )
            engine: Any = life.engine
            engine.interrupt = life.controller.interrupt
            engine.calls = 0  # loading the weights of the checkpoint does not count
            try:
                self._live(life)
            except EngineDied:
                self._roll_back(life)
                continue
            if engine.calls > ending.calls:
                self.outcome.faults["interrupted and resumed"] += 1
                self._save(life)
                self._keep_events(life)
                continue
            self._keep_events(life)
            break
        self.outcome.live = set(life.controller.live)
        _count_faults(self.outcome)
        return self.outcome

    def _scenario(self, life: int) -> Scenario:
        slots, settings = self.case.slots_of_later_lives, self.case.settings_of_later_lives
        scenario = self.case.scenario
        if life and slots:
            scenario = replace(scenario, slots=slots[life % len(slots)])
        if self.state is not None and settings:
            scenario = replace(scenario, schedule=replace(scenario.schedule, **settings[life % len(settings)]))
            now = {name: [None, value] for name, value in asdict(scenario.schedule).items()}
            for events_so_far in (self.outcome.raw, self.outcome.log):
                events_so_far.append(events.SettingsChanged(self.outcome.raw[-1].at, now))
        return scenario

    def _live(self, life: Run) -> None:
        saves = self.case.saves
        for batch in life.controller:
            self.outcome.batches.append(batch)
            life.learn(batch)
            if saves[batch.update % len(saves)] and not life.controller.running:
                self._save(life)

    def _save(self, life: Run) -> None:
        self.state = life.checkpoint()
        self.saved_events = len(self.outcome.log) + len(life.events)
        self.saved_batches = len(self.outcome.batches)
        self.outcome.faults["checkpoints"] += 1

    def _keep_events(self, life: Run) -> None:
        self.outcome.raw += life.events
        self.outcome.log += life.events

    def _roll_back(self, life: Run) -> None:
        outcome = self.outcome
        self._keep_events(life)
        outcome.faults["engine died"] += 1
        if self.state is not None:
            outcome.faults["died and resumed from a checkpoint"] += 1
            outcome.raw.append(events.RolledBack(outcome.raw[-1].at, len(outcome.log) - self.saved_events))
        else:
            outcome.raw.clear()  # nothing to resume: a run from the start, with a log of its own
        del outcome.log[self.saved_events :], outcome.batches[self.saved_batches :]


def play(case: Case) -> Outcome:
    return Player(case).play()


_REASONS = {
    "no score in time, twice": "lost score",
    "no score in time": "late score, regenerated",
    "no reward": "failed score",
    "unfinished members of its group": "unfinished group, regenerated",
    "prompt of": "prompt too long",
    "failed": "retries used up",
    "between two turns": "between two turns, regenerated",
    "its environment cannot": "turns not brought back, regenerated",
}


def _count_faults(outcome: Outcome) -> None:
    finished: dict[int, float] = {}
    for event in outcome.raw:
        match event:
            case events.Failed():
                outcome.faults["request lost by the engine"] += 1
            case events.Preempted():
                outcome.faults["preempted"] += 1
            case events.EnvironmentFailed():
                kind = "hung" if event.reason.startswith("no answer") else "failed"
                outcome.faults[f"environment {kind}"] += 1
            case events.Observed():
                outcome.faults["environment answered"] += 1
            case events.Finished():
                finished[event.rollout] = event.at
            case events.Scored() if event.at > finished[event.rollout]:
                outcome.faults["score later than the response"] += 1
            case events.Regenerated() | events.Rejected():
                kind = next((kind for text, kind in _REASONS.items() if event.reason.startswith(text)), event.reason)
                outcome.faults[kind] += 1
