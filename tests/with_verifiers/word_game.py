"""A taskset with an environment: it answers each turn with the turn's length, and ends after `turns` turns.

The reward is the fraction of turns that hold an `a`. `fault` is what goes wrong, in its second turn.
"""

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import verifiers.v1 as vf

__all__ = ["WordGameEnv", "WordGameTaskset"]


class WordGameConfig(vf.TasksetConfig):
    turns: int = 3
    tasks: int = 40
    fault: Literal["", "raises", "hangs", "stays", "blocks", "dies"] = ""
    only_once: str = ""  # a file: with it the fault strikes once


class WordGameData(vf.TaskData):
    info: dict


class WordGameTask(vf.Task[WordGameData, vf.State, vf.TaskConfig]):
    pass


class WordGameEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class WordGameEnv(vf.Env[WordGameEnvConfig]):
    async def run(self, task: Any, agents: Any) -> None:
        config = self.config.taskset
        replies: list[str] = []
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated:
                replies.append(segment.last_reply)
                if len(replies) == task.data.info["turns"]:
                    break
                observation = f"turn {len(replies)}: {len(segment.last_reply)} letters"
                if len(replies) == 2 and config.fault and _strikes(config.only_once):
                    await _fault(config.fault)
                segment = await interaction.turn(observation)
        trace = interaction.trace
        trace.record_reward("has_a", sum("a" in reply for reply in replies) / max(len(replies), 1), 1.0)
        trace.record_metric("replies", float(len(replies)))


def _strikes(only_once: str) -> bool:
    if not only_once:
        return True
    try:
        Path(only_once).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


async def _fault(fault: str) -> None:
    if fault == "raises":
        raise RuntimeError("the game is broken")
    if fault == "hangs":
        await asyncio.sleep(3600)
    while fault == "stays":  # even if it is canceled
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)
    if fault == "blocks":
        time.sleep(3600)
    os._exit(3)


class WordGameTaskset(vf.Taskset[WordGameTask, WordGameConfig]):
    def load(self) -> Iterator[WordGameTask]:
        for number in range(self.config.tasks):
            data = WordGameData(
                idx=number,
                name=f"word-{number}",
                prompt=f"Word {number}?",
                system_prompt="Play.",
                info={"turns": self.config.turns},
            )
            yield WordGameTask(data, self.config.task)
