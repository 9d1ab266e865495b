"""Engines behind an HTTP API: the engine protocol on top of a server's streams.

    submit -> our queue -> one streaming request per slot (Started) -> deltas -> Finished

Requests wait here and not in the server: at most `slots` are sent at a time (vLLM max_num_seqs, SGLang
max_running_requests), and a freed slot is refilled immediately by the engine's own thread, which does all I/O with
asyncio. Subclasses hold the details of each server. streams.py handles requests and server failures. Weights are
updated in place: through files (weight_files.py), by CUDA IPC (weight_handles.py) or by NCCL (weight_broadcast.py).
"""

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from sortedrl.core.configuration import ConfigurationError, checked_slots
from sortedrl.core.engine import Change, EngineBase, EngineDied, EngineInfo, Request, RequestPreempted
from sortedrl.core.wording import counted
from sortedrl.engines.pool import Pool
from sortedrl.engines.servers.connection import NotReached, ServerConnection
from sortedrl.engines.servers.credentials import Credentials
from sortedrl.engines.servers.messages import ANY_VOCABULARY, Identity, Malformed, Refused, text_of
from sortedrl.engines.servers.streams import ServerStreams
from sortedrl.engines.servers.weight_broadcast import BroadcastGroup, WeightBroadcast
from sortedrl.engines.servers.weight_files import WeightFiles, Weights
from sortedrl.engines.servers.weight_handles import WeightHandles, are_on_one_gpu, exported
from sortedrl.engines.shared import KVCacheReuse, StopWatches, require_empty, require_new, with_output_layer

WATCH_SECONDS = 1.0
WEIGHT_UPDATE_SECONDS = 600.0  # time limit of a weight update
FAILED_UPDATE_SECONDS = 5.0  # for how long a weight update is tried again after status 500
Source = Path | WeightHandles | WeightBroadcast | None  # of weights: a folder, by CUDA IPC, by NCCL; None: keep them
_log = logging.getLogger(__name__)
T = TypeVar("T")


class HttpEngine(ServerStreams, EngineBase):
    """See the docstrings of this module and of streams.py, which explains `silence_seconds` and `unavailable_seconds`.

    `tokenizer` is only needed for stop strings; `api_key`: see credentials.py. `vocabulary` is the vocabulary size of
    the model; larger token ids are refused.
    """

    copies_weights = True
    has_own_device = True
    start_command: str  # of the server, with {slots}
    takes_handles = False  # the server reads weights by CUDA IPC; `check_server` sets it
    takes_broadcasts = False  # the server reads weights by NCCL; `check_server` sets it
    how_to_take_handles = ""  # the command that starts such a server, if there is one
    kv_tokens: int | None = None  # capacity of its KV cache; `check_server` sets it

    def __init__(
        self,
        url: str,
        *,
        slots: int,
        eos_token_ids: Iterable[int],
        tokenizer: Any = None,
        vocabulary: int | None = None,
        seeded: bool = False,
        reuse_kv_cache: bool = False,
        weights_folder: Path | None = None,
        weights_readable_by_all: bool = False,
        api_key: str | None = None,
        silence_seconds: float = 300.0,
        unavailable_seconds: float = 120.0,
    ) -> None:
        for name, seconds in (("silence_seconds", silence_seconds), ("unavailable_seconds", unavailable_seconds)):
            if not seconds > 0:
                why = "a time limit in seconds must be positive"
                raise ConfigurationError(name, seconds, why, "Set it to more than 0.")
        self._credentials = Credentials(url, api_key)
        self.kv_cache_reuse = KVCacheReuse(keep=reuse_kv_cache)
        self.weight_files = WeightFiles(weights_folder, readable_by_all=weights_readable_by_all)
        super().__init__(
            ServerConnection(self._credentials),
            StopWatches(tokenizer),
            slots=checked_slots(slots),
            eos_token_ids=eos_token_ids,
            vocabulary=vocabulary or ANY_VOCABULARY,
            silence_seconds=silence_seconds,
            unavailable_seconds=unavailable_seconds,
        )
        self._seeded = seeded
        self._broadcast_group = BroadcastGroup()
        self._has_hinted = False  # at a faster weight transfer
        try:
            self._result_of(self._open())
        except BaseException as error:
            self.close()
            if isinstance(error, ConfigurationError):  # it may repeat what the server said
                raise ConfigurationError(error.key, error.value, self._clean(error.why), error.fix) from None
            raise

    # What the server's own class adds

    @abstractmethod
    async def check_server(self) -> None:
        """Raise ConfigurationError if the server is not set up as required; read its limits."""

    @abstractmethod
    async def update_from(self, source: Source, version: int) -> str | None:
        """Have the server load these weights in place, and clear all stale KV.

        Returns the weight version that was set on the server, if it supports that.
        """

    def misconfigured(self, reason: str) -> ConfigurationError:
        """The error for a server that was not started as required, with the command that does."""
        fix = f"Start it with {self.start_command.format(slots=self.slots)}"
        return ConfigurationError("url", self.url, reason, fix)

    def require_room(self, flag: str, room: int) -> None:
        if room < self.slots:
            has = counted(self.slots, "slot")
            raise self.misconfigured(f"the server runs with {flag} {room}, but this engine has {has}")

    def weights_name(self, version: int) -> str:
        """The weight version to set on the server, unique to this run."""
        return f"{self._name_prefix}-version-{version}"

    # The protocol

    def info(self) -> EngineInfo:
        return EngineInfo(kv_tokens=self.kv_tokens)

    @property
    def is_available(self) -> bool:
        """Whether a new request would be sent now: False while the server refuses work. Thread-safe."""
        if not self._outage.is_on:
            return True
        return self._probe is None and not self._queue and self._outage.retry_at <= self.now()

    def submit(self, requests: Sequence[Request]) -> None:
        self._raise_if_dead()
        with self._outbox.news:
            require_new(requests, self._outbox.inside)
            for request in requests:
                self._stop_watches.of(request)
            self._outbox.inside |= {request.id for request in requests}
        self._loop.call_soon_threadsafe(self._enqueue, list(requests))

    def poll(self, until: float | None = None) -> list[Change]:
        with self._outbox.news:
            while not self._outbox.delivered and (self._outbox.inside or until is not None):
                self._raise_if_dead()
                seconds = None if until is None else until - self.now()
                if seconds is not None and seconds <= 0:
                    break
                self._outbox.news.wait(seconds)
            if not self._outbox.delivered:
                self._raise_if_dead()
            return self._outbox.take()

    def deliver_to(self, receive: Callable[[Sequence[Change]], None]) -> None:
        """Pass changes to `receive`, in the engine's thread, instead of keeping them for `poll`: with many servers,
        every switch between threads counts. An empty list says that the engine has died: then `poll` raises."""
        self._outbox.receive = receive

    def abort(self, ids: Sequence[int]) -> list[Change]:
        self._result_of(self._abort(set(ids)))
        with self._outbox.news:
            self._outbox.inside -= set(ids)
            return self._outbox.take()

    def update_weights(self, weights: Weights | Path | WeightBroadcast | None, version: int) -> None:
        """Send the weights under their Hugging Face names. If the update fails, the engine is dead.

        A path is a folder with `*.safetensors`. None: only the version has changed; the KV cache is cleared anyway,
        so that a benchmark pays for resumes as a run does. A pool may pass a broadcast to all of its servers.
        """
        self._raise_if_dead()
        require_empty(len(self._outbox.inside), f"weight update to version {version}")
        if weights is None or isinstance(weights, Path | WeightBroadcast):
            self._update_from(weights, version)
        else:
            self._send(dict(with_output_layer(weights)), version)
        self.version = version

    def _send(self, weights: dict[str, Any], version: int) -> None:
        """From GPU to GPU if the server can and the weights are on one GPU, otherwise in a file."""
        is_on_gpu = are_on_one_gpu(weights)
        if is_on_gpu and self.takes_handles:
            with exported(weights) as handles:
                self._update_from(handles, version)
            return
        if is_on_gpu and self.takes_broadcasts:
            self._update_from(WeightBroadcast(weights, self._broadcast_group, servers=1), version)
            return
        if is_on_gpu and self.how_to_take_handles and not self._has_hinted:
            self._has_hinted = True
            hint = "gets its weights through a file. If it runs on the learner's GPU, CUDA IPC is faster: start it with"
            _log.warning("%s %s %s", self.url, hint, self.how_to_take_handles)
        with self.weight_files.written(weights, version) as folder:
            self._update_from(folder, version)

    def _update_from(self, source: Source, version: int) -> None:
        try:
            self._result_of(self._update_weights(source, version))
        except Exception as error:  # for any error, old and new weights may be mixed in the server
            fix = "restart the server"
            if isinstance(source, WeightHandles):
                fix += f" on the learner's GPU ({source.gpu}), or without the IPC backend"
            if isinstance(source, WeightBroadcast):
                self._loop.call_soon_threadsafe(source.leave)
                fix += " on other GPUs of this machine, or without the NCCL backend"
            self._die(f"the weight update to version {version} did not complete ({text_of(error)}); {fix}")
            raise EngineDied(f"{self.url}: {self._outbox.death}") from None  # the error may repeat a secret

    def close(self) -> None:
        """End what is under way; the server keeps running."""
        if not self._is_closed:
            self._is_closed = True
            if not self._background.has_ended:
                self._result_of(self._shut())
            self._background.leave()

    def _raise_if_dead(self) -> None:
        if self._outbox.death is not None:
            raise EngineDied(f"{self.url}: {self._outbox.death}")

    def _result_of(self, work: Coroutine[Any, Any, T]) -> T:
        if self._background.has_ended:
            work.close()
            raise RuntimeError(f"the engine of {self.url} is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # The server, in the engine's thread

    async def _open(self) -> None:
        try:
            await self.check_server()
            self._expected = await self.identity()
        except ConfigurationError:
            raise
        except (Refused, OSError) as error:
            if isinstance(error, Refused) and error.is_about_the_key:
                raise self._credentials.refused() from None
            why, fix = f"no server answers there ({text_of(error)})", "Start the server first, or correct the address."
            raise ConfigurationError("url", self.url, why, fix) from None
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            why = f"the server's answer has an unexpected format ({error!r})"
            fix = "Correct the address, or use a supported version of the server."
            raise ConfigurationError("url", self.url, why, fix) from None
        if not self._expected.is_known:
            _log.warning(
                "%s does not report its start time: a restart between two requests cannot be detected", self.url
            )
        self._background.spawn(self._watch())

    async def _shut(self) -> None:
        tasks = list(self._background.running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _update_weights(self, source: Source, version: int) -> None:
        """Update the weights, and verify that the server did not restart meanwhile. Retries while it is busy."""
        began = self.now()
        while True:
            try:
                before, last = await self.identity(), self._expected
                is_another = before.agrees_with(last) is False
                if is_another and source is None:
                    raise Malformed(f"it is a different server: {before}, but it was {last}")
                if is_another:  # it restarted while idle: fine, since it gets new weights now
                    await self.check_server()
                tag = await self.update_from(source, version)
                after = await self.identity()
                break
            except (Refused, NotReached) as error:
                self._outage.note(self.now(), text_of(error), getattr(error, "retry_after", None))
                is_over = self._outage.is_hopeless(self.now(), began)
                if isinstance(error, Refused):  # 500 is more often an error of the update than of a proxy
                    is_over |= not error.is_servers_state
                    is_over |= error.status == 500 and self.now() - began > FAILED_UPDATE_SECONDS
                if is_over:
                    raise
                await asyncio.sleep(self._outage.retry_at - self.now())
        self._outage.end()
        expected = Identity(before.process, before.weights if source is None else tag or after.weights)
        if expected.agrees_with(after) is False:
            raise Malformed(f"it restarted meanwhile: {after}, but it was {expected}")
        self._expected = expected
        self._doubt()

    # Its state, in the engine's thread

    async def _watch(self) -> None:
        while self._outbox.death is None:
            await asyncio.sleep(WATCH_SECONDS)
            if self._sent or self._queue:
                await self._look()

    async def _look(self) -> None:
        """Ask the server for its state. Missing or invalid answers count as unknown."""
        try:
            running = await self.count_running()
        except Exception as error:
            running = None
            if not await self._is_alive():
                self._note_outage(text_of(error), watched=True)
                return
        self._outage.note_healthy()
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
                self._outbox.add(RequestPreempted(sent.request.id, now, sent.context_tokens))

    def _cut_silent(self) -> None:
        """Fail requests with too few tokens for too long. Preempted ones may wait while others produce tokens.

        A probe that was accepted and generates nothing is turned away: every other request waits for it.
        """
        now, seconds, probe = self.now(), self._silence_seconds, self._probe
        all_are_silent = all(sent.heard_at < now - seconds for sent in self._sent.values())
        if self._outage.is_on:
            cut = [probe] if probe is not None and probe.heard_at < now - seconds else []
        else:
            slow = [sent for sent in self._sent.values() if sent.paced_at < now - seconds]
            cut = [s for s in slow if s.in_slot or all_are_silent or s.heard_at > now - seconds / 2]
        for sent in cut:
            if self._outage.is_on:
                why = "if it may queue a request for longer, set a larger silence_seconds in engine_options"
                self._turn_away(sent, f"no token for {seconds:g} s after it was busy: {why}")
            else:
                made = counted(len(sent.tokens) - sent.paced_tokens, "token")
                self._fail(sent, f"{made} in the last {seconds:g} s, though the server says it is healthy")
            sent.cancel()
        if cut:
            self._background.spawn(self._aborts([sent.name for sent in cut]))

    async def _is_alive(self) -> bool:
        """Whether it says that it is able to generate. Any other answer means that it is reachable."""
        if self._outbox.death is not None:
            return False
        try:
            await self.call("GET", "/health")
        except (Refused, OSError):
            return False
        except Malformed:
            pass
        return True


class ServerPool(Pool):
    """A pool of servers that share one `weights_folder`: weights are written once for all of them, or broadcast once if
    all can take that. If all take handles, they are on the learner's GPU, and each gets handles of its own.
    """

    def __init__(self, engines: Sequence[HttpEngine]) -> None:
        super().__init__(engines)
        self._weight_files = engines[0].weight_files
        self._broadcast_group = BroadcastGroup()

    def update_weights(self, weights: Weights | Path | None, version: int) -> None:
        if weights is None or isinstance(weights, Path):
            super().update_weights(weights, version)
            return
        named = dict(with_output_layer(weights))
        engines, is_on_gpu = [member.engine for member in self._present()], are_on_one_gpu(named)
        if is_on_gpu and all(isinstance(e, HttpEngine) and e.takes_handles for e in engines):
            super().update_weights(named, version)
        elif is_on_gpu and all(isinstance(e, HttpEngine) and e.takes_broadcasts for e in engines):
            super().update_weights(WeightBroadcast(named, self._broadcast_group, servers=len(engines)), version)
        else:
            with self._weight_files.written(named, version) as folder:
                super().update_weights(folder, version)
