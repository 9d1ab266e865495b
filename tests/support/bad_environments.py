"""Environments that end or block their process. Imported by worker processes: the standard library and the task."""

import asyncio
import ctypes
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from sortedrl.tasks.task import Problem

SHORT_LIMIT_SECONDS = 2.0


class Slow(list[int]):
    """Takes long to encode."""

    def __iter__(self) -> Iterator[int]:
        time.sleep(600)
        return iter(())


class Talks:
    """A problem's `answer` says what its second turn does."""

    def reset(self, problem: Problem) -> None:
        self._does = problem.answer
        self._turns = 0

    async def step(self, response: str) -> Any:
        self._turns += 1
        if self._turns == 1:
            return "first"
        await asyncio.sleep(0.1)
        match self._does:
            case "dies":
                os._exit(3)
            case "segfaults":
                ctypes.string_at(0)
            case "blocks":
                time.sleep(600)
            case "blocks in a callback":
                asyncio.get_running_loop().call_soon(time.sleep, 600)
            case "blocks for less than the limit":
                time.sleep(0.6 * SHORT_LIMIT_SECONDS)
            case "stops the loop":
                asyncio.get_running_loop().stop()
                await asyncio.sleep(0)
            case "exits in a task":
                await asyncio.create_task(exits())
            case "dies in a thread":
                await asyncio.to_thread(os._exit, 4)
            case "clears modules":
                sys.modules.clear()
            case "cancels all":
                for task in asyncio.all_tasks():
                    task.cancel()
            case "eats memory":
                raise MemoryError("no room")
            case "is random":
                return f"at {time.time_ns()}"
        await asyncio.sleep(0.1)
        return 1.0

    async def finish(self, reason: str) -> float:
        await asyncio.sleep(1.0)
        return 0.5


class HasSlowState(Talks):
    def state(self) -> Any:
        return {"numbers": Slow() if self._does == "state is slow" and self._turns > 1 else []}

    def restore(self, state: Any) -> None:
        self._turns = 1

    async def step(self, response: str) -> Any:
        result = await super().step(response)
        return "second" if self._does == "state is slow" and self._turns > 1 else result


async def exits() -> None:
    sys.exit(0)


class BadTask:
    name = "bad"

    def __init__(self, has_state: bool = False) -> None:
        self._has_state = has_state

    def train(self) -> Sequence[Problem]:
        return []

    held_out = train

    def environment(self) -> Talks:
        return HasSlowState() if self._has_state else Talks()
