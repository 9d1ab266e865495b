"""What is particular to one kind of inference server: its routes, and the shapes of what it is asked and says.

vllm_server.py and sglang.py fill this in. All that they have in common is in server_streams.py and http_engine.py.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sortedrl.core.engine import Request
from sortedrl.engines.kv_cache_reuse import KVCacheReuse
from sortedrl.engines.servers.messages import Delta, Identity
from sortedrl.engines.stop_strings import StopStrings

WEIGHT_UPDATE_SECONDS = 600.0  # for new weights


@dataclass(slots=True, eq=False)
class Waiting:
    """A request in our queue, which is in the order of `place`."""

    request: Request
    place: int
    turned_away: int = 0


@dataclass(slots=True, eq=False)
class Sent:
    """A request at the server, under the name that the server knows it by."""

    waiting: Waiting
    name: str
    prefix: list[int]
    room: int  # tokens that it may still make
    sent_at: float
    stop_strings: StopStrings | None
    heard_at: float  # when its last token came, or when it was sent
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    in_slot: bool = False
    trusted: bool = False  # its stream began when the server was known to be the right one
    ended: bool = False  # its last change was reported
    unwanted: bool = False  # is being stopped
    task: asyncio.Task[None] | None = None

    @property
    def request(self) -> Request:
        return self.waiting.request

    @property
    def context_tokens(self) -> int:
        """Of prompt and response, if the server has computed any of it."""
        return len(self.request.prompt.tokens) + len(self.prefix) + len(self.tokens) if self.tokens else 0


class ServerDialect(ABC):
    """What `HttpEngine` needs to know of a server."""

    url: str
    slots: int
    version: int  # of the weights
    kv_cache_reuse: KVCacheReuse
    max_length: int | None  # of prompt and response together, where the server tells
    _eos: list[int]  # the end tokens
    _seeded: bool
    _name_prefix: str  # of all that the server knows of us by name

    @abstractmethod
    async def call(
        self, method: str, path: str, *, seconds: float | None = None, body: Any = None, **query: str
    ) -> Any:
        """The answer, from JSON where it is JSON; raises Refused, Malformed, or what breaks a connection."""

    @abstractmethod
    async def check_server(self) -> None:
        """Raise ConfigurationError if the server cannot do what is asked of it; note its limits."""

    @abstractmethod
    async def is_well(self) -> bool:
        """Whether the server is alive and able to generate."""

    @abstractmethod
    async def count_running(self) -> int | None:
        """How many requests the server runs now; None if it does not tell."""

    @abstractmethod
    async def identity(self) -> Identity:
        """Which life of the server this is, and with which weights."""

    @abstractmethod
    def generation(self, request: Request, name: str) -> tuple[str, dict[str, Any]]:
        """Path and body of the request that streams this response."""

    @abstractmethod
    def delta_of(self, event: dict[str, Any], sent: Sent) -> Delta:
        """What one event of the stream says; raises Refused for an error and Malformed for what cannot be right."""

    @abstractmethod
    async def abort_on_server(self, names: Sequence[str]) -> bool:
        """Tell the server to end these; whether it will end their streams by itself."""

    @abstractmethod
    async def update_from_folder(self, folder: Path | None, version: int) -> str | None:
        """Have the server load the weights of this folder (None: keep its own), in place, and forget all stale KV.

        Returns the weight version under which the server was told to keep them, where it can be told.
        """

    def room_for(self, request: Request) -> int:
        """Tokens that the server may make: its max_new_tokens, or what fits beside its context."""
        if self.max_length is None:
            return request.max_new_tokens
        return min(request.max_new_tokens, max(1, self.max_length - len(request.prompt.tokens) - request.prefix_length))

    def weights_name(self, version: int) -> str:
        """The weight version that the server is told: no other run has the same."""
        return f"{self._name_prefix}-version-{version}"
