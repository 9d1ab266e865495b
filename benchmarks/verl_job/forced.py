"""Forced lengths of responses in verl's own agent loop, and jobs that start together and take turns.

Response k to a prompt has the same length in every setting, drawn as in our other tables: median 637 tokens. A response
that is canceled and generated again keeps its place k. Loaded by verl in all its processes
(VERL_USE_EXTERNAL_MODULES); needs one agent loop worker, which counts the places. FORCED_LIMIT is the longest response.
`compute_score` is an arbitrary reward function.

JOB_TURN names a file. Once all is started, the job writes `ready` beside it, frees the GPU memory of its servers and
waits for the file. It has the time after which no further step starts.
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections import defaultdict, deque
from pathlib import Path
from types import ModuleType
from typing import Any
from zlib import crc32

import wrapt

from sortedrl.core.rollout import Prompt
from sortedrl.engines.lengths import LognormalLengths

MEDIAN = 636.85
MOST_WAITING_SECONDS = 1800.0  # for the turn
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


def take_turns(module: ModuleType) -> None:
    plain, turn = module.PPOTrainer.fit, Path(os.environ["JOB_TURN"])

    @functools.wraps(plain)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.checkpoint_manager.sleep_replicas()
        turn.with_name("ready").touch()
        until = time.time() + MOST_WAITING_SECONDS
        while not turn.exists():
            if time.time() > until:
                raise TimeoutError(f"{turn} did not come: whoever started this job is gone")
            time.sleep(0.2)
        self.checkpoint_manager.update_weights(self.global_steps)  # wakes the servers, as after every step
        return plain(self, *args, **kwargs)

    module.PPOTrainer.fit = fit


def end_in_time(module: ModuleType) -> None:
    """No step starts for which, by the longer of the last two, there is no time. The first one compiles."""
    plain, turn = module.PPOTrainer._step_once, Path(os.environ["JOB_TURN"])
    recent: deque[float] = deque(maxlen=2)

    @functools.wraps(plain)
    def step_once(self: Any, *args: Any, **kwargs: Any) -> Any:
        began = time.time()
        done = plain(self, *args, **kwargs)
        recent.append(time.time() - began)
        if time.time() + OTHER_SECONDS + 1.1 * max(recent) > float(turn.read_text()):
            self.total_training_steps = self.global_steps
        return done

    module.PPOTrainer._step_once = step_once


def name_apart(module: ModuleType) -> None:
    """verl names the sockets for weights by Ray's id of the job, which is the same in every cluster on this host."""
    plain = module.RuntimeContext.get_job_id
    mark = crc32(os.environ["JOB_TURN"].encode())
    module.RuntimeContext.get_job_id = lambda self: f"{plain(self)}-{mark:08x}"


if os.environ.get("JOB_TURN") and __name__ == "forced":
    wrapt.register_post_import_hook(force_lengths, "verl.experimental.agent_loop.single_turn_agent_loop")
    wrapt.register_post_import_hook(take_turns, "verl.trainer.ppo.v1.trainer_base")
    wrapt.register_post_import_hook(end_in_time, "verl.trainer.ppo.v1.trainer_base")
    wrapt.register_post_import_hook(name_apart, "ray.runtime_context")
