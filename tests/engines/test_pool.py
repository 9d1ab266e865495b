"""The pool: the contract on embedded and on paced engines, routing, lost members, members that come back."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import invariants
import scenarios
from closing import closed_after
from ledgers import completed, partly_generated
from paced import PacedEngine
from processes import wait_until
from random_runs import peaceful
from scenarios import Run, Scenario
from small_models import engine_of, model_of
from sortedrl.core import Controller, EngineDied, EventLog, Prompt, Prompts, Request, ScoreAtOnce
from sortedrl.core.engine import (
    Engine,
    EngineBase,
    EngineInfo,
    RequestFailed,
    RequestFinished,
    RequestPreempted,
    RequestStarted,
)
from sortedrl.engines.pool import Pool
from sortedrl.testing.engine_contract import TOKEN_LIMITS, EngineContract, Ledger, resumed

MODES = scenarios.MODES
pytestmark = pytest.mark.usefixtures("one_thread", "closes_all")


def pool_of(engines: Sequence[Engine]) -> Pool:
    return closed_after(Pool(engines))


def paced(*slots: int, **changes: Any) -> list[PacedEngine]:
    return [PacedEngine(slots=count, step_seconds=0.001, **changes) for count in slots]


def requests(*budgets: int, first_id: int = 0) -> list[Request]:
    return [Request(first_id + i, Prompt(f"p{i}", [1, 2]), (), budget, i) for i, budget in enumerate(budgets)]


class PoolContract(EngineContract):
    long_limit = 120

    def test_starts_in_order_and_fills_the_slots(self) -> None:
        """Requests leave the queue in order; members then start what they got, each in its own time."""
        ledger = self.undisturbed(self.requests())
        started = list(dict.fromkeys(ledger.started))
        assert sorted(started) == list(range(len(TOKEN_LIMITS)))
        assert all(id - place < self.slots for place, id in enumerate(started))
        assert ledger.most_running == self.slots


class TestPoolOfEmbeddedEngines(PoolContract):
    def make_engine(self, slots: int) -> Engine:
        sizes = [slots // 2, slots - slots // 2]
        return pool_of([engine_of(model_of("Llama"), size, eos_token_ids=(7,)) for size in sizes])

    def weights(self, version: int) -> Any:
        return iter(model_of("Llama", seed=version).state_dict().items())  # one that can be read only once


class TestPoolOfPacedEngines(PoolContract):
    def make_engine(self, slots: int) -> Engine:
        return pool_of(paced(1, 2, slots - 3, length_of=lambda request: 20 + request.seed % 13))


class TestPoolWhoseMembersClocksDiffer(PoolContract):
    def make_engine(self, slots: int) -> Engine:
        early, late = PacedEngine(slots=1, clock_offset=-500.0), PacedEngine(slots=slots - 1, clock_offset=3000.0)
        return pool_of([early, late])


# Routing


def test_requests_go_where_the_load_is_lowest() -> None:
    members = paced(2, 4, 8)
    completed(pool_of(members), requests(*[30] * 7))
    assert [len(member.submitted) for member in members] == [1, 2, 4]


def test_no_member_holds_more_than_it_can_run() -> None:
    fast = PacedEngine(slots=2)

    class Slow(PacedEngine):
        """Its first token comes when the fast one has all requests but two, or after 20 s."""

        def _step(self) -> None:
            until = time.monotonic() + 20.0
            while len(fast.submitted) < 38 and time.monotonic() < until:
                time.sleep(0.001)
            super()._step()

    slow = Slow(slots=2)
    completed(pool_of([slow, fast]), requests(*[10] * 40))
    assert slow.most_inside <= 2 and fast.most_inside <= 2
    assert len(slow.submitted) < 10 < len(fast.submitted), "the slow member must not hoard"


def test_a_stopped_request_goes_back_to_its_member() -> None:
    """Where its keys may still be; in any order."""
    members = paced(2, 2)
    ledger = Ledger(pool_of(members))
    first = requests(*[200] * 4)
    ledger.submit(first)
    while min(len(ledger.tokens(id)) for id in range(4)) < 5:
        ledger.apply(ledger.engine.poll())
    ledger.abort([0, 1, 2, 3])
    kept = {id: list(ledger.segments[id]) for id in range(4)}
    ledger.submit([resumed(first[id], kept[id]) for id in (3, 1, 0, 2)])
    ledger.run()
    for member in members:
        before, after = member.submitted[:2], member.submitted[2:]
        assert {request.id for request in before} == {request.id for request in after}
        assert all(request.prefix for request in after)


def test_the_next_turn_goes_back_to_the_member_of_the_turn_before() -> None:
    """Where the prefix cache has it."""
    members = paced(1, 1)
    ledger = Ledger(pool_of(members))
    for turn in range(3):
        for id in (0, 1) if turn % 2 else (1, 0):
            ledger.finished.pop(id, None)
            ledger.submit([request._replace(id=id) for request in requests(3)])
        ledger.run()
    for member in members:
        assert len({request.id for request in member.submitted}) == 1


def test_a_freed_slot_is_refilled_without_the_caller() -> None:
    member = PacedEngine(slots=1)
    pool = pool_of([member])
    pool.submit(requests(2, 2, 2, 2))
    wait_until(lambda: len(member.submitted) == 4)
    ledger = Ledger(pool, submitted={r.id: r for r in requests(2, 2, 2, 2)}, segments={i: [] for i in range(4)})
    ledger.run()
    assert list(ledger.finished) == [0, 1, 2, 3]


# Losses


def test_requests_of_a_lost_member_continue_elsewhere_behind_what_they_delivered() -> None:
    """The loss is a preemption that says what is computed again."""
    members = paced(2, 2)
    ledger = partly_generated(pool_of(members), requests(*[60] * 4), tokens=5)
    members[0].die()
    lost = 0
    while ledger.open_ids:
        for change in ledger.engine.poll():
            if isinstance(change, RequestPreempted):
                assert change.recompute == 2 + len(ledger.tokens(change.id)), "prompt and response"
                lost += 1
            ledger.apply([change])
    assert sorted(ledger.finished) == [0, 1, 2, 3] and lost == 2
    for id in range(4):
        assert ledger.tokens(id) == list(range(60)), "neither lost nor twice"
        assert ledger.logprobs(id) == [-position - 1 for position in range(60)]
    again = [request for request in members[1].submitted if request.prefix]
    assert len(again) == 2 and all(request.max_new_tokens == 60 - request.prefix_length for request in again)
    assert list(ledger.engine.lost) == [0] and "killed by the test" in ledger.engine.lost[0]  # type: ignore[attr-defined]


def test_a_moved_request_starts_again_after_its_preemption_even_by_a_slow_clock() -> None:
    members = paced(1, 2)
    pool = pool_of(members)
    pool.submit(requests(500, 500))
    started: set[int] = set()
    while len(started) < 2:
        started |= {change.id for change in pool.poll() if isinstance(change, RequestStarted)}
    (lost,) = members[0].submitted
    members[1].clock_offset -= 5.0
    members[0].die()
    wait_until(lambda: len(members[1].submitted) == 2)  # no poll: the loss and the new start are in one report
    time.sleep(0.05)
    changes = [type(change) for change in pool.poll() if change.id == lost.id]
    assert changes.index(RequestPreempted) < changes.index(RequestStarted)


def test_moved_requests_go_before_those_that_never_ran() -> None:
    members = paced(2, 2)
    ledger = partly_generated(pool_of(members), requests(*[200] * 2, *[20] * 2, *[40] * 6), tokens=3)
    members[0].die()
    ledger.run()
    moved = [request.id for request in members[0].submitted]
    order = [request.id for request in members[1].submitted]
    first_new = min(order.index(id) for id in order if id not in moved and id > 3)
    assert all(order.index(id) < first_new for id in moved)


def test_a_member_that_is_lost_while_it_is_stopped() -> None:
    members = paced(2, 2)
    ledger = partly_generated(pool_of(members), requests(*[500] * 4), tokens=3)
    members[0].die()
    ledger.abort([0, 1])
    ledger.abort([2, 3])
    assert ledger.engine.poll() == []
    assert all(ledger.tokens(id) == list(range(len(ledger.tokens(id)))) for id in range(4))


def test_when_the_last_member_is_lost_it_says_so() -> None:
    members = paced(2, 2)
    pool = pool_of(members)
    pool.submit(requests(*[500] * 4))
    members[0].die()
    members[1].die()
    with pytest.raises(EngineDied, match=r"no engine of the pool is left \(engine 1: .*killed.*; engine 2: .*killed"):
        while True:
            pool.poll()
    aborted = pool.abort([0, 1, 2, 3])
    assert not any(isinstance(change, RequestFinished) for change in aborted), "what ran can still be stopped"
    with pytest.raises(EngineDied, match="weight update to version 1 failed on every engine"):
        pool.update_weights(None, 1)


@pytest.mark.parametrize("call", ["poll", "abort", "update_weights"])
def test_a_member_that_wants_to_exit_does_not_stop_the_pool_forever(call: str) -> None:
    """A library that calls sys.exit ends the member's thread only, and all others would wait for it."""

    def leave(*_: Any) -> Any:
        raise SystemExit("no GPU")

    (member,) = paced(2)
    setattr(member, call, leave)
    pool = pool_of([member])
    found: list[BaseException] = []

    def use() -> None:
        try:
            if call != "update_weights":
                pool.submit(requests(50))
                pool.poll(pool.now() + 0.1 if call == "abort" else None)
                pool.abort([0])
            pool.update_weights(None, 1)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "the pool waits forever"
    assert [type(error) for error in found] in ([RuntimeError], [EngineDied]) and "SystemExit: no GPU" in str(found[0])


def test_a_defect_is_not_taken_for_a_loss() -> None:
    class Broken(PacedEngine):
        def poll(self, until: float | None = None) -> list[Any]:
            raise ZeroDivisionError("a defect")

    pool = pool_of([Broken(slots=1), PacedEngine(slots=1)])
    pool.submit(requests(3, 3))
    with pytest.raises(ZeroDivisionError, match="a defect"):
        while True:
            pool.poll()


def test_only_the_end_was_not_reported() -> None:
    """All tokens of the budget came, then the engine died: there is nothing left to ask another member for."""

    class DiesBeforeTheEnd(PacedEngine):
        def poll(self, until: float | None = None) -> list[Any]:
            changes = super().poll(until)
            if any(isinstance(change, RequestFinished) for change in changes):
                self.die()
            return [change for change in changes if not isinstance(change, RequestFinished)]

    ledger = completed(pool_of([DiesBeforeTheEnd(slots=1), PacedEngine(slots=1)]), requests(5))
    assert ledger.finished == {0: True} and ledger.tokens(0) == [0, 1, 2, 3, 4]


class Fails(PacedEngine):
    """Fails these requests after their first token."""

    def __init__(self, fails: Callable[[int], bool]) -> None:
        super().__init__(slots=2)
        self._fails = fails

    def _report(self) -> list[Any]:
        changes = []
        for change in super()._report():
            if not self._fails(change.id) or isinstance(change, RequestStarted):
                changes.append(change)
            elif self._running.pop(change.id, None) is not None:
                changes += [change, RequestFailed(change.id, change.at, "no")]
        return changes


def test_a_request_that_fails_continues_on_another_member_and_one_that_fails_what_others_do_is_taken_out() -> None:
    members = [Fails(lambda id: True), *paced(2, 2)]
    ledger = completed(pool_of(members), requests(*[20] * 60))
    assert sorted(ledger.finished) == list(range(60)) and not ledger.failed
    assert all(ledger.tokens(id) == list(range(20)) for id in range(60)), "behind the token that it had"
    assert ledger.engine.lost == {0: "it failed 8 requests that other engines completed"}  # type: ignore[attr-defined]


def test_a_request_that_fails_on_every_member_fails_and_no_member_is_to_blame() -> None:
    members = [Fails(lambda id: id % 3 == 0) for _ in range(4)]
    ledger = completed(pool_of(members), requests(*[20] * 60))
    assert sorted(ledger.failed) == list(range(0, 60, 3)) and len(ledger.finished) == 40
    assert sum(request.id == 0 for member in members for request in member.submitted) == 3
    assert ledger.engine.lost == {}  # type: ignore[attr-defined]


class Sized(PacedEngine, EngineBase):
    def __init__(self, kv_tokens: int | None) -> None:
        super().__init__(slots=1)
        self.kv_tokens = kv_tokens

    def info(self) -> EngineInfo:
        self._check_alive()
        return EngineInfo(kv_tokens=self.kv_tokens)


@pytest.mark.parametrize(("sizes", "of_all"), [((300, 200), 500), ((300, None), None)])
def test_its_memory_is_that_of_all_members_also_of_lost_ones(sizes: tuple[int | None, ...], of_all: int) -> None:
    pool = pool_of(members := [Sized(size) for size in sizes])
    members[0].die()
    assert pool.info().kv_tokens == of_all


# Weights


class Sleeper(PacedEngine, EngineBase):
    """Notes the kind of sleep that it was sent to."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots=slots)
        self.slept: list[str] = []

    def sleep(self) -> None:
        self._check_alive()
        self.slept.append("sleep")

    def sleep_until_update(self) -> None:
        self._check_alive()
        self.slept.append("sleep_until_update")


SLEEPS = pytest.mark.parametrize("sleep", ["sleep", "sleep_until_update"])


@SLEEPS
def test_all_members_sleep_until_they_are_used_again(sleep: str) -> None:
    members: list[Engine] = [Sleeper(slots=1), Sleeper(slots=2), PacedEngine(slots=1)]  # the last one has no sleep
    pool = pool_of(members)
    getattr(pool, sleep)()
    assert [member.slept for member in members if isinstance(member, Sleeper)] == [[sleep], [sleep]]
    pool.update_weights(None, 1)
    assert len(completed(pool, requests(3, 3, 3, 3)).finished) == 4


@SLEEPS
def test_a_lost_member_is_not_sent_to_sleep_and_one_that_dies_then_is_lost(sleep: str) -> None:
    dead, dying, healthy = members = [Sleeper(slots=1) for _ in range(3)]
    pool = pool_of(members)
    dead.die()
    pool.submit(requests(*[500] * 3))
    while not pool.lost:
        pool.poll(pool.now() + 0.01)
    pool.abort(range(3))
    dying.die()
    getattr(pool, sleep)()
    assert [dead.slept, dying.slept, healthy.slept] == [[], [], [sleep]] and list(pool.lost) == [0, 1]
    healthy.die()
    with pytest.raises(EngineDied, match="no engine of the pool is left"):
        getattr(pool, sleep)()


def test_a_member_that_cannot_load_is_lost() -> None:
    members = [PacedEngine(slots=2, cannot_load=1), PacedEngine(slots=2)]
    pool = pool_of(members)
    pool.update_weights(None, 1)
    ledger = completed(pool, requests(4, 4, 4, 4))
    assert len(members[0].submitted) == 0 and len(ledger.finished) == 4
    assert {segment.version for segments in ledger.segments.values() for segment in segments} == {1}


def test_one_that_comes_back_works_from_the_next_load_on() -> None:
    members = paced(2, 2)
    pool = pool_of(members)
    ledger = Ledger(pool)
    pool.update_weights("weights 1", 1)
    ledger.submit(requests(*[30] * 4))
    members[0].die()
    ledger.run()
    back = PacedEngine(slots=2)
    pool.rejoin(back)
    ledger.submit(requests(3, 3, 3, 3, first_id=10))
    ledger.run()
    assert back.submitted == [], "it has old weights"
    pool.update_weights("weights 2", 2)
    ledger.submit(requests(9, 9, 9, 9, first_id=20))
    ledger.run()
    assert back.loaded == [("weights 2", 2)] and len(back.submitted) == 2
    assert pool.lost == {}


def test_before_any_load_one_that_comes_back_works_at_once() -> None:
    members = paced(1, 1)
    pool = pool_of(members)
    ledger = Ledger(pool)
    ledger.submit(requests(100, 100, 100))
    members[0].die()
    wait_until(lambda: bool(pool.lost))
    back = PacedEngine(slots=1)
    pool.rejoin(back)
    ledger.run()
    assert back.submitted and len(ledger.finished) == 3


def test_only_a_lost_place_of_the_same_size_can_be_taken() -> None:
    pool = pool_of(paced(2, 2))
    with pytest.raises(ValueError, match=r"2 slots, but the lost ones had \[\]"):
        pool.rejoin(PacedEngine(slots=2))


def test_close_ends_the_threads() -> None:
    before = set(threading.enumerate())
    pool = Pool(paced(1, 1, 1))
    pool.submit(requests(5000))
    pool.close()
    wait_until(lambda: set(threading.enumerate()) <= before)


# Whole runs


class PoolRun(Run):
    """A scenario on a pool of paced engines: real time, members that die at any call, some that come back."""

    def __init__(self, scenario: Scenario, sizes: Sequence[int], deaths: Sequence[int | None]) -> None:
        super().__init__(scenario)
        self.members = [self._member(slots, dies_at_call=death) for slots, death in zip(sizes, deaths, strict=True)]
        self.pool = pool_of(self.members)
        order: dict[str, Any] = {"epochs": scenario.epochs, "seed": scenario.schedule.seed, "shuffle": scenario.shuffle}
        parts = self.pool, Prompts(scenario.dataset(), **order), ScoreAtOnce(self._reward), scenario.schedule
        log = EventLog(self._keep, self.metrics)
        self.controller = Controller(*parts, log=log, max_updates=scenario.max_updates)

    def _member(self, slots: int, dies_at_call: int | None = None) -> PacedEngine:
        length_of = self.scenario.length_of
        return PacedEngine(slots=slots, length_of=lambda r: length_of(r.prompt, r.seed), dies_at_call=dies_at_call)

    def _learn(self, batch: Any) -> None:
        for place in self.pool.lost:
            if batch.update % 3 == 2:
                self.pool.rejoin(self._member(self.members[place].slots))
        self.controller.publish()


@st.composite
def pools_that_lose_members(draw: st.DrawFn) -> tuple[Scenario, list[int], list[int | None]]:
    sizes = draw(st.lists(st.integers(1, 3), min_size=2, max_size=4))
    deaths = [None, *(draw(st.none() | st.integers(0, 40)) for _ in sizes[1:])]
    drawn = draw(peaceful(MODES))
    patient = replace(drawn.schedule, score_wait_seconds=60.0)  # the clock is real: with 0 s, any score may be too late
    return replace(drawn, slots=sum(sizes), schedule=patient), sizes, deaths


@pytest.mark.slow
@invariants.examples(150)
@given(pools_that_lose_members())
def test_what_must_hold_whatever_member_is_lost_and_when(drawn: tuple[Scenario, list[int], list[int | None]]) -> None:
    run = PoolRun(*drawn)
    try:
        invariants.check_as_it_goes(run, version=0)
        invariants.check_run(run, run.batches, run.events)
        assert run.run_metrics.rejected == run.run_metrics.failures == 0, "a loss uses up no retries"
    finally:
        run.pool.close()


def test_an_iterator_of_weights_is_read_once_by_the_caller_and_reaches_every_member() -> None:
    members = [PacedEngine(slots=1, step_seconds=0.001) for _ in range(3)]
    threads = []

    def weights() -> Any:
        threads.append(threading.current_thread())
        yield "w", 1.0

    pool_of(members).update_weights(weights(), 1)
    assert [member.loaded for member in members] == [[({"w": 1.0}, 1)]] * 3
    assert threads == [threading.current_thread()]
