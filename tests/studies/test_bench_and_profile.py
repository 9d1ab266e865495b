"""Measurements on an engine: forced lengths, the profile, and schedules benched on it."""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.engine import Change, Engine, Request
from sortedrl.core.rollout import Prompt
from sortedrl.core.schedule import Schedule
from sortedrl.engines.lengths import ForcedLengths, LognormalLengths
from sortedrl.engines.simulated import SimulatedEngine
from sortedrl.engines.simulated_chunked_prefill import ChunkedPrefillEngine
from sortedrl.engines.step_time import Point, StepTime, fit_levels
from sortedrl.studies import bench, profile
from sortedrl.studies.bench import BenchSettings, bench_workload
from sortedrl.studies.measurements import warm_up
from sortedrl.studies.profile_file import Profile, read
from sortedrl.studies.simulate import SimulateSettings
from sortedrl.studies.workload import Workload, limit, run
from sortedrl.studies.workload_settings import simulated_workload
from sortedrl.testing.engine_contract import EngineContract, Ledger, resumed

STEP_TIME = StepTime(((1, 0.004), (8, 0.005), (31, 0.009)), per_cached_token=3e-8, per_prefill_token=2e-5)
ENDLESS = 1 << 30


def endless_engine(slots: int, step_time: StepTime = STEP_TIME, kv_tokens: int | None = None) -> SimulatedEngine:
    """Responses end by what is imposed on them alone."""
    return SimulatedEngine(slots=slots, step_time=step_time, length_of=lambda request: ENDLESS, kv_tokens=kv_tokens)


class TestForcedLengths(EngineContract):
    honors_ignore_eos = False

    def make_engine(self, slots: int) -> Engine:
        return ForcedLengths(endless_engine(slots), lambda request: 20 + request.seed % 13)


def test_a_forced_length_counts_kept_tokens_and_says_what_was_cut() -> None:
    ledger = Ledger(ForcedLengths(endless_engine(2), lambda request: 10 if request.id == 0 else 50))
    requests = [Request(i, Prompt(str(i), [1, 2, 3]), (), 30, i) for i in range(2)]
    ledger.submit(requests)
    ledger.run_until_first_end()
    assert len(ledger.tokens(0)) == 10 and ledger.finished[0] is False
    ledger.abort([1])
    first = list(ledger.segments[1])
    ledger.submit([resumed(requests[1], first)])
    ledger.run()
    assert sum(map(len, first)) + len(ledger.tokens(1)) == 30 and ledger.finished[1] is True


def test_a_profile_finds_the_step_time_that_an_engine_has() -> None:
    engine = endless_engine(32)
    cells = profile.measure(engine, profile.cells_for(32, 2048, math.inf), 1000, steps=40, repeats=1)
    assert {cell.running for cell in cells} == {1, 4, 8, 16, 31} and len({cell.context for cell in cells}) == 3
    found = Profile("simulated", "", 32, tuple(cells), profile.prefill_of(cells), None, None, None, "here")
    fitted = found.step_time()
    for running in (1, 8, 31):
        assert fitted.at(running) == pytest.approx(STEP_TIME.at(running), rel=0.02)
    assert fitted.per_cached_token == pytest.approx(STEP_TIME.per_cached_token, rel=0.05)
    assert fitted.per_prefill_token == pytest.approx(STEP_TIME.per_prefill_token, rel=0.05)
    assert found.fit_error() < 0.02


@pytest.mark.parametrize("factor", [1.5, 3.0])
def test_a_disturbed_measurement_of_a_profile_counts_as_one_of_more_work(factor: float) -> None:
    """The largest sizes are the measure of the others, so they are taken as they are."""
    engine = endless_engine(32)
    cells = profile.measure(engine, profile.cells_for(32, 2048, math.inf), 1000, steps=40, repeats=1)
    true = Profile("simulated", "", 32, tuple(cells), 0.0, None, None, None, "here")
    disturbed = [replace(cell, step_seconds=cell.step_seconds * factor) for cell in cells[:-1:3]]
    found = replace(true, cells=tuple({(cell.running, cell.context): cell for cell in [*cells, *disturbed]}.values()))
    for running in (1, 4, 8, 16, 31):
        assert found.step_time().at(running) == pytest.approx(true.step_time().at(running), rel=0.15)
    assert true.disturbed() == [] and set(found.disturbed()) == set(disturbed)


def test_the_costs_of_prefills_in_steps_that_decode_are_found() -> None:
    """From a profile of large prefills and of single returns: neither of them is counted twice."""
    few, per_step, per_token = 32, 0.006, 1.5e-5
    true = replace(STEP_TIME, per_prefill_token=per_token, per_prefill_step=per_step, prefill_tokens_per_step=512)
    engine = ChunkedPrefillEngine(slots=32, step_time=true, length_of=lambda request: ENDLESS)
    cells = profile.measure(engine, profile.cells_for(32, 2048, math.inf), 1000, steps=40, repeats=1)
    bulk = profile.prefill_of(cells)
    assert bulk > 1.5 * per_token
    per_return = per_step + few * (per_token - bulk)
    found = Profile("simulated", "", 32, tuple(cells), bulk, 512, None, None, "here", per_return, few).step_time()
    assert found.has_chunked_prefill
    assert found.per_prefill_step == pytest.approx(per_step, rel=0.05)
    assert found.per_prefill_token == pytest.approx(per_token, rel=0.05)
    assert found.at(31) == pytest.approx(STEP_TIME.at(31), rel=0.02)


class ShuffledArrivals(ChunkedPrefillEngine):
    """As a server that gets each request through a connection of its own."""

    def submit(self, requests: Sequence[Request]) -> None:
        super().submit(random.Random(len(requests)).sample(requests, len(requests)))


def test_a_profile_does_not_rely_on_the_order_in_which_requests_arrive() -> None:
    true = replace(STEP_TIME, prefill_tokens_per_step=512)
    engine = ShuffledArrivals(slots=32, step_time=true, length_of=lambda request: ENDLESS)
    cells = profile.measure(engine, profile.cells_for(32, 2048, math.inf), 1000, steps=40, repeats=1)
    for cell in cells:
        expected = STEP_TIME.at(cell.running) + STEP_TIME.per_cached_token * cell.cached_tokens
        assert cell.step_seconds == pytest.approx(expected, rel=0.05)


class SlowToSubmit(SimulatedEngine):
    """A request reaches the engine after 10 ms, while the others go on decoding."""

    held: Sequence[Change] = ()

    def submit(self, requests: Sequence[Request]) -> None:
        self.held = [*self.held, *super().poll(until=self.now() + 0.010)] if self.running else self.held
        super().submit(requests)

    def poll(self, until: float | None = None) -> list[Change]:
        held, self.held = self.held, ()
        return list(held) or super().poll(until)


@pytest.mark.parametrize("engine_type", [SimulatedEngine, SlowToSubmit, ChunkedPrefillEngine])
@pytest.mark.parametrize("seconds", [0.0, 0.004])
def test_what_a_return_costs_is_found(seconds: float, engine_type: type[SimulatedEngine]) -> None:
    step_time = replace(STEP_TIME, per_prefill_token=0.0, per_prefill_step=seconds, prefill_tokens_per_step=512)
    engine = engine_type(slots=16, step_time=step_time, length_of=lambda request: ENDLESS)
    found = profile.prefill_step_seconds(engine, 100, 16, 1000, 0.0)
    assert found == pytest.approx(seconds, abs=2e-4)  # a decode step takes 6 ms


def test_a_profile_survives_its_file_and_serves_the_simulator(tmp_path: Path, told: Any, refused: Any) -> None:
    cells = tuple(profile.measure(endless_engine(8), profile.cells_for(8, 512, math.inf), 100, steps=8, repeats=1))
    measured = Profile("simulated", "", 8, cells, 2e-5, 2048, 99_000, 0.1, "here", prefill_step_seconds=0.003)
    path = tmp_path / "profile.json"
    measured.write(path)
    assert read(path) == measured
    assert read(path).step_time().prefill_tokens_per_step == 2048
    assert read(path).step_time().has_chunked_prefill
    arguments = ["simulate", "--step-time", str(path), "--slots", "8", "--rollouts-per-update", "8"]
    arguments += ["--prompts-per-cohort", "32", "--cohorts", "2", "--modes", "baseline", "--expectations", "cold"]
    found = json.loads(told(*arguments, "--median-length", "50", "--max-response-tokens", "200", "--json").out)
    assert found["modes"]["baseline"]["goodput"] > 0
    assert simulated_workload(SimulateSettings(step_time=str(path))).weight_update_seconds == 0.1
    without = SimulateSettings(step_time=str(path), weight_update_seconds=0.0)
    assert simulated_workload(without).weight_update_seconds == 0.0
    assert bench_workload(BenchSettings(step_time=str(path))).weight_update_seconds == 0.0  # it loads none
    no_time = (replace(cells[0], step_seconds=0.0), *cells[1:])
    for broken, words in [
        ({"cells": no_time}, "cells.0.step_seconds: Input should be greater than 0"),
        ({"weight_update_seconds": math.nan}, "weight_update_seconds: Input should be a finite number"),
        ({"weight_update_seconds": -5.0}, "weight_update_seconds: Input should be greater than or equal to 0"),
        ({"weight_update_seconds": "many"}, "is not a profile"),
        ({"kv_tokens": "many"}, "is not a profile"),
    ]:
        replace(measured, **broken).write(path)
        assert words in refused(*arguments)
    path.write_text('{"cells": 3}')
    assert "is not a profile" in refused(*arguments)


def test_levels_are_fitted_as_they_are() -> None:
    points = [Point(r, c, STEP_TIME.at(r) + 3e-8 * c) for r in (1, 8, 31) for c in (100, 40_000)]
    fitted = fit_levels(points)
    assert [fitted.at(r) for r in (1, 8, 31)] == pytest.approx([STEP_TIME.at(r) for r in (1, 8, 31)])
    with pytest.raises(ValueError, match="two sizes and two contexts"):
        fit_levels(points[:2])


def test_who_waits_for_a_prefill_is_not_in_a_slot() -> None:
    """One request a prefill step: the second takes its slot when the first's prefill is over."""
    step_time = StepTime(((1, 0.01), (8, 0.01)), per_prefill_token=1e-3, prefill_tokens_per_step=100)
    engine = endless_engine(3, step_time)
    engine.submit([Request(i, Prompt(str(i), [1] * 100), (), 5, i) for i in range(3)])
    starts = [change.at for change in engine.poll() if type(change).__name__ == "RequestStarted"]
    assert starts == pytest.approx([0.0, 0.1, 0.2])


WORKLOAD = Workload(
    lengths=LognormalLengths(mu=math.log(40), limit=200), step_time=STEP_TIME, slots=16, prompts=128, prompt_tokens=16
)
SCHEDULE = Schedule(mode="baseline", rollouts_per_update=16, prompts_per_cohort=64, max_response_tokens=200)


@pytest.mark.parametrize("text", ["baseline", "partial+elevator@oracle", "on-policy+planned@oracle*1.15", "april"])
def test_a_bench_on_an_engine_that_the_simulator_knows_is_what_it_predicts(text: str) -> None:
    case = bench.case_of(text, WORKLOAD, SCHEDULE)
    found = bench.run(endless_engine(16), case.workload, case.schedule, 100)
    predicted = run(case.workload, case.schedule)
    for name in ("goodput", "kept", "bubble", "waste", "staleness_mean", "sortedness", "length_bias"):
        assert found[name] == pytest.approx(getattr(predicted, name), abs=1e-9), name


def test_the_measured_limit_is_the_simulated_one() -> None:
    measured = bench.measured_limit(endless_engine(16), WORKLOAD, SCHEDULE, 100, turnovers=20)
    assert measured == pytest.approx(limit(WORKLOAD, SCHEDULE), rel=0.03)


def test_progress_has_an_eta_at_the_pace_so_far() -> None:
    lines: list[str] = []
    now = [100.0]
    progress = bench.Progress(2, 5, lines.append, now=lambda: now[0])
    now[0] += 30
    progress.update("partial", 1)
    now[0] += 30
    progress.update("partial", 4)  # it ends early, with one update less
    progress.cases_ended += 1
    now[0] += 60
    progress.update("partial", 1)
    assert lines == [
        "partial: update 1/5  elapsed 0:30  ETA 4:30",
        "partial: update 4/5  elapsed 1:00  ETA 1:30",
        "partial: update 1/5  elapsed 2:00  ETA 1:20",
    ]


@pytest.mark.parametrize(("text", "why"), [("baseline*much", "not a number"), ("april@psychic", "no such expectation")])
def test_a_wrong_case_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        bench.case_of(text, WORKLOAD, SCHEDULE)


ENGINE_WITH_RETURNS = """
from sortedrl.core.engine import EngineInfo
from sortedrl.engines.simulated_chunked_prefill import ChunkedPrefillEngine
from sortedrl.engines.step_time import StepTime

LEVELS = ((1, 0.004), (8, 0.005), (31, 0.009))
# Prefilled tokens are free: a simulated engine has no prefix cache for the context of a return.
STEP_TIME = StepTime(LEVELS, 3e-8, 0.0, per_prefill_step=0.006, prefill_tokens_per_step=512)

class Measured(ChunkedPrefillEngine):
    def info(self):
        return EngineInfo(prefill_tokens_per_step=512)

def engine(spec):
    return Measured(slots=spec.slots, step_time=STEP_TIME, length_of=lambda request: 1 << 30)
"""


def test_a_profile_times_returns_for_responses_of_several_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Any
) -> None:
    (tmp_path / "engine_with_returns.py").write_text(ENGINE_WITH_RETURNS)
    monkeypatch.syspath_prepend(str(tmp_path))
    sizes = ["--slots", "32", "--max-context-tokens", "2048", "--repeats", "1"]

    words, out = ["profile", "--engine", "engine_with_returns:engine", *sizes], tmp_path / "profile.json"
    told(*words, "--out", out)
    assert not read(out).step_time().has_chunked_prefill
    assert "a return with 64 tokens" in told(*words, "--observation-tokens", "64", "--out", out).out
    found = read(out)
    assert found.prefill_step_tokens == 64
    assert found.step_time().per_prefill_step == pytest.approx(0.006, rel=0.1)
    assert found.step_time().per_prefill_token == pytest.approx(0, abs=1e-6)


def test_a_profile_times_a_return_by_default_with_one_server_that_stops_decoding_to_prefill() -> None:
    server = profile.ProfileSettings(engine="sglang", engine_urls=("http://127.0.0.1:1",))
    assert server.observed == 64
    assert server.model_copy(update={"max_context_tokens": 256}).observed == 32
    assert server.model_copy(update={"observation_tokens": 0}).observed == 0
    assert profile.ProfileSettings().observed == profile.ProfileSettings(engine="vllm").observed == 0


def test_bench_and_profile_from_the_command_line(tmp_path: Path, told: Any, refused: Any) -> None:
    out = tmp_path / "profile.json"
    told("profile", "--slots", "4", "--max-context-tokens", "400", "--steps", "2", "--out", out)
    sizes = ["--slots", "4", "--rollouts-per-update", "4", "--prompts-per-cohort", "8", "--prompt-tokens", "8"]
    lengths = ["--median-length", "6", "--max-response-tokens", "16"]
    files = ["--step-time", str(out), "--out", str(tmp_path / "bench.json"), "--events", str(tmp_path / "logs")]
    modes = ["--modes", "baseline", "partial", "--limit", "simulated"]
    output = told("bench", *sizes, *lengths, *files, *modes, "--json")
    assert output.err.startswith("4 updates in 2 modes; loading engine embedded")
    assert "all modes take about 0:" in output.err and "partial: update 2/2  elapsed" in output.err
    printed = json.loads(output.out)
    written = json.loads((tmp_path / "bench.json").read_text())
    assert printed["modes"] == written["modes"] and list(printed["modes"]) == ["baseline", "partial"]
    partial = printed["modes"]["partial"]
    assert partial["trained"] == 8 and partial["predicted"]["trained"] == 8
    assert partial["of_limit"] == partial["goodput"] / printed["limit"]
    assert (tmp_path / "logs" / "partial.jsonl").read_text().count("Updated") == 2
    assert "no file can be made there (File exists)" in refused("bench", "--events", out)


def test_what_is_predicted_keeps_keys_as_the_engine_does(refused: Any) -> None:
    options = ["reuse_kv_cache", "True", "enable_sleep_mode", "True"]
    assert "frees its KV cache" in refused("bench", "--engine", "vllm", "--engine-options", *options)
    assert not bench_workload(BenchSettings(engine="vllm")).reuse_kv_cache
    assert bench_workload(BenchSettings(engine="vllm", engine_options={"reuse_kv_cache": "True"})).reuse_kv_cache
    assert simulated_workload(SimulateSettings(reuse_kv_cache=True)).reuse_kv_cache


def test_bench_honours_the_settings_of_the_schedule() -> None:
    texts = ("partial+elevator@oracle", "partial+elevator*1.3", "partial", "on-policy")
    schedules = [bench.case_of(text, WORKLOAD, Schedule(max_staleness=2, oversubscribe=1.5)).schedule for text in texts]
    assert [(one.oversubscribe, one.max_staleness) for one in schedules] == [(1.5, 2), (1.3, 2), (1.5, 2), (1.5, None)]


class Seen(ForcedLengths):
    """An engine that remembers the prompts that it was given."""

    def __init__(self, slots: int) -> None:
        super().__init__(endless_engine(slots), lambda request: request.max_new_tokens)
        self.prompts: list[tuple[int, ...]] = []

    def submit(self, requests: Sequence[Request]) -> None:
        self.prompts += [tuple(request.prompt.tokens) for request in requests]
        super().submit(requests)


def test_no_measurement_finds_its_keys_in_a_cache() -> None:
    """No prompt begins as another one does, in the profile and in the limit, the warm-up included."""
    engine = Seen(12)
    warm_up(engine, 1000, 400)
    profile.measure(engine, profile.cells_for(12, 400, math.inf), 1000, steps=2, repeats=2)
    beginnings = [prompt[:8] for prompt in engine.prompts]
    assert len(set(beginnings)) == len(beginnings)
    few = replace(WORKLOAD, prompts=20)
    engine = Seen(16)
    bench.measured_limit(engine, few, SCHEDULE, 1000)
    assert len(engine.prompts) > 20 and len(set(engine.prompts)) == len(engine.prompts)
