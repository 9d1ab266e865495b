"""Checkpoints of the scheduler: a fresh controller goes on exactly as the undisturbed run would have."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import scenarios
from paced import PacedEngine
from random_runs import peaceful
from scenarios import Run, Scenario, run, scenario
from sortedrl.core import Batch, ConfigurationError, Controller, Prompt, Prompts, Schedule, ScoreAtOnce, events
from sortedrl.core.checkpoint import restore_cursor, saved_cursor
from sortedrl.core.strategies.base import Sweep

MODES = sorted(set(scenarios.MODES) - {"async-pool"})
LENGTHS = [7, 1, 12, 2, 5, 5, 9, 1, 1, 3, 14, 2, 6]


def what_was_trained_on(batches: list[Batch]) -> list[Any]:
    return [
        (
            batch.update,
            batch.version,
            batch.complete_cohorts,
            batch.filtered_rewards,
            [(r.id, r.prompt.id, r.attempt, r.versions, r.tokens, r.logprobs, r.reward) for r in batch],
        )
        for batch in batches
    ]


def check_goes_on_exactly(plan: Scenario, updates: int) -> None:
    undisturbed = Run(plan).to_end()
    first = Run(plan).updates(updates)
    second = Run(plan, state=first.checkpoint(), last_time=first.engine.now()).to_end()
    assert what_was_trained_on(first.batches + second.batches) == what_was_trained_on(undisturbed.batches)


@pytest.mark.parametrize("updates", [1, 2, 3, 4])
@pytest.mark.parametrize("mode", MODES)
def test_a_restored_run_makes_the_same_batches(mode: str, updates: int) -> None:
    sizes = {"slots": 3, "rollouts_per_update": 3, "prompts_per_cohort": 5, "rollouts_per_prompt": 2}
    plan = scenario(mode, LENGTHS, redraws=True, epochs=2, shuffle=True, seed=5, **sizes)
    check_goes_on_exactly(plan, updates)


def in_small_cohorts(plan: Scenario) -> Scenario:
    """Every prompt that is loaded too early or too late changes the number of its cohort."""
    schedule = plan.schedule
    fewest = -(-schedule.rollouts_per_update // schedule.rollouts_per_prompt)
    return replace(plan, schedule=replace(schedule, prompts_per_cohort=fewest))


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.one_of(peaceful(), peaceful(["tail-batching"]).map(in_small_cohorts)),
    st.integers(1, 6),
    st.sampled_from([None, (1, 2, 9)]),
)
def test_any_schedule_goes_on_exactly_as_the_undisturbed_run(
    plan: Scenario, updates: int, prompt_tokens: tuple[int, ...] | None
) -> None:
    """Also if some prompts are too long."""
    check_goes_on_exactly(plan if prompt_tokens is None else replace(plan, prompt_tokens=prompt_tokens), updates)


@pytest.mark.parametrize("mode", MODES)
def test_the_state_of_a_restored_controller_is_the_state_it_was_restored_from(mode: str) -> None:
    plan = scenario(mode, LENGTHS, slots=3, rollouts_per_update=3, prompts_per_cohort=6, epochs=2)
    state = Run(plan).updates(2).checkpoint()
    assert Run(plan, state=state).checkpoint() == state


def test_the_elevators_sweep_is_in_the_checkpoint() -> None:
    """Expected lengths 1 to 6 from an epoch before, two slots: the sweep rises, turns, and a checkpoint keeps it."""
    plan = scenario("partial+elevator", [1, 2, 3, 4, 5, 6], slots=2, rollouts_per_update=2, epochs=3, shuffle=False)
    first = Run(plan).updates(5)
    sweep = Sweep(*first.checkpoint()["sweep"])
    assert sweep != Sweep()
    assert Run(plan, state=first.checkpoint()).checkpoint()["sweep"] == list(sweep)


def test_cached_tokens_and_ready_rollouts_are_in_the_checkpoint() -> None:
    """Six of the eight end together: two are trained on, four wait as ready, and two are cut at 3 tokens."""
    plan = scenario("partial", [3] * 6 + [9, 9], slots=8, rollouts_per_update=2)
    first = Run(plan).updates(1)
    second = Run(plan, state=first.checkpoint())
    buffer = second.controller.buffer
    assert (buffer.ready, buffer.waiting) == (4, 2)
    assert [len(rollout) for rollout in buffer.live.values() if rollout.resumable] == [3, 3]
    second.to_end()
    assert second.ids == [[2, 3], [4, 5], [6, 7]]
    assert [request.max_new_tokens for request in second.engine.requests] == [97, 97]
    assert [rollout.versions for rollout in second.batches[-1]] == [[0, 0, 0] + [3] * 6] * 2


def test_what_was_finished_and_not_scored_is_scored_again_after_a_restore() -> None:
    plan = scenario("partial", [1, 2, 2, 9], slots=4, rollouts_per_update=2, score_seconds=(30.0, 0.0, 0.0, 0.0))
    first = Run(plan).updates(1)
    assert first.ids == [[1, 2]]
    second = Run(plan, state=first.checkpoint()).to_end()
    assert second.ids == [[0, 3]]
    assert [event.rollout for event in second.all(events.Finished)] == [3]


def test_a_checkpoint_does_not_change_when_the_run_goes_on() -> None:
    plan = scenario("partial+planned", LENGTHS, slots=3, rollouts_per_update=2, prompts_per_cohort=6, epochs=2)
    run = Run(plan).updates(2)
    state = run.controller.state()
    before = json.dumps(state)
    run.updates(5)
    assert json.dumps(state) == before


@pytest.mark.parametrize("mode", MODES)
def test_harvests_have_a_number_each_across_a_restore(mode: str) -> None:
    plan = scenario(mode, LENGTHS, slots=3, rollouts_per_update=2, prompts_per_cohort=6)
    first = Run(plan).updates(2)
    second = Run(plan, state=first.checkpoint()).to_end()
    numbers = [event.harvest for event in first.all(events.HarvestBegan) + second.all(events.HarvestBegan)]
    assert numbers == list(range(len(numbers)))
    assert {batch.harvest for batch in second.batches} <= {e.harvest for e in second.all(events.HarvestBegan)}


def test_a_batch_is_a_sequence_of_rollouts() -> None:
    """PyTorch's DataLoader takes it: that needs `len` and an index."""
    (batch,) = Run(scenario("baseline", [3, 5], slots=2, rollouts_per_update=2)).to_end().batches
    assert [len(batch[0]), len(batch[-1])] == [3, 5]
    assert batch[:1] == (batch[0],)
    with pytest.raises(IndexError):
        batch[2]


def test_a_controller_can_be_stopped_and_iterated_on() -> None:
    plan = scenario("partial", LENGTHS, slots=3, rollouts_per_update=2)
    stopped_often = Run(plan)
    for count in range(1, 8):
        stopped_often.updates(count)
    assert what_was_trained_on(stopped_often.batches) == what_was_trained_on(Run(plan).to_end().batches)


@pytest.mark.parametrize("mode", ["partial", "cohort-at-once", "april"])
def test_a_run_that_ended_at_max_updates_can_be_extended(mode: str) -> None:
    plan = scenario(mode, LENGTHS, slots=3, rollouts_per_update=2)
    ended = Run(replace(plan, max_updates=3)).to_end()
    extended = Run(plan, state=ended.checkpoint()).to_end()
    assert what_was_trained_on(ended.batches + extended.batches) == what_was_trained_on(Run(plan).to_end().batches)


@pytest.mark.parametrize("mode", ["partial", "on-policy", "partial+elevator"])
def test_an_interrupted_harvest_goes_on_after_a_restore(mode: str) -> None:
    """Interrupted while it runs: tokens are kept or dropped as at a harvest, and nothing is lost."""
    plan = scenario(mode, LENGTHS, slots=3, rollouts_per_update=4)
    first = Run(plan)
    poll = first.engine.poll

    def poll_and_interrupt(until: float | None = None) -> Any:
        if first.engine.now() >= 12:
            first.controller.interrupt()
        return poll(until)

    first.engine.poll = poll_and_interrupt  # type: ignore[method-assign]
    first.to_end()
    assert 0 < sum(first.sizes) < len(LENGTHS)
    second = Run(plan, state=first.checkpoint()).to_end()
    assert sorted(id for batch in first.ids + second.ids for id in batch) == list(range(len(LENGTHS)))


def test_no_checkpoint_is_taken_while_rollouts_are_in_the_engine() -> None:
    plan = scenario("april", LENGTHS, slots=3, rollouts_per_update=2, overlap=True, max_staleness=2)
    result = Run(plan)
    next(result.batches_in_turn())
    with pytest.raises(RuntimeError, match=r"2 rollouts in the engine: save after publish\(\), which"):
        result.controller.state()
    result.controller.publish()
    assert result.checkpoint()
    next(iter(result.controller))
    result.controller.interrupt()
    assert not list(result.controller) and result.checkpoint()


@pytest.mark.parametrize("ready", [True, False])
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda segment: segment[1].__setitem__(-1, -1e39), "a log-probability that is not a finite number"),
        (lambda segment: segment[1].__setitem__(-1, None), "a log-probability that is not a finite number"),
        (lambda segment: segment.__setitem__(2, 7), "tokens of version 7, and the newest is 1"),
    ],
)
def test_a_bad_rollout_in_a_checkpoint_is_regenerated_with_its_reason_in_the_log(
    ready: bool, spoil: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Six of the eight end together: two are trained on, four wait as ready, and two are cut at 3 tokens."""
    plan = scenario("partial", [3] * 6 + [9, 9], slots=8, rollouts_per_update=2)
    state = Run(plan).updates(1).checkpoint()
    members = [member for _, _, group in state["buffer"]["groups"] for member in group]
    bad = next(member for member in members if (member["state"] == "ready") == ready)
    spoil(bad["segments"][-1])
    second = Run(plan, state=state).to_end()
    (dropped,) = second.all(events.Regenerated)
    assert (dropped.rollout, dropped.dropped) == (bad["id"], 3) and f"the checkpoint has {reason}" in dropped.reason
    trained = {rollout.id: rollout for batch in second.batches for rollout in batch}
    assert sorted(trained) == [2, 3, 4, 5, 6, 7] and trained[bad["id"]].attempt == 1
    words = "1 rollout of the checkpoint cannot be trained on and will be regenerated: rollout"
    assert f"{words} {bad['id']}, {reason}" in caplog.text


def test_a_checkpoint_of_another_mode_or_dataset_is_refused() -> None:
    state = run("partial", LENGTHS, rollouts_per_update=2, max_updates=2).checkpoint()
    for changes, reason in (
        ({"rollouts_per_prompt": 2}, "made with rollouts_per_prompt = 1, this run has 2"),
        ({"mode": "april"}, "made in mode partial, this run is april"),
        ({"lengths": LENGTHS[:-1]}, "made with 13 prompts, seed = 0 .* this run has 12 prompts, seed = 0"),
        ({"seed": 1}, "made with seed = 0, this run has 1: resume with 0"),
        ({"whole_groups": True}, "made with whole_groups = False, this run has True: resume with False"),
    ):
        given: dict[str, Any] = {"mode": "partial", "lengths": LENGTHS, "rollouts_per_update": 2} | changes
        with pytest.raises(ValueError, match=reason):
            Run(scenario(**given), state=state)
    of_an_older_version = {key: value for key, value in state.items() if key not in ("whole_groups", "seed")}
    Run(scenario("partial", LENGTHS, rollouts_per_update=2, whole_groups=True), state=of_an_older_version)


def test_a_resumed_run_with_a_filter_judges_the_groups_that_were_complete() -> None:
    plan = scenario("partial", [3] * 9, slots=9, rollouts_per_update=2)
    state = Run(plan).updates(1).checkpoint()
    filtered = replace(plan, schedule=replace(plan.schedule, filter_groups="scenarios:keeps_two_of_three"))
    second = Run(filtered, state=state).to_end()
    assert not any(rollout.prompt.payload % 3 == 0 for batch in second.batches for rollout in batch)
    assert second.all(events.Filtered)


def test_ready_groups_whose_prompts_are_too_long_now_are_rejected_whole_and_not_judged_again() -> None:
    groups = {"rollouts_per_prompt": 2, "whole_groups": True, "filter_groups": "equal_rewards"}
    lives = {"group_rewards": ("mixed",), "prompt_tokens": (1, 5), "slots": 18, "rollouts_per_update": 2}
    plan = scenario("partial", [3] * 9, **groups, **lives)
    state = Run(plan).updates(1).checkpoint()
    shorter = replace(plan, schedule=replace(plan.schedule, max_prompt_tokens=2))
    second = Run(shorter, state=state).to_end()
    assert len(second.all(events.Rejected)) == 8 and not second.all(events.Filtered)


@pytest.mark.parametrize("wrong", [{}, {"learner": {}, "controller": {"mode": "partial"}}, None, "state.json"])
def test_something_other_than_a_checkpoint_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"not a state of a controller.*controller\.state\(\)"):
        Run(scenario("partial", [3, 5])).controller.restore(wrong)


@pytest.mark.parametrize("updates", [0, 1])
def test_a_controller_that_has_started_is_not_restored(updates: int) -> None:
    """Its rollouts would be there twice."""
    plan = scenario("partial", [3, 5, 4, 2], slots=2, rollouts_per_update=2)
    used = Run(plan).updates(1)
    other = Run(plan, state=used.checkpoint()) if not updates else used
    with pytest.raises(RuntimeError, match="before its first batch, into a new Controller"):
        other.controller.restore(used.checkpoint())


def test_the_log_of_a_restored_run_goes_on_where_the_last_one_ended() -> None:
    plan = scenario("partial", LENGTHS, slots=3, rollouts_per_update=2)
    first = Run(plan).updates(2)
    state, last_time = first.checkpoint(), first.engine.now()
    second = Run(plan, state=state, last_time=last_time).to_end()
    assert state["events"] == len(first.events)
    assert second.controller.log.count == len(first.events) + len(second.events)
    assert min(event.at for event in second.events) >= last_time
    assert not second.all(events.RunBegan)
    why_first = next(event for event in second.events if isinstance(event, events.Gate | events.Submitted))
    assert isinstance(why_first, events.Submitted)
    assert second.all(events.Gate)[0].at == last_time  # whatever the log's last gate was, it is stated again


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("slots", [1, 6])
def test_a_run_may_be_restored_on_an_engine_with_other_slots(mode: str, slots: int) -> None:
    """As on another machine. The log says so once, and every rollout is trained on once."""
    plan = scenario(mode, LENGTHS, slots=3, rollouts_per_update=3, prompts_per_cohort=5)
    first = Run(plan).updates(1)
    first.controller.update_engine()
    second = Run(replace(plan, slots=slots), state=first.checkpoint(), last_time=first.engine.now()).to_end()
    changed = second.all(events.SlotsChanged)
    assert [event.slots for event in changed] == [slots] and second.events[0] == changed[0]
    assert {event.slot for event in second.all(events.Started)} <= set(range(slots))
    assert sorted(id for batch in first.ids + second.ids for id in batch) == list(range(len(LENGTHS)))
    again = Run(replace(plan, slots=slots), state=first.checkpoint() | {"slots": slots})
    assert not again.all(events.SlotsChanged)


def test_a_restored_run_overlaps_as_before() -> None:
    """The clock of the new engine starts at zero, the log's goes on: the learner's step must still overlap."""
    sizes = {"slots": 3, "rollouts_per_update": 3, "max_staleness": 3}
    plan = scenario("april", [6] * 30, overlap=True, learner_seconds=4.0, **sizes)
    undisturbed = Run(plan).to_end()
    first = Run(plan).updates(4)
    second = Run(plan, state=first.checkpoint(), last_time=first.engine.now()).to_end()
    assert first.engine.now() + second.engine.now() == pytest.approx(undisturbed.engine.now())


@pytest.mark.parametrize("mode", MODES)
def test_a_checkpoint_can_be_restored_more_than_once(mode: str) -> None:
    """A run that goes on from a state leaves it as it is: its tokens are not appended to those of the checkpoint."""
    sizes = {"slots": 3, "rollouts_per_update": 3, "prompts_per_cohort": 5}
    silent = frozenset(range(99))  # tokens of one version are joined
    plan = scenario(mode, LENGTHS, epochs=2, silent_updates=silent, **sizes)
    first = Run(plan).updates(2)
    state, saved = first.checkpoint(), first.checkpoint()
    again = [Run(plan, state=state, last_time=first.engine.now()).to_end() for _ in range(2)]
    assert state == saved
    assert what_was_trained_on(again[0].batches) == what_was_trained_on(again[1].batches)


class Recorded(Sequence[Prompt]):
    """A dataset that tokenizes a prompt when it is read, as TRL's does; `read` has the rows."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, row: Any) -> Any:
        if not 0 <= row < len(self):
            raise IndexError(row)
        self.read.append(row)
        return Prompt(self._names[row], [1, 2])


def controller_on(dataset: Sequence[Prompt], group: int) -> Controller:
    schedule = Schedule(mode="april", rollouts_per_update=4, prompts_per_cohort=4, rollouts_per_prompt=group)
    engine = PacedEngine(slots=3, length_of=lambda request: 1 + request.id % 5)
    return Controller(engine, Prompts(dataset, epochs=3, seed=4), ScoreAtOnce(lambda rollout: 1.0), schedule)


@pytest.mark.parametrize("rollouts_per_prompt", [1, 3])
@pytest.mark.parametrize("updates", [1, 4, 7])
def test_a_restored_run_reads_the_prompts_of_its_rollouts_only(updates: int, rollouts_per_prompt: int) -> None:
    """To read a prompt may take long: it is tokenized, and an environment may be reset for it."""
    names = [f"p{i}" for i in range(10)]
    first = controller_on(Recorded(names), rollouts_per_prompt)
    for _ in zip(range(updates), first, strict=False):
        first.publish()
    first.update_engine()
    state, live = json.loads(json.dumps(first.state())), dict(first.live)
    dataset = Recorded(names)
    second = controller_on(dataset, rollouts_per_prompt)
    second.restore(state)
    assert {id: r.prompt for id, r in second.live.items()} == {id: r.prompt for id, r in live.items()}
    assert sorted({names[row] for row in dataset.read}) == sorted({rollout.prompt.id for rollout in live.values()})
    assert len(dataset.read) <= len({rollout.group for rollout in live.values()})


def test_data_that_is_no_longer_shuffled_is_refused() -> None:
    """Also between two cohorts, when no rollout shows it."""
    prompts = Prompts([Prompt(f"p{i}", [1]) for i in range(10)], seed=4)
    taken = prompts.take(5, within_epoch=True)
    in_order = Prompts([Prompt(f"p{i}", [1]) for i in range(10)], seed=4, shuffle=False)
    with pytest.raises(ValueError, match=r"shuffle = True, this run has .* shuffle = False"):
        restore_cursor(in_order, saved_cursor(prompts))
    again = Prompts([Prompt(f"p{i}", [1]) for i in range(10)], seed=4)
    restore_cursor(again, saved_cursor(prompts) | {"of another version": 1})  # is no other order
    assert not set(taken) & set(again.take(5, within_epoch=True))


def test_data_in_another_order_is_refused() -> None:
    """The rest of an epoch would hold prompts that were trained on, and leave others out."""
    names = [f"p{i}" for i in range(10)]
    first = controller_on(Recorded(names), 1)
    for _ in zip(range(1), first, strict=False):
        first.publish()
    first.update_engine()
    assert first.live
    with pytest.raises(ConfigurationError, match=r"prompts = 'p\d': number \d .* was 'p\d' when"):
        controller_on(Recorded(names[::-1]), 1).restore(first.state())
