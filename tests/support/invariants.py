"""Checks of a run under any schedule: the rules of schedule_rules.py, and what only the controller can tell."""

import math
from collections import Counter

from hypothesis import HealthCheck, settings

from random_runs import Case, Outcome
from scenarios import Run, Scenario
from schedule_rules import check_outcome
from sortedrl.core import STRATEGIES, Batch, Event, events
from sortedrl.log.lines import decode, written
from sortedrl.log.reading import without_rolled_back
from sortedrl.observe.metrics import Metrics
from sortedrl.observe.run_metrics import RunMetrics

EPSILON = 1e-9


def examples(count: int) -> settings:
    """Derandomized: the same schedules in every run, so that a failure is never a matter of luck."""
    return settings(max_examples=count, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def checked_run(scenario: Scenario) -> Run:
    run = Run(scenario)
    check_as_it_goes(run, version=0)
    check_run(run, run.batches, run.events)
    read_back = [decode(line) for line in written(run.events).splitlines(keepends=True)]
    assert Metrics().fold(read_back).run_metrics() == run.run_metrics
    return run


def check_as_it_goes(run: Run, version: int) -> None:
    """To its end, from a version of the weights."""
    for batch in run.batches_in_turn():
        check_batch(run, batch, version)
        version += batch.update not in run.scenario.silent_updates
    check_counts(run)


def check_run(run: Run, batches: list[Batch], raw: list[Event]) -> None:
    """A run that has ended: all its batches and events, with what was rolled back."""
    log = without_rolled_back(raw)
    case = Case(seed=0, scenario=run.scenario, saves=(), endings=())
    check_outcome(Outcome(case=case, raw=raw, log=log, batches=batches, live=set(run.controller.live)))
    check_complete_cohorts(run, batches)
    check_figures(run, Metrics().fold(log).run_metrics(), batches)


def check_batch(run: Run, batch: Batch, version: int) -> None:
    assert batch.version == version
    assert all(rollout.state == "trained" for rollout in batch)
    assert all(rollout.reward == run.scenario.reward_of(rollout) for rollout in batch)
    check_counts(run)


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


def check_figures(run: Run, run_metrics: RunMetrics, batches: list[Batch]) -> None:
    assert all(-EPSILON <= share <= 1 + EPSILON for share in run_metrics.bubble_per_harvest)
    assert run_metrics.cached_tokens == sum(rollout.policy_length for rollout in run.controller.live.values())
    assert sum(run_metrics.staleness_histogram.values()) == run_metrics.trained_tokens
    ages = [b.version - v for b in batches for r in b for v, bit in zip(r.versions, r.mask, strict=True) if bit]
    assert run_metrics.staleness_max == max(ages, default=0)
    assert math.isclose(run_metrics.staleness_mean, sum(ages) / len(ages) if ages else 0.0, abs_tol=EPSILON)
