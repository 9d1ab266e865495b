"""Rewards that fail in every way that we could think of, in real worker processes and real runs.

On some responses: the run goes to its end, and each fault is counted with its reason. On all of them: the run stops
with the reason within one update's worth.
"""

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from paced import PacedEngine
from reward_faults import FAULTS, HANGING, HARMLESS, QUICK, Faults
from sortedrl.core import (
    Controller,
    EventLog,
    Prompt,
    Prompts,
    RejectionWatch,
    Rollout,
    Schedule,
    Segment,
    TooManyRejected,
    events,
)
from sortedrl.tasks.scoring import BackgroundScorer, DirectScorer, reward_function, reward_workers
from sortedrl.tasks.workers import WorkerPool

UPDATE = 8
WORKERS = 2
LIMIT_SECONDS = 20.0
SHORT_LIMIT_SECONDS = 3.0  # for rewards that hang, beside others that do not, even on a busy machine
SHORTEST_LIMIT_SECONDS = 0.3  # where all hang
MEMORY_BYTES = 2**28
NOT_IN_PROCESS = ("interrupts", "eats_memory", "reward_with_many_parts")


class NoWords:
    def decode(self, token_ids: object, *, skip_special_tokens: bool = False) -> str:
        return "words"


# The rest is for make test-slow.
QUICK_ON_SOME = [*QUICK, "ends_process_with_0", "segfaults", "closes_descriptors", "writes_everywhere", "spins_in_c"]
QUICK_ON_ALL = [*QUICK, "ends_process_with_0", "spins"]


def faults(quick: list[str]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in quick else [pytest.mark.slow]) for name in FAULTS]


Pools = dict[float, WorkerPool]


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    """Shared by all faults: what one of them does must not matter to the next."""
    limits = (LIMIT_SECONDS, SHORT_LIMIT_SECONDS, SHORTEST_LIMIT_SECONDS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sortedrl.tasks.worker_process.memory_per_worker", lambda: MEMORY_BYTES)
        made = {limit: reward_workers(Faults(), workers=WORKERS, limit_seconds=limit) for limit in limits}
    yield made
    for pool in made.values():
        pool.close()


class FaultyRun:
    """Three updates' worth of a task, on an engine without a model."""

    def __init__(self, pool: WorkerPool, fault: str, *, every: int, at_once: bool = False) -> None:
        self.log: list[events.Event] = []
        self.lines: list[str] = []
        task = Faults(fault, every, problems=3 * UPDATE)
        score = reward_function(task, NoWords(), pool=pool)
        self.scorer: Any = (
            DirectScorer(score) if at_once else BackgroundScorer(score, threads=WORKERS, limit_seconds=None)
        )
        watch = RejectionWatch(UPDATE, log=self.lines.append)
        prompts = [Prompt(problem.id, [1], problem) for problem in task.train()]
        self.controller = Controller(
            PacedEngine(slots=8, length_of=lambda request: 1 + request.id % 3, step_seconds=0.001),
            Prompts(prompts),
            self.scorer,
            Schedule(mode="partial", rollouts_per_update=UPDATE, prompts_per_cohort=len(prompts)),
            log=EventLog(self.log.append, watch),
        )

    def to_end(self) -> list[int]:
        """The rollouts that were trained on."""
        trained = []
        try:
            for batch in self.controller:
                trained += [rollout.id for rollout in batch]
                self.controller.publish()
        finally:
            if isinstance(self.scorer, BackgroundScorer):
                self.scorer.close()
        return trained

    @property
    def reasons(self) -> dict[int, str]:
        return {event.rollout: event.reason for event in self.log if isinstance(event, events.Rejected)}


def pool_for(pools: Pools, fault: str) -> WorkerPool:
    return pools[SHORT_LIMIT_SECONDS if fault in HANGING else LIMIT_SECONDS]


@pytest.mark.parametrize("fault", faults(QUICK_ON_SOME))
def test_on_some_responses_it_is_counted_and_the_run_goes_to_its_end(pools: Pools, fault: str) -> None:
    every = 3 * UPDATE if fault in HANGING else 6  # fewer of those that take their time
    run = FaultyRun(pool_for(pools, fault), fault, every=every)
    trained = run.to_end()
    rejected = run.reasons
    assert len(rejected) == 3 * UPDATE // every
    assert sorted([*trained, *rejected]) == list(range(3 * UPDATE))
    for reason in rejected.values():
        assert re.search(f"no reward: .*{FAULTS[fault][1]}", reason), reason
        assert len(reason) < 500 and reason.isprintable()
    assert run.lines and run.lines[0].startswith("rejected rollout ")


@pytest.mark.parametrize("fault", faults(QUICK_ON_ALL))
def test_on_all_responses_the_run_stops_with_the_reason(pools: Pools, fault: str) -> None:
    pool = pools[SHORTEST_LIMIT_SECONDS] if fault in HANGING else pools[LIMIT_SECONDS]
    run = FaultyRun(pool, fault, every=1)
    with pytest.raises(TooManyRejected, match=f"the first {UPDATE} rollouts were all rejected") as stopped:
        run.to_end()
    assert re.search(FAULTS[fault][1], str(stopped.value)), stopped.value
    assert len(run.reasons) == UPDATE
    assert re.search(FAULTS[fault][1], run.lines[0]), "the first one is told at once"


@pytest.mark.parametrize("fault", HARMLESS)
def test_what_is_odd_but_no_fault_counts(pools: Pools, fault: str) -> None:
    run = FaultyRun(pool_for(pools, fault), fault, every=2)
    assert len(run.to_end()) == 3 * UPDATE, run.lines
    assert {event.reward for event in run.log if isinstance(event, events.Scored)} == {1.0}


@pytest.mark.parametrize("fault", ["exits", "spins"])
def test_at_once_each_score_is_waited_for_within_the_limit(pools: Pools, fault: str) -> None:
    run = FaultyRun(pool_for(pools, fault), fault, every=3 * UPDATE, at_once=True)
    assert len(run.to_end()) == 3 * UPDATE - 1
    scored = [event.rollout for event in run.log if isinstance(event, events.Scored | events.Rejected)]
    finished = [event.rollout for event in run.log if isinstance(event, events.Finished)]
    assert scored == finished


@pytest.mark.filterwarnings("ignore:coroutine")
@pytest.mark.parametrize("make", [DirectScorer, BackgroundScorer])
@pytest.mark.parametrize("fault", [name for name in QUICK if name not in NOT_IN_PROCESS])
def test_in_this_process_it_ends_no_run_either(make: Callable[..., Any], fault: str) -> None:
    task = Faults(fault)
    scorer = make(reward_function(task, NoWords()))
    problem = task.train()[0]
    scorer.submit(Rollout(0, Prompt(problem.id, [1], problem), 0, 0, 0, 0, segments=[Segment([1], [0.0], version=0)]))
    until = time.monotonic() + 60
    while not (scored := scorer.collect()) and time.monotonic() < until:
        scorer.wait(1.0)
    assert re.search(FAULTS[fault][1], str(scored[0].error))
