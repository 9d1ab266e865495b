"""The life of each request at an inference server, from the first to the last message (asyncio, one thread).

- **Running**: sent requests count as running. Once per second the server is asked how many it is running; if that is
  fewer than were sent (KV cache full), those silent the longest are reported as preempted until they produce tokens
  again. The count is exact; which requests it refers to is inferred.
- **Abort**: the server is told to abort, and its streams are read to the end, so that all generated tokens arrive. If
  the server does not support that, the connection is closed and the tokens received so far are kept.
- **Limits**: a response is cut at its end (requests.py), even if the server sends more. A stream with fewer than
  `FEWEST_TOKENS` tokens in `silence_seconds` on a healthy server fails its request. So does an invalid message.
- **Outage**: a server that is busy, unhealthy or unreachable, or that breaks a connection, does not fail its requests.
  They wait here with the tokens generated so far (reported as RequestPreempted) until the server generates again
  (outage.py): a request that it accepts and leaves without a token for `silence_seconds` counts as refused. After
  `unavailable_seconds` it is dead. A request that is refused again, while the server generates for another one, fails.
- **Identity**: a restarted server has other weights. So after a broken connection, and after a time without streams,
  the tokens of new streams are held back until it has confirmed that it is the same process with the same weights. If
  it is not, they are dropped and the engine is dead.
- **Death**: tokens received so far are delivered, then every call raises `EngineDied` with the reason. Any error in the
  engine's own tasks has the same effect, so no error goes unnoticed.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import count
from typing import Any

from sortedrl.core.engine import (
    Change,
    Request,
    RequestFailed,
    RequestFinished,
    RequestPreempted,
    RequestStarted,
    Sampling,
    Tokens,
)
from sortedrl.core.rollout import Prompt, Segment
from sortedrl.engines.servers import connection
from sortedrl.engines.servers.connection import NotReached, ServerConnection
from sortedrl.engines.servers.engine_thread import BackgroundTasks, Outbox
from sortedrl.engines.servers.messages import BUSY, Delta, Identity, Malformed, OtherWeights, Refused, checked, text_of
from sortedrl.engines.servers.outage import Outage
from sortedrl.engines.servers.requests import Sent, Waiting
from sortedrl.engines.shared import StopWatches, unknown_token

ABORT_SECONDS = 10.0  # for the server to confirm an abort
STOP_SECONDS = 2.0  # for aborted streams to end
ROUNDS_UNTIL_WARNING = 4  # of refusals: 2 to 4 s
TIMES_REFUSED = 3  # in a row, of one request, until it is found out whether that is about the request
FEWEST_FAULTS = 64  # consecutive failures (or two per slot) after which the server counts as broken
_log = logging.getLogger(__name__)


class ServerStreams(ABC):
    """See the module docstring. The abstract methods are the server's own: routes, and the formats of messages."""

    def __init__(
        self,
        server: ServerConnection,
        stop_watches: StopWatches,
        *,
        slots: int,
        eos_token_ids: Iterable[int],
        vocabulary: int,
        silence_seconds: float,
        unavailable_seconds: float,
    ) -> None:
        self.url = server.url
        self.slots = slots
        self.version = 0  # of the weights
        self.max_length: int | None = None  # of prompt plus response, if the server reports it
        self._connection = server
        self.call = server.call
        self._clean = server.credentials.clean
        self._stop_watches = stop_watches
        self._eos = frozenset(eos_token_ids)
        self._vocabulary = vocabulary
        self._silence_seconds = silence_seconds
        self._name_prefix = f"sortedrl-{time.time_ns():x}"  # of all our request ids and weight versions at the server
        self._numbers = count(1)  # of places in the queue, and of names
        self._background = BackgroundTasks(self.url, self._die)
        self._loop = self._background.loop
        self._outbox = Outbox(self._loop)
        self._is_closed = False
        self._queue: list[Waiting] = []  # by place
        self._sent: dict[str, Sent] = {}
        self._server_is_full = False
        self._outage = Outage(unavailable_seconds)
        self._has_warned = False  # about an outage
        self._probe: Sent | None = None  # sent during an outage to see whether it is over
        self._asking = asyncio.Lock()  # while it is found out whether a refusal is about the request
        self._token_at = float("-inf")  # when the last token of any stream arrived
        self._faults = 0  # consecutive requests that failed because of the server
        self._expected = Identity()  # of the server that was given the weights
        self._doubts = 1  # how often its identity became uncertain since it was last confirmed
        self._confirming = asyncio.Lock()
        self._is_asked = False  # whether a task is confirming it

    def now(self) -> float:
        return time.perf_counter()

    # What the server's own class adds

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
    def delta_of(self, data: bytes, sent: Sent) -> Delta:
        """The content of one stream event; raises Refused or Malformed if it cannot be used."""

    @abstractmethod
    async def abort_on_server(self, names: Sequence[str]) -> bool:
        """Abort these requests; returns whether the server will end their streams."""

    def room_for(self, request: Request) -> int:
        """Tokens that the server may generate: max_new_tokens, limited by the room left in the context."""
        if self.max_length is None:
            return request.max_new_tokens
        return min(request.max_new_tokens, max(1, self.max_length - len(request.prompt.tokens) - request.prefix_length))

    # Requests, in the engine's thread

    def _enqueue(self, requests: Sequence[Request]) -> None:
        for request in requests:
            reason = unknown_token(request, self._vocabulary)
            if reason is not None:
                self._outbox.add(RequestFailed(request.id, self.now(), reason))
            else:
                self._queue.append(Waiting(request, next(self._numbers)))
        self._send_waiting()

    def _send_waiting(self) -> None:
        while self._queue and len(self._sent) < self.slots and self._outbox.death is None and not self._is_closed:
            if self._outage.is_on and (self._probe is not None or self._outage.retry_at > self.now()):
                return
            place = 0
            if self._outage.is_on:  # the least refused: it may refuse one request and take all others
                place = min(range(len(self._queue)), key=lambda place: self._queue[place].turned_away)
            sent = self._about_to_send(self._queue.pop(place))
            self._sent[sent.name] = sent
            if self._outage.is_on:
                self._probe = sent
            if not self._server_is_full:
                sent.in_slot = True
                self._outbox.add(RequestStarted(sent.request.id, sent.sent_at))
            sent.task = self._background.spawn(self._stream(sent))
            self._begin_to_confirm()  # before its first token arrives

    def _about_to_send(self, waiting: Waiting) -> Sent:
        name = f"{self._name_prefix}-{next(self._numbers):012d}"  # fixed width: no name is a prefix of another
        request, now = waiting.request, self.now()
        watch = self._stop_watches.of(request)
        eos = frozenset[int]() if request.sampling.ignore_eos else self._eos
        return Sent(waiting, name, self.room_for(request), now, watch, eos, heard_at=now, paced_at=now)

    async def _stream(self, sent: Sent) -> None:
        """Handle one response from its first to its last delta, and report every outcome."""
        try:
            await self._read(sent)
        except Refused as refusal:
            if refusal.is_servers_state:
                reason, is_busy = f"HTTP status {refusal.status}: {refusal}", refusal.status in BUSY
                await self._fail_or_wait(sent, reason, refusal.retry_after, is_busy=is_busy)
            else:
                self._fail(sent, f"the server refused it: {refusal}", is_servers_fault=False)
        except NotReached as error:
            self._turn_away(sent, f"it is unreachable: {text_of(error)}")
        except OSError as error:
            await self._fail_or_wait(sent, f"the connection broke: {text_of(error)}")
        except OtherWeights as error:
            self._die(str(error))
        except Malformed as error:
            self._fail(sent, f"the server sent an invalid message: {error}")
        except Exception as error:
            self._fail(sent, f"the server's message has an unexpected format: {error!r}")
        finally:
            self._leave(sent)

    async def _read(self, sent: Sent) -> None:
        path, body = self.generation(sent.request, sent.name)
        has_ended = await self._connection.stream(path, body, partial(self._take, sent))
        if not has_ended and not self._finish_if_whole(sent):
            await self._fail_or_wait(sent, "the stream ended before the end of the response")

    def _take(self, sent: Sent, data: bytes) -> bool:
        """Handle one event; returns whether the response ends with it. Called for every message: it must be fast."""
        delta = checked(self.delta_of(data, sent), len(sent.tokens), self._vocabulary)
        if delta.weights is not None:
            self._check_weights(sent, delta.weights)
        if self._outage.since is not None and delta.tokens and sent.sent_at >= self._outage.since:
            self._end_outage()
        return self._hear(sent, delta)

    def _check_weights(self, sent: Sent, found: str) -> None:
        """A stream whose first tokens carry our weight version needs no other confirmation."""
        expected = self._expected.weights
        if expected is None:
            return
        if found != expected:
            raise OtherWeights(
                f"it generated tokens with weight version {found} instead of {expected}: it restarted, or "
                "another client updates its weights"
            )
        if not sent.tokens and expected.startswith(self._name_prefix):
            sent.trusted = True

    def _leave(self, sent: Sent) -> None:
        if self._sent.pop(sent.name, None) is None:
            return
        if self._probe is sent:
            self._probe = None
        if not self._sent:
            self._doubt()  # without open streams, a restart would go unnoticed
        self._send_waiting()

    def _hear(self, sent: Sent, delta: Delta) -> bool:
        """Report the delta; returns whether it was the last."""
        tokens, own_end = sent.take(delta.tokens)
        end = own_end or delta.end  # the server's may be that of an abort in the step of the last token
        if end in ("stop", "length") and not sent.tokens:
            raise Malformed(f"the response ended ({end}) without a token")
        if end == "stop" and own_end is None:
            last = sent.tokens[-1]
            del sent.tokens[len(sent.logprobs) :]
            raise Malformed(f"the response ended (stop) with token {last}, which is not one of eos_token_ids")
        now, id = time.perf_counter(), sent.waiting.request.id
        changes: list[Change] = []
        if tokens:
            self._token_at = now
            logprobs = delta.logprobs if own_end is None else delta.logprobs[: len(tokens)]
            sent.logprobs += logprobs
            if sent.hear(now):
                self._outbox.add(RequestStarted(id, now))
            changes.append(Tokens(id, now, Segment(tokens, logprobs, self.version)))
        if end is None:
            self._deliver(sent, changes)
            return False
        if end in ("stop", "length"):
            changes.append(RequestFinished(id, now, truncated=end == "length"))
            sent.ended = True
            self._faults = 0
        self._deliver(sent, changes)
        if not sent.ended:
            self._fail(sent, f"the server ended it: {end}")
        if delta.end is None:
            self._background.spawn(self._aborts([sent.name]))
        return True

    def _finish_if_whole(self, sent: Sent) -> bool:
        """Report the end if the tokens have reached one that the server did not report."""
        end = None if sent.ended else sent.reached()
        if end is not None:
            sent.ended = True
            self._deliver(sent, [RequestFinished(sent.request.id, self.now(), truncated=end == "length")])
        return sent.ended

    # Failures of a request, in the engine's thread

    async def _fail_or_wait(
        self, sent: Sent, reason: str, asked_for: float | None = None, *, is_busy: bool = False
    ) -> None:
        """Make the request wait; fail it if it meets this again and again while the server generates for another one.

        `is_busy`: it is about the server, unless that would be given up now.
        """
        self._doubt()
        if not is_busy:
            self._begin_to_confirm()  # it may have restarted
        async with self._asking:  # if many meet this at once, the first one finds out
            if sent.unwanted or sent.ended:
                return
            is_new = sent.tokens or sent.waiting.turned_away < TIMES_REFUSED - 1
            is_new = is_new or (self._outage.is_on and sent is not self._probe)
            if is_new or (is_busy and not self._is_hopeless()) or not await self._generates():
                self._turn_away(sent, reason, asked_for)
                return
        await self._confirm()
        self._fail(sent, reason, is_servers_fault=False)
        self._end_outage()

    async def _generates(self) -> bool:
        """Whether the server generates a token for a request that is not the scheduler's."""
        probe = self._about_to_send(Waiting(Request(-1, Prompt("", [1]), (), 1, 0, Sampling(ignore_eos=True))))
        path, body = self.generation(probe.request, probe.name)
        try:
            async with asyncio.timeout(connection.PATIENCE_SECONDS):
                return await self._connection.stream(path, body, lambda data: bool(self.delta_of(data, probe).tokens))
        except Exception as error:  # for any reason: it does not
            _log.debug("%s does not generate: %s", self.url, self._clean(text_of(error)))
        return False

    def _fail(self, sent: Sent, reason: str, *, is_servers_fault: bool = True) -> None:
        if sent.unwanted or sent.ended or self._outbox.death is not None:
            return
        sent.ended = True
        self._outbox.drop_untrusted(sent.request.id)
        self._outbox.add(RequestFailed(sent.request.id, self.now(), self._clean(reason)))
        self._faults += is_servers_fault
        if self._faults >= max(FEWEST_FAULTS, 2 * self.slots):
            self._die(f"the last {self._faults} requests all failed, most recently because {reason}")

    def _turn_away(self, sent: Sent, reason: str, asked_for: float | None = None) -> None:
        """Put the request back into our queue with its delivered tokens: the server is unavailable."""
        self._doubt()
        if sent.unwanted or sent.ended or self._outbox.death is not None:
            return
        self._outbox.drop_untrusted(sent.request.id)
        if sent.in_slot:
            self._outbox.add(RequestPreempted(sent.request.id, self.now(), sent.context_tokens))
        sent.ended = True  # in this stream
        waiting = sent.waiting
        waiting.turned_away += 1
        if sent.trusted and sent.tokens:
            waiting.request = waiting.request.continued(Segment(sent.tokens[:], sent.logprobs[:], self.version))
            waiting.turned_away = 1
        insort(self._queue, waiting, key=lambda entry: entry.place)
        self._note_outage(reason, asked_for)

    def _note_outage(self, reason: str, asked_for: float | None = None, *, watched: bool = False) -> None:
        now = self.now()
        self._outage.note(now, reason, asked_for, watched=watched)
        if self._is_hopeless():
            self._die(f"it no longer responds ({reason})")
            return
        if self._outage.rounds == ROUNDS_UNTIL_WARNING and not self._has_warned:
            self._has_warned = True
            _log.warning("%s is unavailable, and requests wait: %s", self.url, self._clean(reason))
        self._loop.call_later(max(0.0, self._outage.retry_at - now) + 0.001, self._send_waiting)

    def _end_outage(self) -> None:
        self._outage.end()
        self._probe = None  # it may go on for long: the next outage needs another one
        self._send_waiting()

    def _is_hopeless(self) -> bool:
        return self._outage.is_hopeless(self.now(), self._token_at)

    async def _abort(self, unwanted: set[int]) -> None:
        self._queue = [waiting for waiting in self._queue if waiting.request.id not in unwanted]
        leaving = [sent for sent in self._sent.values() if sent.request.id in unwanted]
        for sent in leaving:
            sent.unwanted = True
        streams = {sent.name: sent.task for sent in leaving if sent.tokens and sent.task is not None}
        if streams and self._outbox.death is None and await self._aborts(list(streams)):
            await asyncio.wait(streams.values(), timeout=STOP_SECONDS)
        tasks = [sent.task for sent in leaving if sent.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for sent in leaving:
            self._leave(sent)  # a task that was canceled before its first step has not done so
            self._finish_if_whole(sent)
        if self._outbox.held:
            await self._confirm()
        self._outbox.deliver()

    async def _aborts(self, names: Sequence[str]) -> bool:
        try:
            async with asyncio.timeout(ABORT_SECONDS):
                return await self.abort_on_server(names)
        except Exception as error:  # closing the connections ends the requests, too
            _log.debug("%s failed to abort: %s", self.url, self._clean(text_of(error)))
            return False

    # Identity of the server, in the engine's thread

    def _doubt(self) -> None:
        self._doubts += 1

    def _begin_to_confirm(self) -> None:
        if self._doubts and not self._is_asked:
            self._is_asked = True
            self._background.spawn(self._confirm())

    async def _confirm(self) -> None:
        """Trust the streams once the server is confirmed to be the same; give up if it is not."""
        async with self._confirming:
            self._is_asked = False
            while self._doubts and self._outbox.death is None:
                doubts = self._doubts
                try:
                    found = await self.identity()
                    agrees = found.agrees_with(self._expected) if self._expected.is_known else True
                    trouble = "it no longer reports its identity"
                except Exception as error:
                    agrees, trouble = None, text_of(error)
                if agrees is False:
                    self._die(
                        f"it is not the server that was given the weights: {found}, but it was {self._expected}. It "
                        "restarted, or another client updates its weights; tokens generated since were not used"
                    )
                elif agrees is None:
                    self._note_outage(trouble)
                    await asyncio.sleep(max(0.0, self._outage.retry_at - self.now()))
                elif doubts == self._doubts:
                    self._doubts = 0
                    for sent in self._sent.values():
                        sent.trusted = True
                    self._outbox.release()

    def _deliver(self, sent: Sent, changes: Sequence[Change]) -> None:
        """Report a change, or hold it back until the server's identity is confirmed."""
        if not changes:
            return
        if not sent.trusted:
            sent.trusted = not self._doubts
            self._begin_to_confirm()
        self._outbox.add(*changes, trusted=sent.trusted)

    def _die(self, reason: str) -> None:
        sent_now = list(self._sent.values())
        for sent in sent_now:
            if sent.trusted:
                self._finish_if_whole(sent)
        self._outbox.die(self._clean(reason))
        for sent in sent_now:
            self._loop.call_soon_threadsafe(sent.cancel)
