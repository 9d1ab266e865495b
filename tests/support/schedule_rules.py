"""What must hold for any run, checked from its event log and the batches that it handed out.

Nothing here asks the controller or its buffer: `Replay` rebuilds the state of every rollout from the events alone and
fails at the first event that cannot follow the ones before it.
"""

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import groupby, pairwise

from random_runs import Case, Outcome
from scenarios import Scenario
from sortedrl.core import STRATEGIES, Batch, Event, Rollout, Schedule, events
from sortedrl.core.strategies.paper import CohortAtOnce, Partial
from sortedrl.core.strategies.peers import AsyncPool
from sortedrl.log.reading import without_rolled_back
from sortedrl.observe.metrics import Metrics

WAITING, RUNNING, FINISHED = "waiting", "running", "finished"
ENVIRONMENT, RETURNING = "environment", "returning"
NOT_SAMPLED = -1  # in place of a version
READY, TRAINED, REJECTED, FILTERED, SKIPPED = "ready", "trained", "rejected", "filtered", "skipped"
GONE = (TRAINED, REJECTED, FILTERED, SKIPPED)
EPSILON = 1e-9


def check_outcome(outcome: Outcome) -> None:
    scenario = outcome.case.scenario
    assert all(first.at <= second.at for first, second in pairwise(outcome.raw)), "time goes back"
    counted = without_rolled_back(outcome.raw)
    assert list(map(_timeless, counted)) == list(map(_timeless, outcome.log)), "a roll-back removed the wrong events"
    assert all(first.at <= second.at + EPSILON for first, second in pairwise(counted)), "time that counts goes back"
    replay = Replay(scenario)
    for event in outcome.log:
        replay.apply(event)
    replay.check_end(outcome.live)
    check_batches(outcome, replay)
    check_epochs(scenario, outcome.log)
    check_metrics(outcome, counted)


def _timeless(event: Event) -> Event:
    """Events behind a roll-back are moved back in time by what it made void."""
    return event._replace(at=0.0)


@dataclass
class Known:
    """What the log tells about a rollout."""

    prompt: str
    group: int  # the same for rollouts that were loaded together for one reading of their prompt
    index_in_group: int
    cohort: int
    state: str = WAITING
    segments: list[tuple[int, int]] = field(default_factory=list)  # (version, tokens)
    sampled_under: int = 0  # version of the engine when it was last submitted
    kept: int = 0  # tokens when it was last submitted
    attempt: int = 0
    failures: int = 0
    environment_failures: int = 0
    reward: float | None = None
    slot: int | None = None

    @property
    def length(self) -> int:
        return sum(count for _, count in self.segments)

    @property
    def sampled(self) -> int:
        return sum(count for version, count in self.segments if version != NOT_SAMPLED)

    def grow(self, count: int) -> None:
        if count and self.segments and self.segments[-1][0] == self.sampled_under:
            self.segments[-1] = (self.sampled_under, self.segments[-1][1] + count)
        elif count:
            self.segments.append((self.sampled_under, count))

    def drop(self, dropped: int) -> None:
        """Either all tokens or none are dropped; a rollout that lost tokens is at its next attempt."""
        assert dropped in (0, self.sampled), f"{dropped} of {self.sampled} tokens dropped"
        if dropped:
            self.segments.clear()
            self.attempt += 1


class Replay:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.schedule = scenario.schedule
        self.strategy = STRATEGIES[scenario.schedule.mode]
        self.slots = 0
        self.rollouts: dict[int, Known] = {}
        self.groups = 0
        self.version = 0
        self.updates = 0
        self.trained: list[int] = []
        self.most_retries = self.schedule.max_retries
        # Of a resumed run: its environment lost its turns, or the settings of now do not allow it.
        self.may_drop: tuple[str, ...] = (WAITING,) if scenario.turns else ()
        self.last_judged = -1  # the rollout that was scored or rejected last

    def apply(self, event: Event) -> None:
        if isinstance(event, events.Scored | events.Rejected):
            self.last_judged = event.rollout
        match event:
            case events.RunBegan() | events.SlotsChanged():
                assert event.slots != self.slots
                self.slots = event.slots
            case events.SettingsChanged():
                self.schedule = Schedule(**{name: new for name, (_, new) in event.changes.items()})
                self.most_retries = max(self.most_retries, self.schedule.max_retries)
                self.may_drop = (WAITING, READY, RETURNING)
            case events.Loaded():
                self._load(event)
            case events.Submitted():
                self._submit(event)
            case events.Started():
                self._start(event)
            case events.Preempted():
                self._running(event.rollout).slot = None
            case events.Observed():
                self._observe(event)
            case events.EnvironmentFailed():
                rollout = self._in_state(event.rollout, ENVIRONMENT)
                rollout.environment_failures += 1
                assert rollout.environment_failures <= 2 * self.most_retries + 2 and event.reason
            case events.Finished() if self.rollouts[event.rollout].state == ENVIRONMENT:
                rollout = self.rollouts[event.rollout]
                assert (event.made, event.length) == (0, rollout.length)
                rollout.state = FINISHED
            case events.TurnEnded() | events.Finished() | events.Aborted() | events.Failed():
                self._leave_engine(event)
            case events.Scored():
                rollout = self._in_state(event.rollout, FINISHED)
                rollout.state, rollout.reward = READY, event.reward
            case events.Regenerated():
                rollout = self._in_state(event.rollout, FINISHED, READY, ENVIRONMENT, RETURNING, *self.may_drop)
                assert event.dropped == rollout.sampled and event.reason
                rollout.drop(event.dropped)
                rollout.state, rollout.reward = WAITING, None
            case events.Rejected():
                rollout = self._in_state(event.rollout, WAITING, FINISHED, ENVIRONMENT, *self.may_drop)
                assert event.dropped == rollout.sampled and event.reason
                rollout.state = REJECTED
            case events.Skipped():
                self._skip(event)
            case events.Filtered():
                self._filter(event)
            case events.Published():
                assert event.version == self.version + 1
                self.version = event.version
            case events.Updated():
                self._update(event)

    def _in_state(self, id: int, *states: str) -> Known:
        rollout = self.rollouts[id]
        assert rollout.state in states, f"rollout {id} is {rollout.state}, not {' or '.join(states)}"
        return rollout

    def _running(self, id: int) -> Known:
        rollout = self._in_state(id, RUNNING)
        assert rollout.slot is not None, f"rollout {id} has no slot"
        return rollout

    def _load(self, event: events.Loaded) -> None:
        per_prompt = self.schedule.rollouts_per_prompt
        assert event.first == len(self.rollouts) and event.rollouts == len(event.prompts) * per_prompt
        if self.strategy.gated and self.rollouts:
            last = max(rollout.cohort for rollout in self.rollouts.values())
            assert event.cohort == last + 1 or self.schedule.revisit_filtered < 1  # several parts of one cohort
        for prompt in event.prompts:
            for sibling in range(per_prompt):
                self.rollouts[len(self.rollouts)] = Known(prompt, self.groups, sibling, event.cohort)
            self.groups += 1

    def _skip(self, event: events.Skipped) -> None:
        """Prompts whose last group was filtered; they use up their ids."""
        assert self.schedule.revisit_filtered < 1 and event.first == len(self.rollouts)
        for prompt, age in zip(event.prompts, event.ages, strict=True):
            epoch = self.groups // len(self.scenario.lengths)
            judged = [r for r in self.rollouts.values() if r.prompt == prompt and r.state in (TRAINED, FILTERED)]
            filtered = {r.group // len(self.scenario.lengths) for r in judged if r.state == FILTERED}
            assert age > 0 and epoch - age in filtered, "its last group was not filtered"
            if self.schedule.whole_groups:
                assert max(r.group // len(self.scenario.lengths) for r in judged) == epoch - age
            for member in range(self.schedule.rollouts_per_prompt):
                self.rollouts[len(self.rollouts)] = Known(prompt, self.groups, member, 0, state=SKIPPED)
            self.groups += 1

    def _submit(self, event: events.Submitted) -> None:
        rollout = self._in_state(event.rollout, WAITING, RETURNING)
        first = next((r for r in self.rollouts.values() if r.state == RETURNING), rollout)
        assert first.state == rollout.state, "started before a rollout that came back from its environment"
        self._check_backlog(rollout)
        assert event.prefix == rollout.length and rollout.sampled < self.schedule.max_response_tokens
        assert event.prompt_tokens + event.prefix < (self.schedule.max_context_tokens or math.inf), "no room is left"
        assert event.attempt == rollout.attempt
        assert event.prompt_tokens <= (self.schedule.max_prompt_tokens or event.prompt_tokens)
        rollout.state, rollout.kept, rollout.sampled_under = RUNNING, event.prefix, self.version

    def _check_backlog(self, rollout: Known) -> None:
        """Modes that keep tokens open no further rollout while many are in their environments."""
        is_bounded = isinstance(self.strategy, Partial) and not isinstance(self.strategy, AsyncPool)
        if not is_bounded or self.schedule.oversubscribe is not None:
            return
        known = self.rollouts.values()
        group = [other for other in known if other.group == rollout.group] if self.schedule.whole_groups else [rollout]
        if not any(member.segments or member.attempt or member.state != WAITING for member in group):
            in_environment = sum(other.state == ENVIRONMENT for other in known)
            assert in_environment < max(self.slots, 4 * self.schedule.rollouts_needed), "opened too many"

    def _start(self, event: events.Started) -> None:
        rollout = self._in_state(event.rollout, RUNNING)
        assert rollout.slot is None and 0 <= event.slot < self.slots
        assert all(other.slot != event.slot for other in self.rollouts.values()), "two rollouts in a slot"
        rollout.slot = event.slot

    def _observe(self, event: events.Observed) -> None:
        rollout = self._in_state(event.rollout, ENVIRONMENT)
        assert rollout.slot is None, "a slot is held while the environment works"
        rollout.segments.append((NOT_SAMPLED, event.tokens))
        assert event.tokens > 0 and event.length == rollout.length
        rollout.state = RETURNING

    def _leave_engine(self, event: events.TurnEnded | events.Finished | events.Aborted | events.Failed) -> None:
        rollout = self._in_state(event.rollout, RUNNING)
        assert event.made == 0 or rollout.slot is not None or isinstance(event, events.Aborted | events.Failed)
        rollout.grow(event.made)
        rollout.slot = None
        assert rollout.length == rollout.kept + event.made, "over its budget"
        assert rollout.sampled <= self.schedule.max_response_tokens, "over its budget"
        if isinstance(event, events.TurnEnded):
            assert event.length == rollout.length > 0 and self.scenario.turns
            rollout.state = ENVIRONMENT
            return
        if isinstance(event, events.Finished):
            assert event.length == rollout.length > 0
            rollout.state = FINISHED
            return
        if isinstance(event, events.Aborted):
            assert event.length == rollout.length
        else:
            rollout.failures += 1
            assert rollout.failures <= self.most_retries + 1 and event.reason
        assert event.dropped == (0 if self.strategy.keeps_tokens else rollout.sampled)
        rollout.drop(event.dropped)
        rollout.state = WAITING

    def _update(self, event: events.Updated) -> None:
        assert event.update == self.updates and event.version == self.version
        assert len(event.rollouts) == len(set(event.rollouts)) > 0
        bound = 0 if self.strategy.on_policy else self.schedule.max_staleness
        for id, length, reward, segments in zip(
            event.rollouts, event.lengths, event.rewards, event.segments, strict=True
        ):
            rollout = self._in_state(id, READY)
            assert (length, reward, segments) == (rollout.length, rollout.reward, tuple(rollout.segments))
            assert 0 < rollout.sampled <= self.schedule.max_response_tokens
            turns = [[v for v, _ in turn] for n, turn in groupby(segments, lambda s: s[0] == NOT_SAMPLED) if not n]
            versions = [version for turn in turns for version in turn]
            assert versions == sorted(versions) and versions[-1] <= self.version
            assert all(turn == sorted(set(turn)) for turn in turns), "neighbors of one version are one segment"
            assert len(turns) <= (self.schedule.max_turns or math.inf)
            assert bound is None or self.version - versions[0] <= bound, "too stale"
            rollout.state = TRAINED
        self.trained += event.rollouts
        self.updates += 1
        self._check_groups(event.rollouts)
        self._check_gate(event.rollouts)
        self._check_filter(event.rollouts)

    def _filter(self, event: events.Filtered) -> None:
        """A complete group, as soon as its last member is scored or rejected, that its filter does not keep."""
        members = [self._in_state(id, READY) for id in event.rollouts]
        group = {id for id, rollout in self.rollouts.items() if rollout.group == members[0].group}
        if self.schedule.whole_groups:
            assert {id for id in group if self.rollouts[id].state != REJECTED} == set(event.rollouts)
        else:
            assert len(event.rollouts) == 1
        assert self.last_judged in group or event.reason == "surplus", "judged late"
        rewards = [rollout.reward or 0.0 for rollout in members]
        surplus = event.reason == "surplus" and self.strategy.discards_surplus
        assert surplus or not self._keeps(members), "filtered, and has something to teach"
        assert event.tokens == sum(rollout.sampled for rollout in members)
        assert abs(event.reward - sum(rewards) / len(rewards)) < EPSILON
        own = self.schedule.filter_groups != "equal_rewards"
        reasons = {self.schedule.filter_groups} if own else self._reasons(rewards)
        assert surplus or event.reason in reasons
        for rollout in members:
            rollout.state = FILTERED

    def _keeps(self, members: list[Known]) -> bool:
        if self.schedule.filter_groups == "equal_rewards":
            return len({rollout.reward for rollout in members}) > 1
        return bool(int(members[0].prompt.removeprefix("p")) % 3)

    def _reasons(self, rewards: list[float]) -> set[str]:
        if len(rewards) == 1:
            return {"too few members"}
        return {"equal", "right", "wrong"} - {"wrong" if rewards[0] == 1.0 else "right" if rewards[0] == 0.0 else ""}

    def _check_filter(self, ids: tuple[int, ...]) -> None:
        """All groups of the batch are kept ones, and the batch is full as long as there is more data."""
        if self.schedule.filter_groups is None:
            return
        of_group: defaultdict[int, list[Known]] = defaultdict(list)
        for id in ids:
            of_group[self.rollouts[id].group if self.schedule.whole_groups else id].append(self.rollouts[id])
        assert all(map(self._keeps, of_group.values())), "a group that its filter does not keep"
        last = max(self.rollouts[id].cohort for id in ids)
        has_more = self.groups < len(self.scenario.lengths) * self.scenario.epochs or (
            self.strategy.gated and any(r.cohort > last and r.state not in GONE for r in self.rollouts.values())
        )
        if has_more:
            needed = self.schedule.rollouts_needed
            at_once = isinstance(self.strategy, CohortAtOnce)
            ragged = self.schedule.rollouts_per_prompt - 1  # groups that lost members by rejections
            assert len(ids) >= (needed / 2 - ragged if at_once else needed), "an update that is not full"
            exact = not (self.strategy.on_policy or at_once) or self.strategy.discards_surplus
            exact &= self.schedule.max_staleness is None
            assert not exact or len(ids) < needed + self.schedule.rollouts_per_prompt, "more than the update needs"

    def _check_groups(self, ids: tuple[int, ...]) -> None:
        """Where groups are trained on whole, nothing of a group of this batch is left but what was rejected."""
        if self.schedule.whole_groups:
            groups = {self.rollouts[id].group for id in ids}
            members = {id for id, rollout in self.rollouts.items() if rollout.group in groups}
            assert all(self.rollouts[id].state in GONE for id in members), "a group is torn apart"
            assert set(ids) == {id for id in members if self.rollouts[id].state == TRAINED}, "a group in two batches"

    def _check_gate(self, ids: tuple[int, ...]) -> None:
        if self.strategy.gated:
            cohorts = {self.rollouts[id].cohort for id in ids}
            assert len(cohorts) == 1 or self.schedule.filter_groups is not None
            before = [rollout for rollout in self.rollouts.values() if rollout.cohort < max(cohorts)]
            assert all(rollout.state in GONE for rollout in before), "trained on before its cohort"

    def check_end(self, live: set[int]) -> None:
        """Each rollout was trained on once, or rejected, or (in a run that ended early) is still there."""
        assert len(self.trained) == len(set(self.trained))
        left = {id for id, rollout in self.rollouts.items() if rollout.state not in GONE}
        assert left == live
        assert all(rollout.slot is None and rollout.state != RUNNING for rollout in self.rollouts.values())
        if self.scenario.max_updates is None:
            assert not left, "lost rollouts"
        else:
            assert self.updates <= self.scenario.max_updates


def check_batches(outcome: Outcome, replay: Replay) -> None:
    """What was handed out is what the log says, token by token."""
    updates = [event for event in outcome.log if isinstance(event, events.Updated)]
    assert len(updates) == len(outcome.batches)
    for update, batch in zip(updates, outcome.batches, strict=True):
        assert (update.update, update.version) == (batch.update, batch.version)
        assert update.rollouts == tuple(rollout.id for rollout in batch)
        assert list(update.lengths) == sorted(map(len, batch)), "not shortest first"
        _check_rollouts(batch, outcome.case, replay)


def _check_rollouts(batch: Batch, case: Case, replay: Replay) -> None:
    of_group: defaultdict[int, list[tuple[str, int]]] = defaultdict(list)
    for rollout in batch:
        known = replay.rollouts[rollout.id]
        check_tokens(rollout, None if case.settings_of_later_lives else case.scenario)
        assert (rollout.prompt.id, rollout.cohort) == (known.prompt, known.cohort)
        assert rollout.index_in_group == known.index_in_group
        assert rollout.group == rollout.id - known.index_in_group, "the key of a group is its first member"
        of_group[known.group].append((rollout.prompt.id, rollout.index_in_group))
    assert len({rollout.group for rollout in batch}) == len(of_group), "two readings of a prompt are merged"
    for members in of_group.values():  # one reading of one prompt, each sibling once
        assert len({prompt for prompt, _ in members}) == 1 and len(set(members)) == len(members)


def check_tokens(rollout: Rollout, scenario: Scenario | None) -> None:
    """Its tokens are those of its turns and its environment's answers, in order, each with what belongs to it. Without
    a scenario, it is not known which limits ended it."""
    mask = rollout.mask
    if scenario is not None:
        mask = [bit for is_policy, count in scenario.shape(rollout) for bit in [int(is_policy)] * count]
        assert rollout.policy_length <= scenario.schedule.max_response_tokens
    assert rollout.mask == mask and len(rollout) == len(mask) == len(rollout.versions)
    assert rollout.policy_length == sum(mask)
    assert rollout.tokens == list(range(len(mask)))
    assert rollout.logprobs == [-(position + 1) * bit for position, bit in enumerate(mask)]


def check_epochs(scenario: Scenario, log: list[Event]) -> None:
    """Prompts are read epoch by epoch, each of them once."""
    read = [prompt for event in log if isinstance(event, events.Loaded | events.Skipped) for prompt in event.prompts]
    everything = Counter(prompt.id for prompt in scenario.dataset())
    size = len(scenario.lengths)
    for start in range(0, len(read), size):
        epoch = Counter(read[start : start + size])
        assert epoch == everything or (start + size > len(read) and epoch <= everything)
    assert len(read) == size * scenario.epochs or (
        scenario.max_updates is not None and len(read) < size * scenario.epochs
    )


def check_metrics(outcome: Outcome, counted: list[Event]) -> None:
    run_metrics = Metrics().fold(counted).run_metrics()
    assert -EPSILON <= run_metrics.bubble <= run_metrics.idle + EPSILON <= 1 + 2 * EPSILON
    assert abs(sum(run_metrics.bubble_parts.values()) - run_metrics.bubble) < EPSILON
    assert abs(sum(run_metrics.idle_parts.values()) - run_metrics.idle) < EPSILON
    assert run_metrics.updates == len(outcome.batches)
    rollouts = [rollout for batch in outcome.batches for rollout in batch]
    assert run_metrics.trained_tokens == sum(rollout.policy_length for rollout in rollouts)
    filtered = [event for event in counted if isinstance(event, events.Filtered)]
    assert run_metrics.filtered == sum(len(event.rollouts) for event in filtered)
    spent = run_metrics.trained_tokens + run_metrics.dropped_tokens + run_metrics.filtered_tokens
    assert run_metrics.generated_tokens == spent + run_metrics.cached_tokens
    assert outcome.live or not run_metrics.cached_tokens
    assert run_metrics.environment_tokens == sum(len(rollout) - rollout.policy_length for rollout in rollouts)
    turns = sum(rollout.observations + 1 for rollout in rollouts)
    assert run_metrics.turns_mean == (turns / len(rollouts) if rollouts else 0.0)
