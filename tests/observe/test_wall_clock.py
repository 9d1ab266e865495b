"""What a run waits for: hand-made logs with known answers, and simulated runs with a known bottleneck."""

from typing import Any

import pytest
from hypothesis import given, settings

from random_runs import troubled
from scenarios import MODES, EnvironmentCall, Run, Scenario, scenario
from sortedrl import Schedule
from sortedrl.core.events import Event, Finished, Phase, Published, RunBegan, Scored, Started, Submitted, Updated
from sortedrl.engines.lengths import LognormalLengths
from sortedrl.engines.step_time import PRESETS
from sortedrl.observe.metrics import Metrics
from sortedrl.observe.wall_clock import PARTS, bottleneck, bottleneck_line
from sortedrl.studies.workload import Workload, run


def parts(*log: Event) -> dict[str, float]:
    began: tuple[Event, ...] = (RunBegan(0.0, 1, "partial", {}), Phase(0.0, "harvest"))
    return Metrics().fold([*began, *log]).run_metrics().wall_parts


def generated(rollout: int, start: float, end: float) -> tuple[Event, ...]:
    return Submitted(start, rollout, 0, 4, 0, 1.0), Started(start, rollout, 0), Finished(end, rollout, 3, 3, False)


def updated(at: float, *rollouts: int) -> Updated:
    count = len(rollouts)
    return Updated(at, 0, 0, 0, rollouts, (3,) * count, (1.0,) * count, (((0, 3),),) * count, (0,) * count)


def test_each_phase_is_the_time_of_its_part() -> None:
    found = parts(
        *generated(0, 0.0, 4.0), Scored(4.0, 0, 1.0), updated(4.0, 0), Phase(4.0, "learner"), Published(7.0, 1),
        Phase(7.0, "weights"), Phase(8.0, "evaluation"), Phase(18.0, "checkpoint"), Phase(19.0, "end"), Phase(20.0, ""),
    )  # fmt: skip
    seconds = {"generation": 4, "learner": 3, "weights": 1, "evaluation": 10, "checkpoints": 1, "other": 1}
    assert found == pytest.approx({part: seconds.get(part, 0) / 20 for part in PARTS})
    assert bottleneck(found) == "evaluation"


def test_empty_slots_while_scores_are_missing_are_scoring() -> None:
    found = parts(*generated(0, 0.0, 2.0), Scored(10.0, 0, 1.0), updated(10.0, 0), Phase(10.0, "end"))
    assert found["generation"] == pytest.approx(0.2) and found["scoring"] == pytest.approx(0.8)


def test_slots_that_drain_before_the_last_response_ends_are_generation() -> None:
    log = (*generated(0, 0.0, 2.0), Scored(2.0, 0, 1.0), *generated(1, 9.0, 10.0), Scored(10.0, 1, 1.0))
    assert parts(*log, updated(10.0, 0, 1), Phase(10.0, "end"))["scoring"] == 0
    assert parts(*log[:4], Phase(8.0, "end"))["scoring"] == 0, "nor if the harvest is not over yet"


def test_a_busy_engine_ahead_of_the_scores_waits_for_them() -> None:
    """One of eight responses has a score when the update is made: the engine worked for later updates."""
    log = [event for i in range(8) for event in generated(i, float(i), i + 1.0)]
    assert parts(*log, Scored(8.0, 0, 1.0), updated(8.0, 0), Phase(8.0, "end"))["scoring"] == pytest.approx(
        7 / 8 * 7 / 8
    )


def test_a_backlog_that_does_not_grow_is_no_bottleneck() -> None:
    """Every score takes 3 s, as long as three responses, but each second has its score."""
    log: list[Event] = []
    for i in range(50):
        log += generated(i, float(i), i + 1.0)
        if i >= 3:
            log += [Scored(i + 1.0, i - 3, 1.0), updated(i + 1.0, i - 3), Published(i + 1.0, i)]
    found = parts(*log, Phase(50.0, "end"))
    assert found["scoring"] < 0.1 and found["generation"] > 0.9


def test_with_overlap_the_run_waits_for_the_learner_until_it_publishes() -> None:
    found = parts(
        *generated(0, 0.0, 1.0), Scored(1.0, 0, 1.0), updated(1.0, 0), *generated(1, 1.0, 9.0), Scored(9.0, 1, 1.0),
        Published(9.0, 1), updated(10.0, 1), Published(10.0, 2), Phase(10.0, "end"),
    )  # fmt: skip
    assert found["learner"] == pytest.approx(0.8) and found["generation"] == pytest.approx(0.2)


@settings(deadline=None)
@given(troubled())
def test_the_parts_of_any_run_add_up_to_one(scenario: Scenario) -> None:
    found = Run(scenario).to_end().run_metrics.wall_parts
    assert set(found) == set(PARTS) and min(found.values()) >= 0
    assert sum(found.values()) == pytest.approx(1) or not any(found.values())


def run_parts(mode: str, **seconds: float) -> dict[str, float]:
    lengths, overlap = LognormalLengths(limit=512), mode == "async-pool"  # which needs a bound, too
    sizes: dict[str, Any] = {"lengths": lengths, "slots": 16, "prompts": 256, "prompt_tokens": 8}
    schedule = Schedule(
        mode=mode, rollouts_per_update=16, prompts_per_cohort=64, max_response_tokens=512, score_wait_seconds=1e6,
        overlap=overlap, max_staleness=8 if overlap else None,
    )  # fmt: skip
    return run(Workload(**sizes, step_time=PRESETS["h200-8b"], **seconds), schedule).wall_parts


@pytest.mark.parametrize("mode", MODES)
def test_a_simulated_run_names_its_bottleneck(mode: str) -> None:
    quick = run_parts(mode)
    assert bottleneck(quick) == "generation" and quick["scoring"] < 0.02
    assert bottleneck(run_parts(mode, learner_seconds_per_update=100.0)) == "learner"
    slow = run_parts(mode, score_seconds=200.0)
    assert bottleneck(slow) == "scoring" and slow["scoring"] > 0.5, slow


def test_the_line_names_the_bottleneck_and_the_rest() -> None:
    found = dict.fromkeys(PARTS, 0.0) | {"weights": 0.6, "generation": 0.3, "other": 0.1}
    assert bottleneck_line(found) == (
        "bottleneck: weight updates, 60% of wall-clock time (generation 30%, learner 0%, scoring 0%, other 10%)"
    )


def test_the_line_names_environments_and_the_setting() -> None:
    found = dict.fromkeys(PARTS, 0.0) | {"environments": 0.7, "generation": 0.3}
    line = bottleneck_line(found)
    assert line.startswith("bottleneck: environments, 70% of wall-clock time (generation 30%, ")
    assert "oversubscribe" in line
    assert "environments 20%" in bottleneck_line(found | {"environments": 0.2, "generation": 0.8})


@pytest.mark.parametrize(("seconds", "mode"), [(5.0, "baseline"), (200.0, "partial+elevator")])
def test_empty_slots_while_environments_work_are_the_environments(seconds: float, mode: str) -> None:
    """Two turns, each followed by a call: no slot is busy then in the baseline, and few are in the elevator, because it
    stops opening rollouts."""
    knobs: dict[str, Any] = {"turns": (2,), "observations": (3,), "calls": (EnvironmentCall(seconds=seconds),)}
    metrics = Run(scenario(mode, [2] * 40, slots=2, rollouts_per_update=2, **knobs)).to_end().run_metrics
    assert bottleneck(metrics.wall_parts) == "environments"
    assert metrics.wall_parts["environments"] == pytest.approx(metrics.idle_parts["environment"])
    assert sum(metrics.wall_parts.values()) == pytest.approx(1)


def test_a_slow_score_after_a_slow_environment_is_counted_once() -> None:
    """2 s of decoding, 5 s in the environment, 2 s, 5 s, then 6 s for the score."""
    knobs: dict[str, Any] = {"turns": (2,), "observations": (3,), "score_seconds": (6.0,)}
    knobs["calls"] = (EnvironmentCall(seconds=5.0, rewards=False),)
    found = Run(scenario("baseline", [2], slots=1, rollouts_per_update=1, **knobs)).to_end().run_metrics.wall_parts
    assert [round(20 * found[part], 6) for part in ("generation", "environments", "scoring")] == [4, 10, 6]
