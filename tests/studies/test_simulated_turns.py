"""Simulated rollouts of several turns: the limit, freed and held slots, the prefix cache and its memory."""

from __future__ import annotations

import math
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sortedrl.core import Finished, Prompt, Request, Schedule, Segment
from sortedrl.core.rollout import ENVIRONMENT
from sortedrl.engines.episodes import DrawnEpisodes
from sortedrl.engines.lengths import LognormalLengths
from sortedrl.engines.simulated import SimulatedEngine
from sortedrl.engines.simulated_chunked_prefill import ChunkedPrefillEngine
from sortedrl.engines.step_time import PRESETS, linear
from sortedrl.studies.workload import Workload, limit, run, with_mode

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
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


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """The names of a script in benchmarks/."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return lambda name: runpy.run_path(str(BENCHMARKS / name), run_name=name.removesuffix(".py"))


@pytest.mark.slow
def test_turns_measured_on_a_gpu_are_predicted_from_the_cost_of_a_return(
    capsys: pytest.CaptureFixture[str], script: Callable[[str], dict[str, Any]]
) -> None:
    """`python benchmarks/turns.py --repredict ...`: with vLLM on H200s; the calibration of the first was wrong."""
    repredict = script("turns.py")["repredict"]

    def errors(measurement: str, return_seconds: float | None) -> list[float]:
        repredict(BENCHMARKS / "measured" / measurement, return_seconds)
        lines = capsys.readouterr().out.splitlines()[1:]
        return [float(line.split("(")[1].split("%")[0]) for line in lines if "measured" in line]

    without, found = errors("h200-turns-full", 0.0), errors("h200-turns-full", 0.009)
    assert len(without) == len(found) == 3
    assert max(without) > 20 and max(map(abs, found)) < 6
    calibrated = errors("h200-turns-calibrated", None) + errors("h200-turns-calibrated-2", None)
    assert len(calibrated) == 3 and max(map(abs, calibrated)) < 3


@pytest.mark.parametrize("measurement", ["h200-turns-calibrated", "h200-turns-calibrated-2"])
def test_the_prefix_cache_has_as_many_tokens_as_vllm_counted(
    measurement: str, monkeypatch: pytest.MonkeyPatch, script: Callable[[str], dict[str, Any]]
) -> None:
    """Of rollouts that return or resume, in blocks of 16 tokens."""
    reused = 0
    uncached_of = ChunkedPrefillEngine._uncached

    def counted(self: ChunkedPrefillEngine, run: Any, context: int) -> int:
        nonlocal reused
        uncached = uncached_of(self, run, context)
        reused += (context - uncached) // 16 * 16 if run.request.prefix else 0
        return uncached

    monkeypatch.setattr(ChunkedPrefillEngine, "_uncached", counted)
    turns = script("turns.py")
    known, written, options = turns["measurement"](BENCHMARKS / "measured" / measurement)
    for text in options.modes[: len(written["modes"])]:
        mode, shape = turns["Mode"].parsed(text, options.updates), turns["SHAPES"][options.shape]
        reused = 0
        turns["predicted"](shape, mode, known, known.kv_tokens, options)
        assert reused == pytest.approx(written["modes"][mode.name]["reused_kv_tokens"], rel=0.01)


def test_small_delays_change_the_goodput_by_little(
    capsys: pytest.CaptureFixture[str], script: Callable[[str], dict[str, Any]]
) -> None:
    """`python benchmarks/turns_spread.py ...`."""
    spread = script("turns_spread.py")["spread"]
    spread(BENCHMARKS / "measured" / "h200-turns-calibrated-2", ["partial+elevator"], 3, counted_updates=[2])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "deviation" in line]
    assert 0 < float(line.split("standard deviation ")[1].split("%")[0]) < 3


@pytest.mark.parametrize("mode", ["partial+elevator", "on-policy+planned", "baseline"])
def test_with_chunked_prefill_all_is_trained_on_below_the_limit(mode: str) -> None:
    step_time = replace(PRESETS["h200-8b"], per_prefill_step=0.005, prefill_tokens_per_step=256)
    workload = replace(WORKLOAD, step_time=step_time, kv_tokens=6_000)
    found = run(workload, with_mode(SCHEDULE, mode))
    assert found.trained == 48 * 4
    assert found.goodput < limit(replace(workload, kv_tokens=None), SCHEDULE)
