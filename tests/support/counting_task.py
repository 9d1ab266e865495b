"""An environment for tests: it counts turns, and does what a response tells it to."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sortedrl.tasks.task import Problem, Reward


class Counting:
    """Answers `turn N of ID`; `end` ends the episode with N as its reward. Each new instance leaves a line in `log`."""

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

    async def finish(self, reason: str) -> float:
        self._note(f"finish {reason}")
        return -float(self._turns)

    async def close(self) -> None:
        self._note("close")

    def _note(self, what: str) -> None:
        if self._log is not None:
            with Path(self._log).open("a") as file:
                file.write(f"{self._problem.id} {what}\n")


class Remembering(Counting):
    def state(self) -> dict[str, int]:
        return {"turns": self._turns}

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
