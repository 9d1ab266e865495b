"""HTTP to an inference server: short requests and event streams. There are no retries at this level.

Each request has a connection of its own. A server that is too busy to read for a few seconds closes idle connections
before it reads the request that has arrived on one of them; that request would be lost, and with it a weight update.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

from sortedrl.core.configuration import ConfigurationError
from sortedrl.engines.servers.credentials import Credentials
from sortedrl.engines.servers.messages import Malformed, Refused, parsed, reason_of, refusal_in, retry_after
from sortedrl.settings.install_hint import install_hint

try:
    import aiohttp
except ImportError:
    raise ConfigurationError("aiohttp", None, "it is not installed", f"{install_hint('http')}.") from None

BROKEN = (aiohttp.ClientError, OSError)  # any connection failure, including a timeout
NOT_REACHED = (aiohttp.ClientConnectorError,)  # nothing was sent
_LONGEST_LINE = 1 << 22  # bytes of one event
_LONGEST_ANSWER = 1 << 26  # bytes
_LONGEST_ERROR = 1 << 16
_ERROR_SECONDS = 5.0  # to read the text of an error; the status is enough


class ServerConnection:
    """Bound to the event loop in which it was opened."""

    def __init__(self, credentials: Credentials) -> None:
        self.url = credentials.url
        self.credentials = credentials
        self._session: aiohttp.ClientSession | None = None

    async def open(self, connect_seconds: float) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_seconds),
            read_bufsize=_LONGEST_LINE,
            headers=self.credentials.headers,
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def call(self, method: str, path: str, *, seconds: float, body: Any = None, **query: str) -> Any:
        """The response, parsed if it is JSON; raises Refused, and Malformed for invalid JSON."""
        assert self._session is not None
        timeout = aiohttp.ClientTimeout(total=seconds)
        async with self._session.request(
            method, self.url + path, json=body, params=query, timeout=timeout, allow_redirects=method == "GET"
        ) as response:
            if response.status != 200:
                raise await _refusal(response)
            text = await _text(response, _LONGEST_ANSWER)
            if not text or "json" not in response.content_type:
                return text
            try:
                return json.loads(text)
            except (ValueError, RecursionError) as error:
                raise Malformed(f"the response from {path} is not valid JSON ({error})") from None

    async def events(self, path: str, body: Any) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a streamed response up to [DONE]; raises Refused and Malformed."""
        assert self._session is not None
        async with self._session.post(self.url + path, json=body, allow_redirects=False) as response:
            if response.status != 200:
                raise await _refusal(response)
            if response.content_type != "text/event-stream":
                text = await _text(response, _LONGEST_ERROR)
                reason = f"it returned {response.content_type} instead of a stream: {reason_of(text)}"
                raise Refused(response.status, reason)
            async for line in response.content:
                if line.startswith(b"data:"):
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    event = parsed(data)
                    if (refusal := refusal_in(event)) is not None:
                        raise refusal
                    yield event


async def _refusal(response: aiohttp.ClientResponse) -> Refused:
    status = response.status
    reason = ""
    with suppress(*BROKEN):
        async with asyncio.timeout(_ERROR_SECONDS):
            reason = reason_of(await _text(response, _LONGEST_ERROR))
    reason = reason or f"HTTP status {status}"
    if 300 <= status < 400:
        reason = f"it redirects to {response.headers.get('Location')}: use that address instead"
    return Refused(status, reason, retry_after(response.headers.get("Retry-After")))


async def _text(response: aiohttp.ClientResponse, limit: int) -> str:
    """The body, at most `limit` bytes."""
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > limit:
            break
    return b"".join(parts)[:limit].decode(errors="replace")
