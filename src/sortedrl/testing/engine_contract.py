"""The rules that every engine must keep, as one suite.

    check_engine(factory)                                      # raises BrokenRules

    class TestMyEngine(EngineContract):                        # or with pytest, one test per rule
        def make_engine(self, slots: int) -> Engine:
            return factory(contract_spec(slots))

The factory is that of `sortedrl train --engine your.module:factory`: it takes an `EngineSpec`.

The suite sets lengths by `max_new_tokens` and relies only on the protocol. The engine must accept contexts of 64
tokens; responses may end by themselves before their limit.
"""

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, NamedTuple
from unittest import SkipTest

from sortedrl.core.engine import (
    Change,
    Engine,
    EngineSpec,
    Request,
    RequestFailed,
    RequestFinished,
    RequestPreempted,
    RequestStarted,
    Sampling,
    Tokens,
    missing_members,
)
from sortedrl.core.engine_checks import checked_changes, fault_of, plain
from sortedrl.core.rollout import Prompt, Segment
from sortedrl.models import BUILT_IN_MODEL

PATIENCE_SECONDS = 300.0  # without any change
MAX_LENGTH = 64  # tokens of prompt and response
TOKEN_LIMITS = (3, 17, 5, 29, 1, 11, 23, 2, 13, 7, 19, 31)


@dataclass
class Ledger:
    """Folds changes, and checks on each what the protocol requires about their order."""

    engine: Engine
    submitted: dict[int, Request] = field(default_factory=dict)
    started: list[int] = field(default_factory=list)
    running: set[int] = field(default_factory=set)
    segments: dict[int, list[Segment]] = field(default_factory=dict)
    finished: dict[int, bool] = field(default_factory=dict)  # id -> truncated
    failed: dict[int, str] = field(default_factory=dict)
    most_running: int = 0
    last_time: float = float("-inf")
    last_change: float = field(default_factory=time.monotonic)

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.submitted[request.id] = request
            self.segments[request.id] = []
        self.last_change = time.monotonic()
        self.engine.submit(requests)

    def run(self) -> None:
        while self.open_ids:
            self.advance()

    def run_until_first_end(self) -> None:
        before = len(self.finished) + len(self.failed)
        while len(self.finished) + len(self.failed) == before:
            self.advance()

    def advance(self) -> None:
        """Poll once. An engine that reports nothing for long will not end."""
        changes = checked_changes(self.engine, "poll", self.engine.poll())
        if changes:
            self.last_change = time.monotonic()
        waited = time.monotonic() - self.last_change
        assert waited < PATIENCE_SECONDS, f"no change for {waited:.0f} s, though requests {self.open_ids} are open"
        self.apply(changes)

    def abort(self, ids: Sequence[int]) -> None:
        self.apply(checked_changes(self.engine, "abort", self.engine.abort(ids)))
        for id in ids:
            self.running.discard(id)
            self.submitted.pop(id, None)

    @property
    def open_ids(self) -> list[int]:
        return [id for id in self.submitted if id not in self.finished and id not in self.failed]

    def tokens(self, id: int) -> list[int]:
        return [token for segment in self.segments[id] for token in segment.tokens]

    def logprobs(self, id: int) -> list[float]:
        return [value for segment in self.segments[id] for value in segment.logprobs]

    def apply(self, changes: Sequence[Change]) -> None:
        for change in changes:
            assert self.last_time <= change.at <= self.engine.now(), "changes come in time order"
            self.last_time = change.at
            assert change.id in self.submitted, "only requests that are in the engine change"
            assert change.id not in self.finished and change.id not in self.failed, "an end is the last change"
            self._fold(change)

    def _fold(self, change: Change) -> None:
        id = change.id
        if isinstance(change, RequestStarted):
            assert id not in self.running
            self.started.append(id)
            self.running.add(id)
            self.most_running = max(self.most_running, len(self.running))
            assert len(self.running) <= self.engine.slots
        elif isinstance(change, RequestPreempted):
            assert id in self.running
            self.running.remove(id)
        elif isinstance(change, Tokens):
            segment = plain(change.segment).copy()  # the engine may use its lists again
            assert len(segment) > 0
            assert fault_of(segment) is None, fault_of(segment)
            self.segments[id].append(segment)
            assert len(self.tokens(id)) <= self.submitted[id].max_new_tokens
        elif isinstance(change, RequestFinished):
            assert id in self.running, "only a running request can finish"
            assert self.tokens(id), "a finished response has tokens, delivered before"
            self.running.remove(id)
            self.finished[id] = change.truncated
        elif isinstance(change, RequestFailed):
            assert change.reason
            self.running.discard(id)
            self.failed[id] = change.reason


def resumed(request: Request, segments: Sequence[Segment]) -> Request:
    """The request that continues where these segments ended."""
    return reduce(Request.continued, segments, request)


class EngineContract:
    """Subclass it; see the module's docstring."""

    deterministic = True  # equal seeds and weights make equal tokens, regardless of other requests
    honors_ignore_eos = True  # False: something else sets the lengths, as in the simulated engine
    slots = 4
    long_limit = 40  # tokens of requests that will be aborted; more for an engine that continues between two calls

    def make_engine(self, slots: int) -> Engine:
        raise NotImplementedError

    def weights(self, version: int) -> Any:
        """The argument of `update_weights` for this version."""
        return None

    def prompt_tokens(self, index: int) -> list[int]:
        return [1 + (index * 7 + position * 3) % 20 for position in range(2 + index % 5)]

    def reproducible(self, request: Request) -> Request:
        """The request in a form whose tokens are the same in every run; greedy if noise does not follow seeds."""
        return request

    def requests(self, token_limits: Sequence[int] = TOKEN_LIMITS, first_id: int = 0) -> list[Request]:
        return [
            Request(
                first_id + index, Prompt(f"prompt {index}", self.prompt_tokens(index)), (), limit, seed=1000 + index
            )
            for index, limit in enumerate(token_limits)
        ]

    def undisturbed(self, requests: Sequence[Request]) -> Ledger:
        ledger = Ledger(self.make_engine(self.slots))
        ledger.submit(requests)
        ledger.run()
        return ledger

    def test_nothing_submitted_is_reported_at_once(self) -> None:
        assert self.make_engine(self.slots).poll() == []

    def test_every_request_ends_once_within_its_limit(self) -> None:
        ledger = self.undisturbed(self.requests())
        assert sorted(ledger.finished) == list(range(len(TOKEN_LIMITS)))
        assert not ledger.failed
        for id, truncated in ledger.finished.items():
            assert not truncated or len(ledger.tokens(id)) == TOKEN_LIMITS[id]
        assert ledger.engine.poll() == []

    def test_with_ignore_eos_only_the_limit_ends_a_response(self) -> None:
        """As the check of the engine's weights needs."""
        if not self.honors_ignore_eos:
            raise SkipTest("something else sets the lengths of responses")
        sampling = Sampling(ignore_eos=True)
        ledger = self.undisturbed([request._replace(sampling=sampling) for request in self.requests()])
        assert not ledger.failed
        made = [len(ledger.tokens(id)) for id in range(len(TOKEN_LIMITS))]
        assert made == list(TOKEN_LIMITS), f"with ignore_eos, {made} tokens instead of {list(TOKEN_LIMITS)}"

    def test_starts_in_order_and_fills_the_slots(self) -> None:
        ledger = self.undisturbed(self.requests())
        assert list(dict.fromkeys(ledger.started)) == list(range(len(TOKEN_LIMITS)))
        assert ledger.most_running == self.slots

    def test_requests_that_come_later_join(self) -> None:
        ledger = Ledger(self.make_engine(self.slots))
        ledger.submit(self.requests(token_limits=(20, 2)))
        ledger.run_until_first_end()
        ledger.submit(self.requests(token_limits=(3, 4, 5, 6), first_id=10))
        ledger.run()
        assert sorted(ledger.finished) == [0, 1, 10, 11, 12, 13]

    def test_a_response_of_one_token_takes_its_slot_like_any_other(self) -> None:
        """It may start and end in one step of the engine, beside others that neither start nor end."""
        ledger = Ledger(self.make_engine(self.slots))
        ledger.submit(self.requests(token_limits=(self.long_limit,)))
        while not ledger.started:
            ledger.apply(ledger.engine.poll())
        ledger.submit(self.requests(token_limits=(1,), first_id=10))
        ledger.run()  # the ledger checks that only running requests finish
        assert 10 in ledger.started and len(ledger.tokens(10)) == 1

    def test_poll_returns_when_its_time_is_up(self) -> None:
        ledger = Ledger(self.make_engine(self.slots))
        for seconds in (0.0, 0.01):
            until = ledger.engine.now() + seconds
            assert ledger.engine.poll(until) == []
            assert ledger.engine.now() >= until
        ledger.submit(self.requests())
        while ledger.open_ids:
            until = ledger.engine.now() + 0.003
            changes = ledger.engine.poll(until)
            assert changes or ledger.engine.now() >= until
            ledger.apply(changes)

    def test_abort_returns_all_tokens_and_leaves_nothing(self) -> None:
        ledger = Ledger(self.make_engine(self.slots))
        # A remote engine continues until the abort arrives: more of them than it can have started by then.
        requests = self.requests(token_limits=(2, *[self.long_limit] * 40))
        ledger.submit(requests)
        ledger.run_until_first_end()
        aborted = ledger.open_ids
        ledger.abort(aborted)
        assert ledger.engine.poll() == []
        assert ledger.engine.poll(ledger.engine.now() + 0.01) == []
        waiting = [id for id in aborted if id not in ledger.started]
        assert waiting and not any(ledger.segments[id] for id in waiting), "a waiting request has made no tokens"
        again = self.requests(token_limits=(4,) * 6, first_id=100)
        ledger.submit(again)
        ledger.run()
        assert all(request.id in ledger.finished for request in again)

    def test_others_continue_when_some_are_aborted(self) -> None:
        ledger = Ledger(self.make_engine(self.slots))
        ledger.submit(self.requests(token_limits=(2, 40, 30, 40, 25, 35)))
        ledger.run_until_first_end()
        open_ids = ledger.open_ids
        ledger.abort(open_ids[::2])
        ledger.run()
        assert set(open_ids[1::2]) <= set(ledger.finished)

    def test_abort_of_unknown_requests_changes_nothing(self) -> None:
        ledger = self.undisturbed(self.requests(token_limits=(3, 4)))
        assert ledger.engine.abort([0, 1, 999]) == []

    def test_resume_continues_with_what_is_left_of_the_limit(self) -> None:
        requests = {request.id: request for request in self.requests(token_limits=(4, 40, 38, 36))}
        ledger = Ledger(self.make_engine(self.slots))
        ledger.submit(list(requests.values()))
        ledger.run_until_first_end()
        open_ids = ledger.open_ids
        ledger.abort(open_ids)
        aborted = [id for id in open_ids if id not in ledger.finished]  # an engine continues until the abort
        first_parts = {id: ledger.segments[id] for id in aborted}
        ledger.submit([resumed(requests[id], first_parts[id]) for id in aborted])
        ledger.run()
        for id in aborted:
            total = sum(map(len, first_parts[id])) + len(ledger.tokens(id))
            assert total == requests[id].max_new_tokens if ledger.finished[id] else total <= requests[id].max_new_tokens

    def test_aborts_do_not_change_the_tokens(self) -> None:
        if not self.deterministic:
            raise SkipTest("only of engines for which equal seeds and weights give equal tokens: --deterministic")
        requests = {request.id: self.reproducible(request) for request in self.requests()}
        reference = self.undisturbed(list(requests.values()))
        made: dict[int, list[Segment]] = {id: [] for id in requests}
        ledger = Ledger(self.make_engine(self.slots))
        ledger.submit(list(requests.values()))
        while ledger.open_ids:
            ledger.run_until_first_end()
            for id, segments in ledger.segments.items():
                made[id] += segments
                segments.clear()
            left = [id for id in requests if id not in ledger.finished]
            ledger.abort(ledger.open_ids)
            for id in left:
                made[id] += ledger.segments[id]
                ledger.segments[id] = []
            unfinished = [id for id in left if id not in ledger.finished]
            ledger.submit([resumed(requests[id], made[id]) for id in reversed(unfinished)])
        for id in requests:
            tokens = [token for segment in made[id] for token in segment.tokens]
            assert tokens == reference.tokens(id)
            assert ledger.finished[id] == reference.finished[id]

    def test_resumed_requests_continue_behind_their_prefix(self) -> None:
        """Near temperature 0, aborts change no token."""
        sampling = Sampling(temperature=0.01, ignore_eos=True)
        requests = {r.id: r._replace(sampling=sampling) for r in self.requests(token_limits=(8, *[24] * 5))}
        once, again = self.undisturbed([*requests.values()]), self.undisturbed([*requests.values()])
        ledger = Ledger(self.make_engine(self.slots))
        ledger.submit([*requests.values()])
        ledger.run_until_first_end()
        ledger.abort(ledger.open_ids)
        parts = {id: ledger.segments[id] for id in requests if id not in ledger.finished}
        ledger.submit([resumed(requests[id], part) for id, part in parts.items()])
        ledger.run()
        right = []
        for id, part in parts.items():
            prefix = [token for segment in part for token in segment.tokens]
            tokens, first = once.tokens(id)[: len(prefix) + 4], once.tokens(id)[:4]
            follows = tokens[len(prefix) :]
            is_repeated = [*prefix, *follows] == tokens == again.tokens(id)[: len(tokens)]
            if prefix and follows and follows != first and is_repeated:
                right.append(ledger.tokens(id)[: len(follows)] == follows)  # else it does not tell
        if not right:
            raise SkipTest("near temperature 0, its responses differ from run to run, end early or repeat themselves")
        which = f"{sum(right)} of {len(right)} do: the context is prompt.tokens and prefix_tokens"
        assert 2 * sum(right) >= len(right), which

    def test_segments_carry_the_version_that_made_them(self) -> None:
        engine = self.make_engine(self.slots)
        requests = {request.id: request for request in self.requests(token_limits=(3, *[self.long_limit] * 3))}
        ledger = Ledger(engine)
        engine.update_weights(self.weights(5), 5)
        ledger.submit(list(requests.values()))
        ledger.run_until_first_end()
        ledger.abort(ledger.open_ids)
        first_parts = {id: list(ledger.segments[id]) for id in requests}
        assert {segment.version for parts in first_parts.values() for segment in parts} == {5}
        engine.update_weights(self.weights(6), 6)
        left = [id for id in requests if id not in ledger.finished]
        ledger.submit([resumed(requests[id], first_parts[id]) for id in left])
        ledger.run()
        # A remote engine may have finished all of them before the abort arrived.
        assert {segment.version for id in left for segment in ledger.segments[id]} == ({6} if left else set())

    def test_log_probabilities_are_log_probabilities(self) -> None:
        ledger = self.undisturbed(self.requests())
        for id in ledger.finished:
            assert len(ledger.logprobs(id)) == len(ledger.tokens(id))
            assert all(value <= 0 for value in ledger.logprobs(id))
        some = any(value < 0 for id in ledger.finished for value in ledger.logprobs(id))
        assert some, "all are 0, as of tokens that had no alternative; the requests have temperature 1"


class BrokenRules(AssertionError):
    """The rules of the contract that an engine breaks, one per line."""


class Outcome(NamedTuple):
    rule: str
    error: str  # empty if the engine keeps the rule
    skipped: str = ""  # why it was not checked


EngineFactory = Callable[[EngineSpec], Engine]


def contract_spec(slots: int = EngineContract.slots, **more: Any) -> EngineSpec:
    """The spec of the contract's engines, over the built-in model; `more` are further fields of it."""
    return EngineSpec(**{"model": str(BUILT_IN_MODEL), "slots": slots, "max_length": MAX_LENGTH, **more})


def check_engine(factory: EngineFactory, **options: Any) -> None:
    """Check every rule on new engines; raises `BrokenRules`. The options are those of `outcomes_of`."""
    broken = [f"{outcome.rule}: {outcome.error}" for outcome in outcomes_of(factory, **options) if outcome.error]
    if broken:
        raise BrokenRules("\n".join(broken))


def outcomes_of(
    factory: EngineFactory,
    *,
    spec: EngineSpec | None = None,
    weights: Callable[[int], Any] = lambda version: None,
    deterministic: bool = False,
) -> Iterator[Outcome]:
    """Each rule and how the engine does, as it is checked. Without an engine, the only outcome is why there is none.

    `factory` gets `spec`, by default that of the built-in model. `weights` makes the argument of `update_weights` for a
    version. `deterministic`: equal seeds and weights give equal tokens; that is checked, too.
    """
    contract = _ContractOf(factory, spec or contract_spec(), weights)
    contract.deterministic = deterministic
    for name in rules():
        error = skipped = ""
        try:
            getattr(contract, name)()
        except SkipTest as reason:
            skipped = str(reason)
        except _NoEngine as raised:
            yield Outcome("the factory returns an engine", str(raised))
            return
        except Exception as raised:
            error = _in_one_line(raised)
        yield Outcome(name.removeprefix("test_").replace("_", " "), error, skipped)


class _NoEngine(Exception):
    """The factory failed, or returned something else."""


def _in_one_line(error: Exception) -> str:
    """With the line of the code in place of a message that is missing, as of a bare `assert`."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error) or where.line} ({where.filename}:{where.lineno})"


class _ContractOf(EngineContract):
    def __init__(self, factory: EngineFactory, spec: EngineSpec, weights_of: Callable[[int], Any]) -> None:
        self._factory, self._spec, self._weights_of = factory, spec, weights_of

    def make_engine(self, slots: int) -> Engine:
        try:
            engine = self._factory(replace(self._spec, slots=slots))
        except Exception as error:
            raise _NoEngine(_in_one_line(error)) from error
        missing = missing_members(engine)
        if missing:
            raise _NoEngine(f"it returned a {type(engine).__name__} without {', '.join(missing)}")
        return engine

    def weights(self, version: int) -> Any:
        return self._weights_of(version)


def rules() -> list[str]:
    """Names of the tests, in the order of the class."""
    return [name for name in vars(EngineContract) if name.startswith("test_")]
