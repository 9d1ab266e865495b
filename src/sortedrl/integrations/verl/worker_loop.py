"""One run of an agent loop in its worker: what it has sampled so far, and in which contexts.

An agent loop calls `generate` once per turn, each time with all tokens of its context. Usually a prompt extends what
the loop had before: the tokens that it adds are the observation. A loop may also trim the end of the last turn (a stop
token that the template writes differently), or start a new context (a summary, a second attempt at the same prompt).
What it must not do is train on tokens as sampled that no server sampled in that context, as a loop does that encodes
its decoded history again: `fault_of` finds that.
"""

from __future__ import annotations

from array import array
from asyncio import Lock
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sortedrl.integrations.verl.exchange import Report

NOT_SAMPLED = (
    "the agent loop returned tokens with response_mask 1 that were not sampled after this context, for example because "
    "it encoded its history again. Append the token ids that generate returned"
)


class Ticket(NamedTuple):
    """The data of a rollout for a worker. `prefix`: its first turn so far, as (tokens, logprobs, version)."""

    dispatch: int
    prefix: tuple[tuple[array[int], array[float], int], ...]


class RolloutAborted(BaseException):
    """Ends an agent loop whose rollout was canceled. Not an Exception, because agent loops may catch those."""


@dataclass
class Context:
    """The ids of a conversation, and which of them were sampled."""

    prompt_length: int  # before the first turn
    ids: list[int]
    sampled: list[tuple[int, int]] = field(default_factory=list)  # [start, end) of each turn, in order


class WorkerLoop:
    """`turn` makes concurrent calls of `generate` turns that follow each other: a rollout has one slot."""

    def __init__(self, ticket: Ticket, exchange: Any, *, is_single_turn: bool) -> None:
        self.ticket = ticket
        self.is_single_turn = is_single_turn  # its first turn is its last
        self.turn = Lock()
        self.turns = 0
        self.is_full = False  # no token is left of the limit
        self.is_over = False  # the agent loop ended
        self.contexts: list[Context] = []
        self._exchange = exchange
        self._refused = False

    async def report(self, *reports: Report) -> None:
        await self._exchange.report.remote(list(reports))

    async def enter(self, observation: array[int] | None = None) -> int:
        """Wait for a slot; returns how many tokens may be sampled in it."""
        allowed: int | None = await self._exchange.enter.remote(self.ticket.dispatch, observation)
        if allowed is None:
            raise RolloutAborted
        return allowed

    async def has_slot(self) -> bool:
        found: bool = await self._exchange.has_slot.remote(self.ticket.dispatch)
        return found

    def begin_turn(self, prompt: list[int]) -> array[int] | None:
        """The observation before this turn: what the prompt adds, at least its last token. None before the first."""
        if not self.contexts:
            self.contexts.append(Context(len(prompt), prompt))
            return None
        context = self.contexts[-1]
        common = common_prefix(context.ids, prompt)
        start, end = context.sampled[-1] if context.sampled else (len(prompt), 0)
        if common > start:
            context.sampled[-1] = (start, min(end, common))
            context.ids = prompt
        else:
            self.contexts.append(Context(len(prompt), prompt))
        return array("i", prompt[common:] or prompt[-1:])

    def refuse_turn(self) -> None:
        """There is no room for a turn. A loop that does not stop then would never end."""
        if self._refused:
            raise RuntimeError("the agent loop called generate again although response_length is used up")
        self._refused = True

    def end_turn(self, tokens: Sequence[int]) -> None:
        context = self.contexts[-1]
        start = len(context.ids)
        context.ids = [*context.ids, *tokens]
        context.sampled.append((start, len(context.ids)))
        self.turns += 1

    def fault_of(self, outputs: Sequence[Any]) -> str | None:
        """Why these outputs of the agent loop must not be trained on; None if they may."""
        for output in outputs:
            ids = [*output.prompt_ids, *output.response_ids]
            trained = [len(output.prompt_ids) + place for place, bit in enumerate(output.response_mask) if bit]
            if not any(_covers(context, ids, trained) for context in self.contexts):
                return NOT_SAMPLED
        return None


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    shorter = min(len(first), len(second))
    if first[:shorter] == second[:shorter]:
        return shorter
    return next(place for place in range(shorter) if first[place] != second[place])


def _covers(context: Context, ids: Sequence[int], trained: Sequence[int]) -> bool:
    """Whether each place in `trained` was sampled in this context, after the same ids."""
    if not trained:
        return True
    if trained[-1] >= common_prefix(context.ids, ids):
        return False
    sampled = {place for start, end in context.sampled for place in range(start, end)}
    return sampled.issuperset(trained)


WORKER_LOOP: ContextVar[WorkerLoop | None] = ContextVar("sortedrl_worker_loop", default=None)
