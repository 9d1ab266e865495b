"""Checks of what must always hold in a run, under any schedule."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

from hypothesis import HealthCheck, settings

from scenarios import Run, Scenario
from schedule_rules import check_tokens
from sortedrl.core import STRATEGIES, Batch, Event, Rollout, events
from sortedrl.log.lines import JsonLines, decode
from sortedrl.observe.metrics import Metrics
from sortedrl.observe.run_metrics import RunMetrics

EPSILON = 1e-9


def examples(count: int) -> settings:
    """Derandomized: the same schedules in every run, so that a failure is never a matter of luck."""
    return settings(max_examples=count, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


# What must hold


def check_rollout(rollout: Rollout, scenario: Scenario) -> None:
    check_tokens(rollout, scenario)
    assert rollout.versions == sorted(rollout.versions)
    assert rollout.reward == scenario.reward_of(rollout)
    assert len(rollout.prompt.tokens) <= (scenario.schedule.max_prompt_tokens or 0)


def check_staleness(batch: Batch, scenario: Scenario) -> None:
    ages = {batch.version - version for rollout in batch for version in rollout.versions}
    assert min(ages) >= 0
    if STRATEGIES[scenario.schedule.mode].on_policy:
        assert ages == {0}
    if scenario.schedule.max_staleness is not None:
        assert max(ages) <= scenario.schedule.max_staleness


def check_counts(run: Run) -> None:
    buffer = run.controller.buffer
    states = Counter(str(rollout.state) for rollout in buffer.live.values())
    assert states == +Counter(
        waiting=buffer.waiting,
        running=len(buffer.running),
        environment=len(buffer.in_environment),
        returning=len(buffer.returning),
        finished=buffer.finished,
        ready=buffer.ready,
    )
    assert not (buffer.running.keys() & buffer.in_environment.keys())
    if run.environments is not None:
        assert run.environments.pending == len(buffer.in_environment)
    assert buffer.loaded == sum(states.values()) + buffer.trained + buffer.rejected + buffer.filtered
    never_started = sum(r.state == "waiting" and not r.segments and not r.attempt for r in buffer.live.values())
    assert buffer.never_started == never_started
    started = [group for group in buffer.groups() if all(member.state != "waiting" for member in group.members)]
    for gate in {group.gate for group in buffer.groups()}:
        assert buffer.gates[gate].started == sum(len(group.members) for group in started if group.gate == gate)
    assert len(buffer.running) == 0 or run.scenario.schedule.overlap


def check_batch(run: Run, batch: Batch, version: int) -> None:
    assert batch.version == version
    assert len(batch) > 0
    assert [len(rollout) for rollout in batch] == sorted(len(rollout) for rollout in batch)
    for rollout in batch:
        assert rollout.state == "trained"
        check_rollout(rollout, run.scenario)
    check_staleness(batch, run.scenario)
    check_counts(run)


def check_each_once(run: Run, batches: list[Batch], log: list[Event]) -> None:
    """Every rollout of a loaded prompt is trained on exactly once or rejected with a reason, or (in a run that ended
    early) still there."""
    trained = [rollout.id for batch in batches for rollout in batch]
    rejected = [event.rollout for event in log if isinstance(event, events.Rejected)]
    live = list(run.controller.live)
    loaded = [event for event in log if isinstance(event, events.Loaded)]
    rollouts = sum(event.rollouts for event in loaded)
    assert sorted(trained + rejected + live) == list(range(rollouts))
    assert all(event.reason for event in log if isinstance(event, events.Rejected))
    if run.scenario.max_updates is None:
        assert not live
        reads = Counter(prompt for event in loaded for prompt in event.prompts)
        assert reads == {prompt.id: run.scenario.epochs for prompt in run.scenario.dataset()}
        assert rollouts == sum(reads.values()) * run.scenario.schedule.rollouts_per_prompt
    else:
        assert len(batches) <= run.scenario.max_updates


def check_groups(run: Run, batches: list[Batch], log: list[Event]) -> None:
    """Where siblings are compared, all of a prompt that were not rejected are in one batch."""
    if not run.scenario.schedule.whole_groups:
        return
    per_prompt = run.scenario.schedule.rollouts_per_prompt
    gone = {event.rollout for event in log if isinstance(event, events.Rejected)}
    for batch in batches:
        ids = {rollout.id for rollout in batch}
        sets = {id // per_prompt for id in ids}
        assert ids == {n * per_prompt + i for n in sets for i in range(per_prompt)} - gone


def check_cohort_gate(run: Run, batches: list[Batch]) -> None:
    if STRATEGIES[run.scenario.schedule.mode].gated:
        cohorts = [{rollout.cohort for rollout in batch} for batch in batches]
        assert all(len(cohort) == 1 for cohort in cohorts)
        assert [*map(max, cohorts)] == sorted(map(max, cohorts))


def check_complete_cohorts(run: Run, batches: list[Batch]) -> None:
    """The oldest cohort that comes later is the first that is not complete; one may come to nothing by rejections."""
    is_exact = not run.controller.buffer.rejected and not run.controller.live
    for place, batch in enumerate(batches[:-1]):
        oldest = min(rollout.cohort for later in batches[place + 1 :] for rollout in later)
        assert batch.complete_cohorts == oldest if is_exact else batch.complete_cohorts <= oldest


def check_batch_sizes(run: Run) -> None:
    """A batch is one update's worth, in whole groups, or all that is left where the rest would be less than
    half an update. Flexible on-policy (all that is ready); larger under a staleness bound (overdue ones are in it)."""
    schedule = run.scenario.schedule
    strategy = STRATEGIES[schedule.mode]
    of_cohort: Counter[int] = Counter()
    for loaded in run.all(events.Loaded):
        of_cohort[loaded.cohort if strategy.gated else 0] += loaded.rollouts
    group_size = schedule.rollouts_per_prompt if schedule.whole_groups else 1
    whole = -(-schedule.rollouts_per_update // group_size) * group_size
    for batch in run.batches:
        gate = batch.rollouts[0].cohort if strategy.gated else 0
        left = of_cohort[gate]
        need = whole if 2 * (left - whole) >= whole else left
        if "baseline" in schedule.mode:
            need = left
        assert len(batch) >= need
        if not strategy.on_policy and schedule.max_staleness is None:
            assert len(batch) == need
        of_cohort[gate] -= len(batch)


def check_log(run: Run, log: list[Event]) -> None:
    """Times never go back, a slot holds one rollout at a time, and there are never more than `slots`."""
    assert all(first.at <= second.at for first, second in pairwise(log))
    slot_of: dict[int, int] = {}
    for event in log:
        match event:
            case events.Started():
                assert 0 <= event.slot < run.scenario.slots
                assert event.slot not in slot_of.values()
                assert event.rollout not in slot_of
                slot_of[event.rollout] = event.slot
            case events.Preempted():
                del slot_of[event.rollout]
            case events.TurnEnded():
                del slot_of[event.rollout]
            case events.Finished() if event.made or not run.scenario.turns:
                del slot_of[event.rollout]
            case events.Aborted() | events.Failed():
                slot_of.pop(event.rollout, None)
    assert not slot_of


def check_figures(run: Run, run_metrics: RunMetrics, batches: list[Batch]) -> None:
    assert -EPSILON <= run_metrics.bubble <= run_metrics.idle + EPSILON <= 1 + 2 * EPSILON
    assert all(-EPSILON <= share <= 1 + EPSILON for share in run_metrics.bubble_per_harvest)
    assert math.isclose(sum(run_metrics.bubble_parts.values()), run_metrics.bubble, abs_tol=EPSILON)
    assert math.isclose(sum(run_metrics.idle_parts.values()), run_metrics.idle, abs_tol=EPSILON)
    assert (
        run_metrics.generated_tokens
        == run_metrics.trained_tokens + run_metrics.dropped_tokens + run_metrics.cached_tokens
    )
    assert run_metrics.cached_tokens == sum(rollout.policy_length for rollout in run.controller.live.values())
    assert run_metrics.trained_tokens == sum(rollout.policy_length for batch in batches for rollout in batch)
    assert sum(run_metrics.staleness_histogram.values()) == run_metrics.trained_tokens
    assert run_metrics.updates == len(batches)
    ages = [b.version - v for b in batches for r in b for v, bit in zip(r.versions, r.mask, strict=True) if bit]
    assert run_metrics.staleness_max == max(ages, default=0)
    assert math.isclose(run_metrics.staleness_mean, sum(ages) / len(ages) if ages else 0.0, abs_tol=EPSILON)


def through_json(log: list[Event]) -> list[Event]:
    lines: list[str] = []

    class Lines:
        write = staticmethod(lines.append)

    sink = JsonLines(Lines())  # type: ignore[arg-type]
    for event in log:
        sink(event)
    return [decode(line) for line in lines]


def checked_run(scenario: Scenario) -> Run:
    run = Run(scenario)
    version = 0
    for batch in run.batches_in_turn():
        check_batch(run, batch, version)
        version += batch.update not in scenario.silent_updates
    check_counts(run)
    check_each_once(run, run.batches, run.events)
    check_groups(run, run.batches, run.events)
    check_cohort_gate(run, run.batches)
    check_complete_cohorts(run, run.batches)
    check_log(run, run.events)
    check_figures(run, run.run_metrics, run.batches)
    assert Metrics().fold(through_json(run.events)).run_metrics() == run.run_metrics
    return run
