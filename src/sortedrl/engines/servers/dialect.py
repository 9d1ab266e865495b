"""The interface of server-specific code: routes, and the formats of requests and responses.

vllm.py and sglang.py implement it. Their common code is in streams.py and base.py.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.engine import Request
from sortedrl.engines.kv_cache_reuse import KVCacheReuse
from sortedrl.engines.servers.messages import Delta, Identity
from sortedrl.engines.servers.weight_broadcast import WeightBroadcast
from sortedrl.engines.servers.weight_handles import WeightHandles
from sortedrl.engines.stop_strings import StopStrings

WEIGHT_UPDATE_SECONDS = 600.0  # time limit of a weight update


@dataclass(slots=True, eq=False)
class Waiting:
    """A request in our queue, which is ordered by `place`."""

    request: Request
    place: int
    turned_away: int = 0  # times in a row, without a token


@dataclass(slots=True, eq=False)
class Sent:
    """A request at the server, with its request id there."""

    waiting: Waiting
    name: str
    prefix: list[int]
    turn: list[int]  # the part of the prefix that belongs to the current turn
    room: int  # tokens that it may still generate
    sent_at: float
    stop_strings: StopStrings | None
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
        return len(self.request.prompt.tokens) + len(self.prefix) + len(self.tokens) if self.tokens else 0


Source = Path | WeightHandles | WeightBroadcast | None  # of weights: a folder, by CUDA IPC, by NCCL; None: keep them


class ServerDialect(ABC):
    """The server-specific part of `HttpEngine`."""

    start_command: str  # of the server, with {slots}
    url: str
    slots: int
    version: int  # of the weights
    kv_cache_reuse: KVCacheReuse
    max_length: int | None  # of prompt plus response, if the server reports it
    takes_handles = False  # the server reads weights by CUDA IPC; `check_server` sets it
    takes_broadcasts = False  # the server reads weights by NCCL; `check_server` sets it
    how_to_take_handles = ""  # the command that starts such a server, if there is one
    _eos: list[int]  # EOS token ids
    _seeded: bool
    _name_prefix: str  # of all our request ids and weight versions at the server

    @abstractmethod
    async def call(
        self, method: str, path: str, *, seconds: float | None = None, body: Any = None, **query: str
    ) -> Any:
        """The response, parsed if it is JSON; raises Refused, Malformed or a connection error."""

    @abstractmethod
    async def check_server(self) -> None:
        """Raise ConfigurationError if the server is not set up as required; read its limits."""

    async def is_well(self) -> bool:
        """Whether the server is alive and able to generate."""
        await self.call("GET", "/health")
        return True

    @abstractmethod
    async def count_running(self) -> int | None:
        """How many requests the server is running; None if it does not report that."""

    @abstractmethod
    async def identity(self) -> Identity:
        """Which server process this is, and with which weights."""

    @abstractmethod
    def generation(self, request: Request, name: str) -> tuple[str, dict[str, Any]]:
        """Path and body of the streaming request for this response."""

    @abstractmethod
    def delta_of(self, event: dict[str, Any], sent: Sent) -> Delta:
        """The content of one stream event that is not an error; raises Refused or Malformed if it cannot be used."""

    @abstractmethod
    async def abort_on_server(self, names: Sequence[str]) -> bool:
        """Abort these requests; returns whether the server will end their streams."""

    @abstractmethod
    async def update_from(self, source: Source, version: int) -> str | None:
        """Have the server load these weights in place, and clear all stale KV.

        Returns the weight version that was set on the server, if it supports that.
        """

    def misconfigured(self, reason: str) -> ConfigurationError:
        """The error for a server that was not started as required, with the command that does."""
        return ConfigurationError(
            "url", self.url, reason, f"Start it with {self.start_command.format(slots=self.slots)}"
        )

    def room_for(self, request: Request) -> int:
        """Tokens that the server may generate: max_new_tokens, limited by the room left in the context."""
        if self.max_length is None:
            return request.max_new_tokens
        return min(request.max_new_tokens, max(1, self.max_length - len(request.prompt.tokens) - request.prefix_length))

    def weights_name(self, version: int) -> str:
        """The weight version to set on the server, unique to this run."""
        return f"{self._name_prefix}-version-{version}"
