"""An engine that breaks its protocol costs the rollout that it is about, never the run; and what it must not have made
is never trained on."""

import itertools
import json
import time
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from email.utils import formatdate
from typing import Any

import numpy
import pytest
import torch

from paced import PacedEngine
from scenarios import Run, scenario
from sortedrl.core import Controller, EventLog, Prompt, Prompts, Schedule, ScoreAtOnce, TooManyRejected, events
from sortedrl.core.engine import (
    Change,
    Engine,
    EngineDied,
    Request,
    RequestFailed,
    RequestFinished,
    RequestPreempted,
    RequestStarted,
    Tokens,
)
from sortedrl.core.errors import UserError
from sortedrl.core.rollout import Rollout, Segment
from sortedrl.engines.generate import generate
from sortedrl.engines.lengths import ForcedLengths
from sortedrl.engines.pool import Pool
from sortedrl.engines.servers.messages import retry_after
from sortedrl.engines.servers.outage import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, Outage
from sortedrl.testing.engine_contract import Ledger

MOST = 9  # tokens of a response
NAN = float("nan")


class Unruly(PacedEngine):
    """Adds to what it reports: `extra` of each change, while `times` lasts."""

    def __init__(self, extra: Callable[[Change], list[Change]], times: int) -> None:
        super().__init__(slots=3, length_of=lambda request: 2 + request.seed % 6)
        self._extra = extra
        self._times = times

    def _report(self) -> list[Change]:
        reported: list[Change] = []
        for change in super()._report():
            more = self._extra(change) if self._times > 0 else []
            self._times -= bool(more)
            reported += [change, *more]
        return reported


def after(kind: type, make: Callable[[Any], Change]) -> Callable[[Change], list[Change]]:
    return lambda change: [make(change)] if isinstance(change, kind) else []


def at_start(make: Callable[..., Change], *arguments: Any, **options: Any) -> Callable[[Change], list[Change]]:
    return after(RequestStarted, lambda change: make(change, *arguments, **options))


def tokens(change: Any, logprobs: Sequence[Any], version: Any = 0) -> Tokens:
    return Tokens(change.id, change.at, Segment([7] * len(logprobs), list(logprobs), version))


def of_tokens(change: Any, ids: Any, mask: Any = None) -> Tokens:
    return Tokens(change.id, change.at, Segment(ids, [-1.0] * len(ids), 0, mask))


def as_given(change: Any, ids: Any, logprobs: Any) -> Tokens:
    return Tokens(change.id, change.at, Segment(ids, logprobs, 0))


def cut_short(change: Tokens) -> Tokens:
    """As if the engine went on with the lists that it reported."""
    change.segment.tokens = []
    return change


VIOLATIONS: dict[str, tuple[Callable[[Change], list[Change]], str | None]] = {
    "an unknown request": (after(RequestStarted, lambda c: RequestStarted(10**6, c.at)), None),
    "tokens of an unknown request": (after(RequestStarted, lambda c: tokens(c._replace(id=-4), [-1.0])), None),
    "an end twice": (after(RequestFinished, lambda c: c), None),
    "a failure after the end": (after(RequestFinished, lambda c: RequestFailed(c.id, c.at, "late")), None),
    "tokens after the end": (after(RequestFinished, lambda c: tokens(c, [-1.0])), None),
    "a start twice": (after(RequestStarted, lambda c: c), None),
    "a preemption without a slot": (after(RequestFinished, lambda c: RequestPreempted(c.id, c.at, 1)), None),
    "too many tokens": (at_start(tokens, [-1.0] * (MOST + 1)), "max_new_tokens was 9"),
    "tokens of the environment": (at_start(tokens, [-1.0], version=-1), "version -1"),
    "tokens of weights to come": (at_start(tokens, [-1.0], version=99), "version 99"),
    "NaN": (at_start(tokens, [NAN]), "engine reported a log-probability that is not a finite number from -10000 to 0"),
    "infinity": (at_start(tokens, [float("-inf")]), "log-probability"),
    "beyond the learner's float32": (at_start(tokens, [-1e39]), "from -10000 to 0"),
    "far out of range": (at_start(tokens, [-1.0, -1e300]), "from -10000 to 0"),
    "null": (at_start(tokens, [None]), "log-probability"),
    "NaN in a tuple": (at_start(as_given, (7,), (NAN,)), "log-probability"),
    "NaN beside a range": (at_start(as_given, range(1), [NAN]), "log-probability"),
    "a huge number": (at_start(tokens, [-(10**400)]), "log-probability"),
    "more than certain": (at_start(tokens, [0.7]), "log-probability"),
    "a token that is text": (at_start(of_tokens, ["7"]), "reported a token id that is not an integer"),
    "half a token": (at_start(of_tokens, [3.5]), "token id"),
    "no token": (at_start(of_tokens, [None]), "token id"),
    "a token that is a bool": (at_start(of_tokens, [True]), "token id"),
    "a negative token": (at_start(of_tokens, [3, -1]), "reported token id -1, and ids count from 0"),
    "a negative token in an array": (at_start(of_tokens, numpy.array([3, -1])), "token id -1"),
    "a mask of other numbers": (at_start(of_tokens, [3, 4], mask=[1, 2]), "mask"),
    "a mask of text": (at_start(of_tokens, [3, 4], mask=["1", "0"]), "reported a mask that is not made of 0 and 1"),
    "no version": (at_start(tokens, [-1.0], version=None), "reported a version that is not an integer"),
    "a version that is text": (at_start(tokens, [-1.0], version="0"), "version"),
    "a segment that changed": (after(RequestStarted, lambda c: cut_short(tokens(c, [-1.0]))), "log-probabilities"),
    "no time": (after(RequestStarted, lambda c: c._replace(at=None)), "at None"),
    "a time that is no number": (after(RequestStarted, lambda c: c._replace(at=NAN)), "a change at nan"),
    "the end of time": (after(RequestStarted, lambda c: c._replace(at=float("inf"))), "a change at inf"),
    "a time to come": (
        after(RequestStarted, lambda c: c._replace(at=c.at + 1e4)),
        "time that its clock has not reached",
    ),
}


class OfArrays(PacedEngine):
    """Delivers tokens and log-probabilities in sequences of this kind."""

    def __init__(self, kind: Callable[[list[Any]], Any]) -> None:
        super().__init__(slots=2, length_of=lambda request: 2 + request.id % 6)
        self._kind = kind

    def _report(self) -> list[Change]:
        return [self._in_arrays(change) for change in super()._report()]

    def _in_arrays(self, change: Change) -> Change:
        if not isinstance(change, Tokens):
            return change
        count, version = len(change.segment), change.segment.version
        made, logprobs = self._kind(list(range(5, 5 + count))), self._kind([-0.5] * count)
        return change._replace(segment=Segment(made, logprobs, version))


KINDS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "array": numpy.array,
    "list of numbers of numpy": lambda values: list(numpy.array(values)),
    "tensor": torch.tensor,
}


class KeepsItsLists(PacedEngine):
    """Delivers its own record of each chunk. If it `reuses` it, the next chunk of the request is in the same lists."""

    def __init__(self, *, reuses: bool) -> None:
        super().__init__(slots=2, length_of=lambda request: 2 + request.seed % 6)
        self._reuses = reuses
        self.record: dict[Any, tuple[list[int], list[float]]] = {}

    def _report(self) -> list[Change]:
        return [self._kept(change) if isinstance(change, Tokens) else change for change in super()._report()]

    def _kept(self, change: Tokens) -> Change:
        ours = self.record.setdefault(change.id if self._reuses else change.at, ([], []))
        ours[0][:], ours[1][:] = change.segment.tokens, change.segment.logprobs
        return change._replace(segment=Segment(*ours, change.segment.version))


def trained_by(
    engine: Engine, rollouts: int, per_update: int, mode: str = "partial", log: list[Any] | None = None, **changes: Any
) -> tuple[list[Rollout], list[Any], Controller]:
    """All rollouts that a run trains on, its events, and its controller."""
    log = [] if log is None else log
    sizes = {"rollouts_per_update": per_update, "prompts_per_cohort": rollouts, "max_response_tokens": MOST}
    prompts = Prompts([Prompt(f"p{i}", [1]) for i in range(rollouts)])
    schedule = Schedule(**{"mode": mode} | sizes | changes)
    controller = Controller(engine, prompts, ScoreAtOnce(len), schedule, log=EventLog(log.append))
    trained: list[Rollout] = []
    for batch in controller:
        trained += batch
        controller.publish()
        json.dumps(controller.state())  # a checkpoint can be written at any time
    return trained, log, controller


def failures_in(log: list[Any]) -> list[str]:
    return [event.reason for event in log if isinstance(event, events.Failed)]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_may_come_in_any_kind_of_sequence(kind: str) -> None:
    """A checkpoint is JSON: a run must not find out at its first checkpoint that it cannot be written."""
    trained, _, _ = trained_by(OfArrays(KINDS[kind]), 9, per_update=3)
    assert len(trained) == 9
    for rollout in trained:
        assert {type(token) for token in rollout.tokens} == {int}
        assert {type(value) for value in rollout.logprobs} == {float}


@pytest.mark.parametrize("reuses", [False, True])
@pytest.mark.parametrize("pooled", [False, True])
def test_an_engine_may_keep_and_reuse_the_lists_that_it_delivers(reuses: bool, pooled: bool) -> None:
    engine = KeepsItsLists(reuses=reuses)
    with closing(Pool([engine])) if pooled else nullcontext(engine) as used:
        trained, _, _ = trained_by(used, 9, per_update=3)
        (response,) = generate(used, [Request(99, Prompt("p", [1]), (), MOST, 5)])
        ledger = Ledger(used)  # of the contract suite
        ledger.submit([Request(100, Prompt("p", [1]), (), MOST, 5)])
        ledger.run()
    assert ledger.tokens(100) == response.tokens and ledger.logprobs(100) == response.logprobs
    for made in [*trained, response]:
        assert made.logprobs == [-position - 1 for position in made.tokens]
        assert made.tokens == list(range(len(made.tokens))) != []
    assert {len(values) for lists in engine.record.values() for values in lists} == {1}, "the engine's lists grew"


@pytest.mark.parametrize("mode", ["baseline", "on-policy", "partial"])
@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_report_that_cannot_be_right_costs_its_rollout_at_most(name: str, mode: str) -> None:
    extra, reason = VIOLATIONS[name]
    trained, log, controller = trained_by(Unruly(extra, 2), 12, per_update=4, mode=mode)
    assert sorted(rollout.id for rollout in trained) == list(range(12))
    for rollout in trained:
        assert rollout.tokens == list(range(len(rollout))) and len(rollout) <= MOST
        assert rollout.logprobs == [-position - 1 for position in rollout.tokens]
    failed = failures_in(log)
    assert len(failed) == (0 if reason is None else 2) and all(reason in text for text in failed if reason)
    assert controller._generation.engine.ignored == (2 if reason is None else 0)


class DiesOfAborts(Unruly):
    """With the first broken change, it is asked to abort, and dies."""

    def abort(self, ids: Sequence[int]) -> list[Change]:
        self.die()
        return super().abort(ids)


def test_what_came_before_the_death_of_an_engine_that_broke_its_protocol_stays_valid() -> None:
    engine = DiesOfAborts(after(RequestFinished, lambda c: tokens(c._replace(id=c.id + 1), [NAN])), times=1)
    engine._length_of = lambda request: 2 + request.id
    log: list[Any] = []
    with pytest.raises(EngineDied):
        trained_by(engine, 3, per_update=3, log=log)
    assert [type(event) for event in log].count(events.Finished) == 1


class KeepsItsVersion(PacedEngine):
    """Takes the weights, but not their version."""

    def update_weights(self, weights: Any, version: int) -> None:
        super().update_weights(weights, 0)


@pytest.mark.parametrize("mode", ["baseline", "partial+elevator"])
def test_an_engine_whose_tokens_keep_an_old_version_ends_the_run_with_the_reason(mode: str) -> None:
    """All staleness would be wrong: in partial modes it would grow with every update."""
    schedule = Schedule(mode=mode, rollouts_per_update=8, prompts_per_cohort=16, max_response_tokens=MOST)
    prompts = Prompts([Prompt(f"p{i}", [1]) for i in range(48)])
    engine = KeepsItsVersion(slots=8, length_of=lambda request: 2 + request.seed % 6)
    controller = Controller(engine, prompts, ScoreAtOnce(len), schedule)
    with pytest.raises(TooManyRejected, match=r"tokens of version 0, and the last update_weights was to version [12]"):
        for batch in controller:
            assert batch.update < 2
            controller.publish({})


class RunsAhead(PacedEngine):
    """Calls the tokens that it returns when it is aborted those of the weights that follow."""

    def abort(self, ids: Sequence[int]) -> list[Change]:
        self._step()
        return [self._of_next_version(change) for change in super().abort(ids)]

    def _of_next_version(self, change: Change) -> Change:
        if not isinstance(change, Tokens):
            return change
        return change._replace(segment=replace(change.segment, version=change.segment.version + 1))


def test_tokens_of_published_weights_that_the_engine_does_not_have_yet_cost_their_rollout() -> None:
    """With overlap, the learner's version counts up before the engine is aborted and gets the weights."""
    engine = RunsAhead(slots=4, length_of=lambda request: 2 + request.id)
    _, log, _ = trained_by(engine, 12, per_update=4, max_response_tokens=40, overlap=True, max_retries=99)
    said = "the engine reported tokens of version 1, and the last update_weights was to version 0"
    assert said in failures_in(log)


class ReturnsSomethingElse(PacedEngine):
    """Returns `made(changes)` from `method`."""

    def __init__(self, method: str, made: Callable[[list[Change]], Any]) -> None:
        super().__init__(slots=2, length_of=lambda request: 2 + request.id % 6)
        self._method, self._made = method, made

    def poll(self, until: float | None = None) -> list[Change]:
        return self._returned("poll", super().poll(until))

    def abort(self, ids: Sequence[int]) -> list[Change]:
        return self._returned("abort", super().abort(ids))

    def _returned(self, method: str, changes: list[Change]) -> Any:
        return self._made(changes) if method == self._method else changes


NO_CHANGES: dict[str, tuple[Callable[[list[Change]], Any], str]] = {
    "None": (lambda changes: None, "returned None: "),
    "a dict": (lambda changes: {change.id: change for change in changes}, "returned a dict: "),
    "an empty dict": (lambda changes: {}, "returned a dict: "),
    "one change": (lambda changes: RequestStarted(0, 0.0), "returned a RequestStarted: "),
    "a list of dicts": (lambda changes: [*changes, {"id": 0}], "returned a list with a dict in it: "),
    "a list of None": (lambda changes: [None], "returned a list with None in it: "),
    "a class": (lambda changes: [RequestStarted], "returned a list with the class RequestStarted in it: "),
    "tokens without a segment": (
        lambda changes: [Tokens(0, 0.0, [5, 6])],  # type: ignore[arg-type]
        "returned Tokens with a list in place of a Segment: ",
    ),
}


def train_with(engine: Engine) -> None:
    trained_by(engine, 9, per_update=3)


def evaluate_with(engine: Engine) -> None:
    generate(engine, [Request(i, Prompt(f"p{i}", [1]), (), MOST, i) for i in range(3)])


USES: dict[str, Callable[[Engine], None]] = {
    "training": train_with,
    "a wrapped engine": lambda engine: train_with(ForcedLengths(engine, lambda request: 2 + request.id % 6)),
    "an evaluation": evaluate_with,
}


@pytest.mark.parametrize("name", NO_CHANGES)
@pytest.mark.parametrize(
    ("use", "method"), [*((use, "poll") for use in USES), ("training", "abort"), ("a wrapped engine", "abort")]
)
def test_a_method_that_returns_no_list_of_changes_is_named_in_one_line(name: str, use: str, method: str) -> None:
    made, expected = NO_CHANGES[name]
    with pytest.raises(UserError) as raised:
        USES[use](ReturnsSomethingElse(method, made))
    text = str(raised.value)
    assert text.startswith(f"ReturnsSomethingElse.{method} {expected}it must return a list of changes (Request")
    assert "\n" not in text


def test_an_engine_of_a_pool_that_returns_no_list_of_changes_is_named() -> None:
    pool = Pool([ReturnsSomethingElse("poll", lambda changes: None)])
    expected = r"^ReturnsSomethingElse\.poll returned None: it must return a list"
    with closing(pool), pytest.raises(UserError, match=expected):
        evaluate_with(pool)


class ReportsWithAborts(Unruly):
    """Has changes of other requests to report when it aborts one."""

    def abort(self, ids: Sequence[int]) -> list[Change]:
        self._step()
        return super().abort(ids)


def test_what_an_abort_reports_of_other_requests_counts() -> None:
    extra = after(RequestStarted, lambda change: tokens(change, [0.5]))  # not a log-probability
    trained, log, _ = trained_by(ReportsWithAborts(extra, 2), 12, per_update=4)
    assert sorted(rollout.id for rollout in trained) == list(range(12))
    assert all(rollout.tokens == list(range(len(rollout))) for rollout in trained)
    assert len(failures_in(log)) == 2


class FailsAtTheEnd(PacedEngine):
    """Delivers all tokens of its first response, then fails it in place of its end."""

    def __init__(self) -> None:
        super().__init__(slots=1, length_of=lambda request: 10 * MOST)
        self._has_failed = False

    def _report(self) -> list[Change]:
        changes = super()._report()
        for place, change in enumerate(changes):
            if isinstance(change, RequestFinished) and not self._has_failed:
                self._has_failed = True
                changes[place] = RequestFailed(change.id, change.at, "lost")
        return changes


def test_a_response_that_fails_at_its_token_limit_is_regenerated() -> None:
    """It has no room for another token, so it cannot be resumed."""
    engine = FailsAtTheEnd()
    trained, log, _ = trained_by(engine, 2, per_update=1)
    assert [(event.dropped, event.reason) for event in log if isinstance(event, events.Failed)] == [(MOST, "lost")]
    assert sorted(rollout.attempt for rollout in trained) == [0, 1]
    assert all(request.max_new_tokens == MOST for request in engine.submitted)


class FinishesLate(PacedEngine):
    """Reports ends later than the last tokens, one by one, and none to an abort."""

    def _report(self) -> list[Change]:
        changes = super()._report()
        ends = [change for change in changes if isinstance(change, RequestFinished)]
        others = [change for change in changes if change not in ends]
        self._unreported = ends if others else ends[1:]
        return others or ends[:1]

    def abort(self, ids: Sequence[int]) -> list[Change]:
        self._unreported.clear()
        return super().abort(ids)


def test_a_response_of_which_only_the_end_was_not_reported_is_regenerated() -> None:
    engine = FinishesLate(slots=3, length_of=lambda request: MOST)
    assert len(trained_by(engine, 6, per_update=1)[0]) == 6
    assert min(request.max_new_tokens for request in engine.submitted) > 0


@pytest.mark.parametrize("damage", [[[5], [None]], [[5], [float("nan")]], [[5, 6], [-1.0]]])
def test_a_checkpoint_with_values_that_must_not_be_trained_on_restores(damage: list[Any]) -> None:
    plan = scenario("partial", [7, 1, 12, 2, 5, 5, 9, 1], slots=3, rollouts_per_update=3, prompts_per_cohort=8)
    first = Run(plan).updates(1)
    state = json.loads(json.dumps(first.checkpoint()))
    members = [member for _, _, group in state["buffer"]["groups"] for member in group if member["segments"]]
    members[0]["segments"] = [[*damage, 0, None]]
    second = Run(plan, state=state, last_time=first.engine.now()).to_end()
    trained = [rollout for batch in first.batches + second.batches for rollout in batch]
    assert sorted(rollout.id for rollout in trained) == list(range(8))
    assert all(len(rollout.tokens) == len(rollout.logprobs) for rollout in trained)
    assert all(value is not None and value <= 0 for rollout in trained for value in rollout.logprobs)


# What servers say


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("3", 3.0), ("0.5", 0.5), ("-1", 0.0), ("soon", None), ("nan", None), ("inf", None), ("", None), (None, None)],
)
def test_retry_after_in_seconds(header: str | None, seconds: float | None) -> None:
    assert retry_after(header) == seconds


def test_retry_after_as_a_date() -> None:
    assert retry_after(formatdate(time.time() + 100, usegmt=True)) == pytest.approx(100, abs=5)
    assert retry_after(formatdate(time.time() - 100, usegmt=True)) == 0


def test_pauses_grow_to_a_limit_and_one_round_counts_once() -> None:
    outage, now, pauses = Outage(give_up_seconds=1000), 0.0, []
    for _ in range(12):
        outage.note(now, "busy")
        outage.note(now, "busy")  # of the same round
        pauses.append(outage.retry_at - now)
        now = outage.retry_at
    assert pauses[0] < 2 * FIRST_PAUSE_SECONDS and pauses[-1] == LONGEST_PAUSE_SECONDS
    assert all(a < b for a, b in itertools.pairwise(pauses[:6]))


def test_a_server_is_hopeless_after_its_time_without_a_token() -> None:
    outage = Outage(give_up_seconds=10)
    outage.note(0.0, "busy", asked_for=86400)
    assert outage.retry_at <= 10
    assert not outage.is_hopeless(9, last_token_at=0) and outage.is_hopeless(10, last_token_at=0)
    assert not outage.is_hopeless(14, last_token_at=5)
    outage.end()
    assert not outage.is_hopeless(99, last_token_at=0)
