"""`simulate` and `plan` simulate a schedule once if another one, by the rules, has the same run."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from sortedrl.core.events import Event, RunBegan
from sortedrl.core.schedule import Schedule
from sortedrl.engines.episodes import DrawnEpisodes
from sortedrl.engines.lengths import LognormalLengths
from sortedrl.engines.step_time import PRESETS
from sortedrl.studies.simulate import IN_LOAD_ORDER, Case, cases, compare
from sortedrl.studies.workload import Workload, run, with_mode

SHORT = LognormalLengths(mu=5.0, limit=1000)


def log_of(workload: Workload, schedule: Schedule) -> list[Event]:
    log: list[Event] = []
    run(workload, schedule, log.append)
    assert isinstance(log[0], RunBegan)
    return log[1:]  # the first event has the mode


@pytest.mark.parametrize(("mode", "simpler"), IN_LOAD_ORDER.items())
@pytest.mark.parametrize("seed", range(12))
def test_modes_that_sort_by_expected_length_run_in_load_order_if_no_length_is_known(
    mode: str, simpler: str, seed: int
) -> None:
    rng = random.Random(seed)
    update = rng.choice((8, 16))
    schedule = Schedule(
        rollouts_per_update=update,
        prompts_per_cohort=rng.choice((1, 2, 4)) * update,
        whole_groups=rng.random() < 0.3,
        oversubscribe=rng.choice((None, 1.2)),
        max_staleness=rng.choice((None, 2)),
        max_response_tokens=rng.choice((500, 8192)),
        seed=seed,
    )
    workload = Workload(
        lengths=SHORT,
        episodes=DrawnEpisodes(lengths=SHORT, turns=3) if rng.random() < 0.5 else None,
        slots=rng.choice((4, 16, 40)),
        prompts=6 * update + rng.randrange(update),
        step_time=PRESETS["h200-8b"],
        weight_update_seconds=rng.choice((0.0, 1.0)),
        learner_seconds_per_token=rng.choice((0.0, 1e-3)),
        reuse_kv_cache=rng.random() < 0.5,
        stream=rng.random() < 0.5,
        hold_slots=rng.random() < 0.3,
    )
    assert log_of(workload, with_mode(schedule, mode)) == log_of(workload, with_mode(schedule, simpler))


def test_runs_that_are_alike_are_simulated_once_and_each_has_its_row() -> None:
    workload = Workload(lengths=SHORT, slots=8, prompts=64)
    modes = ("baseline", "baseline+longest-first", "partial", "partial+planned")
    counts: list[tuple[int, int]] = []
    rows = cases(workload, Schedule(rollouts_per_update=16, prompts_per_cohort=32), modes, ("cold",))
    found = compare(rows, (0, 1), on_progress=lambda done, total: counts.append((done, total)))
    assert counts[-1] == (6, 6)  # two runs and the limit, for each seed
    assert [row["mode"] for row in found.values()] == list(modes)
    assert list(found) == list(modes)


@pytest.mark.parametrize(
    "change",
    [
        {"expectation": "warm"},
        {"epochs": 2},
        {"kv_tokens": 5000},
        {"score_seconds": 1.0},
        {"overlap": True},
        {"rollouts_per_prompt": 2},
    ],
)
def test_where_a_length_may_be_known_every_mode_is_simulated(change: dict[str, Any]) -> None:
    schedule = Schedule(rollouts_per_update=16, prompts_per_cohort=32)
    of_schedule = {key: value for key, value in change.items() if hasattr(schedule, key)}
    of_workload = {key: value for key, value in change.items() if key not in of_schedule}
    workload = replace(Workload(lengths=SHORT, slots=8, prompts=64), **of_workload)
    schedule = replace(schedule, **of_schedule)
    rows = [Case(mode, workload, with_mode(schedule, mode)) for mode in ("partial", "partial+planned")]
    counts: list[int] = []
    compare(rows, (0,), on_progress=lambda done, total: counts.append(total))
    assert counts[-1] == 3
