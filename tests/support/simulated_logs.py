"""Event logs of small simulated runs, as files."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sortedrl.core import Schedule
from sortedrl.core.events import Event
from sortedrl.engines.lengths import LognormalLengths
from sortedrl.log.lines import JsonLines
from sortedrl.observe.metrics import Metrics
from sortedrl.observe.run_metrics import RunMetrics
from sortedrl.studies.workload import Workload
from sortedrl.studies.workload import run as simulate

SMALL = Workload(
    lengths=LognormalLengths(mu=4.0, between=0.8, within=0.6, limit=400),
    slots=8,
    prompts=64,
    prompt_tokens=4,
    learner_seconds_per_update=3.0,
    weight_update_seconds=0.5,
)
NEEDS: dict[str, dict[str, Any]] = {"async-pool": {"max_staleness": 2, "overlap": True}}
SCHEDULE = Schedule(mode="baseline", rollouts_per_update=8, prompts_per_cohort=32, max_response_tokens=400)


def simulated_log(path: Path, mode: str = "partial", *, seed: int = 0, workload: Workload = SMALL) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        simulate(workload, replace(SCHEDULE, mode=mode, seed=seed, **NEEDS.get(mode, {})), JsonLines(file))
    return path


def figures_of(log: Sequence[Event]) -> RunMetrics:
    return Metrics().fold(log).run_metrics()
