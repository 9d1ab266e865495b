"""The timeline: which slice has which outcome. That slices add up to the metrics: test_trace.py."""

import pytest
from hypothesis import HealthCheck, given, settings

from random_runs import peaceful
from scenarios import Run, Scenario, run
from sortedrl.core.events import (
    Aborted,
    Event,
    Failed,
    Finished,
    HarvestBegan,
    Loaded,
    Preempted,
    Published,
    Regenerated,
    Rejected,
    RolledBack,
    RunBegan,
    Started,
    Submitted,
    Updated,
)
from sortedrl.core.strategies.ours import LookaheadPartial
from sortedrl.observe.timeline import Slice, slices
from trace_rules import assert_tokens_agree, assert_valid_trace

RANDOM = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


@RANDOM
@given(peaceful())
def test_in_a_calm_run_that_ended_all_is_trained_dropped_kept_or_ahead(scenario: Scenario) -> None:
    done = Run(scenario).to_end()
    found = slices(done.events)
    assert {s.outcome for s in found} <= {"trained", "kept", "lookahead", "dropped"}
    trained = [s.rollout for s in found if s.outcome == "trained"]
    ahead = {s.rollout for s in found if s.outcome == "lookahead"}
    assert len(trained) == len(set(trained))
    assert {r for ids in done.ids for r in ids} <= set(trained) | ahead
    if scenario.schedule.mode != "partial+lookahead":
        assert not ahead


def test_full_memory_gives_preempted_slices() -> None:
    log = run("baseline", [30, 30, 30, 30], rollouts_per_update=4, kv_tokens=70).events
    found = slices(log)
    assert any(s.outcome == "preempted" and s.made > 0 for s in found)
    assert_valid_trace(log)
    assert_tokens_agree(log)


class MyLookahead(LookaheadPartial):
    pass


@pytest.mark.parametrize("mode", ["partial+lookahead", f"{__name__}:MyLookahead"])
def test_lookahead_slices_are_those_of_a_cohort_that_is_not_open_yet(mode: str) -> None:
    log = run(mode, [2, 20, 2, 20, 2, 20, 2, 20], rollouts_per_update=4, prompts_per_cohort=4).events
    ahead = [s for s in slices(log) if s.outcome == "lookahead"]
    assert ahead and {s.rollout for s in ahead} <= {4, 5, 6, 7}
    last_of_first = max(e.at for e in log if isinstance(e, Updated) and set(e.rollouts) & {0, 1, 2, 3})
    assert all(s.start < last_of_first for s in ahead)


def test_lookahead_is_marked_in_a_log_without_the_gate_of_its_mode() -> None:
    first, *log = run("partial+lookahead", [2, 20] * 4, rollouts_per_update=4, prompts_per_cohort=4).events
    assert isinstance(first, RunBegan)
    assert slices([first._replace(gated=False), *log]) == slices([first, *log])


# By hand


def slices_of(*log: Event) -> list[Slice]:
    return slices([RunBegan(0.0, 2, "partial", {}), Loaded(0.0, 0, 0, 2, ("a", "b")), *log])


def outcomes(*log: Event) -> list[str]:
    return [s.outcome for s in slices_of(*log)]


def enter(at: float = 0.0, rollout: int = 0, kept: int = 0) -> list[Event]:
    return [Submitted(at, rollout, 0, 1, kept, 5.0), Started(at, rollout, 0)]


def updated(at: float, rollout: int, length: int) -> Updated:
    return Updated(at, 0, 0, 0, (rollout,), (length,), (1.0,), (((0, length),),), (0,))


def test_each_way_out_of_a_slot_has_its_outcome() -> None:
    finished = [*enter(), Finished(1.0, 0, 3, 3, False)]
    stopped = [*enter(), Aborted(1.0, 0, 3, 3, 0)]
    assert outcomes(*finished, updated(2.0, 0, 3)) == ["trained"]
    assert outcomes(*finished) == ["kept"]
    assert outcomes(*stopped) == ["kept"]
    assert outcomes(*enter()) == ["running"]
    assert outcomes(*enter(), Preempted(1.0, 0, 4)) == ["preempted"]
    assert outcomes(*enter(), Failed(1.0, 0, 3, 0, "lost")) == ["failed"]
    assert outcomes(*enter(), Aborted(1.0, 0, 3, 3, 3)) == ["dropped"]
    assert outcomes(*enter(), Aborted(1.0, 0, 0, 0, 0)) == ["dropped"]
    assert outcomes(*finished, Regenerated(2.0, 0, 3, "late score")) == ["dropped"]
    assert outcomes(*stopped, Rejected(2.0, 0, 3, "no reward")) == ["dropped"]
    assert outcomes(*stopped, *enter(2.0, kept=3), Failed(3.0, 0, 1, 4, "lost")) == ["dropped", "failed"]
    assert outcomes(*stopped, *enter(2.0, kept=3), Finished(3.0, 0, 1, 4, False), updated(4.0, 0, 4)) == [
        "kept",
        "trained",
    ]


def test_a_redo_does_not_void_the_attempt_that_is_trained_on() -> None:
    first = [*enter(), Finished(1.0, 0, 3, 3, False), Regenerated(1.0, 0, 3, "late score")]
    second = [Submitted(2.0, 0, 1, 1, 0, 5.0), Started(2.0, 0, 0), Finished(3.0, 0, 5, 5, False)]
    found = slices_of(*first, *second, updated(4.0, 0, 5))
    assert [(s.attempt, s.outcome, s.made, s.update) for s in found] == [(0, "dropped", 3, None), (1, "trained", 5, 0)]


def test_a_slice_knows_its_version_and_harvest_and_what_it_made_before_a_preemption() -> None:
    found = slices_of(
        *(HarvestBegan(0.0, 0, 0), *enter(kept=2), Preempted(1.0, 0, 1 + 2 + 4)),  # prompt, kept, made
        *(Started(2.0, 0, 1), Aborted(3.0, 0, 9, 11, 0), Published(3.0, 1)),
        *(HarvestBegan(3.0, 1, 1), *enter(4.0, kept=11), Finished(5.0, 0, 1, 12, False)),
    )
    assert [(s.slot, s.made, s.version, s.harvest) for s in found] == [(0, 4, 0, 0), (1, 5, 0, 0), (0, 1, 1, 1)]


def test_weights_that_are_published_within_a_harvest_count_from_then_on() -> None:
    found = slices_of(
        *(HarvestBegan(0.0, 0, 3), *enter(), Published(1.0, 4), Aborted(1.0, 0, 2, 2, 0)),
        *(*enter(1.0, kept=2), Finished(2.0, 0, 1, 3, False)),
    )
    assert [s.version for s in found] == [3, 4]


def test_what_was_rolled_back_is_in_no_slice() -> None:
    void = [*enter(), Aborted(1.0, 0, 3, 3, 0)]
    assert [s.start for s in slices_of(*void, RolledBack(1.0, len(void)), *enter(5.0))] == [4.0]
