"""An environment for tests: it counts turns, and does what a response tells it to. Worker processes import it: the
standard library and the task."""

import asyncio
import ctypes
import inspect
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sortedrl.tasks.task import Problem, Reward

SHORT_LIMIT_SECONDS = 2.0
SPOILS: dict[str, Callable[[], Any]] = {  # end or block their process
    "dies": lambda: os._exit(3),
    "segfaults": lambda: ctypes.string_at(0),
    "blocks": lambda: time.sleep(600),
    "blocks in a callback": lambda: asyncio.get_running_loop().call_soon(time.sleep, 600),
    "blocks for less than the limit": lambda: time.sleep(0.6 * SHORT_LIMIT_SECONDS),
    "stops the loop": lambda: asyncio.get_running_loop().stop(),
    "exits in a task": lambda: asyncio.create_task(exits()),
    "dies in a thread": lambda: asyncio.to_thread(os._exit, 4),
    "clears modules": sys.modules.clear,
    "cancels all": lambda: [task.cancel() for task in asyncio.all_tasks()],
    "eats memory": lambda: bytearray(2**60),
}


async def exits() -> None:
    sys.exit(0)


class Slow(list[int]):
    """Takes long to encode."""

    def __iter__(self) -> Iterator[int]:
        time.sleep(600)
        return iter(())


class Counting:
    """Answers `turn N of ID`; `end` ends the episode with N as its reward. Each new instance leaves a line in `log`.

    A problem's `answer` says what the second turn does, in place of the response, while others are in theirs."""

    def __init__(self, log: str | None = None) -> None:
        self._log = log
        self._turns = 0

    def reset(self, problem: Problem) -> list[dict[str, str]]:
        self._problem = problem
        self._note("reset")
        return [{"role": "user", "content": problem.question}]

    async def step(self, response: str) -> Any:
        self._turns += 1
        self._note(f"step {response}")
        if self._turns == 2 and self._problem.answer is not None:
            response = await self._does(self._problem.answer)
        match response.split():
            case ["end"]:
                return Reward(float(self._turns), True, {"part": 0.5})
            case ["sleep", seconds]:
                await asyncio.sleep(float(seconds))
            case ["raise"]:
                raise ValueError("told to raise")
            case ["exit"]:
                raise SystemExit("told to exit")
            case ["interrupt"]:
                raise KeyboardInterrupt
            case ["number"]:
                return [{"role": "user", "content": 5}]
            case ["surrogate"]:
                return "a file name: \udc80"
            case ["nothing"]:
                return None
            case ["random"]:
                return f"at {time.time_ns()}"
            case ["large"]:
                return "x" * 10_000_000
        return f"turn {self._turns} of {self._problem.id}"

    async def _does(self, what: str) -> str:
        await asyncio.sleep(0.1)
        done = SPOILS[what]() if what in SPOILS else None
        if inspect.isawaitable(done):
            await done
        await asyncio.sleep(0.1)
        return "end" if what in SPOILS else what

    async def finish(self, reason: str) -> float:
        self._note(f"finish {reason}")
        if self._problem.answer is not None:
            await asyncio.sleep(1.0)
        return -float(self._turns)

    async def close(self) -> None:
        self._note("close")

    def _note(self, what: str) -> None:
        if self._log is not None:
            with Path(self._log).open("a") as file:
                file.write(f"{self._problem.id} {what}\n")


class Remembering(Counting):
    def state(self) -> Any:
        return Slow() if self._problem.answer == "state is slow" and self._turns == 2 else {"turns": self._turns}

    def restore(self, state: dict[str, int]) -> None:
        self._note("restore")
        self._turns = state["turns"]


class CountingTask:
    name = "counting"

    def __init__(self, log: str | None = None, remembers: bool = False) -> None:
        self._log = log
        self._remembers = remembers

    def train(self) -> Sequence[Problem]:
        return [Problem(f"p{number}", f"question {number}", None) for number in range(64)]

    def held_out(self) -> Sequence[Problem]:
        return [Problem(f"h{number}", f"question {number}", None) for number in range(8)]

    def environment(self) -> Counting:
        return (Remembering if self._remembers else Counting)(self._log)
