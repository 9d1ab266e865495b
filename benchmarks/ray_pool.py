"""How many engine events per second one controller handles from a Ray pool, and at what CPU cost.

    python benchmarks/ray_pool.py --engines 1 2 4 --seconds 20

Each engine has 256 slots and delivers one token per slot every 20 ms, like an 8B model on a GPU. No model runs, so the
load comes only from the controller, Ray and the events. All engines and the controller share this machine. The maximum
is 12,800 deltas per second and engine; `kept up` is the fraction of it that reached the controller.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import ray

from sortedrl.core import Controller, EventLog, Prompt, Prompts, Request, Schedule, ScoreAtOnce
from sortedrl.core.engine import Change, RequestFinished, RequestStarted, Tokens
from sortedrl.core.rollout import Segment
from sortedrl.integrations.ray import RayPool

SLOTS = 256
STEP_SECONDS = 0.02


class TickingEngine:
    """One token per running request and tick; a request ends after 100 to 899 tokens."""

    def __init__(self) -> None:
        self.slots = SLOTS
        self._version = 0
        self._queue: deque[Request] = deque()
        self._made: dict[int, int] = {}
        self._running: dict[int, Request] = {}
        self._changes: list[Change] = []
        self._next_tick = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter()

    def submit(self, requests: Sequence[Request]) -> None:
        self._queue.extend(requests)
        self._admit()

    def poll(self, until: float | None = None) -> list[Change]:
        end = self.now() + 1.0 if until is None else until
        while not self._changes and (wait := min(self._next_tick, end) - self.now()) > 0:
            time.sleep(wait)
        if self._running and self.now() >= self._next_tick:
            self._tick()
        return self._report()

    def abort(self, ids: Sequence[int]) -> list[Change]:
        self._queue = deque(request for request in self._queue if request.id not in set(ids))
        for id in ids:
            self._running.pop(id, None)
            self._made.pop(id, None)
        return self._report()

    def update_weights(self, weights: Any, version: int) -> None:
        self._version = version

    def _admit(self) -> None:
        while self._queue and len(self._running) < self.slots:
            request = self._queue.popleft()
            self._running[request.id] = request
            self._made[request.id] = request.prefix_length
            self._changes.append(RequestStarted(request.id, self.now()))

    def _tick(self) -> None:
        now = self.now()
        self._next_tick = max(self._next_tick + STEP_SECONDS, now - STEP_SECONDS)
        for id, request in list(self._running.items()):
            position = self._made[id]
            self._made[id] = position + 1
            self._changes.append(Tokens(id, now, Segment([position], [-1.0], self._version)))
            if position + 1 >= 100 + request.seed % 800:
                del self._running[id], self._made[id]
                self._changes.append(RequestFinished(id, now, truncated=False))
        self._admit()

    def _report(self) -> list[Change]:
        changes, self._changes = self._changes, []
        return changes


class Counted:
    """Counts the changes that a pool delivers."""

    def __init__(self, pool: RayPool) -> None:
        self.slots = pool.slots
        self.changes = self.tokens = 0
        self._pool = pool
        self.now, self.submit, self.update_weights = pool.now, pool.submit, pool.update_weights

    def poll(self, until: float | None = None) -> list[Change]:
        return self._counted(self._pool.poll(until))

    def abort(self, ids: Sequence[int]) -> list[Change]:
        return self._counted(self._pool.abort(ids))

    def _counted(self, changes: list[Change]) -> list[Change]:
        self.changes += len(changes)
        self.tokens += sum(len(change.segment) for change in changes if isinstance(change, Tokens))
        return changes


def measure(engines: int, seconds: float) -> dict[str, Any]:
    pool = RayPool(TickingEngine, engines=engines, num_cpus=1)
    engine = Counted(pool)
    update = SLOTS * engines
    schedule = Schedule(
        mode="partial+elevator", rollouts_per_update=update, prompts_per_cohort=4 * update, max_response_tokens=1000
    )
    prompts = Prompts([Prompt(f"p{i}", [1]) for i in range(64 * update)], epochs=1)
    controller = Controller(engine, prompts, ScoreAtOnce(len), schedule, log=EventLog())
    began, cpu_began = time.perf_counter(), time.process_time()
    updates = 0
    for _ in controller:
        updates += 1
        controller.publish()
        if time.perf_counter() - began > seconds:
            break
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    pool.close()
    ideal = engines * SLOTS / STEP_SECONDS
    return {
        "engines": engines,
        "slots": pool.slots,
        "seconds": wall,
        "updates": updates,
        "deltas_per_second": engine.tokens / wall,
        "events_per_second": engine.changes / wall,
        "kept_up": engine.tokens / wall / ideal,
        "controller_cpu": cpu / wall,
        "microseconds_per_delta": 1e6 * cpu / max(1, engine.tokens),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    ray.init(num_cpus=max(arguments.engines), include_dashboard=False, logging_level="error", log_to_driver=False)
    rows = [measure(engines, arguments.seconds) for engines in arguments.engines]
    ray.shutdown()
    if arguments.json:
        print(json.dumps({"cores": os.cpu_count(), "ray": ray.__version__, "rows": rows}))
        return
    print(f"{os.cpu_count()} cores, Ray {ray.__version__}, engines of {SLOTS} slots, a delta per slot every 20 ms")
    print("engines  deltas/s  events/s  kept up  controller CPU  us per delta")
    for row in rows:
        print(
            f"{row['engines']:7d}  {row['deltas_per_second']:8,.0f}  {row['events_per_second']:8,.0f}  "
            f"{row['kept_up']:7.0%}  {row['controller_cpu']:14.0%}  {row['microseconds_per_delta']:12.1f}"
        )


if __name__ == "__main__":
    main()
