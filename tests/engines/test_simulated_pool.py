"""Several simulated engines as one: they add up, no token is lost or made twice, and engines may die."""

import time
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest
from test_pool import PoolContract
from test_simulated_engine import ends, engine, request, to_end

from random_runs import case_of, play
from schedule_rules import check_outcome
from sortedrl.core import Event, Schedule
from sortedrl.core.engine import Engine, Tokens
from sortedrl.engines.pool_members import even_split, route
from sortedrl.engines.simulated import SimulatedEngine
from sortedrl.engines.simulated_chunked_prefill import ChunkedPrefillEngine
from sortedrl.engines.simulated_pool import SimulatedPool
from sortedrl.engines.step_time import PRESETS, StepTime, linear
from sortedrl.observe.run_metrics import RunMetrics
from sortedrl.studies.workload import Workload, limit, run

PER_ENGINE = 128
ENGINES = 8


def pool(*slots: int, **options: Any) -> SimulatedPool:
    return SimulatedPool([engine(count, **options) for count in slots])


class TestSimulatedPool(PoolContract):
    honors_ignore_eos = False
    kind: type[SimulatedEngine] = SimulatedEngine
    step_time = StepTime(((1, 0.001), (8, 0.002)), per_cached_token=1e-6, per_prefill_token=1e-5)

    def make_engine(self, slots: int) -> Engine:
        options: dict[str, Any] = {"step_time": self.step_time, "length_of": lambda request: 20 + request.seed % 13}
        return SimulatedPool([self.kind(slots=n, **options) for n in even_split(slots, min(slots, 3))])


class TestSimulatedPoolWithChunkedPrefill(TestSimulatedPool):
    kind = ChunkedPrefillEngine
    step_time = replace(TestSimulatedPool.step_time, prefill_tokens_per_step=64, per_prefill_step=0.001)


def test_a_request_goes_home_or_to_the_least_loaded_engine() -> None:
    class Member:
        def __init__(self, slots: int, free_slots: int) -> None:
            self.slots, self.free_slots = slots, free_slots

    busy, half, large = Member(4, 1), Member(4, 2), Member(8, 5)
    assert route(None, [busy, half, large]) is large
    assert route(busy, [busy, half, large]) is busy
    assert route(busy, [half]) is half, "its home has no room"
    assert even_split(10, 4) == [2, 2, 3, 3]


def test_each_engine_has_its_own_step_time() -> None:
    """Two requests on one engine take 3 s per step, on two engines 2 s."""
    step_time = linear(1.0, 1.0)
    one, two = pool(2, step_time=step_time), pool(1, 1, step_time=step_time)
    for engines, seconds in ((one, 30.0), (two, 20.0)):
        engines.submit([request(0, 10), request(1, 10)])
        assert {at for _, at in ends(to_end(engines))} == {seconds}


def test_changes_come_in_time_order_while_another_engine_prefills() -> None:
    """A request of 100 prompt tokens prefills for 10 s; the other engine finishes in the meantime."""
    step_time = replace(linear(1.0, 0.0, per_prefill_token=0.1), prefill_tokens_per_step=50)
    both = pool(2, 1, step_time=step_time)
    both.submit([request(0, 5, prompt=100), request(1, 3), request(2, 4, prompt=10)])
    changes = to_end(both)
    times = [change.at for change in changes]
    assert times == sorted(times)
    ended = dict(ends(changes))
    assert ended[1] == 3.0 and ended[0] > 10.0


def test_a_resumed_request_finds_its_kv_cache_at_home_only() -> None:
    """Engines 0 and 1 have a slot each. The one with the KV cache is taken when the request comes back."""
    for home_is_free in (True, False):
        both = pool(1, 1, step_time=linear(1.0, 0.0, per_prefill_token=1.0), reuse_kv_cache=True)
        both.submit([request(0, 10, prompt=4)])
        while both.now() < 9:
            both.poll(until=9.0)
        (segment,) = [change.segment for change in both.abort([0]) if isinstance(change, Tokens)]
        if not home_is_free:
            both.submit([request(1, 100)])  # as loaded as the other one: the first engine gets it
        began = both.now()
        both.submit([request(0, 10, prompt=4).continued(segment)])
        end = dict(ends(to_end(both)))[0]
        left = 10 - len(segment)
        assert end - began == pytest.approx(left if home_is_free else left + 4 + len(segment))


@pytest.mark.parametrize("block", range(4))
def test_random_schedules_on_pools_whose_engines_die_hold_to_the_rules(block: int) -> None:
    preempted = 0
    for seed in range(block * 40, (block + 1) * 40):
        case = case_of(seed, with_turns=seed % 2 == 0)
        try:
            outcome = play(replace(case, deaths_in_pool=(3 + seed % 17, 20 + seed % 31)[: seed % 3]))
            check_outcome(outcome)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        preempted += outcome.faults["preempted"]
    assert preempted > 10


# A cluster of equal engines


def cluster(engines: int, mode: str, *sinks: Any, cohorts: int = 2, seed: int = 0) -> tuple[RunMetrics, float]:
    """A run, and the limit: the same load for each engine."""
    workload = Workload(
        step_time=PRESETS["h200-8b"],
        slots=PER_ENGINE * engines,
        engines=engines,
        prompts=cohorts * 4 * PER_ENGINE * engines,
    )
    schedule = Schedule(
        mode=mode, rollouts_per_update=PER_ENGINE * engines, prompts_per_cohort=4 * PER_ENGINE * engines, seed=seed
    )
    return run(workload, schedule, *sinks), limit(workload, schedule)


@pytest.mark.parametrize("mode", ["partial+elevator", "partial+lookahead"])
def test_eight_engines_are_eight_times_one(mode: str) -> None:
    """If their slots are full; a drain waits for the longest response of all."""
    ones = [cluster(1, mode, cohorts=3, seed=seed) for seed in range(3)]
    eight, limit_of_eight = cluster(ENGINES, mode, cohorts=3)
    assert 7.8 <= eight.goodput / fmean(one.goodput for one, _ in ones) <= 8.6
    assert eight.staleness_mean == pytest.approx(fmean(one.staleness_mean for one, _ in ones), rel=0.05)
    assert limit_of_eight == pytest.approx(8 * fmean(limit for _, limit in ones), rel=0.03)
    assert eight.goodput < limit_of_eight and all(one.goodput < limit for one, limit in ones)


def test_an_event_of_eight_engines_costs_at_most_one_and_a_half_times_that_of_one() -> None:
    def seconds_per_event(engines: int) -> float:
        log: list[Event] = []
        began = time.process_time()
        cluster(engines, "partial+elevator", log.append, cohorts=4 if engines == 1 else 1)
        return (time.process_time() - began) / len(log)

    ratios = sorted(seconds_per_event(ENGINES) / seconds_per_event(1) for _ in range(3))
    assert ratios[0] <= 1.5, ratios  # other processes disturb some of them
