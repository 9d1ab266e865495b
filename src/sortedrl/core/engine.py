"""The engine protocol: all that the scheduler asks of whatever generates tokens.

An engine keeps its own queue. It starts requests in the order in which they were submitted, runs at most
`slots` of them at once and refills a freed slot at once. It reports what happened as `Change`s in time order:

    Started     a request took a slot (its prefill counts as running)
    Preempted   it lost its slot, for lack of memory or because a server takes no work for now, and went back to the
                engine's queue; Started follows again
    Tokens      tokens it made, as a segment. An engine may deliver as finely or as coarsely as it likes: what
                counts is that the segments of a request, in order, are all its tokens, once
    Finished    it ended by itself or (`truncated`) by its budget; all its tokens were delivered before
    Failed      the engine refused or lost it; tokens delivered before are valid, and it is out of the engine

What must hold for every engine (tests/engine_contract.py):
- every submitted request ends in exactly one of Finished, Failed, or a call of `stop` that names it;
- `stop` returns undelivered tokens and leaves nothing of the request behind;
- a request never yields more tokens than its `budget`, kept tokens not counted;
- a segment's version is that of the weights that sampled it;
- all calls come from one thread, and an engine that is gone raises `EngineDied` from then on. What it had delivered
  before is valid; where it can, it hands out what it still holds before it raises, and last tokens come with their
  Finished in one list, so that nobody goes on behind an end.

The controller trusts no engine with a run: a report that breaks this protocol costs its rollout, at most. An engine
whose server may be busy can have a property `is_available`; a pool then gives new work to others first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from sortedrl.core.rollout import Prompt, Segment


class EngineDied(RuntimeError):
    """The engine is gone, with all that runs in it: a process that ended, a server that does not answer."""


@dataclass(frozen=True, slots=True)
class Sampling:
    temperature: float = 1.0
    top_p: float = 1.0
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False  # go on to the max_new_tokens, whatever is sampled: for measurements with forced lengths


class Request(NamedTuple):
    """A rollout to start or to resume. `budget` is what is left of its token budget."""

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


class Started(NamedTuple):
    id: int
    at: float


class Preempted(NamedTuple):
    id: int
    at: float
    recompute: int  # tokens of prompt and response that will be prefilled again


class Tokens(NamedTuple):
    id: int
    at: float
    segment: Segment


class Finished(NamedTuple):
    id: int
    at: float
    truncated: bool


class Failed(NamedTuple):
    id: int
    at: float
    reason: str


Change = Started | Preempted | Tokens | Finished | Failed


class Engine(Protocol):
    slots: int

    def now(self) -> float:
        """Seconds on the engine's clock: virtual time in the simulator. Never goes back."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue the requests, in this order."""

    def poll(self, until: float | None = None) -> list[Change]:
        """Block until something changed or the clock reaches `until`; what happened since, in time order.

        With nothing submitted and no `until` it returns an empty list at once.
        """

    def abort(self, ids: Sequence[int]) -> list[Change]:
        """Take the requests out; what happened up to now, undelivered tokens included.

        A request that finished before it could be stopped is reported as Finished, not as stopped.
        """

    def update_weights(self, weights: Any, version: int) -> None:
        """Continue under these weights. Called only while nothing is submitted."""
