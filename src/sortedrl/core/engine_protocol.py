"""The engine protocol: what the scheduler requires of anything that generates tokens.

An engine has its own queue. It starts requests in submission order, runs at most `slots` of them at a time, and
refills a freed slot immediately. It reports `Change`s in time order:

    RequestStarted     a request took a slot (prefill counts as running)
    RequestPreempted   it lost its slot, as memory ran out or a server is paused, and is back in the engine's queue;
                       another RequestStarted follows
    Tokens             new tokens, as one segment. An engine may deliver them in chunks of any size; the segments of a
                       request, in order, must hold each of its tokens once
    RequestFinished    it ended by itself, or (`truncated`) at `max_new_tokens`; all its tokens were delivered before
    RequestFailed      the engine refused or lost it; tokens delivered before are valid, and it is out of the engine

Rules for every engine (testing/engine_contract.py checks them):
- every submitted request ends in exactly one of RequestFinished, RequestFailed, or an `abort` that names it;
- `abort` returns undelivered tokens and leaves nothing of the request behind;
- a request never yields more than `max_new_tokens`, its prefix not counted, and a finished one yields at least 1;
- a segment's version is the version of the weights that sampled it;
- all calls come from one thread;
- an engine that has died raises `EngineDied` from then on. Changes delivered before stay valid. If it can, it delivers
  the changes it still holds before it raises. The last tokens of a request and its RequestFinished come in one list.

A change that breaks this protocol costs at most its rollout, never the run (core/engine_checks.py). What an engine may
offer beyond it is in core/engine.py.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

from sortedrl.core.configuration import checked_bool, checked_float, checked_texts
from sortedrl.core.errors import UserError
from sortedrl.core.rollout import Prompt, Segment


class EngineDied(UserError, RuntimeError):
    """The engine and all requests in it are lost: its process ended, or its server does not answer."""


class Unchanged(Enum):
    """`controller.publish(UNCHANGED)`: a new version with the same weights, as in a benchmark without a learner."""

    UNCHANGED = "unchanged"


UNCHANGED = Unchanged.UNCHANGED


@dataclass(frozen=True, slots=True)
class Sampling:
    temperature: float = 1.0
    top_p: float = 1.0
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False  # always generate max_new_tokens: for benchmarks with fixed lengths

    def __post_init__(self) -> None:
        temperature = checked_float("temperature", self.temperature, lambda t: 0 <= t < math.inf, "of 0 or more")
        top_p = checked_float("top_p", self.top_p, lambda p: 0 < p <= 1, "above 0 and up to 1")
        object.__setattr__(self, "temperature", temperature)
        object.__setattr__(self, "top_p", top_p)
        object.__setattr__(self, "stop_strings", checked_texts("stop_strings", self.stop_strings))
        object.__setattr__(self, "ignore_eos", checked_bool("ignore_eos", self.ignore_eos))


class Request(NamedTuple):
    """A rollout to start or to resume. `prefix`: the tokens generated so far, which do not count as new."""

    id: int
    prompt: Prompt
    prefix: tuple[Segment, ...]
    max_new_tokens: int
    seed: int
    sampling: Sampling = Sampling()

    @property
    def prefix_length(self) -> int:
        return sum(map(len, self.prefix))

    @property
    def prefix_tokens(self) -> list[int]:
        return [token for segment in self.prefix for token in segment.tokens]

    def continued(self, made: Segment) -> Request:
        """The rest of it, behind tokens that it has generated."""
        return self._replace(prefix=(*self.prefix, made), max_new_tokens=self.max_new_tokens - len(made))

    @property
    def turn_tokens(self) -> list[int]:
        """The part of the prefix that belongs to the current turn: the tokens after the environment's last answer."""
        tokens: list[int] = []
        for segment in self.prefix:
            tokens = [] if segment.is_environment else [*tokens, *segment.tokens]
        return tokens


class RequestStarted(NamedTuple):
    id: int
    at: float


class RequestPreempted(NamedTuple):
    id: int
    at: float
    recompute: int  # tokens of prompt and response that will be prefilled again


class Tokens(NamedTuple):
    id: int
    at: float
    segment: Segment


class RequestFinished(NamedTuple):
    id: int
    at: float
    truncated: bool


class RequestFailed(NamedTuple):
    id: int
    at: float
    reason: str


class RequestBroken(RequestFailed):
    """What the engine reported about the request breaks the protocol (engine_checks.py): none of its tokens is kept."""

    __slots__ = ()


Change = RequestStarted | RequestPreempted | Tokens | RequestFinished | RequestFailed


class Engine(Protocol):
    slots: int

    @abstractmethod
    def now(self) -> float:
        """Seconds on the engine's clock (virtual time in the simulator). It never goes back."""

    @abstractmethod
    def submit(self, requests: Sequence[Request]) -> None:
        """Queue the requests, in this order."""

    @abstractmethod
    def poll(self, until: float | None = None) -> list[Change]:
        """Block until there are changes or the clock reaches `until`; returns the changes in time order.

        With nothing submitted and no `until` it returns an empty list immediately."""

    @abstractmethod
    def abort(self, ids: Sequence[int]) -> list[Change]:
        """Remove the requests; returns all changes up to now, undelivered tokens included.

        A request that finished before it could be aborted is reported as RequestFinished."""

    @abstractmethod
    def update_weights(self, weights: Any, version: int) -> None:
        """Generate with these weights from now on. Called only while no request is submitted.

        None: it decodes with the learner's own module, or the weights are `UNCHANGED`."""
