"""All metrics of a run, as one fold over its event log. The same fold serves simulated and real runs.

Feed `Metrics` every event, then ask for `run_metrics()` at any time. Definitions are in docs/metrics.md; the invariants
here: 0 <= bubble <= idle <= 1, and the parts of bubble and idle add up to them. They hold for a log that lacks events,
too: an event of a rollout that is not where the event says, or of an update that was counted, is ignored.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import fmean

from sortedrl.core import events
from sortedrl.core.events import Event
from sortedrl.core.rejections import Reasons
from sortedrl.core.rollout import ENVIRONMENT
from sortedrl.log.reading import SeveralRuns, handlers_of, without_rolled_back
from sortedrl.observe.run_metrics import RunMetrics, Snapshot
from sortedrl.observe.tallies import TurnTally, log_lengths, rank_correlation, sortedness
from sortedrl.observe.uncut_length import Attempts
from sortedrl.observe.wall_clock import Moment, WallClock

HARVEST = "harvest"
BUBBLE_PARTS = ("drain", "refill", "queued", "kv_limited", "held_back", "environment")
_COUNTS = (  # metrics of these names: of rollouts, then of tokens
    *("loaded", "trained", "rejected", "filtered", "failures", "regenerated", "truncated", "preemptions", "skipped"),
    *("generated_tokens", "trained_tokens", "filtered_tokens", "dropped_tokens", "prefill_tokens", "re_prefill_tokens"),
    *("drafted_tokens", "accepted_tokens"),
)
REWARDS_KEPT = 60  # updates, for a display
_IN_SNAPSHOT = [name for name in Snapshot.__slots__ if name in RunMetrics.__slots__ and name not in _COUNTS]
_PART_OF_GATE = {"drain": "drain", "held back": "held_back", "open": "refill"}


class Metrics:
    """The fold. Holds a few numbers per rollout, never tokens."""

    def __init__(self) -> None:
        self.mode = ""
        self.slots = 0
        self._began = self._time = 0.0
        self.phase, self._gate = "", "open"
        self._live: set[int] = set()  # submitted to the engine, in a slot or in its queue
        self._memory_is_short = False  # from a preemption until no slot is empty while requests wait
        self._empty = dict.fromkeys(BUBBLE_PARTS, 0.0)  # slot-seconds
        self._other_phases: defaultdict[str, float] = defaultdict(float)  # slot-seconds of those that are no harvest
        self._harvest_seconds = self._harvest_capacity = 0.0  # the latter in slot-seconds
        self._empty_of_a_slot = self._in_environments = 0.0  # mean seconds: of environments, and all others
        self._harvest_marks: list[tuple[float, float]] = []  # (all, empty) slot-seconds of harvests at each start
        self._in_slot: set[int] = set()
        self._have_tokens, self._ready = set[int](), set[int]()  # untrained rollouts: all with tokens; scored ones
        self.published = 0  # updates
        self.rewards: deque[float] = deque(maxlen=REWARDS_KEPT)  # means of the latest updates, latest last
        self.last_lengths: Sequence[int] = ()  # of the latest update
        self._first_expected: dict[int, float] = {}
        self._count = dict.fromkeys(_COUNTS, 0)
        self._staleness: Counter[int] = Counter()
        self._segments: Counter[int] = Counter()
        self._loaded = self._next_update = 0  # rollouts and updates before these were seen, or are lost
        self._updates: list[list[list[float]]] = []  # log lengths, by unit
        self._reward_sum = self._streamed_seconds = 0.0
        self._streamed: set[int] = set()  # rollouts, for the coming update
        self._trained_streamed = self._steps_of_requests = 0
        self._longest_wait = self._oldest_skipped = 0
        self._expected_lengths, self._real_lengths = array("d"), array("d")
        self._attempts = Attempts()
        self._reasons, self._filtered_reasons = Reasons(), Counter[str]()  # of rejections; filtered rollouts
        self._wall_clock = WallClock()
        self._turns = TurnTally()
        self._rollouts_per_prompt = 1
        self._trains_whole_groups = self._keeps_seeds = self._overlaps = False
        self._handlers = handlers_of(self)

    def __call__(self, event: Event) -> None:
        handler = self._handlers.get(type(event))
        if event.at > self._time and self.slots:
            self._pass_time(event.at)
        if handler is not None:
            handler(event)

    def fold(self, log: Iterable[Event]) -> Metrics:
        """All events that count; events that were rolled back do not."""
        for event in without_rolled_back(log):
            self(event)
        return self

    # Time

    def slot_seconds(self) -> dict[str, float]:
        """Where the slot-time went so far: busy, the parts of the bubble, and phases other than harvest."""
        return {"busy": self._harvest_capacity - sum(self._empty.values())} | self._empty | self._other_phases

    def _pass_time(self, at: float) -> None:
        seconds = at - self._time
        self._time = at
        if self.phase != HARVEST:
            self._other_phases[self.phase] += self.slots * seconds
            return
        self._harvest_seconds += seconds
        self._harvest_capacity += self.slots * seconds
        submitted, in_environment = min(self.slots, len(self._live)), 0
        queued, free = max(0, submitted - len(self._in_slot)), self.slots - submitted
        if not queued and not free:
            return
        if self._turns.in_use and self._gate != "open":
            in_environment = min(free, len(self._turns.since))
            self._empty["environment"] += in_environment * seconds
            self._in_environments += in_environment / self.slots * seconds
        self._empty["kv_limited" if self._memory_is_short else "queued"] += queued * seconds
        self._empty[_PART_OF_GATE[self._gate]] += (free - in_environment) * seconds
        self._empty_of_a_slot += (queued + free - in_environment) / self.slots * seconds

    def _now(self) -> Moment:
        return Moment(self._time, self._empty_of_a_slot, self._in_environments)

    def _on_run_began(self, event: events.RunBegan) -> None:
        if self.slots:
            raise SeveralRuns("a second run starts in the same event log: give each run an EventLog of its own")
        self.mode, self.slots = event.mode, event.slots
        self._began = self._time = event.at
        self._wall_clock.begin(self._now())
        self.phase = "start"
        self._rollouts_per_prompt = self._attempts.group_size = event.settings.get("rollouts_per_prompt", 1)
        self._trains_whole_groups = event.settings.get("whole_groups", False)
        self._keeps_seeds = event.settings.get("keep_seed", False)
        self._overlaps = event.settings.get("overlap", False)

    def _on_slots_changed(self, event: events.SlotsChanged) -> None:
        if self.slots:  # else the events before the resume are missing
            self.slots = event.slots

    def _on_phase(self, event: events.Phase) -> None:
        self.phase = event.phase
        if self._live and event.phase != HARVEST and not self._overlaps:  # the events of their ends are lost
            self._live.clear()
            self._in_slot.clear()
        self._wall_clock.phase(event.phase, self._now())

    def _on_gate(self, event: events.Gate) -> None:
        self._gate = event.why

    def _on_harvest_began(self, event: events.HarvestBegan) -> None:
        self._harvest_marks.append((self._harvest_capacity, sum(self._empty.values())))

    # Rollouts

    def _on_loaded(self, event: events.Loaded) -> None:
        end = event.first + event.rollouts
        self._count["loaded"] += max(0, end - max(event.first, self._loaded))
        self._loaded = max(self._loaded, end)

    def _on_submitted(self, event: events.Submitted) -> None:
        rollout = event.rollout
        self._live.add(rollout)
        if event.prefix:
            self._have_tokens.add(rollout)
        prefilled_before = event.prefix or event.attempt or rollout in self._first_expected
        self._count["re_prefill_tokens" if prefilled_before else "prefill_tokens"] += event.prompt_tokens + event.prefix
        if self._turns.in_use:
            new = self._turns.submit(rollout, event.at)
            self._count["prefill_tokens"] += new
            self._count["re_prefill_tokens"] -= new
        if not prefilled_before:
            self._first_expected[rollout] = event.expected

    def _on_started(self, event: events.Started) -> None:
        if event.rollout in self._live:
            self._in_slot.add(event.rollout)
        if self._memory_is_short:
            self._note_room()

    def _on_preempted(self, event: events.Preempted) -> None:
        self._in_slot.discard(event.rollout)
        if event.recompute:  # 0: it had not started
            self._memory_is_short = True
            self._count["preemptions"] += 1
            self._count["re_prefill_tokens"] += event.recompute

    def _on_turn_ended(self, event: events.TurnEnded) -> None:
        if self._leave_engine(event.rollout, event.made):
            self._turns.end_turn(event)

    def _on_observed(self, event: events.Observed) -> None:
        self._turns.observe(event)
        self._have_tokens.add(event.rollout)

    def _on_environment_failed(self, event: events.EnvironmentFailed) -> None:
        self._turns.failures += 1

    def _on_finished(self, event: events.Finished) -> None:
        rollout = event.rollout
        if not self._leave_engine(rollout, event.made) and not self._turns.leave(rollout, event.at):
            return
        self._count["truncated"] += event.truncated
        sampled = event.length - self._turns.tokens_of(rollout)
        self._attempts.ended(rollout, sampled, finished=True)
        self._wall_clock.finish(rollout, self._now())

    def _on_aborted(self, event: events.Aborted) -> None:
        if self._leave_engine(event.rollout, event.made):
            if event.length:
                self._have_tokens.add(event.rollout)
            self._drop(event.rollout, event.dropped)

    def _on_failed(self, event: events.Failed) -> None:
        if self._leave_engine(event.rollout, event.made):
            self._count["failures"] += 1
            if event.made:
                self._have_tokens.add(event.rollout)
            self._drop(event.rollout, event.dropped)

    def _on_regenerated(self, event: events.Regenerated) -> None:
        self._count["regenerated"] += 1
        self._ready.discard(event.rollout)
        self._drop(event.rollout, event.dropped)
        self._wall_clock.forget(event.rollout)

    def _on_scored(self, event: events.Scored) -> None:
        self._wall_clock.score(event.rollout, self._now())
        self._ready.add(event.rollout)

    def _on_rejected(self, event: events.Rejected) -> None:
        self._count["rejected"] += 1
        self._count["dropped_tokens"] += event.dropped
        self._reasons.add(event.reason)
        self._wall_clock.forget(event.rollout)
        self._turns.drop(event.rollout, event.at)
        self._attempts.forget(event.rollout)
        self._first_expected.pop(event.rollout, None)
        self._leave((event.rollout,))

    def _on_skipped(self, event: events.Skipped) -> None:
        self._count["skipped"] += len(event.prompts)
        self._oldest_skipped = max(self._oldest_skipped, *event.ages)

    def _on_filtered(self, event: events.Filtered) -> None:
        self._count["filtered"] += len(event.rollouts)
        self._count["filtered_tokens"] += event.tokens
        self._filtered_reasons[event.reason] += len(event.rollouts)
        self._reward_sum += event.reward * len(event.rollouts)
        self._leave(event.rollouts)
        for rollout in event.rollouts:
            self._first_expected.pop(rollout, None)
            self._turns.drop(rollout, event.at)
            self._attempts.trained(rollout, event.tokens // len(event.rollouts))

    def _drop(self, rollout: int, dropped: int) -> None:
        if dropped:
            self._count["dropped_tokens"] += dropped
            self._have_tokens.discard(rollout)
            self._turns.drop(rollout, self._time)
            self._attempts.dropped(rollout, dropped)

    def _leave_engine(self, rollout: int, made: int) -> bool:
        """Whether it was there."""
        if rollout not in self._live:
            return False
        self._live.remove(rollout)
        self._in_slot.discard(rollout)
        if self._memory_is_short:
            self._note_room()
        self._count["generated_tokens"] += made
        return True

    def _leave(self, rollouts: Iterable[int]) -> None:
        """They were trained on, rejected or filtered."""
        for rest in (self._live, self._in_slot, self._have_tokens, self._ready):
            rest.difference_update(rollouts)

    def _note_room(self) -> None:
        self._memory_is_short = min(self.slots, len(self._live)) > len(self._in_slot)

    def _on_streamed(self, event: events.Streamed) -> None:
        self._streamed.update(event.rollouts)
        self._streamed_seconds += event.seconds

    def _on_drafted(self, event: events.Drafted) -> None:
        self._count["drafted_tokens"] += event.drafted
        self._count["accepted_tokens"] += event.accepted
        self._steps_of_requests += event.sampled - event.accepted

    def _on_updated(self, event: events.Updated) -> None:
        if event.update < self._next_update:
            return
        self._next_update = event.update + 1
        self._leave(event.rollouts)
        self.rewards.append(fmean(event.rewards))
        self.last_lengths = event.lengths
        self._trained_streamed += len(self._streamed.intersection(event.rollouts))
        self._streamed.clear()
        self._wall_clock.update(self._now())
        group = self._rollouts_per_prompt if self._trains_whole_groups else 1
        self._updates.append(log_lengths(event, group))
        lengths = self._turns.train(event)
        self._count["trained"] += len(event.rollouts)
        self._count["trained_tokens"] += sum(lengths)
        self._reward_sum += sum(event.rewards)
        self._longest_wait = max(self._longest_wait, *event.waited)
        staleness, segment_counts, learner_version = self._staleness, self._segments, event.version
        for segments in event.segments:
            observed = 0
            for version, tokens in segments:
                if version == ENVIRONMENT:
                    observed += 1
                else:
                    staleness[learner_version - version] += tokens
            segment_counts[len(segments) - observed] += 1
        for rollout, length in zip(event.rollouts, lengths, strict=True):
            expected = self._first_expected.pop(rollout, None)
            if expected is not None:
                self._expected_lengths.append(expected)
                self._real_lengths.append(length)
            self._attempts.trained(rollout, length)

    def _on_published(self, event: events.Published) -> None:
        self._wall_clock.publish(self._now())
        self.published = self._next_update

    # The metrics

    def snapshot(self) -> Snapshot:
        count, steps = self._count, self._steps_of_requests
        wall = self._time - self._began
        empty, capacity = sum(self._empty.values()), self._harvest_capacity
        capacity_before, empty_before = self._harvest_marks[-1] if self._harvest_marks else (0.0, 0.0)
        return Snapshot(
            wall_seconds=wall,
            bubble=_ratio(empty, capacity),
            bubble_now=_ratio(empty - empty_before, capacity - capacity_before),
            idle=sum(self._idle_parts().values()),
            goodput=_ratio(count["trained_tokens"], self._harvest_seconds),
            waste=_ratio(count["dropped_tokens"], count["generated_tokens"]),
            filtered_fraction=_ratio(count["filtered"], count["filtered"] + count["trained"]),
            rejected=count["rejected"],
            rejected_most=self._reasons.most_frequent() if count["rejected"] else "",
            staleness_mean=_ratio(sum(age * n for age, n in self._staleness.items()), count["trained_tokens"]),
            staleness_max=max(self._staleness, default=0),
            tokens_per_step=1 + count["accepted_tokens"] / steps if steps else None,
        )

    def places(self) -> dict[str, int]:
        """How many rollouts are where, of those that are not trained, rejected or filtered."""
        elsewhere = self._live.union(self._turns.since, self._wall_clock.unscored, self._ready)
        found = {
            "resumable": len(self._have_tokens - elsewhere),  # aborted with its tokens kept, or back from environments
            "queued": len(self._live) - len(self._in_slot),  # in the engine, without a slot
            "running": len(self._in_slot),
            "environment": len(self._turns.since),  # between two turns, without a slot
            "finished": len(self._wall_clock.unscored),  # but not scored yet
            "ready": len(self._ready),
        }
        gone = sum(self._count[name] for name in ("trained", "rejected", "filtered"))
        return {"waiting": max(0, self._count["loaded"] - gone - sum(found.values()))} | found  # they have no tokens

    def _idle_parts(self) -> dict[str, float]:
        capacity = self._harvest_capacity + sum(self._other_phases.values())
        return {part: _ratio(value, capacity) for part, value in (self._empty | self._other_phases).items()}

    def run_metrics(self, uncut_mean_length: float | None = None) -> RunMetrics:
        """A simulation passes the exact `uncut_mean_length`; otherwise it is estimated, which can take a second."""
        count = self._count
        now = self.snapshot()
        wall, capacity = now.wall_seconds, self._harvest_capacity
        scored_tokens, scored = (count[f"trained{of}"] + count[f"filtered{of}"] for of in ("_tokens", ""))
        cached = count["generated_tokens"] - count["dropped_tokens"] - scored_tokens
        updates = len(self._updates)
        mean_length = _ratio(count["trained_tokens"], count["trained"])
        uncut, of_all = uncut_mean_length, mean_length
        if uncut is None:  # estimated, with the filtered ones
            uncut, of_all = self._uncut_mean_length(), _ratio(scored_tokens, scored)
        return RunMetrics(
            mode=self.mode,
            slots=self.slots,
            **count,
            seconds=self._harvest_seconds,
            **{name: getattr(now, name) for name in _IN_SNAPSHOT},
            bubble_parts={part: _ratio(value, capacity) for part, value in self._empty.items()},
            bubble_per_harvest=self._bubble_per_harvest(),
            idle_parts=self._idle_parts(),
            wall_parts=self._wall_clock.fractions(self._now()),
            kept=_ratio(count["trained_tokens"] + cached, self._harvest_seconds),
            cached_tokens=cached,
            rejected_reasons=self._reasons.counts(),
            filtered_reasons=dict(self._filtered_reasons.most_common()),
            updates=updates,
            harvests=len(self._harvest_marks),
            rollouts_per_update_mean=_ratio(count["trained"], updates),
            updates_per_hour=3600 * _ratio(updates, wall),
            trained_rollouts_per_hour=3600 * _ratio(count["trained"], wall),
            trained_tokens_per_hour=3600 * _ratio(count["trained_tokens"], wall),
            staleness_histogram=dict(sorted(self._staleness.items())),
            segments_histogram=dict(sorted(self._segments.items())),
            sortedness=sortedness(self._updates),
            mean_length=mean_length,
            uncut_mean_length=uncut,
            length_bias=None if uncut is None else of_all / uncut - 1 if uncut else 0.0,
            expectation_quality=rank_correlation(self._expected_lengths, self._real_lengths),
            longest_wait_updates=self._longest_wait,
            skipped_fraction=_ratio(count["skipped"], count["skipped"] + count["loaded"] / self._rollouts_per_prompt),
            skipped_age_max=self._oldest_skipped,
            mean_reward=_ratio(self._reward_sum, scored),
            streamed_fraction=_ratio(self._trained_streamed, count["trained"]),
            streamed_seconds=self._streamed_seconds,
            turns_mean=_ratio(self._turns.trained_turns, count["trained"]),
            environment_seconds=self._turns.seconds_at(self._time),
            environment_tokens=self._turns.trained_tokens,
            environment_failures=self._turns.failures,
        )

    def _bubble_per_harvest(self) -> tuple[float, ...]:
        marks = [*self._harvest_marks, (self._harvest_capacity, sum(self._empty.values()))]
        return tuple(
            _ratio(empty - empty_before, capacity - capacity_before)
            for (capacity_before, empty_before), (capacity, empty) in pairwise(marks)
        )

    def _uncut_mean_length(self) -> float | None:
        """None with `keep_seed`: regenerating then repeats the same attempt, which carries no new information."""
        return None if self._keeps_seeds and self._attempts.was_any_cut else self._attempts.mean_if_uncut()


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
