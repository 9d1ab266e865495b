"""What engines behind an HTTP API share: streams, a queue, aborts, the server's state, weights through memory.

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
- **Messages** are checked (server_messages.py). One that cannot be right fails its request, with the reason.
- **Limits**: a response is cut at its token budget, whatever the server goes on to send. A stream without a token for
  `silence_seconds` on a server that is well fails its request.
- **Outage**: a server that is busy, ill or not reachable is the server's state and no request's failure. Its requests
  wait here, behind the tokens that they have (reported as Preempted), until it takes work again (outage.py). After
  `unavailable_seconds` it is dead.
- **Identity**: a server that restarts has other weights. While a stream is open, a restart breaks it. So after a broken
  connection, and after a time without streams, the server must first show that it is the same with the same weights:
  until then the tokens of new streams are held back. If it is another, they are dropped and the engine is dead.
- **Death**: what had arrived is handed out, then every call raises `EngineDied` with the reason. That holds for any
  error in the engine's own tasks, too: none of them ends unseen.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from sortedrl.core.engine import Change, EngineDied, Failed, Finished, Preempted, Request, Started, Tokens
from sortedrl.core.rollout import Segment
from sortedrl.core.schedule import ConfigurationError
from sortedrl.engines.old_keys import OldKeys
from sortedrl.engines.outage import Outage
from sortedrl.engines.pool import Pool
from sortedrl.engines.server_connection import BROKEN, NOT_REACHED, ServerConnection
from sortedrl.engines.server_messages import (
    ANY_VOCABULARY,
    BUSY,
    Delta,
    Identity,
    Malformed,
    OtherWeights,
    Refused,
    checked,
    said,
)
from sortedrl.engines.stop_strings import StopStrings, StopWatches

_WATCH_SECONDS = 1.0
_PATIENCE_SECONDS = 30.0  # with a server that is asked something small
_SETTLE_SECONDS = 0.5  # in which a server that is going down stops to say that it is well
_ABORT_SECONDS = 10.0  # for the server to answer that it aborts
_STOP_SECONDS = 2.0  # for aborted streams to end by themselves
LOAD_SECONDS = 600.0
_FEWEST_FAULTS = 64  # in a row, or two for each slot: then no answer of the server can be used
_TURNS_AT_THE_HEAD = 3  # of a request that is refused: then others are tried first
_SHARED_MEMORY = Path("/dev/shm")
_log = logging.getLogger(__name__)
Weights = Mapping[str, Any] | Iterable[tuple[str, Any]]
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request in our queue, which is in the order of `place`."""

    request: Request
    place: int
    turned_away: int = 0


@dataclass(slots=True, eq=False)
class Sent:
    """A request at the server, under the name that the server knows it by."""

    waiting: _Waiting
    name: str
    kept: list[int]
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
        return len(self.request.prompt.tokens) + len(self.kept) + len(self.tokens) if self.tokens else 0


class HttpEngine(ABC):
    """See the module's docstring. `tokenizer` is needed for stop strings only.

    `silence_seconds` and `unavailable_seconds` are the limits that it describes. `vocabulary` is the number of tokens
    that the model knows; ids beyond it are refused.
    """

    def __init__(
        self,
        url: str,
        *,
        slots: int,
        eos_token_ids: Iterable[int],
        tokenizer: Any = None,
        vocabulary: int | None = None,
        seeded: bool = False,
        keep_old_keys: bool = False,
        weights_folder: Path | None = None,
        silence_seconds: float = 300.0,
        unavailable_seconds: float = 120.0,
    ) -> None:
        if slots < 1:
            raise ConfigurationError("slots", slots, "an engine needs at least 1", "Set it to 1 or more.")
        for name, seconds in (("silence_seconds", silence_seconds), ("unavailable_seconds", unavailable_seconds)):
            if not seconds > 0:
                raise ConfigurationError(name, seconds, "it is a time limit in seconds", "Set it to more than 0.")
        self.url = url.rstrip("/")
        self.slots = slots
        self.version = 0
        self.load_seconds = 0.0  # of the last load
        self.max_length: int | None = None  # of prompt and response together, where the server tells
        self._vocabulary = vocabulary or ANY_VOCABULARY
        self._eos = sorted(set(eos_token_ids))
        self._eos_set = frozenset(self._eos)
        self._seeded = seeded
        self.old_keys = OldKeys(keep=keep_old_keys)
        self.weights_folder = weights_folder or (_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None)
        self._stop_watches = StopWatches(tokenizer)
        self._news = threading.Condition()  # guards these four
        self._changes: list[Change] = []
        self._inside: set[int] = set()
        self._death: str | None = None
        self._is_closed = False
        self._queue: deque[_Waiting] = deque()  # the rest belongs to the engine's thread
        self._sent: dict[str, Sent] = {}
        self._places_given = 0
        self._names_given = 0
        self._name_prefix = f"sortedrl-{time.time_ns():x}"
        self._server_is_full = False
        self._silence_seconds = silence_seconds
        self._outage = Outage(unavailable_seconds)
        self._probe: Sent | None = None  # sent in an outage, to see whether it is over
        self._token_at = float("-inf")  # when the last token of any stream came
        self._faults = 0  # requests in a row that failed by the server's fault
        self._identity = Identity()  # of the server that was given the weights
        self._is_confirmed = False  # it is still the same
        self._doubts = 0  # how often that became uncertain
        self._confirming = asyncio.Lock()
        self._is_asked = False  # whether somebody is about to confirm it
        self._held: list[tuple[Change, bool]] = []  # from the first of a stream that is not trusted on; is it trusted?
        self._tasks: set[asyncio.Task[Any]] = set()  # beside those of streams
        self._connection = ServerConnection(self.url)
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._note_unhandled)
        threading.Thread(target=self._loop.run_forever, name=f"engine {url}", daemon=True).start()
        try:
            self._result_of(self._open())
        except BaseException:
            self.close()
            raise

    # What a server's own engine says

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
    async def abort(self, names: Sequence[str]) -> bool:
        """Tell the server to end these; whether it will end their streams by itself."""

    @abstractmethod
    async def load_folder(self, folder: Path | None, version: int) -> str | None:
        """Have the server load the weights of this folder (None: keep its own), in place, and forget all old keys.

        Returns the weight version under which the server was told to keep them, where it can be told.
        """

    def room_for(self, request: Request) -> int:
        """Tokens that the server may make: its budget, or what fits beside its context."""
        if self.max_length is None:
            return request.budget
        return min(request.budget, max(1, self.max_length - len(request.prompt.tokens) - request.kept_length))

    def weights_name(self, version: int) -> str:
        """The weight version that the server is told: no other run has the same."""
        return f"{self._name_prefix}-version-{version}"

    # The protocol

    def now(self) -> float:
        return time.perf_counter()

    @property
    def is_available(self) -> bool:
        """Whether a new request would be sent now: not while the server takes no work. For any thread."""
        if not self._outage.is_on:
            return True
        return self._probe is None and not self._queue and self._outage.retry_at <= self.now()

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
            with written(weights, version, self.weights_folder) as folder:
                self._load_from(folder, version)
        self.version = version
        self.load_seconds = self.now() - began

    def _load_from(self, folder: Path | None, version: int) -> None:
        try:
            self._result_of(self._update_weights(folder, version))
        except Exception as error:  # whatever it is, old and new weights may be mixed in the server
            self._die(f"the weights of version {version} did not load to the end ({said(error)}); restart the server")
            raise EngineDied(f"{self.url}: {self._death}") from error

    def close(self) -> None:
        """End the engine's thread; the server is left as it is."""
        if not self._is_closed:
            self._is_closed = True
            self._result_of(self._shut())
            self._loop.call_soon_threadsafe(self._loop.stop)

    # The server, in the engine's thread

    async def call(
        self, method: str, path: str, *, seconds: float | None = None, body: Any = None, **query: str
    ) -> Any:
        """The answer, from JSON where it is JSON; raises Refused, Malformed, or what breaks a connection."""
        patience = _PATIENCE_SECONDS if seconds is None else seconds
        return await self._connection.call(method, path, seconds=patience, body=body, **query)

    async def _open(self) -> None:
        await self._connection.open(_PATIENCE_SECONDS)
        try:
            await self.check_server()
            self._identity = await self.identity()
        except (Refused, *BROKEN) as error:
            raise ConfigurationError(
                "url", self.url, f"no server answers there ({said(error)})", "Start it first, or correct the address."
            ) from None
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            if isinstance(error, ConfigurationError):
                raise
            reason = f"the server there answers in another shape than expected ({error!r})"
            raise ConfigurationError("url", self.url, reason, "Correct the address, or its version.") from None
        if not self._identity.is_known:
            _log.warning("%s does not say when it started: a restart between two requests is not noticed", self.url)
        self._spawn(self._watch())

    async def _shut(self) -> None:
        tasks = [*self._tasks, *(sent.task for sent in self._sent.values() if sent.task is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._connection.close()

    async def _update_weights(self, folder: Path | None, version: int) -> None:
        """Load, and see to it that the server did not restart meanwhile. One that is busy is asked again."""
        began = self.now()
        while True:
            try:
                before = await self.identity()
                is_another = before.agrees_with(self._identity) is False
                if is_another and folder is None:
                    raise Malformed(f"it is not the server of before: {before}, and it was {self._identity}")
                if is_another:  # it restarted while nothing ran: the new weights make it the right one
                    await self.check_server()
                tag = await self.load_folder(folder, version)
                after = await self.identity()
                break
            except (Refused, *NOT_REACHED) as error:
                is_busy = not isinstance(error, Refused) or error.status in BUSY
                self._outage.note(self.now(), said(error), getattr(error, "retry_after", None))
                if not is_busy or self._outage.is_hopeless(self.now(), began):
                    raise
                await asyncio.sleep(self._outage.retry_at - self.now())
        self._outage.end()
        expected = Identity(before.process, before.weights if folder is None else tag or after.weights)
        if expected.agrees_with(after) is False:
            raise Malformed(f"it restarted meanwhile: {after}, and it was {expected}")
        self._identity = expected
        self._doubt()

    # Requests, in the engine's thread

    def _enqueue(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._places_given += 1
            self._queue.append(_Waiting(request, self._places_given))
        self._send_waiting()

    def _send_waiting(self) -> None:
        while self._queue and len(self._sent) < self.slots and self._death is None and not self._is_closed:
            if self._outage.is_on and (self._probe is not None or self._outage.retry_at > self.now()):
                return
            waiting = self._queue.popleft()
            self._names_given += 1
            name = f"{self._name_prefix}-{self._names_given:012d}"  # none is the beginning of another
            request, now = waiting.request, self.now()
            watch = self._stop_watches.of(request)
            sent = Sent(waiting, name, request.kept_tokens, self.room_for(request), now, watch, heard_at=now)
            self._sent[name] = sent
            if self._outage.is_on:
                self._probe = sent
            if not self._server_is_full:
                sent.in_slot = True
                self._add(Started(request.id, now))
            sent.task = self._loop.create_task(self._stream(sent))
            self._begin_to_confirm()  # before its first token is there

    async def _stream(self, sent: Sent) -> None:
        """One response from its first to its last delta. Whatever happens to it is reported."""
        try:
            await self._read(sent)
        except Refused as refusal:
            if refusal.status in BUSY:
                self._turn_away(sent, f"HTTP status {refusal.status}: {refusal}", refusal.retry_after)
            elif refusal.status < 500:
                self._fail(sent, f"the server refused it: {refusal}", is_servers_fault=False)
            else:
                await self._fail_or_wait(sent, f"the server could not do it: {refusal}")
        except NOT_REACHED as error:
            self._turn_away(sent, f"it cannot be reached: {said(error)}")
        except BROKEN as error:
            await self._fail_or_wait(sent, f"the connection broke: {said(error)}")
        except OtherWeights as error:
            self._die(str(error))
        except Malformed as error:
            self._fail(sent, f"the server's answer cannot be right: {error}")
        except Exception as error:
            self._fail(sent, f"the server's answer has another shape than expected: {error!r}")
        finally:
            self._leave(sent)

    async def _read(self, sent: Sent) -> None:
        path, body = self.generation(sent.request, sent.name)
        async with aclosing(self._connection.events(path, body)) as events:
            async for event in events:
                delta = checked(self.delta_of(event, sent), len(sent.tokens), self._vocabulary)
                self._check_weights(delta)
                if delta.tokens and self._outage.since is not None and sent.sent_at >= self._outage.since:
                    self._outage.end()
                    self._send_waiting()
                if self._hear(sent, delta):
                    return
        if not self._finish_if_whole(sent):
            await self._fail_or_wait(sent, "the server ended the response before its end")

    def _check_weights(self, delta: Delta) -> None:
        expected = self._identity.weights
        if delta.weights is not None and expected is not None and delta.weights != expected:
            raise OtherWeights(
                f"it made tokens with weight version {delta.weights}, and it was given {expected}: it restarted, or "
                "somebody else loads weights into it"
            )

    def _leave(self, sent: Sent) -> None:
        if self._sent.pop(sent.name, None) is None:
            return
        if self._probe is sent:
            self._probe = None
        if not self._sent:
            self._doubt()  # a restart would break no stream now
        self._send_waiting()

    def _hear(self, sent: Sent, delta: Delta) -> bool:
        """Report what came; whether it was the last."""
        tokens, own_end = self._up_to_its_end(sent, list(delta.tokens))
        end = delta.end
        if own_end is not None and (end not in ("stop", "length") or len(tokens) < len(delta.tokens)):
            end = own_end  # such as aborted, in the step of its last token; or the server goes on behind the end
        if end in ("stop", "length") and not sent.tokens:
            raise Malformed(f"it ended the response ({end}) without a token")
        now = self.now()
        if tokens:
            sent.heard_at = self._token_at = now
            sent.logprobs += delta.logprobs[: len(tokens)]
            if not sent.in_slot:
                sent.in_slot = True
                self._add(Started(sent.request.id, now))
        changes: list[Change] = []
        if tokens:
            segment = Segment(tokens, list(delta.logprobs[: len(tokens)]), self.version)
            changes.append(Tokens(sent.request.id, now, segment))
        if end in ("stop", "length"):
            changes.append(Finished(sent.request.id, now, truncated=end == "length"))
            sent.ended = True
        self._deliver(sent, changes)
        if end is not None and not sent.ended:
            self._fail(sent, f"the server ended it: {end}")
        if end is not None and delta.end is None:
            self._spawn(self._aborts([sent.name]))
        return end is not None

    def _up_to_its_end(self, sent: Sent, tokens: list[int]) -> tuple[list[int], str | None]:
        """Note the tokens, at most up to where the response ends by our own rules; and which rule ends it."""
        room = sent.room - len(sent.tokens)
        end = "length" if len(tokens) >= room else None
        tokens = tokens[:room]
        if not sent.request.sampling.ignore_end and not self._eos_set.isdisjoint(tokens):
            count = next(place for place, token in enumerate(tokens, start=1) if token in self._eos_set)
            tokens, end = tokens[:count], "stop"
        if sent.stop_strings is None:
            sent.tokens += tokens
            return tokens, end
        for count, token in enumerate(tokens, start=1):
            sent.tokens.append(token)
            if sent.stop_strings.completed_by_last(sent.kept, sent.tokens):
                return tokens[:count], "stop"
        return tokens, end

    def _finish_if_whole(self, sent: Sent) -> bool:
        """Report the end that the server did not get to report, if the tokens have come to one."""
        if sent.ended or not sent.tokens:
            return sent.ended
        end = None
        if sent.tokens[-1] in self._eos_set and not sent.request.sampling.ignore_end:
            end = "stop"
        elif len(sent.tokens) >= sent.room:
            end = "length"
        if end is not None:
            sent.ended = True
            self._deliver(sent, [Finished(sent.request.id, self.now(), truncated=end == "length")])
        return sent.ended

    # What goes wrong with a request, in the engine's thread

    async def _fail_or_wait(self, sent: Sent, reason: str) -> None:
        """One request's failure, or the first sign of the server's: which of them, its health tells soon."""
        self._doubt()
        if sent.unwanted or sent.ended:
            return
        await asyncio.sleep(_SETTLE_SECONDS)
        if not await self._is_alive():
            self._turn_away(sent, reason)
            return
        await self._confirm()
        self._fail(sent, reason)

    def _fail(self, sent: Sent, reason: str, *, is_servers_fault: bool = True) -> None:
        if sent.unwanted or sent.ended or self._death is not None:
            return
        sent.ended = True
        self._drop_held(sent)
        self._add(Failed(sent.request.id, self.now(), reason))
        self._faults += is_servers_fault
        if self._faults >= max(_FEWEST_FAULTS, 2 * self.slots):
            self._die(f"the last {self._faults} requests all failed, the last one because {reason}")

    def _turn_away(self, sent: Sent, reason: str, asked_for: float | None = None) -> None:
        """Back to our queue, behind the tokens that were handed out: the server takes no work for now."""
        self._doubt()
        if sent.unwanted or sent.ended or self._death is not None:
            return
        now = self.now()
        self._drop_held(sent)
        if sent.in_slot:
            self._add(Preempted(sent.request.id, now, sent.context_tokens))
        sent.ended = True  # in this stream
        waiting = sent.waiting
        waiting.turned_away += 1
        if waiting.turned_away % _TURNS_AT_THE_HEAD == 0:
            self._places_given += 1
            waiting.place = self._places_given
        if sent.trusted and sent.tokens:
            made = Segment(sent.tokens[:], sent.logprobs[:], self.version)
            request = waiting.request
            waiting.request = replace(request, kept=(*request.kept, made), budget=request.budget - len(made))
        self._queue = deque(sorted((*self._queue, waiting), key=lambda entry: entry.place))
        self._note_outage(reason, asked_for)

    def _note_outage(self, reason: str, asked_for: float | None = None, *, watched: bool = False) -> None:
        now = self.now()
        self._outage.note(now, reason, asked_for, watched=watched)
        if self._outage.is_hopeless(now, self._token_at):
            self._die(f"it does not answer any more ({reason})")
        else:
            self._loop.call_later(max(0.0, self._outage.retry_at - now) + 0.001, self._send_waiting)

    async def _stop(self, unwanted: set[int]) -> None:
        self._queue = deque(waiting for waiting in self._queue if waiting.request.id not in unwanted)
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
        if self._held:
            await self._confirm()

    async def _aborts(self, names: Sequence[str]) -> bool:
        try:
            async with asyncio.timeout(_ABORT_SECONDS):
                return await self.abort(names)
        except Exception as error:  # then the connections are closed, which ends them, too
            _log.debug("%s does not abort: %s", self.url, said(error))
            return False

    # The server's state, in the engine's thread

    async def _watch(self) -> None:
        while self._death is None:
            await asyncio.sleep(_WATCH_SECONDS)
            if self._sent or self._queue:
                await self._look()

    async def _look(self) -> None:
        """Ask the server how it is. What it does not tell, or tells in no sensible way, is not known."""
        running: int | None = None
        trouble: Exception | None = None
        try:
            running = await self.count_running()
        except Exception as error:
            trouble = error
        if trouble is not None and not await self._is_alive():
            self._note_outage(said(trouble), watched=True)
            return
        self._outage.is_well_again()
        if running is not None and running >= 0:
            self._note_running(running)
        self._cut_silent()
        self._send_waiting()

    def _note_running(self, running: int) -> None:
        now = self.now()
        missing = len(self._sent) - running
        silent = [sent for sent in self._sent.values() if sent.heard_at < now - _WATCH_SECONDS]
        self._server_is_full = missing > 0 and bool(silent)
        to_report = missing - sum(not sent.in_slot for sent in self._sent.values())
        for sent in sorted((s for s in silent if s.in_slot), key=lambda s: s.heard_at)[: max(0, to_report)]:
            if not sent.ended:
                sent.in_slot = False
                self._add(Preempted(sent.request.id, now, sent.context_tokens))

    def _cut_silent(self) -> None:
        """Fail what has made no token for too long. What is preempted may wait, as long as others make tokens."""
        if self._outage.is_on or not self._sent:
            return
        longest_ago = self.now() - self._silence_seconds
        all_are_silent = max(sent.heard_at for sent in self._sent.values()) < longest_ago
        silent = [s for s in self._sent.values() if s.heard_at < longest_ago and (s.in_slot or all_are_silent)]
        for sent in silent:
            self._fail(sent, f"no token came for {self._silence_seconds:g} s, and the server says that it is well")
            if sent.task is not None:
                sent.task.cancel()
        if silent:
            self._spawn(self._aborts([sent.name for sent in silent]))

    async def _is_alive(self) -> bool:
        if self._death is not None:
            return False
        try:
            return await self.is_well()
        except (Refused, *BROKEN):
            return False
        except Exception:  # it answered, whatever it said
            return True

    # Whether it is the server that was given the weights, in the engine's thread

    def _doubt(self) -> None:
        self._is_confirmed = False
        self._doubts += 1

    def _begin_to_confirm(self) -> None:
        if not self._is_confirmed and not self._is_asked:
            self._is_asked = True
            self._spawn(self._confirm())

    async def _confirm(self) -> None:
        """Hand out what is held as soon as the server has shown that it is still the same; give up another one."""
        async with self._confirming:
            self._is_asked = False
            while not self._is_confirmed and self._death is None:
                doubts = self._doubts
                try:
                    found = await self.identity()
                    agrees = found.agrees_with(self._identity) if self._identity.is_known else True
                    trouble = "it does not say any more which server it is"
                except Exception as error:
                    agrees, trouble = None, said(error)
                if agrees is False:
                    self._die(
                        f"it is not the server that was given the weights: {found}, and it was {self._identity}. It "
                        "restarted, or somebody else loads weights into it; what it made since was not used"
                    )
                elif agrees is None:
                    self._note_outage(trouble)
                    await asyncio.sleep(max(0.0, self._outage.retry_at - self.now()))
                elif doubts == self._doubts:
                    self._trust()

    def _trust(self) -> None:
        self._is_confirmed = True
        for sent in self._sent.values():
            sent.trusted = True
        held, self._held = self._held, []
        self._hand_out([change for change, _ in held])

    def _deliver(self, sent: Sent, changes: Sequence[Change]) -> None:
        """Report what the server made, or hold it back until the server has shown that it is the right one."""
        if not changes:
            return
        sent.trusted = sent.trusted or self._is_confirmed
        if not sent.trusted:
            self._begin_to_confirm()
        self._add(*changes, trusted=sent.trusted)

    def _add(self, *changes: Change, trusted: bool = True) -> None:
        """At once, so that last tokens and their end are seen together; in order, so behind what is held."""
        if self._held or not trusted:
            self._held += [(change, trusted) for change in changes]
        else:
            self._hand_out(changes)

    def _drop_held(self, sent: Sent) -> None:
        """What was made for it and cannot be trusted."""
        id = sent.request.id
        self._held = [(change, trusted) for change, trusted in self._held if trusted or change.id != id]

    def _die(self, reason: str) -> None:
        sent_now = list(self._sent.values())
        with self._news:
            for sent in sent_now:
                if sent.trusted:
                    self._finish_if_whole(sent)
            self._hand_out(c for c, trusted in self._held if trusted and not isinstance(c, Started | Preempted))
            self._held.clear()
            self._death = self._death or reason
            self._news.notify_all()
        here = asyncio.current_task() if self._is_own_thread() else None
        for sent in sent_now:
            if sent.task is not None and sent.task is not here:
                self._loop.call_soon_threadsafe(sent.task.cancel)

    # Small things

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Do this beside the streams. If it fails, the engine is dead: nobody else would notice."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end_of)

    def _note_end_of(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._die(f"the engine's own task failed: {error!r}")

    def _note_unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "handle" in context and "exception" in context:  # a callback: of ours, or one that our streams rely on
            self._die(f"the engine's own task failed: {context['exception']!r}")
        else:
            _log.debug("%s: %s", self.url, context.get("message"))

    def _hand_out(self, changes: Iterable[Change]) -> None:
        with self._news:
            for change in changes:
                self._changes.append(change)
                if isinstance(change, Finished | Failed):
                    self._inside.discard(change.id)
                if isinstance(change, Finished):
                    self._faults = 0
            self._news.notify_all()

    def _report(self) -> list[Change]:
        changes, self._changes = self._changes, []
        return changes

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
        self._weights_folder = engines[0].weights_folder

    def load(self, weights: Weights | None, version: int) -> None:
        if weights is None:
            super().load(None, version)
            return
        with written(weights, version, self._weights_folder) as folder:
            super().load(folder, version)


@contextmanager
def written(weights: Weights, version: int, parent: Path | None) -> Iterator[Path]:
    """A folder with these weights, for as long as they are needed."""
    folder: Path | None = None
    try:
        try:
            folder = Path(tempfile.mkdtemp(prefix=f"sortedrl-version-{version}-", dir=parent))
            folder.chmod(0o755)  # the server may be another user
            write_weights(weights, folder / "model.safetensors")
        except OSError as error:
            raise ConfigurationError(
                "weights_folder",
                str(parent or tempfile.gettempdir()),
                f"the weights of version {version} cannot be written there ({error})",
                "Name a folder with more room that the server can read, too.",
            ) from error
        yield folder
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def write_weights(weights: Weights, file: Path) -> None:
    """Write the file under another name, then rename it: it is either whole or not there.

    A tied output layer is always written: servers keep the old one if it is not named.
    """
    from safetensors.torch import save_file

    named = dict(weights)
    embedding = named.get("model.embed_tokens.weight")
    if embedding is not None:
        named.setdefault("lm_head.weight", embedding)
    seen: set[int] = set()
    for name, tensor in named.items():
        tensor = tensor.detach().contiguous()
        named[name] = tensor.clone() if tensor.data_ptr() in seen else tensor  # the format holds no shared tensors
        seen.add(tensor.data_ptr())
    partial = file.with_suffix(".partial")
    save_file(named, partial)
    partial.rename(file)
