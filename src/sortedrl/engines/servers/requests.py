"""The requests of an engine: those that wait for a slot at the server, and those that were sent to it."""

import asyncio
from dataclasses import dataclass, field

from sortedrl.core.engine import Request
from sortedrl.engines.shared import StopWatch

FEWEST_TOKENS = 8  # of a running response in `silence_seconds`


@dataclass(slots=True, eq=False)
class Waiting:
    request: Request
    place: int = 0  # in the queue: of its submission, also if the server turned it away
    turned_away: int = 0  # times in a row, without a token


@dataclass(slots=True, eq=False)
class Sent:
    """A request at the server, with its request id there."""

    waiting: Waiting
    name: str
    room: int  # tokens that it may still generate
    sent_at: float
    stop_watch: StopWatch | None
    eos: frozenset[int]  # the tokens that end it
    heard_at: float  # when its last token arrived, or when it was sent
    paced_at: float  # when the last of each `FEWEST_TOKENS` tokens arrived, or when it was sent
    paced_tokens: int = 0  # how many it had then
    is_back: bool = False  # since then it has lost its slot and got it back
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    in_slot: bool = False
    trusted: bool = False  # its stream started after the server's identity was confirmed
    ended: bool = False  # its last change was reported
    unwanted: bool = False  # is being aborted
    task: asyncio.Task[None] | None = None

    @property
    def request(self) -> Request:
        return self.waiting.request

    @property
    def context_tokens(self) -> int:
        """Tokens of prompt and response, if the server has computed any of it."""
        made = len(self.tokens)
        return len(self.request.prompt.tokens) + self.request.prefix_length + made if made else 0

    def cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()

    def hear(self, now: float) -> bool:
        """Note that tokens arrived; returns whether it got its slot with them."""
        self.heard_at = now
        count = len(self.tokens)
        if count >= self.paced_tokens + FEWEST_TOKENS:
            self.paced_at, self.paced_tokens, self.is_back = now, count, False
        if self.in_slot:
            return False
        if not self.is_back:
            self.paced_at, self.is_back = now, True
        self.in_slot = True
        return True

    # Where a response ends by our own rules: a server may send more, or end a stream without saying why

    def take(self, tokens: list[int]) -> tuple[list[int], str | None]:
        """Store the tokens up to the end of the response; returns them, and the rule that ends it."""
        room = self.room - len(self.tokens)
        end = None
        if len(tokens) >= room:
            tokens, end = tokens[:room], "length"
        if not self.eos.isdisjoint(tokens):
            count = next(place for place, token in enumerate(tokens, start=1) if token in self.eos)
            tokens, end = tokens[:count], "stop"
        if self.stop_watch is None:
            self.tokens += tokens
            return tokens, end
        for count, token in enumerate(tokens, start=1):
            self.tokens.append(token)
            if self.stop_watch(self.tokens):
                return tokens[:count], "stop"
        return tokens, end

    def reached(self) -> str | None:
        """The end that the stored tokens have reached, if it is one that the server did not report."""
        if not self.tokens:
            return None
        if self.tokens[-1] in self.eos:
            return "stop"
        return "length" if len(self.tokens) >= self.room else None
