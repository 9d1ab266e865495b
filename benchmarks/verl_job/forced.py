"""Forced lengths of responses in verl's own agent loop, and a job that ends by itself in time.

Response k to a prompt has the same length in every setting, drawn as in our other tables: median 637 tokens. A response
that is canceled and generated again keeps its place k. Loaded by verl in all its processes
(VERL_USE_EXTERNAL_MODULES); needs one agent loop worker, which counts the places. FORCED_LIMIT is the longest response,
JOB_ENDS the time after which no further step starts. `compute_score` is an arbitrary reward function.
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections import defaultdict, deque
from types import ModuleType
from typing import Any
from zlib import crc32

import wrapt

from sortedrl.core.rollout import Prompt
from sortedrl.engines.lengths import LognormalLengths

MEDIAN = 636.85
OTHER_SECONDS = 6.0  # of a step, outside of `_step_once`: weights to the servers, twice
LIMIT, SEED = int(os.environ.get("FORCED_LIMIT", "4096")), int(os.environ.get("FORCED_SEED", "5"))


def lengths() -> LognormalLengths:
    return LognormalLengths(mu=math.log(MEDIAN * LIMIT / 4096), limit=LIMIT, seed=SEED)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **unused: Any
) -> dict[str, float]:
    return {"score": float(crc32(solution_str.encode()) & 1)}


class Places:
    """Of each prompt's responses: 0, 1, 2, ..., and again those that were given back."""

    def __init__(self) -> None:
        self._next: defaultdict[int, int] = defaultdict(int)
        self._returned: defaultdict[int, list[int]] = defaultdict(list)

    def take(self, prompt: int) -> int:
        if self._returned[prompt]:
            return self._returned[prompt].pop()
        place, self._next[prompt] = self._next[prompt], self._next[prompt] + 1
        return place

    def give_back(self, prompt: int, place: int) -> None:
        self._returned[prompt].append(place)


def force_lengths(module: ModuleType) -> None:
    plain, places, length_of = module.SingleTurnAgentLoop.run, Places(), lengths()

    @functools.wraps(plain)
    async def run(self: Any, sampling_params: dict[str, Any], priority: int = 0, **fields: Any) -> Any:
        prompt = int(fields["index"])
        place = places.take(prompt)
        forced = {**sampling_params, "max_tokens": length_of(Prompt(str(prompt), [0], prompt), place)}
        try:
            return await plain(self, forced, priority, **fields)
        except BaseException:
            places.give_back(prompt, place)
            raise

    module.SingleTurnAgentLoop.run = run


def end_in_time(module: ModuleType) -> None:
    """No step starts for which, by the longer of the last two, there is no time. The first one compiles."""
    plain, ends = module.PPOTrainer._step_once, float(os.environ["JOB_ENDS"])
    recent: deque[float] = deque(maxlen=2)

    @functools.wraps(plain)
    def step_once(self: Any, *args: Any, **kwargs: Any) -> Any:
        began = time.time()
        done = plain(self, *args, **kwargs)
        recent.append(time.time() - began)
        if time.time() + OTHER_SECONDS + 1.1 * max(recent) > ends:
            self.total_training_steps = self.global_steps
        return done

    module.PPOTrainer._step_once = step_once


if os.environ.get("JOB_ENDS") and __name__ == "forced":
    wrapt.register_post_import_hook(force_lengths, "verl.experimental.agent_loop.single_turn_agent_loop")
    wrapt.register_post_import_hook(end_in_time, "verl.trainer.ppo.v1.trainer_base")
