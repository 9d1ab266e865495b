"""How far one controller scales: events per second and memory with the slots of a whole cluster (docs/many_gpus.md).

    python benchmarks/controller_scale.py --engines 1024 --slots 256

The engines are simulated as one with `engines x slots` slots, in virtual time. This measures the CPU time of scheduler,
buffer and metrics (and of the simulated engine, which a real cluster does not need). `needed` is the required rate:
events per virtual second.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import time
from collections import Counter

from sortedrl.core.controller import Controller
from sortedrl.core.engine import Change, Request
from sortedrl.core.events import Event, EventLog
from sortedrl.core.prompts import Prompts
from sortedrl.core.schedule import Schedule
from sortedrl.engines.lengths import LognormalLengths
from sortedrl.engines.simulated import SimulatedEngine
from sortedrl.engines.simulated_loop import SimulatedScorer
from sortedrl.engines.step_time import StepTime
from sortedrl.observe.metrics import Metrics
from sortedrl.studies.workload import SimulatedPrompts, Workload, simulated_engine

STEP_SECONDS = 0.02  # of every engine, independent of their number


class Timed:
    """The simulated engine, with its own CPU time measured separately."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self.engine = engine
        self.slots = engine.slots
        self.seconds = 0.0

    def now(self) -> float:
        return self.engine.now()

    def submit(self, requests: list[Request]) -> None:
        began = time.process_time()
        self.engine.submit(requests)
        self.seconds += time.process_time() - began

    def poll(self, until: float | None = None) -> list[Change]:
        began = time.process_time()
        changes = self.engine.poll(until)
        self.seconds += time.process_time() - began
        return changes

    def abort(self, ids: list[int]) -> list[Change]:
        began = time.process_time()
        changes = self.engine.abort(ids)
        self.seconds += time.process_time() - began
        return changes

    def update_weights(self, weights: object, version: int) -> None:
        self.engine.update_weights(weights, version)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engines", type=int, default=1024)
    parser.add_argument(
        "--slots", type=int, default=256, help="per engine (vLLM max_num_seqs, SGLang max_running_requests)"
    )
    parser.add_argument("--median-length", type=float, default=8000.0)
    parser.add_argument("--limit", type=int, default=32_768)
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--mode", default="partial+elevator")
    arguments = parser.parse_args()
    slots = arguments.engines * arguments.slots
    steady = StepTime(((1, STEP_SECONDS), (2 * slots, STEP_SECONDS)))
    workload = Workload(
        lengths=LognormalLengths(mu=math.log(arguments.median_length), limit=arguments.limit),
        step_time=steady,
        slots=slots,
        prompts=(arguments.updates + 2) * slots,
    )
    schedule = Schedule(
        mode=arguments.mode,
        rollouts_per_update=slots,
        prompts_per_cohort=2 * slots,
        max_response_tokens=arguments.limit,
    )
    counts: Counter[str] = Counter()

    def count(event: Event) -> None:
        counts[type(event).__name__] += 1

    simulated = simulated_engine(workload)
    engine = Timed(simulated)
    controller = Controller(
        engine,
        Prompts(SimulatedPrompts(workload.prompts, 128), epochs=1, seed=0),
        SimulatedScorer(simulated),
        schedule,
        log=EventLog(Metrics(), count),
        max_updates=arguments.updates,
    )
    began = time.process_time()
    for _ in controller:
        controller.publish()
    seconds = time.process_time() - began
    events, own = sum(counts.values()), seconds - engine.seconds
    print(
        json.dumps(
            {
                "slots": slots,
                "updates": arguments.updates,
                "events": events,
                "cpu_seconds": round(seconds, 1),
                "of_which_simulated_engine": round(engine.seconds, 1),
                "events_per_second": round(events / own),
                "virtual_seconds": round(simulated.now()),
                "needed_events_per_second": round(events / simulated.now()),
                "peak_memory_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
                "by_kind": dict(counts.most_common()),
            }
        )
    )


if __name__ == "__main__":
    main()
