"""The metrics: hand-made event logs whose answers can be computed on paper, and small runs."""

import math
import random
import statistics
from collections.abc import Sequence
from itertools import accumulate, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scenarios import Run, run, scenario
from sortedrl.core.events import (
    Aborted,
    Event,
    Failed,
    Finished,
    Gate,
    HarvestBegan,
    Loaded,
    Phase,
    Preempted,
    Regenerated,
    Rejected,
    RolledBack,
    RunBegan,
    SlotsChanged,
    Started,
    Submitted,
    Updated,
)
from sortedrl.engines.step_time import linear
from sortedrl.log.reading import SeveralRuns, without_rolled_back
from sortedrl.observe.metrics import Metrics
from sortedrl.observe.run_metrics import RunMetrics
from sortedrl.observe.tallies import rank_correlation


def run_metrics(*log: Event, slots: int = 2) -> RunMetrics:
    return Metrics().fold([RunBegan(0.0, slots, "partial", {}), Phase(0.0, "harvest"), *log]).run_metrics()


def submitted(at: float, rollout: int, *, attempt: int = 0, kept: int = 0, expected: float = 1.0) -> Submitted:
    return Submitted(at, rollout, attempt, 10, kept, expected)


def updated(
    at: float, lengths: Sequence[int], *, first: int = 0, version: int = 0, sampled: int = 0, update: int = 0
) -> Updated:
    """A batch of fresh rollouts, all sampled under one version."""
    ids = tuple(range(first, first + len(lengths)))
    segments = tuple(((sampled, length),) for length in lengths)
    return Updated(at, update, 0, version, ids, tuple(lengths), (1.0,) * len(ids), segments, (0,) * len(ids))


# Slot-time


def in_slots(at: float, *rollouts: int, first_slot: int = 0) -> list[Event]:
    """Submitted, and started at once."""
    started = [Started(at, rollout, slot) for slot, rollout in enumerate(rollouts, first_slot)]
    return [*(submitted(at, rollout) for rollout in rollouts), *started]


def finished(at: float, *rollouts: int, tokens: int = 4) -> list[Event]:
    return [Finished(at, rollout, tokens, tokens, False) for rollout in rollouts]


END = Phase(10.0, "end")


def test_an_empty_slot_counts_by_the_reason_why_it_is_empty() -> None:
    """Two slots for 10 s: both empty for 1 s before the first submit, one in use for 4 s, then drained."""
    gates = Gate(1.0, "held back"), Gate(3.0, "drain")
    result = run_metrics(Gate(0.0, "open"), *in_slots(1.0, 0), *gates, *finished(5.0, 0), END)
    assert result.seconds == 10.0
    parts = {part: share for part, share in result.bubble_parts.items() if share}
    assert parts == {"refill": 2 / 20, "held_back": 2 / 20, "drain": (2 + 2 * 5) / 20}
    assert result.bubble == pytest.approx(16 / 20)


def test_a_resumed_run_with_other_slots_counts_each_second_with_the_slots_of_then() -> None:
    """Two slots for 10 s, of which one is in use; 2 s in which none can be; then four for 5 s, of which three are."""
    result = run_metrics(
        *(HarvestBegan(0.0, 0, 0), Gate(0.0, "drain"), *in_slots(0.0, 0), *finished(10.0, 0)),
        *(Phase(10.0, "checkpoint"), SlotsChanged(11.0, 4), Phase(12.0, "harvest"), HarvestBegan(12.0, 1, 0)),
        *(*in_slots(12.0, 1, 2, 3), *finished(17.0, 1, 2, 3), Phase(17.0, "end")),
    )
    assert result.slots == 4
    assert result.bubble == result.bubble_parts["drain"] == pytest.approx((10 + 5) / (20 + 20))
    assert result.bubble_per_harvest == pytest.approx((10 / 20, 5 / 20))
    assert result.idle_parts["checkpoint"] == pytest.approx((2 + 4) / (20 + 6 + 20))
    assert result.idle == pytest.approx((15 + 6) / 46)
    assert result.seconds == 15.0


BOTH = in_slots(0.0, 0, 1)
WAITS: dict[str, tuple[list[Event], float, float]] = {  # queued and KV-limited slot-seconds of 20
    "what the engine has not started is queued": (
        [submitted(0.0, 0), submitted(0.0, 1), Started(1.0, 0, 0), Started(3.0, 1, 1), *finished(10.0, 0, 1)], 4, 0,
    ),
    "a preemption is forgotten with the harvest even if no time passes between": (
        [
            *(*BOTH, Preempted(2.0, 1, 30), Aborted(4.0, 0, 4, 4, 0), Aborted(4.0, 1, 2, 2, 0)),
            *(submitted(4.0, 0), submitted(4.0, 1), Started(6.0, 0, 0), Started(6.0, 1, 1)),
        ], 4, 2,
    ),
    "a preemption is forgotten once all slots are full though more waits": (
        [
            *(*BOTH, submitted(0.0, 2), submitted(0.0, 3), Preempted(2.0, 1, 30), Started(4.0, 1, 1)),
            *(*finished(6.0, 0, tokens=6), Started(7.0, 2, 0)),
        ], 1, 2,
    ),
    "what is taken back before it started is queued": (  # a server over HTTP said that it runs one only
        [*BOTH, Preempted(1.0, 1, 0), Started(3.0, 1, 1)], 2, 0,
    ),
    "after a preemption, waiting ones are KV-limited until all run": (  # at 5 s, 1 runs again and 2 still waits
        [
            *(*BOTH, Preempted(2.0, 1, 30), *finished(4.0, 0, tokens=8), submitted(4.0, 2)),
            *(Started(5.0, 1, 0), Started(6.0, 2, 1), *finished(7.0, 2, tokens=8)),
            *(submitted(7.0, 3), Started(8.0, 3, 1), *finished(10.0, 1, 3, tokens=6)),
        ], 1, 2 + 2 + 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WAITS)
def test_a_slot_that_waits_is_queued_or_kv_limited(case: str) -> None:
    log, queued, kv_limited = WAITS[case]
    found = run_metrics(*log, END)
    assert (found.bubble_parts["queued"], found.bubble_parts["kv_limited"]) == (queued / 20, kv_limited / 20)
    assert found.preemptions == (kv_limited > 0)


def test_a_slot_is_kv_limited_where_a_request_was_preempted_and_waits() -> None:
    preempted = Preempted(4.0, 1, 30), *finished(8.0, 0, tokens=8), Started(8.0, 1, 0), *finished(10.0, 1, tokens=6)
    result = run_metrics(*BOTH, *preempted, END)
    assert result.bubble_parts["kv_limited"] == 4 / 20
    assert result.bubble_parts["refill"] == 2 / 20
    assert (result.preemptions, result.re_prefill_tokens) == (1, 30)


def test_idle_adds_the_phases_in_which_the_engine_rests() -> None:
    phases = Phase(4.0, "scores"), Phase(5.0, "learner"), Phase(8.0, "weights")
    result = run_metrics(*BOTH, *finished(4.0, 0, 1), *phases, END)
    assert (result.bubble, result.wall_seconds, result.seconds) == (0.0, 10.0, 4.0)
    assert result.idle == pytest.approx(0.6)
    assert {part: share for part, share in result.idle_parts.items() if share} == pytest.approx(
        {"scores": 0.1, "learner": 0.3, "weights": 0.2}
    )


def test_the_bubble_of_each_harvest_is_its_own() -> None:
    result = run_metrics(
        *(HarvestBegan(0.0, 0, 0), *in_slots(0.0, 0), *finished(2.0, 0), Phase(2.0, "learner"), Phase(7.0, "harvest")),
        *(HarvestBegan(7.0, 1, 1), *in_slots(7.0, 1, 2), *finished(9.0, 1, 2), Phase(9.0, "end")),
    )
    assert result.bubble_per_harvest == (0.5, 0.0)
    assert (result.bubble, result.harvests) == (0.25, 2)


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_prefill_counts_as_running_whether_or_not_slots_stay_empty(slots: int) -> None:
    """One rollout: 10 s of prefill, 10 s of decode. Only the slots that nobody uses are empty."""
    knobs = {"prompt_tokens": (10,), "step_time": linear(1.0, 0.0, per_prefill_token=1.0)}
    result = run("baseline", [10], slots=slots, rollouts_per_update=1, **knobs).run_metrics
    assert result.seconds == 20.0
    assert result.bubble == pytest.approx((slots - 1) / slots)
    assert result.bubble_parts["drain"] == pytest.approx(result.bubble)


def test_a_cap_that_leaves_slots_empty_shows_as_held_back() -> None:
    result = run("on-policy+planned", [5] * 8, slots=4, rollouts_per_update=2).run_metrics
    assert result.bubble == 0.5
    assert result.bubble_parts["held_back"] == 3 / 8
    assert result.bubble_parts["drain"] == 1 / 8  # the last of four batches: nothing is left to hold back


# Tokens


def test_generated_tokens_are_trained_on_dropped_or_cached() -> None:
    result = run_metrics(
        Loaded(0.0, 0, 0, 5, ("a", "b", "c", "d", "e")),
        *(submitted(0.0, i) for i in range(5)),
        *(*finished(3.0, 0, tokens=3), Aborted(3.0, 1, 3, 3, 3), Aborted(3.0, 2, 3, 3, 0)),
        *(Failed(3.0, 3, 2, 0, "lost"), Rejected(3.0, 3, 2, "failed once")),
        *(*finished(3.0, 4, tokens=3), Regenerated(3.0, 4, 3, "no score in time")),
        *(updated(3.0, [3]), Phase(3.0, "end")),
    )
    assert result.generated_tokens == 14
    assert (result.trained_tokens, result.dropped_tokens, result.cached_tokens) == (3, 8, 3)
    assert result.waste == pytest.approx(8 / 14)
    assert result.goodput == pytest.approx(3 / 3)
    assert result.kept == pytest.approx(6 / 3)
    assert (result.loaded, result.trained, result.rejected, result.failures, result.regenerated) == (5, 1, 1, 1, 1)


def test_prefill_and_re_prefill_are_counted_beside_the_output() -> None:
    aborted = submitted(0.0, 0), Aborted(1.0, 0, 1, 1, 0), submitted(1.0, 0, kept=1)
    result = run_metrics(*aborted, submitted(1.0, 1), Failed(1.0, 1, 0, 0, "lost"), submitted(1.0, 1))
    assert result.prefill_tokens == 20
    assert result.re_prefill_tokens == 11 + 10


def test_staleness_is_by_token() -> None:
    batch = Updated(1.0, 0, 0, 3, (0, 1), (4, 2), (0.0, 1.0), (((1, 1), (3, 3)), ((3, 2),)), (2, 5))
    result = run_metrics(batch)
    assert result.staleness_histogram == {0: 5, 2: 1}
    assert result.staleness_mean == pytest.approx(2 / 6)
    assert result.staleness_max == 2
    assert result.segments_histogram == {1: 1, 2: 1}
    assert result.longest_wait_updates == 5
    assert result.mean_reward == 0.5


def test_rates_are_per_wall_clock_hour() -> None:
    second = updated(0.0, [5, 5], first=2, update=1)
    result = run_metrics(updated(0.0, [5, 5]), Phase(0.0, "learner"), second, Phase(36.0, "end"))
    assert result.updates_per_hour == pytest.approx(200)
    assert result.trained_rollouts_per_hour == pytest.approx(400)
    assert result.trained_tokens_per_hour == pytest.approx(2000)
    assert result.rollouts_per_update_mean == 2


def test_the_figures_of_an_empty_run_are_zero() -> None:
    result = Metrics().run_metrics()
    assert (result.bubble, result.idle, result.goodput, result.length_bias) == (0, 0, 0, 0)
    assert (result.expectation_quality, result.sortedness) == (None, None)


# Order and expectation


def sortedness(batches: Sequence[Sequence[int]], *, group: int = 1) -> float | None:
    """Of updates with these lengths; `group`: rollouts that are trained on together."""
    settings = {"rollouts_per_prompt": group, "whole_groups": group > 1}
    firsts = accumulate((len(batch) for batch in batches), initial=0)
    numbered = enumerate(zip(batches, firsts, strict=False))
    updates = [updated(0.0, batch, first=first, update=i) for i, (batch, first) in numbered]
    return Metrics().fold([RunBegan(0.0, 2, "partial", settings), *updates]).run_metrics().sortedness


def test_sortedness_compares_the_variance_within_updates_with_that_of_random_ones() -> None:
    assert sortedness([[1, 1], [8, 8], [64, 64]]) == pytest.approx(1.0)
    assert sortedness([[5, 5], [5, 5]]) == 0.0
    assert sortedness([[2, 8], [32, 128]]) == pytest.approx(1 - (4 / 2) / (20 / 3))  # log 2: 1, 3, 5, 7
    assert sortedness([[1, 64], [64, 1]]) == pytest.approx(1 - (36 / 2) / (36 / 3))  # more mixed than at random


def test_sortedness_is_not_known_where_every_order_would_look_the_same() -> None:
    assert sortedness([[3], [5], [9]]) is None
    assert sortedness([[3, 4], [5, 9]], group=2) is None
    assert sortedness([]) is None


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 5000), min_size=1, max_size=3), min_size=2, max_size=3).filter(
        lambda batches: len(batches) < sum(map(len, batches)) <= 5
    ),
    st.sampled_from((1, 2)),
)
def test_sortedness_of_random_updates_is_0_in_the_mean_whatever_their_sizes(
    batches: list[list[int]], group: int
) -> None:
    """Exactly: over all ways to deal out the same rollouts (with whole groups: the same groups)."""
    units = [[length, 1 + length // 3][:group] for batch in batches for length in batch]
    scores = []
    for dealt in permutations(units):
        rest = iter(dealt)
        scores.append(sortedness([[n for _ in batch for n in next(rest)] for batch in batches], group=group) or 0.0)
    assert statistics.fmean(scores) == pytest.approx(0, abs=1e-9)


def test_rank_correlation_of_equal_and_opposite_orders() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1.0)
    assert rank_correlation([1, 2, 3, 4], [9, 7, 5, 3]) == pytest.approx(-1.0)
    assert rank_correlation([1, 1, 2, 2], [1, 2, 1, 2]) == pytest.approx(0.0)
    assert rank_correlation([1, 1, 1], [1, 2, 3]) is None
    assert rank_correlation([1], [1]) is None
    assert rank_correlation([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / math.sqrt(4.5 * 5)), "ties"


def test_expectation_quality_compares_what_was_expected_at_the_first_start() -> None:
    result = run_metrics(
        submitted(0.0, 0, expected=5.0),
        Aborted(1.0, 0, 1, 1, 0),
        submitted(1.0, 0, kept=1, expected=999.0),
        submitted(1.0, 1, expected=7.0),
        submitted(1.0, 2, expected=9.0),
        updated(1.0, [10, 20, 30]),
    )
    assert result.expectation_quality == pytest.approx(1.0)


# Length bias (tests/observe/test_uncut_length.py holds the estimate)


def test_a_run_that_cuts_nothing_has_no_length_bias() -> None:
    for mode in ("baseline", "partial", "april", "on-policy+planned"):
        result = run(mode, [9, 1, 7, 3, 30, 2], slots=3, rollouts_per_update=3).run_metrics
        assert result.length_bias == pytest.approx(0.0), mode
        assert result.uncut_mean_length == pytest.approx(52 / 6)


def test_only_trained_rollouts_count_in_the_length_bias() -> None:
    """Two are trained on when the run ends. The others were stopped with their tokens kept: nothing was cut."""
    result = run("partial", [2, 2, 50, 50], rollouts_per_update=2, max_updates=1).run_metrics
    assert result.cached_tokens == 4
    assert (result.uncut_mean_length, result.length_bias) == (2, 0)


def test_cutting_and_redoing_shows_as_a_length_bias() -> None:
    lengths = [random.Random(i).choice([5, 10, 20, 40, 80]) for i in range(400)]
    sizes = {"slots": 16, "rollouts_per_update": 16, "prompts_per_cohort": 64}
    result = run("on-policy", lengths, redraws=True, **sizes).run_metrics
    assert result.length_bias is not None and result.length_bias < -0.05
    assert result.uncut_mean_length == pytest.approx(sum(lengths) / len(lengths), rel=0.1)


def test_a_simulation_that_knows_the_uncut_mean_gives_it() -> None:
    log = [RunBegan(0.0, 2, "on-policy", {}), updated(1.0, [3, 5])]
    assert Metrics().fold(log).run_metrics(8.0).length_bias == -0.5


def test_the_length_bias_is_not_known_where_a_redo_repeats_the_cut_attempt() -> None:
    knobs = {"slots": 4, "rollouts_per_update": 2, "prompts_per_cohort": 8, "keep_seed": True}
    result = run("on-policy", [9, 1, 7, 3, 30, 2, 4, 8], **knobs).run_metrics
    assert result.dropped_tokens
    assert (result.uncut_mean_length, result.length_bias) == (None, None)


# A resumed run


def test_a_run_that_was_resumed_has_the_figures_of_an_undisturbed_one() -> None:
    lengths = [7, 1, 12, 2, 5, 5, 9, 1, 1, 3]
    plan = scenario("partial", lengths, slots=3, rollouts_per_update=2, prompts_per_cohort=5, learner_seconds=1.5)
    undisturbed = Run(plan).to_end()
    for updates in range(1, len(undisturbed.batches)):
        first = Run(plan).updates(updates)
        second = Run(plan, state=first.checkpoint(), last_time=first.engine.now()).to_end()
        assert_same_figures(Metrics().fold([*first.events, *second.events]).run_metrics(), undisturbed.run_metrics)


@pytest.mark.parametrize("clock_goes_back", [True, False])
def test_no_metric_counts_what_was_rolled_back_nor_its_time(clock_goes_back: bool) -> None:
    """A kill 2 updates after the checkpoint: those updates took 20 s of the learner each."""
    lengths = [7, 1, 12, 2, 5, 5, 9, 1, 1, 3]
    plan = scenario("partial", lengths, slots=3, rollouts_per_update=2, prompts_per_cohort=5, learner_seconds=20.0)
    undisturbed = Run(plan).to_end()
    first = Run(plan).updates(2)
    state, counted, saved_at = first.checkpoint(), len(first.events), first.engine.now()
    first.updates(4)
    last_time = saved_at if clock_goes_back else first.engine.now()
    second = Run(plan, state=state, last_time=last_time).to_end()
    mark = RolledBack(last_time, len(first.events) - counted)
    raw = [*first.events, mark, *second.events]
    for log in (raw, without_rolled_back(raw)):
        assert_same_figures(Metrics().fold(log).run_metrics(), undisturbed.run_metrics)


def test_two_runs_in_one_log_have_no_metrics_together() -> None:
    """Neither from a file, nor in a loop that uses one EventLog for both."""
    log = run("partial", [3, 1, 2, 5], rollouts_per_update=2).events
    with pytest.raises(SeveralRuns, match="events of 2 runs"):
        Metrics().fold([*log, *log])
    metrics = Metrics().fold(log)
    with pytest.raises(SeveralRuns, match="give each run an EventLog of its own"):
        metrics(log[0])


def assert_same_figures(got: RunMetrics, expected: RunMetrics) -> None:
    for name in RunMetrics.__slots__:
        value = getattr(expected, name)
        approximate = value if isinstance(value, str) or value is None else pytest.approx(value)
        assert getattr(got, name) == approximate, name
