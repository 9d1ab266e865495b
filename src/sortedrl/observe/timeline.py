"""Which rollout was in which slot, and when: a fold over the event log, the same for every engine.

A slice is a rollout's continuous time in a slot, from `Started` until it leaves. Its outcome is the first line that
applies:

    running    the log ends while it is in the slot
    preempted  the engine preempted it for lack of KV cache memory
    failed     the engine lost the request
    dropped    it finished or was aborted, and its tokens were discarded, then or later (aborted in a mode that keeps no
               tokens, regenerated, failed or rejected afterwards), or it was aborted before its first token
    filtered   its group was complete, and the filter did not keep it
    lookahead  it was started for a later cohort while an earlier one still had untrained rollouts (only in modes with
               a cohort gate: without one, every rollout belongs to the current window)
    stepped    a turn ended in this slot, and the rollout went to its environment; another turn follows
    kept       it was aborted and its tokens were kept for resume, or it finished and the log ends before its update
    trained    it finished in this slot and is in an update

Events are ignored if those before them are lost: of a rollout that was not loaded or submitted, or in no slot of the
run. Where the end of a slice is lost, the next one in its slot or the end of the harvest ends it.

Invariants: each slice has exactly one outcome; slices of a slot do not overlap. If no event is lost, their durations
add up to the busy slot-time of observe/metrics.py, and `made` adds up to the generated tokens, except for running
slices, whose tokens are not in the log yet. `update` is the update in which the tokens of the slice were trained on,
for every outcome (a kept slice has one once its rollout was trained on), or None.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from sortedrl.core import events
from sortedrl.core.events import Event
from sortedrl.core.strategies.registry import STRATEGIES
from sortedrl.log.reading import handlers_of, without_rolled_back

RUNNING, PREEMPTED, FAILED, DROPPED = "running", "preempted", "failed", "dropped"
LOOKAHEAD, KEPT, STEPPED, TRAINED, FILTERED = "lookahead", "kept", "stepped", "trained", "filtered"
OUTCOMES = (TRAINED, FILTERED, STEPPED, KEPT, LOOKAHEAD, DROPPED, PREEMPTED, FAILED, RUNNING)


@dataclass(slots=True)
class Slice:
    """Times in seconds on the engine's clock. `version` and `harvest` are those at its start."""

    slot: int
    start: float
    rollout: int
    attempt: int
    version: int
    harvest: int
    is_ahead: bool  # of the current cohort
    end: float = math.inf  # while it is in the slot
    outcome: str = RUNNING
    made: int = 0  # tokens
    update: int | None = None


def slot_counts(log: Iterable[Event]) -> tuple[int, ...]:
    """The slots of a run, in order: more than one number if it was resumed with others."""
    return tuple(event.slots for event in log if isinstance(event, (events.RunBegan, events.SlotsChanged)))


def slices(log: Iterable[Event]) -> list[Slice]:
    """All slices, by start and then by slot. Rolled-back events are left out."""
    return _Timeline().fold(without_rolled_back(log))


class _Timeline:
    def __init__(self) -> None:
        self._slices: list[Slice] = []
        self._holder: list[Slice | None] = []  # by slot: the latest one
        self._in_slot: dict[int, Slice] = {}  # by rollout, like all below
        self._untrained: dict[int, list[Slice]] = {}  # slices whose tokens are neither trained nor dropped yet
        self._since_submit: dict[int, list[Slice]] = {}
        self._submitted: dict[int, events.Submitted] = {}  # the last time
        self._in_environment: set[int] = set()
        self._cohort: dict[int, int] = {}  # in modes with a cohort gate
        self._open: Counter[int] = Counter()  # rollouts neither trained nor rejected, by cohort, in these modes
        self._gated = self._overlaps = False
        self._version = self._harvest = self._loaded = 0

    def fold(self, log: Sequence[Event]) -> list[Slice]:
        handlers = handlers_of(self)
        for event in log:
            handler = handlers.get(type(event))
            if handler is not None:
                handler(event)
        for stay in self._in_slot.values():
            stay.end = log[-1].at
        return sorted(self._slices, key=attrgetter("start", "slot", "end"))

    # The run

    def _on_run_began(self, event: events.RunBegan) -> None:
        built_in = STRATEGIES.get(event.mode)  # the first logs of this format do not have `gated`
        self._gated = event.gated or (built_in is not None and built_in.gated)
        self._overlaps = event.settings.get("overlap", False)
        self._on_slots_changed(event)

    def _on_slots_changed(self, event: events.RunBegan | events.SlotsChanged) -> None:
        self._holder = [None] * event.slots

    def _on_phase(self, event: events.Phase) -> None:
        if self._in_slot and event.phase != "harvest" and not self._overlaps:
            for stay in list(self._in_slot.values()):
                self._leave_slot(stay.rollout, event.at, KEPT)

    def _on_loaded(self, event: events.Loaded) -> None:
        if self._gated:
            new = range(max(event.first, self._loaded), event.first + event.rollouts)
            self._cohort |= dict.fromkeys(new, event.cohort)
            self._open[event.cohort] += len(new)
            self._loaded = max(self._loaded, new.stop)

    def _on_harvest_began(self, event: events.HarvestBegan) -> None:
        self._harvest, self._version = event.harvest, event.version

    def _on_published(self, event: events.Published) -> None:
        self._version = event.version

    # Into a slot and out of it

    def _on_submitted(self, event: events.Submitted) -> None:
        self._submitted[event.rollout] = event
        self._since_submit[event.rollout] = []

    def _on_started(self, event: events.Started) -> None:
        rollout, slot = event.rollout, event.slot
        submitted, cohort = self._submitted.get(rollout), self._cohort.get(rollout)
        if submitted is None or rollout in self._in_slot or not 0 <= slot < len(self._holder):
            return
        before = self._holder[slot]
        if before is not None and before.end == math.inf:
            self._leave_slot(before.rollout, event.at, KEPT)
        is_ahead = cohort is not None and cohort > min(self._open)
        stay = Slice(slot, event.at, rollout, submitted.attempt, self._version, self._harvest, is_ahead)
        self._slices.append(stay)
        self._holder[slot] = self._in_slot[rollout] = stay
        self._since_submit[rollout].append(stay)
        self._untrained.setdefault(rollout, []).append(stay)

    def _on_preempted(self, event: events.Preempted) -> None:
        submitted = self._submitted.get(event.rollout)
        if submitted is not None:
            self._leave_slot(event.rollout, event.at, PREEMPTED)
            self._count_made(event.rollout, max(0, event.recompute - submitted.prompt_tokens - submitted.prefix))

    def _on_turn_ended(self, event: events.TurnEnded) -> None:
        self._leave_engine(event, STEPPED)
        self._in_environment.add(event.rollout)

    def _on_observed(self, event: events.Observed) -> None:
        self._in_environment.discard(event.rollout)

    def _on_finished(self, event: events.Finished) -> None:
        if event.rollout not in self._in_environment:
            self._leave_engine(event, KEPT)
            return
        self._in_environment.discard(event.rollout)
        for stay in self._untrained.get(event.rollout, [])[-1:]:
            stay.outcome = KEPT if stay.outcome == STEPPED else stay.outcome  # no other turn follows

    def _on_aborted(self, event: events.Aborted) -> None:
        self._leave_engine(event, KEPT)
        if event.dropped or not event.length:
            self._drop(event.rollout)

    def _on_failed(self, event: events.Failed) -> None:
        self._leave_engine(event, FAILED)
        if event.dropped:
            self._drop(event.rollout)

    def _leave_slot(self, rollout: int, at: float, outcome: str) -> None:
        stay = self._in_slot.pop(rollout, None)
        if stay is not None:  # otherwise it was in the engine's queue
            stay.end = at
            stay.outcome = LOOKAHEAD if stay.is_ahead and outcome in (KEPT, STEPPED) else outcome

    def _leave_engine(self, event: Any, outcome: str) -> None:
        self._leave_slot(event.rollout, event.at, outcome)
        self._count_made(event.rollout, event.made)

    def _count_made(self, rollout: int, since_submit: int) -> None:
        """The log counts tokens since submit, so subtract those of earlier slices."""
        if stays := self._since_submit.get(rollout):
            stays[-1].made += since_submit - sum([stay.made for stay in stays])

    # Outcomes of the tokens

    def _on_regenerated(self, event: events.Regenerated) -> None:
        self._drop(event.rollout)

    def _on_rejected(self, event: events.Rejected) -> None:
        self._drop(event.rollout)
        self._close(event.rollout)

    def _on_filtered(self, event: events.Filtered) -> None:
        for rollout in event.rollouts:
            for stay in self._untrained.pop(rollout, []):
                stay.outcome = FILTERED if stay.outcome in (KEPT, STEPPED, LOOKAHEAD) else stay.outcome
            self._close(rollout)

    def _on_updated(self, event: events.Updated) -> None:
        for rollout in event.rollouts:
            stays = self._untrained.pop(rollout, [])
            for stay in stays:
                stay.update = event.update
            if stays and stays[-1].outcome == KEPT:  # earlier ones were aborted, the last one finished
                stays[-1].outcome = TRAINED
            if self._gated:
                self._close(rollout)

    def _drop(self, rollout: int) -> None:
        self._in_environment.discard(rollout)
        for stay in self._untrained.pop(rollout, []):
            if stay.outcome in (KEPT, STEPPED, LOOKAHEAD):
                stay.outcome = DROPPED

    def _close(self, rollout: int) -> None:
        cohort = self._cohort.pop(rollout, None)
        if cohort is not None:
            self._open[cohort] -= 1
            if not self._open[cohort]:
                del self._open[cohort]
