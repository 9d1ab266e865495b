"""Hosts environment instances: creates them, passes turns to them, brings lost ones back.

A host lives in this process (`LocalHost`), or in worker processes (environment_workers.py), where instances can neither
crash nor block this one. A call holds all that is needed to bring its instance back, so a host may lose any instance.
"""

import asyncio
import json
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from sortedrl.core.user_values import reason_of
from sortedrl.tasks.environment import Environment, Response, as_messages, end_of, is_end
from sortedrl.tasks.environment_calls import Results
from sortedrl.tasks.task import Problem

ERRORS = (Exception, SystemExit, KeyboardInterrupt)


@dataclass(frozen=True, slots=True)
class Call:
    """A turn for an instance, or, without a `response`, its end by a limit (`reason`).

    `instance` is its number; a number is never used again. `earlier` are the responses before this one, and `state` is
    the instance's own after them, or None."""

    number: int
    instance: int
    problem: Problem
    earlier: tuple[Response, ...]
    state: Any
    response: Response | None
    reason: str = ""


class Result(NamedTuple):
    """Of one call: an observation (chat messages), a reward as (value, correct, parts), or an error.

    `replayed`: the observations of the earlier turns, if the instance had to step through them again; None: not.
    `counts`: that its turns cannot be replayed counts as a failure. Not if another instance ended its process."""

    call: int
    observation: list[dict[str, Any]] | None = None
    reward: tuple[float, bool, dict[str, float]] | None = None
    error: str | None = None
    is_lost: bool = False
    replayed: list[list[dict[str, Any]]] | None = None
    state: Any = None
    counts: bool = True


class Host(Results[Result], Protocol):
    def submit(self, call: Call) -> None:
        """Must not block, except for a host that answers at once."""

    def drop(self, instance: int) -> None:
        """Close an instance, and end its call if one is pending: no result follows. Must not block."""

    def close(self) -> None: ...


class Lost(Exception):
    """The recorded turns cannot be replayed."""


class Instances:
    """The live instances of one process.

    `raises`: the errors that are not those of the environment. In the main thread of the run a KeyboardInterrupt is
    Ctrl-C, which ends the run. Of a MemoryError in a worker process other instances may be the reason, and the process
    should end.
    """

    def __init__(self, build: Callable[[], Environment], *, raises: tuple[type[BaseException], ...] = ()) -> None:
        self._build = build
        self._raises = raises
        self._time_limits: dict[int, asyncio.Timeout] = {}  # by call
        self._live: dict[int, Environment] = {}

    async def answer(self, call: Call, limit_seconds: float) -> Result:
        """Raises no error of the environment. After one the instance is closed."""
        try:
            async with asyncio.timeout(limit_seconds) as self._time_limits[call.number]:
                result = await self._answered(call)
        except Lost as error:
            result = Result(call.number, error=str(error), is_lost=True)
        except TimeoutError as error:
            reason = reason_of(error) if str(error) else f"no answer within {limit_seconds:g} s"
            result = Result(call.number, error=reason)
        except ERRORS as error:
            if isinstance(error, self._raises):
                raise
            result = Result(call.number, error=reason_of(error))
        finally:
            self._time_limits.pop(call.number, None)
        if result.observation is None:
            await self.close(call.instance, limit_seconds)
        return result

    def excuse(self, culprit: int, seconds: float) -> None:
        """A call blocked the event loop for so long: the others get that time in addition."""
        for call, limit in self._time_limits.items():
            if call != culprit and not limit.expired():
                limit.reschedule((limit.when() or 0.0) + seconds)

    async def close(self, instance: int, limit_seconds: float) -> None:
        close = getattr(self._live.pop(instance, None), "close", None)
        if close is not None:
            try:
                async with asyncio.timeout(limit_seconds):
                    await close()
            except ERRORS as error:  # its rollout has all that it needs
                if isinstance(error, self._raises):
                    raise

    async def _answered(self, call: Call) -> Result:
        environment = self._live.get(call.instance)
        replayed = None
        if environment is None:
            environment = self._live[call.instance] = self._build()
            replayed = await _brought_back(environment, call)
        if call.response is None:
            reward = end_of(await environment.finish(call.reason), "the result of finish")
            return Result(call.number, reward=reward, replayed=replayed)
        result = await environment.step(call.response)
        if is_end(result):
            return Result(call.number, reward=end_of(result, "the result of step"), replayed=replayed)
        return Result(call.number, as_messages(result), replayed=replayed, state=_state_of(environment))


def _state_of(environment: Environment) -> Any:
    """A copy of its state, as plain data; None if it has none."""
    if not hasattr(environment, "state"):
        return None
    try:
        return json.loads(json.dumps(environment.state()))
    except (TypeError, ValueError) as error:
        raise TypeError(f"the result of state is not plain data: {error}") from None


async def _brought_back(environment: Environment, call: Call) -> list[list[dict[str, Any]]] | None:
    """Brings a new instance to where the call continues; returns the observations if it had to replay."""
    environment.reset(call.problem)
    if not call.earlier:
        return None
    if call.state is not None and hasattr(environment, "restore"):
        environment.restore(call.state)
        return None
    replayed = []
    for turn, response in enumerate(call.earlier, 1):
        result = await environment.step(response)
        if is_end(result):
            raise Lost(f"turn {turn} of {len(call.earlier)} ended the episode when it was replayed")
        replayed.append(as_messages(result))
    return replayed


class LocalHost:
    """Answers in this process, inside `submit`: nothing depends on timing. For environments that are fast and safe.

    In this thread, or, if that runs an event loop as in a notebook, in another one, for which this one waits."""

    def __init__(self, build: Callable[[], Environment], *, limit_seconds: float) -> None:
        self._instances = Instances(build, raises=(KeyboardInterrupt,))
        self._limit_seconds = limit_seconds
        self._loop = asyncio.new_event_loop()
        self._other_thread = ThreadPoolExecutor(1)
        self._done: list[Result] = []

    def submit(self, call: Call) -> None:
        self._done.append(self._run(self._instances.answer(call, self._limit_seconds)))

    def collect(self) -> list[Result]:
        done, self._done = self._done, []
        return done

    def wait(self, timeout_seconds: float) -> None: ...

    def drop(self, instance: int) -> None:
        self._run(self._instances.close(instance, self._limit_seconds))

    def close(self) -> None:
        self._other_thread.shutdown()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        if asyncio._get_running_loop() is None:
            return self._loop.run_until_complete(work)
        return self._other_thread.submit(self._loop.run_until_complete, work).result()
