"""A checkpoint engine of verl for one machine without GPUs, in place of nccl's: the learner writes its weights to a
file, which all servers read.

Registered by `actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=file_engine`.
"""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

Named = tuple[str, torch.Tensor]


@CheckpointEngineRegistry.register("file")
class FileCheckpointEngine(CheckpointEngine):
    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self.is_master = is_master

    def prepare(self) -> str | None:
        return tempfile.mkdtemp() if self.is_master else None

    @classmethod
    def build_topology(cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]) -> Any:
        return {"folder": [metadata[0]] * actor_wg_world_size}, {"folder": [metadata[0]] * rollout_world_size}

    def init_process_group(self, folder: str) -> None:
        self.folder = Path(folder)

    def finalize(self) -> None:
        if self.is_master:
            shutil.rmtree(self.folder)

    async def send_weights(self, weights: Iterator[Named], global_steps: int | None = None) -> dict[str, float]:
        whole = {name: weight.detach().float().cpu() for name, weight in weights}  # all ranks gather them
        if self.is_master:
            torch.save(whole, self.folder / "part")
            (self.folder / "part").rename(self.folder / "whole")
        return {"weights/sent": 1.0}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[Named]:
        while not (self.folder / "whole").exists():
            await asyncio.sleep(0.02)
        for named in torch.load(self.folder / "whole").items():
            yield named
