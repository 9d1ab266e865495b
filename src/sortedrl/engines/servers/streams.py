"""The life of each request at an inference server, from the first to the last message, in one thread (asyncio).

- **Running**: sent requests count as running. Once per second the server is asked how many it is running; if that is
  fewer than were sent (KV cache full), those silent the longest are reported as preempted until they produce tokens
  again. The count is exact; which requests it refers to is inferred.
- **Abort**: the server is told to abort, and its streams are read to the end, so that all generated tokens arrive. If
  the server does not support that, the connection is closed and the tokens received so far are kept.
- **Messages** are validated (messages.py). An invalid one fails its request, with the reason.
- **Limits**: a response is cut at its `max_new_tokens`, even if the server sends more. A stream without a token for
  `silence_seconds` on a healthy server fails its request.
- **Outage**: a server that is busy, unhealthy or unreachable does not fail its requests. They wait here with the tokens
  generated so far (reported as Preempted) until the server generates again (outage.py): a request that it accepts and
  leaves without a token for `silence_seconds` counts as refused. After `unavailable_seconds` it is dead.
- **Identity**: a restarted server has other weights. A restart breaks open streams. So after a broken connection, and
  after a time without streams, the server must first confirm that it is the same process with the same weights; until
  then the tokens of new streams are held back. If it is not, they are dropped and the engine is dead.
- **Death**: tokens received so far are delivered, then every call raises `EngineDied` with the reason. Any error in the
  engine's own tasks has the same effect, so no error goes unnoticed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from contextlib import aclosing
from typing import Any

from sortedrl.core.engine import Change, Failed, Finished, Preempted, Request, Started, Tokens
from sortedrl.core.rollout import Segment
from sortedrl.engines.refusals import unknown_token
from sortedrl.engines.servers.connection import BROKEN, NOT_REACHED, ServerConnection
from sortedrl.engines.servers.dialect import Sent, ServerDialect, Waiting
from sortedrl.engines.servers.messages import (
    BUSY,
    Delta,
    Identity,
    Malformed,
    OtherWeights,
    Refused,
    checked,
    refusal_in,
    said,
)
from sortedrl.engines.servers.outage import Outage, silent_after_busy
from sortedrl.engines.servers.outbox import Outbox
from sortedrl.engines.stop_strings import StopWatches

WATCH_SECONDS = 1.0
PATIENCE_SECONDS = 30.0  # timeout of a short request
SETTLE_SECONDS = 0.5  # until a server that is shutting down no longer reports that it is healthy
ABORT_SECONDS = 10.0  # for the server to confirm an abort
STOP_SECONDS = 2.0  # for aborted streams to end
FEWEST_FAULTS = 64  # consecutive failures (or two per slot) after which the server counts as broken
_TURNS_AT_THE_HEAD = 3  # of a refused request, before others are tried first
_log = logging.getLogger(__name__)


class ServerStreams(ServerDialect):
    """See the module docstring."""

    def __init__(
        self,
        connection: ServerConnection,
        stop_watches: StopWatches,
        *,
        vocabulary: int,
        silence_seconds: float,
        unavailable_seconds: float,
    ) -> None:
        self._connection = connection
        self._stop_watches = stop_watches
        self._vocabulary = vocabulary
        self._eos_set = frozenset(self._eos)
        self._outbox = Outbox(connection.api_key.hidden_in)
        self._is_closed = False
        self._queue: deque[Waiting] = deque()
        self._sent: dict[str, Sent] = {}
        self._places_given = 0
        self._names_given = 0
        self._server_is_full = False
        self._silence_seconds = silence_seconds
        self._outage = Outage(unavailable_seconds)
        self._probe: Sent | None = None  # sent during an outage to see whether it is over
        self._token_at = float("-inf")  # when the last token of any stream arrived
        self._faults = 0  # consecutive requests that failed because of the server
        self._identity = Identity()  # of the server that was given the weights
        self._is_confirmed = False  # whether it is known to be still the same
        self._doubts = 0  # how often its identity became uncertain
        self._confirming = asyncio.Lock()
        self._is_asked = False  # whether a task is confirming it
        self._tasks: set[asyncio.Task[Any]] = set()  # other than those of streams
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._note_unhandled)

    def now(self) -> float:
        return time.perf_counter()

    async def call(
        self, method: str, path: str, *, seconds: float | None = None, body: Any = None, **query: str
    ) -> Any:
        patience = PATIENCE_SECONDS if seconds is None else seconds
        return await self._connection.call(method, path, seconds=patience, body=body, **query)

    # Requests, in the engine's thread

    def _enqueue(self, requests: Sequence[Request]) -> None:
        for request in requests:
            reason = unknown_token(request, self._vocabulary)
            if reason is not None:
                self._outbox.add(Failed(request.id, self.now(), reason))
                continue
            self._places_given += 1
            self._queue.append(Waiting(request, self._places_given))
        self._send_waiting()

    def _send_waiting(self) -> None:
        while self._queue and len(self._sent) < self.slots and self._outbox.death is None and not self._is_closed:
            if self._outage.is_on and (self._probe is not None or self._outage.retry_at > self.now()):
                return
            waiting = self._queue.popleft()
            self._names_given += 1
            name = f"{self._name_prefix}-{self._names_given:012d}"  # fixed width: no name is a prefix of another
            request, now = waiting.request, self.now()
            watch = self._stop_watches.of(request)
            prefix, turn = request.prefix_tokens, request.turn_tokens
            sent = Sent(waiting, name, prefix, turn, self.room_for(request), now, watch, heard_at=now)
            self._sent[name] = sent
            if self._outage.is_on:
                self._probe = sent
            if not self._server_is_full:
                sent.in_slot = True
                self._outbox.add(Started(request.id, now))
            sent.task = self._loop.create_task(self._stream(sent))
            sent.task.add_done_callback(self._note_end_of)
            self._begin_to_confirm()  # before its first token arrives

    async def _stream(self, sent: Sent) -> None:
        """Handle one response from its first to its last delta, and report every outcome."""
        try:
            await self._read(sent)
        except Refused as refusal:
            if refusal.status in BUSY:
                self._turn_away(sent, f"HTTP status {refusal.status}: {refusal}", refusal.retry_after)
            elif refusal.status < 500:
                self._fail(sent, f"the server refused it: {refusal}", is_servers_fault=False)
            else:
                await self._fail_or_wait(sent, f"the server failed: {refusal}")
        except NOT_REACHED as error:
            self._turn_away(sent, f"it is unreachable: {said(error)}")
        except BROKEN as error:
            await self._fail_or_wait(sent, f"the connection broke: {said(error)}")
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
        async with aclosing(self._connection.events(path, body)) as events:
            async for event in events:
                if (refusal := refusal_in(event)) is not None:
                    raise refusal
                delta = checked(self.delta_of(event, sent), len(sent.tokens), self._vocabulary)
                self._check_weights(sent, delta)
                if delta.tokens and self._outage.since is not None and sent.sent_at >= self._outage.since:
                    self._outage.end()
                    self._send_waiting()
                if self._hear(sent, delta):
                    return
        if not self._finish_if_whole(sent):
            await self._fail_or_wait(sent, "the stream ended before the end of the response")

    def _check_weights(self, sent: Sent, delta: Delta) -> None:
        """A stream whose first tokens carry our weight version needs no other confirmation."""
        expected = self._identity.weights
        is_first = expected is not None and not sent.tokens
        if is_first and delta.weights == expected and str(expected).startswith(self._name_prefix):
            sent.trusted = True
        if delta.weights is not None and expected is not None and delta.weights != expected:
            raise OtherWeights(
                f"it generated tokens with weight version {delta.weights} instead of {expected}: it restarted, or "
                "another client updates its weights"
            )

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
        tokens, own_end = self._up_to_its_end(sent, list(delta.tokens))
        end = delta.end
        if own_end is not None and (own_end == "stop" or end != "stop" or len(tokens) < len(delta.tokens)):
            end = own_end  # aborted in the step of its last token, or a stop string is completed at the limit
        if end in ("stop", "length") and not sent.tokens:
            raise Malformed(f"the response ended ({end}) without a token")
        now = self.now()
        if tokens:
            sent.heard_at = self._token_at = now
            sent.logprobs += delta.logprobs[: len(tokens)]
            if not sent.in_slot:
                sent.in_slot = True
                self._outbox.add(Started(sent.request.id, now))
        changes: list[Change] = []
        if tokens:
            segment = Segment(tokens, list(delta.logprobs[: len(tokens)]), self.version)
            changes.append(Tokens(sent.request.id, now, segment))
        if end in ("stop", "length"):
            changes.append(Finished(sent.request.id, now, truncated=end == "length"))
            sent.ended = True
            self._faults = 0
        self._deliver(sent, changes)
        if end is not None and not sent.ended:
            self._fail(sent, f"the server ended it: {end}")
        if end is not None and delta.end is None:
            self._spawn(self._aborts([sent.name]))
        return end is not None

    def _up_to_its_end(self, sent: Sent, tokens: list[int]) -> tuple[list[int], str | None]:
        """Store the tokens up to the end of the response by our own rules; returns the rule that ends it."""
        room = sent.room - len(sent.tokens)
        end = "length" if len(tokens) >= room else None
        tokens = tokens[:room]
        if not sent.request.sampling.ignore_eos and not self._eos_set.isdisjoint(tokens):
            count = next(place for place, token in enumerate(tokens, start=1) if token in self._eos_set)
            tokens, end = tokens[:count], "stop"
        if sent.stop_strings is None:
            sent.tokens += tokens
            return tokens, end
        for count, token in enumerate(tokens, start=1):
            sent.tokens.append(token)
            if sent.stop_strings.completed_by_last(sent.turn, sent.tokens):
                return tokens[:count], "stop"
        return tokens, end

    def _finish_if_whole(self, sent: Sent) -> bool:
        """Report the end if the tokens have reached one that the server did not report."""
        if sent.ended or not sent.tokens:
            return sent.ended
        end = None
        if sent.tokens[-1] in self._eos_set and not sent.request.sampling.ignore_eos:
            end = "stop"
        elif len(sent.tokens) >= sent.room:
            end = "length"
        if end is not None:
            sent.ended = True
            self._deliver(sent, [Finished(sent.request.id, self.now(), truncated=end == "length")])
        return sent.ended

    # Failures of a request, in the engine's thread

    async def _fail_or_wait(self, sent: Sent, reason: str) -> None:
        """Fail the request, or make it wait if a health check shows that the server is the problem."""
        self._doubt()
        if sent.unwanted or sent.ended:
            return
        await asyncio.sleep(SETTLE_SECONDS)
        if not await self._is_alive():
            self._turn_away(sent, reason)
            return
        await self._confirm()
        self._fail(sent, reason)

    def _fail(self, sent: Sent, reason: str, *, is_servers_fault: bool = True) -> None:
        if sent.unwanted or sent.ended or self._outbox.death is not None:
            return
        sent.ended = True
        self._outbox.drop_untrusted(sent.request.id)
        self._outbox.add(Failed(sent.request.id, self.now(), reason))
        self._faults += is_servers_fault
        if self._faults >= max(FEWEST_FAULTS, 2 * self.slots):
            self._die(f"the last {self._faults} requests all failed, most recently because {reason}")

    def _turn_away(self, sent: Sent, reason: str, asked_for: float | None = None) -> None:
        """Put the request back into our queue with its delivered tokens: the server is unavailable."""
        self._doubt()
        if sent.unwanted or sent.ended or self._outbox.death is not None:
            return
        now = self.now()
        self._outbox.drop_untrusted(sent.request.id)
        if sent.in_slot:
            self._outbox.add(Preempted(sent.request.id, now, sent.context_tokens))
        sent.ended = True  # in this stream
        waiting = sent.waiting
        waiting.turned_away += 1
        if waiting.turned_away % _TURNS_AT_THE_HEAD == 0:
            self._places_given += 1
            waiting.place = self._places_given
        if sent.trusted and sent.tokens:
            made = Segment(sent.tokens[:], sent.logprobs[:], self.version)
            request = waiting.request
            waiting.request = request._replace(
                prefix=(*request.prefix, made), max_new_tokens=request.max_new_tokens - len(made)
            )
        self._queue = deque(sorted((*self._queue, waiting), key=lambda entry: entry.place))
        self._note_outage(reason, asked_for)

    def _note_outage(self, reason: str, asked_for: float | None = None, *, watched: bool = False) -> None:
        now = self.now()
        self._outage.note(now, reason, asked_for, watched=watched)
        if self._outage.is_hopeless(now, self._token_at):
            self._die(f"it no longer responds ({reason})")
        else:
            self._loop.call_later(max(0.0, self._outage.retry_at - now) + 0.001, self._send_waiting)

    async def _abort(self, unwanted: set[int]) -> None:
        self._queue = deque(waiting for waiting in self._queue if waiting.request.id not in unwanted)
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
            self._finish_if_whole(sent)
        if self._outbox.is_holding:
            await self._confirm()

    async def _aborts(self, names: Sequence[str]) -> bool:
        try:
            async with asyncio.timeout(ABORT_SECONDS):
                return await self.abort_on_server(names)
        except Exception as error:  # closing the connections ends the requests, too
            _log.debug("%s failed to abort: %s", self.url, said(error))
            return False

    # The server's state, in the engine's thread

    async def _watch(self) -> None:
        while self._outbox.death is None:
            await asyncio.sleep(WATCH_SECONDS)
            if self._sent or self._queue:
                await self._look()

    async def _look(self) -> None:
        """Ask the server for its state. Missing or invalid answers count as unknown."""
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
        silent = [sent for sent in self._sent.values() if sent.heard_at < now - WATCH_SECONDS]
        self._server_is_full = missing > 0 and bool(silent)
        to_report = missing - sum(not sent.in_slot for sent in self._sent.values())
        for sent in sorted((s for s in silent if s.in_slot), key=lambda s: s.heard_at)[: max(0, to_report)]:
            if not sent.ended:
                sent.in_slot = False
                self._outbox.add(Preempted(sent.request.id, now, sent.context_tokens))

    def _cut_silent(self) -> None:
        """Fail requests without a token for too long. Preempted ones may wait while others produce tokens."""
        if self._outage.is_on:
            self._turn_away_silent_probe()
            return
        longest_ago = self.now() - self._silence_seconds
        all_are_silent = all(sent.heard_at < longest_ago for sent in self._sent.values())
        silent = [s for s in self._sent.values() if s.heard_at < longest_ago and (s.in_slot or all_are_silent)]
        for sent in silent:
            self._fail(
                sent, f"no token for {self._silence_seconds:g} s, although the server reports that it is healthy"
            )
            if sent.task is not None:
                sent.task.cancel()
        if silent:
            self._spawn(self._aborts([sent.name for sent in silent]))

    def _turn_away_silent_probe(self) -> None:
        """A probe that was accepted and generates nothing is refused, too: every other request waits for it."""
        probe = self._probe
        if probe is None or probe.heard_at >= self.now() - self._silence_seconds:
            return
        self._turn_away(probe, silent_after_busy(self._silence_seconds))
        if probe.task is not None:
            probe.task.cancel()
        self._spawn(self._aborts([probe.name]))

    async def _is_alive(self) -> bool:
        if self._outbox.death is not None:
            return False
        try:
            return await self.is_well()
        except (Refused, *BROKEN):
            return False
        except Exception:  # any answer means that it is reachable
            return True

    # Identity of the server, in the engine's thread

    def _doubt(self) -> None:
        self._is_confirmed = False
        self._doubts += 1

    def _begin_to_confirm(self) -> None:
        if not self._is_confirmed and not self._is_asked:
            self._is_asked = True
            self._spawn(self._confirm())

    async def _confirm(self) -> None:
        """Deliver held changes once the server is confirmed to be the same; give up if it is not."""
        async with self._confirming:
            self._is_asked = False
            while not self._is_confirmed and self._outbox.death is None:
                doubts = self._doubts
                try:
                    found = await self.identity()
                    agrees = found.agrees_with(self._identity) if self._identity.is_known else True
                    trouble = "it no longer reports its identity"
                except Exception as error:
                    agrees, trouble = None, said(error)
                if agrees is False:
                    self._die(
                        f"it is not the server that was given the weights: {found}, but it was {self._identity}. It "
                        "restarted, or another client updates its weights; tokens generated since were not used"
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
        self._outbox.release()

    def _deliver(self, sent: Sent, changes: Sequence[Change]) -> None:
        """Report a change, or hold it back until the server's identity is confirmed."""
        if not changes:
            return
        sent.trusted = sent.trusted or self._is_confirmed
        if not sent.trusted:
            self._begin_to_confirm()
        self._outbox.add(*changes, trusted=sent.trusted)

    def _die(self, reason: str) -> None:
        sent_now = list(self._sent.values())
        with self._outbox.news:
            for sent in sent_now:
                if sent.trusted:
                    self._finish_if_whole(sent)
            self._outbox.die(reason)
        here = asyncio.current_task() if self._is_own_thread() else None
        for sent in sent_now:
            if sent.task is not None and sent.task is not here:
                self._loop.call_soon_threadsafe(sent.task.cancel)

    # Helpers

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a background task. If it fails, the engine is dead, since nothing else would notice."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end_of)

    def _note_end_of(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._die(f"the engine's own task failed: {error!r}")

    def _note_unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "handle" in context and "exception" in context:  # a callback of ours, or one that our streams rely on
            self._die(f"the engine's own task failed: {context['exception']!r}")
        else:
            _log.debug("%s: %s", self.url, context.get("message"))

    def _is_own_thread(self) -> bool:
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False
