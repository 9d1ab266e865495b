"""How full the rollout servers are, measured in the same way in every trainer mode.

Loaded by verl in all its processes (VERL_USE_EXTERNAL_MODULES). The client records when each request goes to a server
and when it returns; the trainer records when it waits for a batch, and how many rollouts it got. Both append lines to
their own files in OCCUPANCY_FOLDER; `bubble` combines them. Times are from the host's monotonic clock.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import wrapt

FOLDER = os.environ.get("OCCUPANCY_FOLDER")


def note(kind: str, **fields: Any) -> None:
    with Path(str(FOLDER), f"{kind}-{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(fields) + "\n")


def watch_client(module: ModuleType) -> None:
    plain = module.LLMServerClient.generate

    @functools.wraps(plain)
    async def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        begin = time.monotonic()
        try:
            return await plain(self, *args, **kwargs)
        finally:
            note("request", begin=begin, end=time.monotonic())

    module.LLMServerClient.generate = generate


def watch_sampling(module: ModuleType) -> None:
    plain = module.PPOTrainer._step_once

    @functools.wraps(plain)
    def step_once(self: Any, *args: Any, **kwargs: Any) -> Any:
        sample, began = self.replay_buffer.sample, time.monotonic()

        @functools.wraps(sample)
        def timed(*a: Any, **k: Any) -> Any:
            found = sample(*a, **k)
            note("harvest", begin=began, end=time.monotonic(), rollouts=len(found[0].keys))
            return found

        self.replay_buffer.sample = timed
        try:
            return plain(self, *args, **kwargs)
        finally:
            self.replay_buffer.sample = sample

    module.PPOTrainer._step_once = step_once


def harvests_in(folder: Path) -> list[dict[str, Any]]:
    """When the trainer waited for each batch, and the number of rollouts that it got."""
    return sorted(whole_lines(folder.glob("harvest-*.jsonl")), key=lambda harvest: harvest["begin"])


def until_last_response(folder: Path, harvests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The harvests, each until its last response: the rest is the trainer's polling."""
    ends = [request["end"] for request in whole_lines(folder.glob("request-*.jsonl"))]

    def shortened(harvest: dict[str, Any]) -> dict[str, Any]:
        within = [end for end in ends if harvest["begin"] <= end <= harvest["end"]]
        return harvest | {"end": max(within, default=harvest["begin"])}

    return [shortened(harvest) for harvest in harvests]


def bubble(folder: Path, harvests: Sequence[dict[str, Any]], slots: int) -> float:
    """The fraction of empty slot-time in these harvests. Requests queued at a server do not count as busy."""
    requests = whole_lines(folder.glob("request-*.jsonl"))
    marks = sorted(
        [(r["begin"], 1, 0) for r in requests]
        + [(r["end"], -1, 0) for r in requests]
        + [(h["begin"], 0, 1) for h in harvests]
        + [(h["end"], 0, -1) for h in harvests]
    )
    busy = seconds = last = 0.0
    active = inside = 0
    for at, request_change, harvest_change in marks:
        if inside:
            busy += min(active, slots) * (at - last)
            seconds += at - last
        last, active, inside = at, active + request_change, inside + harvest_change
    return 1 - busy / (slots * seconds) if seconds else 0.0


def whole_lines(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """The lines of files that may end in a partial line, left by a killed job."""
    lines = (line for path in paths for line in path.read_text().splitlines(keepends=True))
    return [json.loads(line) for line in lines if line.endswith("\n")]


if FOLDER:
    wrapt.register_post_import_hook(watch_client, "verl.workers.rollout.llm_server")
    wrapt.register_post_import_hook(watch_sampling, "verl.trainer.ppo.v1.trainer_base")
