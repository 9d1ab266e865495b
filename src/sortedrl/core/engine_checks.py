"""What an engine reports, checked where it enters: behind `CheckedEngine`, every change is about a running request, and
every token may be trained on."""

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from numbers import Real
from operator import index
from typing import Any, get_args

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.engine import (
    Change,
    Engine,
    ForwardingEngine,
    Request,
    RequestFailed,
    RequestFinished,
    RequestPreempted,
    RequestStarted,
    Tokens,
)
from sortedrl.core.engine_protocol import EngineDied, RequestBroken
from sortedrl.core.errors import UserError
from sortedrl.core.rollout import Segment
from sortedrl.core.wording import kind_of

KINDS = frozenset(get_args(Change))
HIGHEST_LOGPROB = 1e-3  # a probability of 1, with room for rounding
LOWEST_LOGPROB = -1e4  # far below any token that was sampled, and far from overflow in the learner's float32
MOST_SECONDS_AHEAD = 1.0  # of the engine's clock: one that is put together from several may be a little off
_TOKEN_KINDS, _LOGPROB_KINDS = frozenset({int}), frozenset({float, int})
NO_LOGPROB = f"a log-probability that is not a finite number from {LOWEST_LOGPROB:g} to 0"
_log = logging.getLogger(__name__)


class NoChanges(UserError, TypeError):
    """A method of an engine returned something other than a list of changes."""


class _Submitted:
    """A request that has not ended."""

    def __init__(self, request: Request) -> None:
        prefix = request.prefix
        self.most = self.room = request.max_new_tokens
        self.has_slot = False
        self.is_first = not prefix  # its first turn
        self.ends_turn = bool(prefix) and not prefix[-1].is_environment  # its turn has a token


class CheckedEngine(ForwardingEngine):
    """Passes on what may be applied as it is.

    A request with a change that breaks the protocol is aborted and reported as `RequestBroken`: it costs its rollout,
    not the run. A change about a request that does not run, a second start, and a preemption without a slot are ignored
    and counted. Two faults end the run, because every rollout would fail: a method that returns no list of changes, and
    tokens of weights from before a restored checkpoint, since the caller forgot to update the engine."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self.ignored = 0
        self._submitted: dict[int, _Submitted] = {}  # by request id
        self._slots_taken = 0
        self._version = 0  # of the last weight update, which found nothing submitted: every new token has it
        self._restored_version = 0
        self._checks: dict[type, Callable[[Any, _Submitted], Change | None]] = {
            Tokens: self._tokens,
            RequestStarted: self._start,
            RequestPreempted: self._preempt,
            RequestFinished: self._finish,
            RequestFailed: self._fail,
        }

    def expect_version(self, version: int) -> None:
        """A checkpoint was restored: the engine must hold weights of this version."""
        self._version = self._restored_version = version

    def update_weights(self, weights: Any, version: int) -> None:
        self.inner.update_weights(weights, version)
        self._version = version

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._submitted[request.id] = _Submitted(request)
        self.inner.submit(requests)

    def poll(self, until: float | None = None) -> list[Change]:
        return self._checked(checked_changes(self.inner, "poll", self.inner.poll(until)))

    def abort(self, ids: Sequence[int]) -> list[Change]:
        changes = self._checked(checked_changes(self.inner, "abort", self.inner.abort(ids)))
        for id in ids:
            self._leave(id)
        return changes

    def _checked(self, changes: Sequence[Change]) -> list[Change]:
        passed: list[Change] = []
        broken: dict[int, str] = {}  # by request id: what is wrong
        running, checks = self._submitted, self._checks
        latest = self.inner.now() + MOST_SECONDS_AHEAD if changes else 0.0
        for change in changes:
            request = running.get(change.id)
            if request is None:
                self._ignore(change, "it does not run")
            elif change.id not in broken:
                try:
                    if type(change.at) is not float and not isinstance(change.at, Real):
                        raise ValueError(f"a change at {change.at!r}, which is not a time")
                    if not change.at <= latest:  # or NaN
                        raise ValueError(f"a change at {change.at!r}, a time that its clock has not reached")
                    checked = checks[type(change)](change, request)
                except ConfigurationError:
                    raise
                except ValueError as error:
                    broken[change.id] = f"the engine reported {error}"
                else:
                    if checked is not None:
                        passed.append(checked)
        if broken:
            with suppress(EngineDied):  # it raises this at the next call, too: what came before is not lost
                later = checked_changes(self.inner, "abort", self.inner.abort(list(broken)))
                passed += self._checked([change for change in later if change.id not in broken])
            for id, fault in broken.items():
                self._leave(id)
                passed.append(RequestBroken(id, self.inner.now(), fault))
        return passed

    # Each returns the change to pass on; None: it is ignored. A ValueError says what is wrong with it.

    def _start(self, change: RequestStarted, request: _Submitted) -> Change | None:
        if request.has_slot:
            self._ignore(change, "it has a slot")
            return None
        if self._slots_taken == self.slots:
            raise ValueError(f"a start, and all {self.slots} slots are taken")
        request.has_slot = True
        self._slots_taken += 1
        return change

    def _preempt(self, change: RequestPreempted, request: _Submitted) -> Change | None:
        if not request.has_slot:
            self._ignore(change, "it has no slot")
            return None
        request.has_slot = False
        self._slots_taken -= 1
        return change

    def _finish(self, change: RequestFinished, request: _Submitted) -> Change:
        self._leave(change.id)
        if request.ends_turn or (change.truncated and not request.is_first):
            return change
        # A learner cannot train on nothing, and an environment has nothing to answer.
        what = "response" if request.is_first else "turn"
        return RequestFailed(change.id, change.at, f"the engine ended a {what} without a token")

    def _fail(self, change: RequestFailed, _: _Submitted) -> Change:
        self._leave(change.id)
        return change

    def _tokens(self, change: Tokens, request: _Submitted) -> Change:
        segment = plain(change.segment)
        if fault := fault_of(segment):
            raise ValueError(fault)
        if segment is not change.segment:
            change = Tokens(change.id, change.at, segment)
        made, version = len(segment.tokens), segment.version
        if made > request.room:
            raise ValueError(f"{made} tokens where {request.room} were left: max_new_tokens was {request.most}")
        if version != self._version:
            raise self._wrong_version(version)
        if made:
            request.room -= made
            request.ends_turn = True
        return change

    def _leave(self, id: int) -> None:
        request = self._submitted.pop(id, None)
        if request is not None and request.has_slot:
            self._slots_taken -= 1

    def _ignore(self, change: Change, reason: str) -> None:
        self.ignored += 1
        if self.ignored == 1:  # one line is enough to find a broken engine
            _log.warning("%s of request %s is ignored: %s", type(change).__name__, change.id, reason)

    def _wrong_version(self, version: int) -> ValueError:
        if version < 0:
            return ValueError(f"tokens of version {version}, and versions count from 0")
        needed = self._restored_version
        if version >= needed:
            last = f"the last update_weights was to version {self._version}"
            return ValueError(f"tokens of version {version}, and {last}")
        why = f"the engine samples with weights of this version, but the checkpoint has version {needed}"
        fix = f"Call engine.update_weights(weights, {needed}) before controller.restore(state)."
        return ConfigurationError("version", version, why, fix)


def checked_changes(engine: Engine, method: str, returned: Any) -> list[Change]:
    """What `method` of the engine returned, if it is a list of changes. Raises `NoChanges`."""
    if not isinstance(returned, list | tuple) or type(returned) in KINDS:  # a change is a tuple
        raise _error(engine, method, kind_of(returned))
    for change in returned:
        if type(change) not in KINDS:
            raise _error(engine, method, f"a list with {kind_of(change)} in it")
        if type(change) is Tokens and type(change.segment) is not Segment:
            raise _error(engine, method, f"Tokens with {kind_of(change.segment)} in place of a Segment")
    return returned  # type: ignore[return-value]  # a tuple is as good


def _error(engine: Engine, method: str, what: str) -> NoChanges:
    while isinstance(engine, ForwardingEngine):
        engine = engine.inner
    return NoChanges(
        f"{type(engine).__name__}.{method} returned {what}: it must return a list of changes (RequestStarted, "
        "Tokens, RequestFinished, RequestFailed or RequestPreempted), which is empty if nothing changed. "
        "See docs/engine_authors.md"
    )


def fault_of(segment: Segment) -> str | None:
    """What in it must not be trained on; None if all may. Only lists are checked: they come from real engines."""
    if not isinstance(segment.logprobs, list) or not segment.logprobs:
        return None
    try:
        highest, lowest = max(segment.logprobs), min(segment.logprobs)
        is_valid = math.isfinite(sum(segment.logprobs)) and lowest >= LOWEST_LOGPROB and highest <= HIGHEST_LOGPROB
    except (TypeError, OverflowError):
        is_valid = False
    return None if is_valid else NO_LOGPROB


def plain(segment: Segment) -> Segment:
    """The segment with Python's numbers in lists, since a checkpoint cannot hold arrays. Ranges are the simulator's.

    Raises a ValueError, which names what was reported, for anything but token ids, log-probabilities, a mask of 0 and
    1, and an integer as version."""
    tokens, logprobs, version, mask = segment.tokens, segment.logprobs, segment.version, segment.mask
    if type(tokens) is type(logprobs) is range:
        return segment
    if type(tokens) is not list or not _TOKEN_KINDS.issuperset(map(type, tokens)):
        tokens = _numbers(tokens, _integer, "a token id that is not an integer")
    if tokens and min(tokens) < 0:
        raise ValueError(f"token id {min(tokens)}, and ids count from 0")
    if type(logprobs) is not list or not _LOGPROB_KINDS.issuperset(map(type, logprobs)):
        logprobs = _numbers(logprobs, float, NO_LOGPROB)
    if mask is not None:
        mask = _numbers(mask, _bit, "a mask that is not made of 0 and 1")
    if type(version) is not int:
        (version,) = _numbers([version], _integer, "a version that is not an integer")
    if tokens is segment.tokens and logprobs is segment.logprobs and mask is None and version is segment.version:
        segment.__post_init__()  # an engine may have changed the lists since it made the segment
        return segment
    return Segment(tokens, logprobs, version, mask)


def _numbers(values: Sequence[Any], convert: Callable[[Any], Any], fault: str) -> list[Any]:
    try:
        return [convert(value) for value in values]
    except (TypeError, ValueError, OverflowError):
        raise ValueError(fault) from None


def _integer(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return index(value)


def _bit(value: Any) -> int:
    if value not in (0, 1):
        raise ValueError
    return int(value)
