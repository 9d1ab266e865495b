"""The engine pool with engines as Ray actors on any node of a cluster.

    pool = RayPool(make_engine, engines=8, num_gpus=1)      # make_engine() is called on the node of each actor
    controller = Controller(pool, ...)

Each actor hosts one engine; a `RayEngine` is its local proxy and a normal member of the pool. A lost actor or node is a
lost member (engines/pool.py): its requests continue elsewhere after the tokens delivered so far. `RayPool.revive`
restarts engines where the cluster has room; they start to work at the next weight update.

- **Clocks**: nodes have different clocks, so every reply carries the actor's time and is converted to ours. A timestamp
  is off by the transfer time of the reply, and never goes back.
- **Traffic**: changes within `_LINGER_SECONDS` come in one reply.
- **Weights** are put into Ray's object store once, and all actors read them from there.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.engine import EngineBase, EngineInfo, with_defaults
from sortedrl.settings.install_hint import install_hint

try:
    import ray
except ImportError:
    raise ConfigurationError("ray", None, "Ray is not installed", f"{install_hint('ray')}.") from None

from sortedrl.core.engine import Change, Engine, EngineDied, Request, RequestFailed, RequestFinished
from sortedrl.core.engine_checks import checked_changes
from sortedrl.engines.pool import Pool

START_SECONDS = 600.0  # of an engine: a large model is loaded
_LINGER_SECONDS = 0.01
_ANSWER_SECONDS = 60.0  # timeout of a short call
_WEIGHT_UPDATE_SECONDS = 1800.0
_LOST = (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError, ray.exceptions.RaySystemError)


class Reply(NamedTuple):
    now: float  # on the actor's clock
    is_available: bool
    changes: list[Change]


class EngineHost:
    """The actor: an engine that returns its clock with every reply."""

    def __init__(self, make_engine: Callable[[], Engine]) -> None:
        self._engine = with_defaults(make_engine())

    def get(self, name: str) -> Any:
        """An attribute of the engine."""
        return getattr(self._engine, name)

    def call(self, name: str, *arguments: Any) -> Any:
        """A method of the engine."""
        return getattr(self._engine, name)(*arguments)

    def poll(self, seconds: float) -> Reply:
        engine = self._engine
        end = engine.now() + seconds
        changes = self._polled(end)
        linger = min(end, engine.now() + _LINGER_SECONDS)
        while changes and engine.now() < linger:
            changes += self._polled(linger)
        return self._reply(changes)

    def _polled(self, until: float) -> list[Change]:
        return [*checked_changes(self._engine, "poll", self._engine.poll(until))]

    def abort(self, ids: Sequence[int]) -> Reply:
        return self._reply(checked_changes(self._engine, "abort", self._engine.abort(ids)))

    def _reply(self, changes: Sequence[Change]) -> Reply:
        return Reply(self._engine.now(), self._engine.is_available, list(changes))


class RayEngine(EngineBase):
    """An engine in an actor. `options` go to the actor: num_gpus, num_cpus, resources, scheduling_strategy ...

    `start_seconds=None` does not wait for the start: several can start at once (`started`).
    """

    copies_weights = True
    has_own_device = True
    slots: int

    def __init__(
        self, make_engine: Callable[[], Engine], *, start_seconds: float | None = START_SECONDS, **options: Any
    ) -> None:
        host = ray.remote(EngineHost).options(max_restarts=0, max_task_retries=0, **options)
        self._actor = host.remote(make_engine)
        self._inside: set[int] = set()
        self._last_time = float("-inf")
        self._is_available = True  # by the last reply
        self._asking = threading.Lock()
        self._question: Any = None  # whether it is available again, on its way
        if start_seconds is not None:
            started([self], start_seconds)

    def now(self) -> float:
        return time.perf_counter()

    def submit(self, requests: Sequence[Request]) -> None:
        self._answer(self._actor.call.remote("submit", list(requests)))
        self._inside |= {request.id for request in requests}

    def poll(self, until: float | None = None) -> list[Change]:
        changes: list[Change] = []
        while not changes and (self._inside or until is not None):
            seconds = _ANSWER_SECONDS / 2 if until is None else max(0.0, until - self.now())
            changes = self._received(self._answer(self._actor.poll.remote(seconds), seconds + _ANSWER_SECONDS))
            if until is not None and self.now() >= until:
                break
        return changes

    def abort(self, ids: Sequence[int]) -> list[Change]:
        changes = self._received(self._answer(self._actor.abort.remote(list(ids))))
        self._inside -= set(ids)
        return changes

    def update_weights(self, weights: Any, version: int) -> None:
        """`weights` may already be in Ray's object store (an ObjectRef)."""
        self._answer(self._actor.call.remote("update_weights", weights, version), _WEIGHT_UPDATE_SECONDS)

    @property
    def is_available(self) -> bool:
        """By its last reply. Never waits: one that is not available and has no requests is asked in the background."""
        with self._asking:
            if not self._is_available:
                self._question = self._question or self._actor.get.remote("is_available")
                if ray.wait([self._question], timeout=0)[0]:
                    question, self._question = self._question, None
                    try:
                        self._is_available = ray.get(question)
                    except ray.exceptions.RayError:
                        self._is_available = True  # it is lost, which the next call to it reports
            return self._is_available

    def info(self) -> EngineInfo:
        info: EngineInfo = self._answer(self._actor.call.remote("info"))
        return info

    def sleep(self) -> None:
        self._answer(self._actor.call.remote("sleep"))

    def sleep_until_update(self) -> None:
        self._answer(self._actor.call.remote("sleep_until_update"))

    def close(self) -> None:
        """Kill the actor, and with it the engine."""
        ray.kill(self._actor)

    def _answer(self, call: Any, seconds: float = _ANSWER_SECONDS) -> Any:
        try:
            return ray.get(call, timeout=seconds)
        except _LOST as error:
            self.close()  # it may just be unreachable: free its resources for another
            raise EngineDied(_why_lost(error)) from error
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error  # the engine's own exception

    def _received(self, reply: Reply) -> list[Change]:
        """Its changes, on our clock."""
        its_now, self._is_available, changes = reply
        self._inside -= {change.id for change in changes if isinstance(change, RequestFinished | RequestFailed)}
        offset = self.now() - its_now
        stamped: list[Change] = []
        for change in changes:
            self._last_time = max(self._last_time, change.at + offset)
            stamped.append(change._replace(at=self._last_time))
        return stamped


def started(engines: Sequence[RayEngine], seconds: float = START_SECONDS) -> Sequence[RayEngine]:
    """Wait for each of them. If one cannot start, or on Ctrl-C, all are closed."""
    try:
        for engine in engines:
            engine.slots = engine._answer(engine._actor.get.remote("slots"), seconds)
    except BaseException:  # in a notebook the traceback would keep the actors, and their GPUs
        for engine in engines:
            engine.close()
        raise
    return engines


def _why_lost(error: Exception) -> str:
    """In one line. The text of an actor that could not be created starts with a traceback and ends with the cause."""
    first, *others = str(error).strip().splitlines()
    if others and getattr(error, "actor_init_failed", False):
        return f"the engine could not be created in its actor: {others[-1].strip()}"
    return f"the engine's actor is lost: {first}"


class RayPool(Pool):
    """`engines` actors, each with the engine that `make_engine` creates on its node; `options` apply to each actor."""

    def __init__(self, make_engine: Callable[[], Engine], *, engines: int, **options: Any) -> None:
        self._make_engine = make_engine
        self._options = {"scheduling_strategy": "SPREAD", **options}
        super().__init__(started([self._new_engine(None) for _ in range(engines)]))

    def update_weights(self, weights: Any, version: int) -> None:
        super().update_weights(None if weights is None else ray.put(on_host(weights)), version)

    def revive(self, *, start_seconds: float = 60.0) -> int:
        """Replace lost engines as far as the cluster has room; returns how many were started."""
        came = 0
        for _ in self.lost:
            try:
                engine = self._new_engine(start_seconds)
            except EngineDied:
                break
            try:
                self.rejoin(engine)
            except ValueError:  # it has another number of slots
                engine.close()
                raise
            came += 1
        return came

    def _new_engine(self, start_seconds: float | None) -> RayEngine:
        return RayEngine(self._make_engine, start_seconds=start_seconds, **self._options)


def on_host(weights: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The weights in CPU memory, where any node can read them."""
    return {
        name: weight.detach().cpu() if hasattr(weight, "detach") else weight for name, weight in dict(weights).items()
    }
