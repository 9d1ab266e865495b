"""Streaming in the simulator: what it gains, where, and that it changes nothing else."""

import json
from dataclasses import replace
from typing import Any

import pytest

from sortedrl.core.schedule import Schedule
from sortedrl.engines.lengths import LognormalLengths
from sortedrl.engines.simulated_loop import SHARED_DECODING, speed_at
from sortedrl.engines.step_time import PRESETS
from sortedrl.observe.run_metrics import RunMetrics
from sortedrl.studies.plan import Allowed, is_faster, plan
from sortedrl.studies.workload import Workload, run

# One harvest of 128 rollouts takes about 60 s here, and the learner then about 0.6 of that.
H200 = Workload(
    lengths=LognormalLengths(limit=8192),
    step_time=PRESETS["h200-8b"],
    prompts=8 * 128,
    learner_seconds_per_token=1.45e-4,
    weight_update_seconds=1.0,
)
SINGLE = Schedule(mode="baseline", rollouts_per_update=128, prompts_per_cohort=128)
GROUPS = replace(SINGLE, rollouts_per_prompt=8, prompts_per_cohort=16, whole_groups=True)


def learner_over_harvest(found: RunMetrics) -> float:
    return found.idle_parts["learner"] * found.wall_seconds / found.seconds


def gain(workload: Workload, schedule: Schedule) -> float:
    alone, streamed = run(workload, schedule), run(replace(workload, stream=True), schedule)
    assert streamed.trained_tokens == alone.trained_tokens
    assert streamed.seconds == pytest.approx(alone.seconds, rel=1e-9) or workload.share_gpu
    return alone.wall_seconds / streamed.wall_seconds


@pytest.mark.parametrize(("schedule", "least"), [(SINGLE, 1.35), (replace(GROUPS, prompts_per_cohort=16), 1.25)])
def test_the_baseline_gains_on_separate_devices(schedule: Schedule, least: float) -> None:
    workload = replace(H200, prompts=8 * 128 // schedule.rollouts_per_prompt)
    assert 0.5 < learner_over_harvest(run(workload, schedule)) < 0.7
    assert gain(workload, schedule) >= least
    assert gain(replace(workload, weight_update_seconds=0.0), schedule) > gain(workload, schedule)


def test_nothing_is_stale_and_the_work_is_counted() -> None:
    found = run(replace(H200, stream=True), SINGLE)
    assert found.staleness_max == 0
    assert 0.5 < found.streamed_fraction < 1
    in_turn = found.idle_parts["learner"] * found.wall_seconds
    total = H200.learner_seconds_per_token * found.trained_tokens
    assert found.streamed_seconds + in_turn == pytest.approx(total, rel=0.05)


def test_a_shared_gpu_gains_less_than_its_measured_speeds_allow() -> None:
    assert 1.0 < gain(replace(H200, share_gpu=True), SINGLE) < 1.19
    assert [round(speed_at(SHARED_DECODING, n), 3) for n in (1, 8, 36, 64, 128)] == [0.59, 0.59, 0.525, 0.46, 0.46]


@pytest.mark.parametrize("mode", ["partial", "partial+elevator", "on-policy", "on-policy+planned", "cohort-at-once"])
def test_other_modes_lose_nothing(mode: str) -> None:
    schedule = replace(SINGLE, mode=mode, prompts_per_cohort=512)
    workload = replace(H200, prompts=1024)
    alone, streamed = run(workload, schedule), run(replace(workload, stream=True), schedule)
    assert streamed.wall_seconds <= alone.wall_seconds * 1.001
    assert (streamed.streamed_fraction > 0) == (mode != "cohort-at-once")


def test_plan_recommends_it_where_it_pays() -> None:
    allowed = Allowed(staleness_mean=0.0, cohort_updates=2)
    small = replace(H200, slots=32, prompts=64, learner_seconds_per_token=4 * H200.learner_seconds_per_token)
    schedule = replace(SINGLE, rollouts_per_update=32, prompts_per_cohort=64)
    found = plan(small, schedule, allowed)
    assert found.streamed is not None and found.streamed.run_of_limit > found.choice.run_of_limit
    assert "add --stream (exact)" in found.reason
    shared = found.streamed_on_shared_gpu
    assert shared is not None and found.choice.run_of_limit < shared.run_of_limit < found.streamed.run_of_limit
    assert ("stream_sms" in found.reason) == is_faster(shared, found.choice)
    without = plan(replace(small, learner_seconds_per_token=0.0), schedule, allowed)
    assert without.streamed is None and without.streamed_on_shared_gpu is None and "--stream" not in without.reason


def test_the_command(told: Any) -> None:
    words = "simulate --json --cohorts 2 --prompts-per-cohort 256 --modes baseline --learner-seconds-per-token 2e-4"

    def wall(*more: str) -> Any:
        return json.loads(told(*words.split(), *more).out)["modes"]["baseline"]["wall_seconds"]

    assert wall("--stream") < wall("--stream", "--share-gpu") < wall()
