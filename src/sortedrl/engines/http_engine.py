"""What engines behind an HTTP API share: streams, a queue, aborts, the server's death, weights through memory.

    submit -> our queue -> one streaming request for each slot (Started) -> deltas -> Finished

Requests wait here and not in the server: at most `slots` are sent at a time, and a freed slot is refilled at once by
the engine's own thread, in which all traffic happens (asyncio). What is particular to a server is in a subclass.

- **Running**: what was sent runs, unless the server says otherwise. Once a second it is asked how many it runs; when
  that is fewer than were sent (no memory), those that were silent longest are reported as preempted until they are
  heard again. The count is the server's own; which ones it meant is inferred.
- **Stop**: the server is told to abort and its streams are read to their end, so that every token that it had made
  arrives. Where it cannot be told, the connection is closed, and what had arrived is kept.
- **Weights** go in place, through a folder in memory (`/dev/shm`) that is removed when they are loaded. So the server
  must see that folder: the same machine, or a `weights_folder` that both sides share.
- **Death**: a server that refuses connections, answers its health check with an error or leaves two small questions
  unanswered for `_PATIENCE_SECONDS` each is dead, and so is one whose weights did not load to the end. What had arrived
  is handed out, then every call raises `EngineDied`. A single request that it rejects is Failed with its reason.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from sortedrl.core.engine import Change, EngineDied, Failed, Finished, Preempted, Request, Started, Tokens
from sortedrl.core.rollout import Segment
from sortedrl.core.schedule import ConfigurationError
from sortedrl.engines.api_key import ApiKey
from sortedrl.engines.old_keys import OldKeys
from sortedrl.engines.pool import Pool
from sortedrl.engines.stop_strings import StopStrings, StopWatches
from sortedrl.engines.weight_files import WeightFiles, Weights

try:
    import aiohttp
except ImportError:
    raise ConfigurationError("aiohttp", None, "it is not installed", "pip install 'sortedrl[http]'") from None

_WATCH_SECONDS = 1.0
_PATIENCE_SECONDS = 30.0  # with a server that is asked something small
_SETTLE_SECONDS = 0.5  # in which a server that is going down stops to say that it is well
_STOP_SECONDS = 2.0  # for aborted streams to end by themselves
LOAD_SECONDS = 600.0
_KEEP_ALIVE_SECONDS = 2.0  # less than servers keep an idle connection, so that none is closed under a new request
_LONGEST_LINE = 1 << 22  # bytes of one delta
_BROKEN = (aiohttp.ClientError, OSError)  # a connection, by whatever means; a time-out too
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of one stream. `end` is None, `stop`, `length`, or the server's word for any other end."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    end: str | None = None


class Refused(Exception):
    """The server answered with an error. `status` is that of HTTP, also where the error came within a stream."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status

    @property
    def is_about_the_key(self) -> bool:
        return self.status in (401, 403)


@dataclass(slots=True, eq=False)
class Sent:
    """A request at the server, under the name that the server knows it by."""

    request: Request
    name: str
    kept: list[int]
    heard_at: float
    stop_strings: StopStrings | None
    tokens: list[int] = field(default_factory=list)
    in_slot: bool = False
    unwanted: bool = False  # is being stopped
    task: asyncio.Task[None] | None = None


class HttpEngine(ABC):
    """See the module's docstring. `tokenizer` is needed for stop strings only; `api_key`: see api_key.py."""

    def __init__(
        self,
        url: str,
        *,
        slots: int,
        eos_token_ids: Iterable[int],
        tokenizer: Any = None,
        seeded: bool = False,
        keep_old_keys: bool = False,
        weights_folder: Path | None = None,
        weights_readable_by_all: bool = False,
        api_key: str | None = None,
    ) -> None:
        if slots < 1:
            raise ConfigurationError("slots", slots, "an engine needs at least 1", "Set it to 1 or more.")
        self.url = url.rstrip("/")
        self.slots = slots
        self.version = 0
        self.load_seconds = 0.0  # of the last load
        self.max_length: int | None = None  # of prompt and response together, where the server tells
        self._eos = sorted(set(eos_token_ids))
        self._tokenizer = tokenizer
        self._seeded = seeded
        self.old_keys = OldKeys(keep=keep_old_keys)
        self.api_key = ApiKey(api_key)
        self.weight_files = WeightFiles(weights_folder, readable_by_all=weights_readable_by_all)
        self._stop_watches = StopWatches(tokenizer)
        self._news = threading.Condition()  # guards these four
        self._changes: list[Change] = []
        self._inside: set[int] = set()
        self._death: str | None = None
        self._is_closed = False
        self._queue: deque[Request] = deque()  # the rest belongs to the engine's thread
        self._sent: dict[str, Sent] = {}
        self._names_given = 0
        self._name_prefix = f"sortedrl-{time.time_ns():x}"
        self._server_is_full = False
        self._session: aiohttp.ClientSession | None = None
        self._watching: asyncio.Task[None] | None = None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name=f"engine {url}", daemon=True).start()
        try:
            self._result_of(self._open())
        except BaseException:
            self.close()
            raise

    # What a server's own engine says

    @abstractmethod
    async def check_server(self) -> None:
        """Raise ConfigurationError if the server cannot do what is asked of it; note its limits.

        A refusal that is about the API key is raised as it is.
        """

    @abstractmethod
    async def is_well(self) -> bool:
        """Whether the server is alive and able to generate."""

    @abstractmethod
    async def count_running(self) -> int | None:
        """How many requests the server runs now; None if it does not tell."""

    @abstractmethod
    def generation(self, request: Request, name: str) -> tuple[str, dict[str, Any]]:
        """Path and body of the request that streams this response."""

    @abstractmethod
    def delta_of(self, event: dict[str, Any], sent: Sent) -> Delta:
        """What one event of the stream says; raises Refused for an error."""

    @abstractmethod
    async def abort(self, names: Sequence[str]) -> bool:
        """Tell the server to end these; whether it will end their streams by itself."""

    @abstractmethod
    async def load_folder(self, folder: Path | None, version: int) -> None:
        """Have the server load the weights of this folder (None: keep its own), in place, and forget all old keys."""

    def room_for(self, request: Request) -> int:
        """Tokens that the server may make: its budget, or what fits beside its context."""
        if self.max_length is None:
            return request.budget
        return min(request.budget, max(1, self.max_length - len(request.prompt.tokens) - request.kept_length))

    # The protocol

    def now(self) -> float:
        return time.perf_counter()

    def submit(self, requests: Sequence[Request]) -> None:
        self._raise_if_dead()
        with self._news:
            inside = set(self._inside)
            for request in requests:
                if request.id in inside:
                    raise ValueError(f"request {request.id} is in the engine already: stop it first")
                inside.add(request.id)
                self._stop_watches.of(request)
            self._inside = inside
        self._loop.call_soon_threadsafe(self._enqueue, list(requests))

    def poll(self, until: float | None = None) -> list[Change]:
        with self._news:
            while not self._changes and (self._inside or until is not None):
                self._raise_if_dead()
                seconds = None if until is None else until - self.now()
                if seconds is not None and seconds <= 0:
                    break
                self._news.wait(seconds)
            if not self._changes:
                self._raise_if_dead()
            return self._report()

    def stop(self, ids: Sequence[int]) -> list[Change]:
        self._result_of(self._stop(set(ids)))
        with self._news:
            self._inside -= set(ids)
            return self._report()

    def load(self, weights: Weights | Path | None, version: int) -> None:
        """Send the weights, under their Hugging Face names. If they do not arrive whole, the server is given up.

        A path is a folder with `model.safetensors`. None: they have not changed, only their version has; keys are
        forgotten all the same, so that a measurement pays for resumes as a run does.
        """
        self._raise_if_dead()
        if self._inside:
            raise RuntimeError(f"load of version {version} while {len(self._inside)} requests are in: stop them first")
        began = self.now()
        if weights is None or isinstance(weights, Path):
            self._load_from(weights, version)
        else:
            with self.weight_files.written(weights, version) as folder:
                self._load_from(folder, version)
        self.version = version
        self.load_seconds = self.now() - began

    def _load_from(self, folder: Path | None, version: int) -> None:
        try:
            self._result_of(self.load_folder(folder, version))
        except (Refused, KeyError, TypeError, ValueError, *_BROKEN) as error:
            self._die(f"the weights of version {version} did not load to the end ({_said(error)}); restart the server")
            raise EngineDied(f"{self.url}: {self._death}") from error

    def close(self) -> None:
        """End the engine's thread; the server is left as it is."""
        if not self._is_closed:
            self._is_closed = True
            self._result_of(self._shut())
            self._loop.call_soon_threadsafe(self._loop.stop)

    # HTTP, in the engine's thread

    async def call(
        self, method: str, path: str, *, seconds: float | None = None, body: Any = None, **query: str
    ) -> Any:
        """The answer, from JSON where it is JSON; raises Refused."""
        assert self._session is not None
        timeout = aiohttp.ClientTimeout(total=_PATIENCE_SECONDS if seconds is None else seconds)
        async with self._session.request(method, self.url + path, json=body, params=query, timeout=timeout) as response:
            text = await response.text()
            if response.status != 200:
                reason = self.api_key.hidden_in(reason_of(text))
                raise Refused(response.status, reason or f"HTTP status {response.status}")
            return json.loads(text) if text and "json" in response.content_type else text

    async def _open(self) -> None:
        self._session = aiohttp.ClientSession(
            headers=self.api_key.headers,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_PATIENCE_SECONDS),
            read_bufsize=_LONGEST_LINE,
        )
        try:
            await self.check_server()
        except Refused as refusal:
            if not refusal.is_about_the_key:
                raise
            raise self.api_key.refused_by(self.url) from None
        except _BROKEN as error:
            raise ConfigurationError(
                "url", self.url, f"no server answers there ({_said(error)})", "Start it first, or correct the address."
            ) from None
        self._watching = self._loop.create_task(self._watch())

    async def _shut(self) -> None:
        tasks = [sent.task for sent in self._sent.values()] + [self._watching]
        for task in tasks:
            if task is not None:
                task.cancel()
        await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def _events(self, sent: Sent) -> AsyncGenerator[dict[str, Any], None]:
        assert self._session is not None
        path, body = self.generation(sent.request, sent.name)
        async with self._session.post(self.url + path, json=body) as response:
            if response.status != 200:
                text = await response.text()
                raise Refused(response.status, reason_of(text) or f"HTTP status {response.status}")
            async for line in response.content:
                if line.startswith(b"data:"):
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    yield json.loads(data)

    # Requests, in the engine's thread

    def _enqueue(self, requests: Sequence[Request]) -> None:
        self._queue.extend(requests)
        self._send_waiting()

    def _send_waiting(self) -> None:
        while self._queue and len(self._sent) < self.slots and self._death is None and not self._is_closed:
            request = self._queue.popleft()
            self._names_given += 1
            name = f"{self._name_prefix}-{self._names_given:012d}"  # none is the beginning of another
            sent = Sent(request, name, request.kept_tokens, self.now(), self._stop_watches.of(request))
            self._sent[name] = sent
            if not self._server_is_full:
                sent.in_slot = True
                self._add(Started(request.id, self.now()))
            sent.task = self._loop.create_task(self._stream(sent))

    async def _stream(self, sent: Sent) -> None:
        """One response from its first to its last delta."""
        try:
            async with aclosing(self._events(sent)) as events:
                async for event in events:
                    if self._hear(sent, self.delta_of(event, sent)):
                        return
            if not self._finish_if_whole(sent):
                await self._fail_or_die(sent, "the server ended the response before its end")
        except Refused as refusal:
            if refusal.status < 500:
                self._fail(sent, f"the server refused it: {refusal}")
            else:
                await self._fail_or_die(sent, f"the server could not do it: {refusal}")
        except _BROKEN as error:
            await self._fail_or_die(sent, f"the connection broke: {_said(error)}")
        except (KeyError, TypeError, ValueError) as error:
            self._fail(sent, f"the server's answer has another shape than expected: {error!r}")
        finally:
            self._sent.pop(sent.name, None)
            self._send_waiting()

    def _hear(self, sent: Sent, delta: Delta) -> bool:
        """Report what came; whether it was the last."""
        tokens, end = list(delta.tokens), delta.end
        if sent.stop_strings is None:
            sent.tokens += tokens
        else:
            for count, token in enumerate(tokens, start=1):
                sent.tokens.append(token)
                if sent.stop_strings.completed_by_last(sent.kept, sent.tokens):
                    tokens, end = tokens[:count], "stop"
                    break
        if end not in (None, "stop", "length"):
            end = self._end_of(sent) or end  # such as aborted, in the step of its last token
        sent.heard_at = now = self.now()
        id = sent.request.id
        changes: list[Change] = []
        if tokens and not sent.in_slot:
            sent.in_slot = True
            changes.append(Started(id, now))
        if tokens:
            changes.append(Tokens(id, now, Segment(tokens, list(delta.logprobs[: len(tokens)]), self.version)))
        if end in ("stop", "length"):
            changes.append(Finished(id, now, truncated=end == "length"))
        elif end is not None and not sent.unwanted:
            changes.append(Failed(id, now, f"the server ended it: {end}"))
        self._add(*changes)
        return end is not None

    def _end_of(self, sent: Sent) -> str | None:
        """How its tokens end, if they do."""
        if sent.tokens and sent.tokens[-1] in self._eos and not sent.request.sampling.ignore_end:
            return "stop"
        return "length" if len(sent.tokens) >= self.room_for(sent.request) else None

    def _finish_if_whole(self, sent: Sent) -> bool:
        """Report the end that the server did not get to report, if the tokens have come to one."""
        end = self._end_of(sent)
        with self._news:
            is_new = end is not None and sent.request.id in self._inside
            if is_new:
                self._add(Finished(sent.request.id, self.now(), truncated=end == "length"))
        return is_new

    async def _fail_or_die(self, sent: Sent, reason: str) -> None:
        """One request's bad luck, or the first sign of the server's end: which of them, its health tells soon."""
        if sent.unwanted:
            return
        await asyncio.sleep(_SETTLE_SECONDS)
        if await self._is_alive():
            self._fail(sent, reason)
        else:
            self._die(f"it does not answer any more ({reason})")

    def _fail(self, sent: Sent, reason: str) -> None:
        if not sent.unwanted:
            self._add(Failed(sent.request.id, self.now(), reason))

    async def _stop(self, unwanted: set[int]) -> None:
        self._queue = deque(request for request in self._queue if request.id not in unwanted)
        leaving = [sent for sent in self._sent.values() if sent.request.id in unwanted]
        for sent in leaving:
            sent.unwanted = True
        streams = {sent.name: sent.task for sent in leaving if sent.tokens and sent.task is not None}
        if streams and self._death is None and await self._aborts(list(streams)):
            await asyncio.wait(streams.values(), timeout=_STOP_SECONDS)
        tasks = [sent.task for sent in leaving if sent.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for sent in leaving:
            self._finish_if_whole(sent)

    async def _aborts(self, names: Sequence[str]) -> bool:
        try:
            return await self.abort(names)
        except (Refused, *_BROKEN):
            return False

    # The server's state, in the engine's thread

    async def _watch(self) -> None:
        while self._death is None:
            await asyncio.sleep(_WATCH_SECONDS)
            if not self._sent:
                continue
            try:
                running = await self.count_running()
            except (Refused, KeyError, ValueError, *_BROKEN) as error:
                if not await self._is_alive():
                    self._die(f"it does not answer any more ({_said(error)})")
                continue
            if running is not None:
                self._note_running(running)

    def _note_running(self, running: int) -> None:
        now = self.now()
        missing = len(self._sent) - running
        silent = [sent for sent in self._sent.values() if sent.heard_at < now - _WATCH_SECONDS]
        self._server_is_full = missing > 0 and bool(silent)
        to_report = missing - sum(not sent.in_slot for sent in self._sent.values())
        for sent in sorted((s for s in silent if s.in_slot), key=lambda s: s.heard_at)[: max(0, to_report)]:
            sent.in_slot = False
            context = len(sent.request.prompt.tokens) + len(sent.kept) + len(sent.tokens)
            self._add(Preempted(sent.request.id, now, context if sent.tokens else 0))

    async def _is_alive(self) -> bool:
        if self._death is not None:
            return False
        try:
            return await self.is_well()
        except (Refused, *_BROKEN):
            return False

    def _die(self, reason: str) -> None:
        sent_now = list(self._sent.values())
        with self._news:
            for sent in sent_now:
                self._finish_if_whole(sent)
            self._death = self._death or self.api_key.hidden_in(reason)
            self._news.notify_all()
        here = asyncio.current_task() if self._is_own_thread() else None
        for sent in sent_now:
            if sent.task is not None and sent.task is not here:
                self._loop.call_soon_threadsafe(sent.task.cancel)

    # Small things

    def _add(self, *changes: Change) -> None:
        """At once, so that last tokens and their end are seen together."""
        with self._news:
            self._changes += changes
            self._inside -= {change.id for change in changes if isinstance(change, Finished | Failed)}
            self._news.notify_all()

    def _report(self) -> list[Change]:
        changes, self._changes = self._changes, []
        return [
            change._replace(reason=self.api_key.hidden_in(change.reason)) if isinstance(change, Failed) else change
            for change in changes
        ]

    def _raise_if_dead(self) -> None:
        if self._death is not None:
            raise EngineDied(f"{self.url}: {self._death}")

    def _is_own_thread(self) -> bool:
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    def _result_of(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


class ServerPool(Pool):
    """A pool of servers that see one `weights_folder`: weights are written once for all of them."""

    def __init__(self, engines: Sequence[HttpEngine]) -> None:
        super().__init__(engines)
        self._weight_files = engines[0].weight_files

    def load(self, weights: Weights | None, version: int) -> None:
        if weights is None:
            super().load(None, version)
            return
        with self._weight_files.written(weights, version) as folder:
            super().load(folder, version)


def reason_of(answer: Any) -> str:
    """The message in an answer that reports an error, in the shapes that servers use."""
    if isinstance(answer, str):
        try:
            answer = json.loads(answer)
        except ValueError:
            return str(answer).strip()[:500]
    for key in ("error", "detail", "message"):
        if isinstance(answer, Mapping) and answer.get(key):
            answer = answer[key]
    return str(answer)[:500]


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__
