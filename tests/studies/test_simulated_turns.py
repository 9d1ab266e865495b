"""Simulated rollouts of several turns: the limit, freed and held slots, the prefix cache and its memory."""

from __future__ import annotations

import math
import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from sortedrl.core import Finished, Prompt, Request, Schedule, Segment
from sortedrl.core.rollout import ENVIRONMENT
from sortedrl.engines.episodes import DrawnEpisodes
from sortedrl.engines.lengths import LognormalLengths
from sortedrl.engines.simulated import SimulatedEngine
from sortedrl.engines.step_time import PRESETS, linear
from sortedrl.studies.workload import Workload, limit, run, with_mode

TURNS = DrawnEpisodes(
    lengths=LognormalLengths(mu=math.log(60), limit=400), turns=3, observation_tokens=16, seconds_mean=2.0
)
WORKLOAD = Workload(
    episodes=TURNS,
    step_time=PRESETS["h200-8b"],
    slots=16,
    prompts=48,
    expectation="warm",
)
SCHEDULE = Schedule(rollouts_per_update=16, rollouts_per_prompt=4, prompts_per_cohort=16, max_response_tokens=1000)


def test_freed_slots_beat_held_ones_and_both_stay_below_the_limit() -> None:
    bound = limit(WORKLOAD, SCHEDULE)
    freed = run(WORKLOAD, SCHEDULE)
    held = run(replace(WORKLOAD, hold_slots=True), SCHEDULE)
    baseline = run(WORKLOAD, with_mode(SCHEDULE, "baseline"))
    assert baseline.goodput < held.goodput < freed.goodput < bound
    assert held.bubble_parts["environment"] > 0.2 > freed.bubble_parts["environment"]
    assert freed.turns_mean == 3.0 and freed.trained == 48 * 4
    assert freed.environment_tokens == 2 * 16 * freed.trained


def test_the_mean_latency_is_the_one_that_is_set() -> None:
    drawn = [seconds for seed in range(3000) for seconds in TURNS(Prompt("p", (), 0), seed).seconds[:2]]
    assert sum(drawn) / len(drawn) == pytest.approx(2.0, rel=0.05)


def two_turns(engine: SimulatedEngine, *, update_between: bool = False) -> float:
    """Seconds from the submit of the second turn until it has made one token, after one prompt of 10 tokens and a
    first turn of 5; the environment's answer has 4."""
    prompt = Prompt("p", range(10))
    engine.submit([Request(0, prompt, (), 100, seed=0)])
    while not any(isinstance(change, Finished) for change in engine.poll()):
        pass
    if update_between:
        engine.update_weights(None, 1)
    prefix = (Segment(range(5), range(-1, -6, -1), 0), Segment(range(5, 9), [0.0] * 4, ENVIRONMENT))
    began = engine.now()
    engine.submit([Request(0, prompt, prefix, 100, seed=0)])
    while not any(isinstance(change, Finished) for change in engine.poll()):
        pass
    return engine.now() - began


@pytest.mark.parametrize(
    ("options", "update_between", "prefilled"),
    [
        ({}, False, 10 + 5 + 4),
        ({"prefix_cache": True}, False, 4),
        ({"prefix_cache": True}, True, 10 + 5 + 4),
        ({"prefix_cache": True, "reuse_kv_cache": True}, True, 4),
    ],
)
def test_a_turn_prefills_what_the_cache_does_not_have(
    options: dict[str, bool], update_between: bool, prefilled: int
) -> None:
    def end_of_turn(request: Request) -> int:
        return request.prefix_length + (1 if request.prefix else 5)

    engine = SimulatedEngine(
        slots=1, step_time=linear(1.0, 0.0, per_prefill_token=100.0), length_of=end_of_turn, **options
    )
    assert two_turns(engine, update_between=update_between) == pytest.approx(1.0 + 100.0 * prefilled)


def test_cached_turns_take_memory_and_go_before_a_request_is_preempted() -> None:
    """Memory for one context and a little more: the second request evicts the first one's turn, which is prefilled
    again."""

    def length(request: Request) -> int:
        return request.prefix_length + 5

    def prefill_of_second_turn(kv_tokens: int | None) -> float:
        engine = SimulatedEngine(
            slots=1,
            step_time=linear(1.0, 0.0, per_prefill_token=100.0),
            length_of=length,
            prefix_cache=True,
            kv_tokens=kv_tokens,
        )
        prompt = Prompt("p", range(10))
        engine.submit([Request(0, prompt, (), 100, seed=0), Request(1, prompt, (), 100, seed=1)])
        ended = 0
        while ended < 2:
            ended += sum(isinstance(change, Finished) for change in engine.poll())
        prefix = (Segment(range(5), range(-1, -6, -1), 0), Segment(range(5, 9), [0.0] * 4, ENVIRONMENT))
        began = engine.now()
        engine.submit([Request(0, prompt, prefix, 100, seed=0)])
        while not any(isinstance(change, Finished) for change in engine.poll()):
            pass
        return (engine.now() - began - 5.0) / 100.0

    assert prefill_of_second_turn(None) == pytest.approx(4)
    assert prefill_of_second_turn(60) == pytest.approx(4)
    assert prefill_of_second_turn(26) == pytest.approx(19)


def test_turns_measured_on_a_gpu_are_predicted_from_the_cost_of_a_return(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python benchmarks/turns.py --repredict ...`: with vLLM on two H200s, three modes and one."""
    benchmarks = Path(__file__).parents[2] / "benchmarks"
    monkeypatch.syspath_prepend(benchmarks)
    repredict = runpy.run_path(str(benchmarks / "turns.py"), run_name="turns")["repredict"]

    def errors(measurement: str, return_seconds: float | None) -> list[float]:
        repredict(benchmarks / "measured" / measurement, return_seconds)
        lines = capsys.readouterr().out.splitlines()[1:]
        return [float(line.split("(")[1].split("%")[0]) for line in lines if "measured" in line]

    without, found = errors("h200-turns-full", 0.0), errors("h200-turns-full", 0.007)
    assert len(without) == len(found) == 3
    assert max(without) > 20 and max(map(abs, found)) < 6
    (calibrated,) = errors("h200-turns-calibrated", None)
    assert abs(calibrated) < 6
