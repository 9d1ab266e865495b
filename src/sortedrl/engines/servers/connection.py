"""HTTP to an inference server: short requests and event streams. There are no retries at this level.

Each request has a connection of its own. A server that is too busy to read for a few seconds closes idle connections
before it reads the request that has arrived on one of them; that request would be lost, and with it a weight update.

An event is handled in the callback of the socket that it came from, with no task in between: a pool's client may get
tens of thousands of them per second (benchmarks/pool_client.py). That is why this is not left to an HTTP library.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlencode, urlsplit

from sortedrl.engines.servers.credentials import Credentials
from sortedrl.engines.servers.messages import Malformed, Refused, msgspec, reason_of, retry_after

PATIENCE_SECONDS = 30.0  # timeout of a connection and of a short request
_LONGEST_HEAD = 1 << 16  # bytes
_LONGEST_EVENT = 1 << 22
_LONGEST_ANSWER = 1 << 26
_LONGEST_ERROR = 1 << 16
_ERROR_SECONDS = 5.0  # to read the text of an error; the status is enough
_NO_BODY = (204, 304)


class NotReached(ConnectionError):
    """Nothing was sent."""


class ServerConnection:
    """Requests to one server, with its credentials."""

    def __init__(self, credentials: Credentials) -> None:
        self.url = credentials.url
        self.credentials = credentials

    async def call(
        self, method: str, path: str, *, seconds: float | None = None, body: Any = None, **query: str
    ) -> Any:
        """The response, parsed if it is JSON. Raises Refused, Malformed, NotReached and other `OSError`s."""
        async with asyncio.timeout(seconds or PATIENCE_SECONDS), self._exchange(method, path, body, query) as response:
            if response.status != 200:
                raise await _refusal(response)
            text = await _text(response, _LONGEST_ANSWER)
        if not text or "json" not in response.content_type:
            return text
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise Malformed(f"the response from {path} is not valid JSON ({error})") from None

    async def stream(self, path: str, body: Any, take: Callable[[bytes], bool]) -> bool:
        """Call `take` with the data of each event until it returns True: then, so does this. False: the stream ended.

        Raises as `call` does, and what `take` raises."""
        async with self._exchange("POST", path, body, {}) as response:
            if response.status != 200:
                raise await _refusal(response)
            if response.content_type != "text/event-stream":
                reason = f"it returned {response.content_type} instead of a stream"
                raise Refused(response.status, f"{reason}: {reason_of(await _text(response, _LONGEST_ERROR))}")
            events = _Events(take)
            await response.read(events)
            return events.were_enough

    @asynccontextmanager
    async def _exchange(
        self, method: str, path: str, body: Any, query: dict[str, str]
    ) -> AsyncIterator[_ResponseProtocol]:
        """Send a request; its response, once it has a status."""
        loop = asyncio.get_running_loop()
        data = b"" if body is None else msgspec.json.encode(body)
        try:
            address = urlsplit(self.url + path)
            is_safe = address.scheme == "https"
            if not (is_safe or address.scheme == "http"):
                raise ValueError("the address must begin with http:// or https://")
            headers = {
                "Host": address.netloc,
                "Connection": "close",
                "Accept-Encoding": "identity",
                "Content-Type": "application/json",
                "Content-Length": str(len(data)),
                **self.credentials.headers,
            }
            lines = [f"{name}: {value}" for name, value in headers.items()]
            target = address.path + (f"?{urlencode(query)}" if query else "")
            head = "\r\n".join([f"{method} {target} HTTP/1.1", *lines, "\r\n"]).encode()
            async with asyncio.timeout(PATIENCE_SECONDS):
                port = address.port or (443 if is_safe else 80)
                transport, response = await loop.create_connection(
                    lambda: _ResponseProtocol(loop), address.hostname or "", port, ssl=is_safe or None
                )
        except (OSError, ValueError) as error:
            raise NotReached(str(error) or "no connection in time") from None
        try:
            transport.write(head + data)
            await response.head
            yield response
        finally:
            transport.abort()


class _ResponseProtocol(asyncio.Protocol):
    """One response. What arrives before `read` waits for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.head: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[None] = loop.create_future()
        self._consume: Callable[[bytes], bool] | None = None
        self._rest = b""  # arrived and not used yet
        self.status = 0
        self.headers: dict[str, str] = {}
        self.content_type = ""
        self._is_chunked = False
        self._left: int | None = None  # bytes of the body, or of its current chunk; None: until the connection closes
        self._is_lost = False  # the connection
        self._error: Exception | None = None  # which broke it

    async def read(self, consume: Callable[[bytes], bool]) -> None:
        """Pass the body on, part by part, until it ends or `consume` returns True. Raises what `consume` raises."""
        self._consume = consume
        arrived, self._rest = self._rest, b""
        self.data_received(arrived)
        if self._is_lost:
            self._note_lost()
        await self._ended

    def data_received(self, data: bytes) -> None:
        if self._ended.done():
            return
        try:
            if self._rest:
                data, self._rest = self._rest + data, b""
            if self.head.done() and self._consume is not None:
                self._take_chunks(data) if self._is_chunked else self._take(data)
                return
            self._rest = data
            if not self.head.done():
                self._take_head()
        except Exception as error:
            self._end(error)

    def connection_lost(self, error: Exception | None) -> None:
        self._is_lost, self._error = True, error
        if not self.head.done() or self._consume is not None:
            self._note_lost()

    def _note_lost(self) -> None:
        is_whole = self._error is None and self.head.done() and self._left is None
        self._end(None if is_whole else self._error or ConnectionError("the server closed the connection"))

    def _end(self, error: Exception | None = None) -> None:
        for future in (self.head, self._ended):
            if not future.done():
                future.set_result(None) if error is None else future.set_exception(error)
                future.exception()  # the caller may have gone

    def _take_head(self) -> None:
        head, found, rest = self._rest.partition(b"\r\n\r\n")
        if len(head) > _LONGEST_HEAD:
            raise Malformed("the head of the response does not end")
        if not found:
            return
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, status = first.partition(" ")
        if not version.startswith("HTTP/1.") or not status[:3].isdigit():
            raise Malformed(f"this is not an HTTP response: {first!r}")
        self.status, self._rest = int(status[:3]), rest
        if self.status < 200:  # the response itself follows
            return self._take_head()
        fields = [line.partition(":") for line in lines]
        self.headers = {name.strip().lower(): value.strip() for name, _, value in fields}
        self.content_type = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        self._is_chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        if self._is_chunked or self.status in _NO_BODY:
            self._left = 0
        elif (length := self.headers.get("content-length")) is not None:
            self._left = _length(length, 10)
        self.head.set_result(None)
        if not self._is_chunked and self._left == 0:
            self._end()

    def _take(self, data: bytes) -> None:
        assert self._consume is not None
        if self._left is not None:
            data = data[: self._left]
            self._left -= len(data)
        if self._consume(data) or self._left == 0:
            self._end()

    def _take_chunks(self, data: bytes) -> None:
        assert self._consume is not None and self._left is not None
        place = 0
        while place < len(data):
            if self._left == 0:
                end = data.find(b"\r\n", place)
                if end < 0:
                    self._rest = data[place:]
                    if len(self._rest) > _LONGEST_HEAD:
                        raise Malformed("the size of a chunk does not end")
                    return
                line, place = data[place:end], end + 2
                if not line:  # the end of the chunk before
                    continue
                self._left = _length(line.partition(b";")[0].decode("latin-1").strip(), 16)
                if self._left == 0:
                    return self._end()
            part = data[place : place + self._left]
            place += len(part)
            self._left -= len(part)
            if self._consume(part):
                return self._end()


def _length(text: str, base: int) -> int:
    """Of a body or a chunk. Raises Malformed."""
    with suppress(ValueError):
        if text.isalnum():  # no sign
            return int(text, base)
    raise Malformed(f"this is not a length: {text!r}")


class _Events:
    """Splits a body into events, each of which is one line of data."""

    def __init__(self, take: Callable[[bytes], bool]) -> None:
        self._take = take
        self._rest = b""
        self.were_enough = False

    def __call__(self, data: bytes) -> bool:
        data = self._rest + data
        place = 0
        while (end := data.find(b"\n", place)) >= 0:
            if data.startswith(b"data:", place):
                event = data[place + 5 : end]
                if event.strip() == b"[DONE]":
                    return True
                if self._take(event):
                    self.were_enough = True
                    return True
            place = end + 1
        self._rest = data[place:]
        if len(self._rest) > _LONGEST_EVENT:
            raise Malformed(f"an event is longer than {_LONGEST_EVENT} bytes")
        return False


async def _refusal(response: _ResponseProtocol) -> Refused:
    reason = ""
    try:
        async with asyncio.timeout(_ERROR_SECONDS):
            reason = reason_of(await _text(response, _LONGEST_ERROR))
    except (OSError, Malformed):
        pass
    reason = reason or f"HTTP status {response.status}"
    if 300 <= response.status < 400:
        reason = f"it redirects to {response.headers.get('location')}: use that address instead"
    return Refused(response.status, reason, retry_after(response.headers.get("retry-after")))


async def _text(response: _ResponseProtocol, limit: int) -> str:
    """The body, at most `limit` bytes."""
    body = bytearray()

    def collect(part: bytes) -> bool:
        body.extend(part)
        return len(body) > limit

    await response.read(collect)
    return body[:limit].decode(errors="replace")
