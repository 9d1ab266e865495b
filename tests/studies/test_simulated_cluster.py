"""`simulate` for a cluster: the learner's time, a learner on its own GPUs, weight updates, and one cluster two ways."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from statistics import fmean
from typing import Any

import pytest

from sortedrl.core import Event, events
from sortedrl.core.configuration import ConfigurationError
from sortedrl.engines.step_time import PRESETS
from sortedrl.observe.run_metrics import RunMetrics
from sortedrl.studies.simulate import SimulateSettings
from sortedrl.studies.workload import Workload, parts_of, run, with_mode
from sortedrl.studies.workload_settings import simulated_schedule, simulated_workload

SMALL: dict[str, Any] = {"slots": 32, "rollouts_per_update": 32, "cohorts": 4}


def played(mode: str, *, seed: int = 0, **flags: Any) -> RunMetrics:
    settings = SimulateSettings(**flags)
    settings.check()
    return run(simulated_workload(settings), replace(with_mode(simulated_schedule(settings), mode), seed=seed))


def test_learner_seconds_are_those_of_an_update_of_the_configured_size() -> None:
    found = played("baseline", **SMALL, learner_seconds=20.0)
    assert found.updates == 16 and found.wall_seconds - found.seconds == pytest.approx(16 * 20.0, rel=0.1)
    larger = played("baseline", **SMALL | {"rollouts_per_update": 64}, learner_seconds=20.0)
    assert (larger.wall_seconds - larger.seconds) / larger.updates == pytest.approx(20.0, rel=0.1)
    bounded = played("partial+elevator", **SMALL, learner_seconds=20.0, max_staleness=1)
    assert bounded.rollouts_per_update_mean > 2 * 32, "the harvest waits for old rollouts"
    seconds = (bounded.wall_seconds - bounded.seconds) / bounded.updates
    assert seconds == pytest.approx(20.0 * bounded.rollouts_per_update_mean / 32, rel=0.1), "it grows with the update"


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"learner_seconds": 5.0, "learner_seconds_per_token": 1e-4}, "a part of it is set, too"),
        ({"learner_seconds": 5.0, "learner_seconds_per_update": 1.0}, "a part of it is set, too"),
        ({"stream": True}, "work per token is not set"),
        ({"share_gpu": True}, "engine and learner take turns"),
        ({"share_gpu": True, "stream": True, "separate_learner": True, "learner_seconds": 5.0}, "no GPU is shared"),
        ({"weights_gb": 16.0}, "both a size and a bandwidth"),
        ({"weights_gb": 16.0, "weights_gb_per_second": 8.0, "weight_update_seconds": 1.0}, "give another time"),
        ({"controllers": 4}, "engines = 1: 4 controllers get equal parts of it. Use a multiple of 4"),
        ({"controllers": 2, "engines": 2, "slots": 127}, "slots = 127: 2 controllers"),
        (
            {"controllers": 2, "engines": 2, "rollouts_per_prompt": 8, "whole_groups": True, "rollouts_per_update": 24},
            "Use a multiple of 16",
        ),
        ({"controllers": 2, "engines": 2, "overlap": True}, "engine and learner take turns"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(flags: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        SimulateSettings(**flags).check()


def test_a_learner_on_its_own_gpus_works_while_the_engine_generates() -> None:
    """Modes that keep tokens overlap; the others stream, and no token becomes stale by it."""
    learner: dict[str, Any] = {"learner_seconds": 20.0, "max_staleness": 4}
    for mode in ("baseline", "partial+elevator"):
        together = played(mode, **SMALL, **learner)
        apart = played(mode, **SMALL, **learner, separate_learner=True)
        assert apart.trained_tokens_per_hour > 1.1 * together.trained_tokens_per_hour
        assert (apart.streamed_fraction > 0.5) == (mode == "baseline")
        assert apart.staleness_max == 0 if mode == "baseline" else apart.staleness_mean > together.staleness_mean


def test_engines_that_the_learner_slows_down_between_two_steps_lose_no_token(caplog: pytest.LogCaptureFixture) -> None:
    """Rounding must not put the end of a response before its last tokens."""
    flags = {"engines": 4, "slots": 64, "rollouts_per_update": 64, "learner_seconds": 20.0, "cohorts": 6}
    for seed in range(3):
        found = played("baseline", seed=seed, **flags, stream=True, share_gpu=True)
        assert found.trained == found.loaded and found.rejected == found.failures == 0
    assert not caplog.records


def test_a_weight_update_takes_the_time_of_its_bytes() -> None:
    flags = SimulateSettings(weights_gb=16.0, weights_gb_per_second=8.0)
    assert simulated_workload(flags).weight_update_seconds == 2.0
    assert simulated_workload(SimulateSettings(weight_update_seconds=3.0)).weight_update_seconds == 3.0
    several = Workload(slots=4, engines=2, prompts=4, weight_update_seconds=2.0)
    alone = replace(several, engines=1)
    schedule = simulated_schedule(SimulateSettings(rollouts_per_update=2))
    waits = [found.wall_seconds - found.seconds for found in (run(several, schedule), run(alone, schedule))]
    assert waits[0] == pytest.approx(waits[1]) and waits[0] > 0, "all engines get them at once"


def test_controllers_meet_at_every_update_and_train_on_everything_once() -> None:
    """Their parts differ by the longest response, and all wait for it; one controller never waits for another."""
    sizes: dict[str, Any] = {"engines": 4, "slots": 128, "rollouts_per_update": 128, "cohorts": 4}
    log: list[Event] = []
    settings = SimulateSettings(**sizes, controllers=4, learner_seconds=20.0)
    settings.check()
    workload, schedule = simulated_workload(settings), simulated_schedule(settings)
    parts = parts_of(workload, schedule)
    assert [(part.slots, part.engines, of_part.rollouts_per_update) for part, of_part in parts] == [(32, 1, 32)] * 4
    assert sum(part.prompts for part, _ in parts) == workload.prompts
    found = run(workload, with_mode(schedule, "baseline"), log.append)
    alone = run(replace(workload, controllers=1), with_mode(schedule, "baseline"))
    assert found.slots == alone.slots == 128 and found.loaded == found.trained == alone.trained == 4 * 512
    assert found.updates == alone.updates == 16 and found.rollouts_per_update_mean == 128
    assert found.generated_tokens == found.trained_tokens + found.dropped_tokens + found.cached_tokens
    assert 0.5 * alone.trained_tokens_per_hour < found.trained_tokens_per_hour < alone.trained_tokens_per_hour
    assert found.trained_tokens_per_hour == pytest.approx(3600 * found.trained_tokens / found.wall_seconds)
    assert sum(isinstance(event, events.Updated) for event in log) == 16, "the first controller's events"


def on_engines(engines: int, mode: str, seed: int = 0, **flags: Any) -> RunMetrics:
    sizes = {"engines": engines, "slots": 256 * engines, "rollouts_per_update": 64 * engines, "cohorts": 8}
    groups = {"rollouts_per_prompt": 8, "whole_groups": True, "learner_seconds": 60.0}
    return played(mode, seed=seed, **sizes, **groups, **flags, median_length=2500.0, max_response_tokens=16_384)


@pytest.mark.parametrize("bound", [None, 4])
def test_a_cluster_is_as_fast_and_as_stale_as_its_engines_alone(bound: int | None) -> None:
    """Eight engines of 256 slots with updates of 512, and one of them with updates of 64."""
    alone = [on_engines(1, "partial+elevator", seed, max_staleness=bound) for seed in range(6)]
    cluster = on_engines(8, "partial+elevator", max_staleness=bound)
    speed = fmean(found.trained_tokens_per_hour for found in alone)
    assert cluster.trained_tokens_per_hour == pytest.approx(8 * speed, rel=0.05)
    assert cluster.staleness_mean == pytest.approx(fmean(found.staleness_mean for found in alone), rel=0.05)
    if bound is not None:
        assert max(found.staleness_max for found in [*alone, cluster]) <= bound


@pytest.mark.parametrize("mode", ["partial+elevator", "april"])
def test_a_learner_slower_than_the_engine_does_not_make_data_ever_staler(mode: str) -> None:
    """No cohort gate holds rollouts back here: ready ones would pile up with every update, or make updates larger."""
    for more in ({}, {"max_staleness": 2}):
        slow = SMALL | {"cohorts": 12, "overlap": True, "separate_learner": True, "learner_seconds": 60.0} | more
        found = played(mode, **slow)
        assert found.staleness_mean < 4 and found.staleness_max <= 8
        assert found.rollouts_per_update_mean < 1.5 * 32
        assert found.trained / 32 * 60.0 == pytest.approx(found.wall_seconds, rel=0.1), "the learner is always busy"


def test_the_baseline_of_a_cluster_is_slower_only_because_it_waits_for_the_longest_of_more_responses() -> None:
    """How long it waits follows from the distribution of lengths and the step time alone."""
    step_time, draw = PRESETS["h200-8b"], random.Random(0)

    def group() -> list[int]:
        of_prompt = draw.gauss(0, 0.8)
        return [min(16_384, round(2500 * math.exp(of_prompt + draw.gauss(0, 0.6)))) for _ in range(8)]

    def harvest(lengths: Sequence[int]) -> float:
        seconds, done = len(lengths) * 128 * step_time.per_prefill_token, 0
        for ended, length in enumerate(sorted(lengths)):
            running, steps = len(lengths) - ended, length - done
            seconds += steps * (
                step_time.at(running) + step_time.per_cached_token * running * (128 + (done + length - 1) / 2)
            )
            done = length
        return seconds

    updates = [[group() for _ in range(64)] for _ in range(150)]
    alone = fmean(harvest([*chain(*groups[i : i + 8])]) for groups in updates for i in range(0, 64, 8))
    spread = fmean(max(harvest([group[i] for group in groups]) for i in range(8)) for groups in updates)
    assert spread > 1.1 * alone
    found = on_engines(8, "baseline")
    assert found.seconds / found.updates == pytest.approx(spread, rel=0.02)
    few = [on_engines(1, "baseline", seed) for seed in range(4)]
    assert fmean(one.seconds / one.updates for one in few) == pytest.approx(alone, rel=0.06)
