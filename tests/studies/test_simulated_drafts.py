"""Drafts in the simulator: what they cost, when they pay, and what the settings refuse."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from multi_token import MultiTokenEngine
from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.engine import Request, RequestFinished
from sortedrl.core.rollout import Prompt
from sortedrl.core.schedule import Schedule
from sortedrl.engines.lengths import LognormalLengths
from sortedrl.engines.simulated import SimulatedEngine
from sortedrl.engines.speculative import DraftCounts
from sortedrl.engines.step_time import checking_drafts, linear, pays_up_to, with_drafts
from sortedrl.studies import profile_file
from sortedrl.studies.profile import drafts_to_measure, measure
from sortedrl.studies.profile_file import Cell, Profile
from sortedrl.studies.workload import Workload, run

PLAIN = linear(5.0, 0.03, per_cached_token=0.001)
DRAFTED = checking_drafts(PLAIN, 3)


def test_a_step_that_checks_drafts_costs_that_of_more_requests_and_reads_contexts_once() -> None:
    assert DRAFTED.at(8) == pytest.approx(PLAIN.at(32))
    assert DRAFTED.per_cached(8) == PLAIN.per_cached_token


def test_a_response_alone_is_faster_by_what_a_step_yields() -> None:
    def seconds(when: Any) -> float:
        step_time = with_drafts(PLAIN, DRAFTED, 2.0, when, slots=4)
        engine = SimulatedEngine(slots=4, step_time=step_time, length_of=lambda request: 100)
        engine.submit([Request(0, Prompt("p", range(10)), (), 1000, 0)])
        ends = [change for change in engine.poll() if isinstance(change, RequestFinished)]
        return ends[0].at

    steps, cached = 50, sum(10 + 2 * step + 0.5 for step in range(50))
    assert seconds("always") == seconds("tail") == pytest.approx(steps * DRAFTED.at(1) + 0.001 * cached)
    assert seconds("none") == pytest.approx(100 * PLAIN.at(1) + 0.001 * sum(10 + step for step in range(100)))


def test_drafts_pay_up_to_the_point_where_both_take_equally_long() -> None:
    most = pays_up_to(PLAIN, DRAFTED, 2.0, slots=128)
    assert most == 83  # (5 + 0.12 r) / 2 = 5 + 0.03 r at 83.3
    tail = with_drafts(PLAIN, DRAFTED, 2.0, "tail", slots=128)
    assert tail.at(83) == pytest.approx(DRAFTED.at(83) / 2) and tail.at(84) == PLAIN.at(84)
    assert pays_up_to(PLAIN, DRAFTED, 1.0, slots=128) == 0
    assert pays_up_to(PLAIN, DRAFTED, 2.0, slots=128, context=1000) > most, "each context is read once for two tokens"


@pytest.mark.parametrize("mode", ["baseline", "on-policy+planned", "partial+elevator"])
def test_a_run_generates_the_same_responses_sooner(mode: str) -> None:
    schedule = Schedule(mode=mode, rollouts_per_update=16, prompts_per_cohort=32, max_response_tokens=400)
    workload = Workload(lengths=LognormalLengths(mu=4.0, limit=400), slots=16, prompts=64, step_time=PLAIN)
    plain = run(workload, schedule)
    drafted = run(replace(workload, step_time=with_drafts(PLAIN, DRAFTED, 2.0, "tail", 16)), schedule)
    assert drafted.goodput > 1.5 * plain.goodput
    if mode == "baseline":
        assert drafted.trained_tokens == plain.trained_tokens


BASELINE = ["simulate", "--modes", "baseline", "--cohorts", "1"]


def test_simulate_has_drafts(told: Any) -> None:
    drafts = ["--drafts", "tail", "--draft-tokens", "3", "--draft-acceptance", "2.0"]
    found = [json.loads(told(*BASELINE, "--json", *flags).out)["modes"]["baseline"] for flags in ((), drafts)]
    assert 1.3 < found[1]["goodput"] / found[0]["goodput"] < 2.0
    assert "drafts of 3 tokens, while at most" in told(*BASELINE, "--drafts", "tail").out


SMALL = ["--slots", "32", "--rollouts-per-update", "32", "--median-length", "100", "--max-response-tokens", "800"]


@pytest.mark.parametrize("acceptance", [1.02, 2.0])
def test_plan_says_from_which_acceptance_on_drafts_pay(acceptance: float, told: Any) -> None:
    flags = [*SMALL, "--cohorts", "1", "--drafts", "tail", "--draft-acceptance", acceptance, "--json"]
    found = json.loads(told("plan", *flags, "--max-staleness-mean", "0").out)["drafts"]
    pays_from = found["options"][0]["pays_from"]
    assert 1.02 < pays_from < 2.0
    assert (found["options"][0]["gain"] > 1.02) == (acceptance > pays_from)
    assert ("Leave speculative_config unset" in found["reason"]) == (acceptance < pays_from)


def cells(seconds: float) -> tuple[Cell, ...]:
    return tuple(Cell(r, c, r * c, seconds + 0.001 * r + 1e-8 * r * c, 1e-5) for r in (1, 8, 15) for c in (32, 256))


def test_measured_steps_with_drafts_replace_the_model(tmp_path: Path, told: Any, refused: Any) -> None:
    measured = Profile("vllm", "m", 16, cells(0.01), 1e-5, 2048, 100_000, None, "here", draft_tokens=3)
    measured = replace(measured, draft_cells=cells(0.012))
    measured.write(tmp_path / "drafts.json")
    assert profile_file.read(tmp_path / "drafts.json") == measured
    assert measured.drafted_step_time().at(8) == pytest.approx(0.02)
    flags = ["--slots", "16", "--rollouts-per-update", "16", "--drafts", "always"]
    flags += ["--draft-step-time", str(tmp_path / "drafts.json")]
    assert "measured with 3" in refused(*BASELINE, *flags, "--draft-tokens", "2")
    assert "drafts of 3 tokens, always" in told(*BASELINE, *flags).out


class WithDrafts(MultiTokenEngine):
    draft_counts = DraftCounts()

    def _pass_steps(self, steps: int) -> None:
        super()._pass_steps(steps)
        self.draft_counts.steps = {1: self._step}


def test_a_profile_times_steps_with_drafts_not_tokens() -> None:
    engine = WithDrafts(slots=8, step_time=linear(5.0, 0.0), length_of=lambda request: request.max_new_tokens)

    def measured(method: str) -> tuple[DraftCounts | None, int]:
        return drafts_to_measure(engine, {"speculative_config": {"method": method, "num_speculative_tokens": 3}})

    counts, tokens = measured("eagle3")
    [cell] = measure(engine, [(4, 32)], 100, steps=30, repeats=1, counts=counts)
    assert tokens == 3 and cell.step_seconds == pytest.approx(5.0), "a third of it per token"
    with pytest.raises(ConfigurationError, match="does not draft in each"):
        measured("ngram")


def test_a_step_with_drafts_reads_each_context_at_least_once() -> None:
    """Even if a few measurements are mostly noise."""
    flat = tuple(replace(cell, step_seconds=0.02) for cell in cells(0.01))
    plain = Profile("vllm", "m", 16, cells(0.01), 1e-5, 2048, 100_000, None, "here", draft_tokens=3)
    drafted = replace(plain, draft_cells=flat).drafted_step_time()
    assert drafted.per_cached_token == pytest.approx(1e-8)
    assert drafted.at(15) + 1e-8 * 15 * (32 + 256) / 2 == pytest.approx(0.02)
