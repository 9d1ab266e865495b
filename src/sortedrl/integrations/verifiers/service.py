"""Runs episodes: environment servers, their clients and the endpoint, in the event loop of one thread.

A server that dies or whose event loop is blocked loses its episodes: each reports an error, which the scheduler answers
with a retry. The next episode starts the server again.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from queue import SimpleQueue
from typing import Any, TypeVar

from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.episode import WireEpisode
from verifiers.v1.serve.client import EnvClient
from verifiers.v1.types import SamplingConfig

from sortedrl.core.user_values import one_line
from sortedrl.integrations.verifiers.env_server import EXIT_SECONDS, START_SECONDS, EnvServerProcess
from sortedrl.integrations.verifiers.episode import Ask, Endpoint, Episode, EpisodeFailed, Outcome, Refused, Report
from sortedrl.tasks.environment_calls import Turn
from sortedrl.tasks.worker_process import WorkerError

T = TypeVar("T")
EPISODES = count()  # a number of its own for each
TRACE_SECONDS = 30.0  # for a server to name the trace of a request that is already here
CLOSE_SECONDS = 4 * EXIT_SECONDS
PROMPTS_AT_A_TIME = 16
HEALTH_SECONDS = 5.0  # between two checks of a server
_NO_KEY = "SORTEDRL_NO_API_KEY"  # a variable that is not set: the endpoint needs no key


@dataclass(eq=False)
class _Server:
    """A place for a process, which is started when it is needed."""

    process: EnvServerProcess | None = None
    client: EnvClient | None = None
    watch: asyncio.Task[None] | None = None
    episodes: set[Episode] = field(default_factory=set)
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)


class Service:
    """Callable from any thread. `config` is the environment's, `client` are settings of verifiers' model client, both
    as plain data."""

    def __init__(self, config: Mapping[str, Any], client: Mapping[str, Any]) -> None:
        self._config = config
        self._client_settings = client
        self._limit_seconds = START_SECONDS
        self._episodes: dict[int, Episode] = {}
        self._traces: dict[str, asyncio.Future[Episode]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._endpoint = Endpoint(self._turn_for)
        self._servers = [_Server()]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_run_loop, args=(self._loop,), name="verifiers", daemon=True)
        self._thread.start()
        self._url = self._call(self._endpoint.start())
        self._closed = False

    # From other threads

    def ask(self, ask: Ask, on_report: Callable[[Report], None]) -> None:
        """`on_report` is called once, from the service's thread, unless the episode is dropped before."""
        self._loop.call_soon_threadsafe(self._take, ask, on_report)

    def drop(self, episode: int) -> None:
        self._loop.call_soon_threadsafe(self._drop, episode)

    def process_ids(self) -> list[int]:
        return [server.process.process_id for server in self._servers if server.process is not None]

    def resize(self, workers: int, limit_seconds: float) -> None:
        """For episodes that start from now on. `limit_seconds`: between two requests of an episode."""
        self._limit_seconds = limit_seconds
        self._servers += [_Server() for _ in range(workers - len(self._servers))]

    def wait_until_ready(self) -> None:
        """Raises WorkerError."""
        self._call(self._started(self._servers[0]))

    def prompts_of(self, tasks: Sequence[Mapping[str, Any]]) -> list[list[int]]:
        """The tokens with which episodes of these tasks start. Raises WorkerError.

        Each episode is played up to its first request. The first one may have to wait for a harness that installs its
        program."""
        self.wait_until_ready()
        reports: SimpleQueue[Report] = SimpleQueue()
        probes = {number: Ask(number, next(EPISODES), task, (), ()) for number, task in enumerate(tasks)}
        waiting = list(reversed(probes.values()))
        found: dict[int, list[int]] = {}
        for _ in range(min(PROMPTS_AT_A_TIME, len(waiting))):
            self._loop.call_soon_threadsafe(self._take, waiting.pop(), reports.put)
        while len(found) < len(probes):
            report = reports.get()
            self.drop(probes[report.call].episode)
            if report.observation is None:
                raise WorkerError(f"an episode asked for no turn: {report.error or 'it ended at once'}")
            found[report.call] = report.observation
            if waiting:
                self._loop.call_soon_threadsafe(self._take, waiting.pop(), reports.put)
        return [found[number] for number in probes]

    def close(self) -> None:
        """End all episodes, servers and their programs."""
        if self._closed:
            return
        self._closed = True
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(CLOSE_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    # In the service's thread

    def _take(self, ask: Ask, on_report: Callable[[Report], None]) -> None:
        episode = self._episodes.get(ask.episode)
        if episode is None:
            episode = self._episodes[ask.episode] = Episode(self._run, on_report, self._limit_seconds)
        episode.take(ask)

    def _drop(self, number: int) -> None:
        episode = self._episodes.pop(number, None)
        if episode is None:
            return
        self._traces = {trace: one for trace, one in self._traces.items() if not one.done() or one.result() != episode}
        ending = episode.end()
        if ending is not None:
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    def _trace(self, trace: str) -> asyncio.Future[Episode]:
        if trace not in self._traces:
            self._traces[trace] = self._loop.create_future()
        return self._traces[trace]

    async def _turn_for(self, trace: str, prompt: Any) -> Turn:
        """A request may arrive before its server has named the trace."""
        try:
            episode = await asyncio.wait_for(asyncio.shield(self._trace(trace)), TRACE_SECONDS)
        except TimeoutError:
            self._traces.pop(trace, None)
            raise Refused("no such episode") from None
        return await episode.turn_for(trace, prompt)

    async def _run(self, episode: Episode, task: Mapping[str, Any]) -> Outcome:
        """Play an episode on the server with the fewest. Raises EpisodeFailed."""
        server = min(self._servers, key=lambda one: len(one.episodes))
        server.episodes.add(episode)
        try:
            client = await self._started(server)
            episode.progress()

            def name_trace(delta: Mapping[str, Any]) -> None:
                future = self._trace(delta["trace"])
                if not future.done():
                    future.set_result(episode)

            settings = TrainClientConfig(base_url=self._url, api_key_var=_NO_KEY, **self._client_settings)
            return outcome_of(await client.run(settings, "policy", SamplingConfig(), dict(task), on_delta=name_trace))
        except (WorkerError, RuntimeError) as error:
            raise EpisodeFailed(one_line(str(error))) from None
        finally:
            server.episodes.discard(episode)

    # Servers

    async def _started(self, server: _Server) -> EnvClient:
        async with server.starting:
            if server.client is None:
                server.process = process = await EnvServerProcess.start(self._config)
                server.client = EnvClient(process.address)
                server.watch = asyncio.create_task(self._watch(server, process, server.client))
            return server.client

    async def _watch(self, server: _Server, process: EnvServerProcess, client: EnvClient) -> None:
        """Wait for the end of the process, and kill it if it does not answer. Then its episodes fail."""
        blocked = ""
        while not process.ended.done():
            await asyncio.wait([process.ended], timeout=HEALTH_SECONDS)
            health = asyncio.create_task(client.health(self._limit_seconds))
            await asyncio.wait([process.ended, health], return_when=asyncio.FIRST_COMPLETED)
            if health.done() and not _is_healthy(health) and not process.ended.done():
                blocked = (
                    f"verifiers' environment server did not answer within {self._limit_seconds:g} s and was killed: an "
                    "environment blocks its event loop"
                )
                await process.kill()
            health.cancel()
        server.process = server.client = None
        for episode in [*server.episodes]:
            episode.fail(blocked or process.ended.result())
        await client.close()

    async def _close(self) -> None:
        for number in [*self._episodes]:
            self._drop(number)
        if self._ending:
            await asyncio.wait(self._ending, timeout=EXIT_SECONDS)
        await asyncio.gather(*(self._stop(server) for server in self._servers))
        await self._endpoint.close()

    async def _stop(self, server: _Server) -> None:
        async with server.starting:
            if server.process is not None:
                await server.process.stop()
            if server.watch is not None:
                await server.watch


def _is_healthy(check: asyncio.Task[bool]) -> bool:
    """Of a check that has ended. One that raised has found no healthy server."""
    return check.exception() is None and check.result()


def outcome_of(episode: WireEpisode) -> Outcome:
    """The reward of an episode's one trace, with its parts. Raises EpisodeFailed."""
    errors = [*episode.errors, *(error for trace in episode.traces if not trace.ok for error in trace.errors)]
    if errors:
        cause = errors[-1].message.strip().rpartition("\n")[2]  # of a program's traceback, the last line
        raise EpisodeFailed(one_line(f"{errors[-1].type}: {cause}"))
    if len(episode.traces) != 1:
        raise EpisodeFailed(
            f"the episode has {len(episode.traces)} traces: a rollout is one agent's, and environments with several "
            "agents are not supported"
        )
    (trace,) = episode.traces
    rewards = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    return Outcome(float(trace.reward), metrics | rewards)


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()
