"""A run as Chrome-trace JSON (the trace-event format), which ui.perfetto.dev and chrome://tracing open.

    process "slots"   one track per slot with the slices of observe/timeline.py, colored by outcome
    process "environments"   rollouts in their environments, as asynchronous slices: viewers stack those that overlap
    process "run"     tracks: phases; learner (one slice per update, and per part that was streamed to it during the
                      harvest); weight versions, as instants
                      counters: running, waiting, resumable, environment, ready
    arrows            from slice to slice of a trained rollout, and from the last one to its update

Perfetto derives a slice's color from its name without digits, so the outcome determines it; chrome://tracing uses the
color given.

Invariants (tests/support/trace_rules.py): times are whole nanoseconds since the run started; events are in time order;
slices of a track do not overlap; every arrow starts and ends inside a slice. Slices of slots are as long as in the
timeline, to the nanosecond. Only learner slices are stretched: an update that took no time is drawn 1 ns long, after
the one before it, so that arrows have a slice to end in.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import Any, TextIO

from sortedrl.core import events
from sortedrl.core.events import Event
from sortedrl.log.reading import without_rolled_back
from sortedrl.observe.run_state import RolloutPlaces
from sortedrl.observe.timeline import slices, slot_counts

RUN, SLOTS, ENVIRONMENTS = 1, 2, 3  # processes
# Tracks; their numbers are unique across processes, since viewers may mix them up.
PHASES, LEARNER, VERSIONS, FIRST_SLOT = 101, 102, 103, 1001
COLORS = {
    "trained": "good", "stepped": "olive", "kept": "yellow", "lookahead": "rail_response", "dropped": "terrible",
    "filtered": "grey", "preempted": "bad", "failed": "black", "running": "gray",
}  # fmt: skip
_OUTLINE = (events.RunBegan, events.SlotsChanged, events.Phase, events.Updated, events.Streamed, events.Published)
_ENDS_OF_VISITS = events.Observed | events.Finished | events.Regenerated | events.Rejected
COUNTERS = ("running", "waiting", "resumable", "environment", "ready")
Json = dict[str, Any]


def trace_events(log: Iterable[Event]) -> list[Json]:
    """Names of processes and tracks first, then everything in time order."""
    kept = without_rolled_back(log)
    return _Trace(kept).events() if kept else []


def write_trace(log: Iterable[Event], file: TextIO) -> None:
    """One event per line."""
    encode = json.JSONEncoder(separators=(",", ":")).encode
    file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
    file.write(",\n".join(map(encode, trace_events(log))))
    file.write("\n]}\n")


class _Trace:
    def __init__(self, log: list[Event]) -> None:
        self._log = log
        self._outline = [event for event in log if isinstance(event, _OUTLINE)]
        self._slices = slices(log)
        self._update_starts: dict[int, int] = {}  # of learner slices

    def events(self) -> list[Json]:
        timed = [
            *self._slot_slices(),
            *self._environment_slices(),
            *self._phase_slices(),
            *self._learner_slices(),
            *self._counters(),
            *self._arrows(),
        ]
        timed.sort(key=lambda event: (event["ts"], event["ph"] != "X"))  # a slice comes before arrows into it
        for event in timed:
            event["ts"] /= 1000  # the format counts in microseconds
            if "dur" in event:
                event["dur"] /= 1000
        return [*self._names(), *timed]

    def _time(self, at: float) -> int:
        """Nanoseconds since the run started."""
        return round((at - self._log[0].at) * 1e9)

    def _names(self) -> Iterator[Json]:
        counts = slot_counts(self._outline)
        mode = next((event.mode for event in self._outline if isinstance(event, events.RunBegan)), "")
        processes = {RUN: f"run, {mode}", SLOTS: f"slots, {', then '.join(map(str, counts))}"}
        if events.TurnEnded in set(map(type, self._log)):
            processes[ENVIRONMENTS] = "environments"
        tracks = {PHASES: "phases", LEARNER: "learner", VERSIONS: "weight versions"}
        tracks |= {FIRST_SLOT + slot: f"slot {slot}" for slot in range(max(counts, default=0))}
        for process, name in processes.items():
            yield from _named("process", {"pid": process}, name, process)
        for track, name in tracks.items():
            where = {"pid": RUN if track < FIRST_SLOT else SLOTS, "tid": track}
            yield from _named("thread", where, name, track)

    def _slot_slices(self) -> Iterator[Json]:
        for stay in self._slices:
            facts = {key: getattr(stay, key) for key in ("rollout", "attempt", "version", "harvest")}
            facts |= {"tokens": stay.made, "update": None if stay.update is None else stay.update + 1}
            where = SLOTS, FIRST_SLOT + stay.slot, self._time(stay.start), self._time(stay.end)
            found = _slice(*where, f"{stay.outcome} #{stay.rollout}", stay.outcome, facts)
            yield found | {"cname": COLORS[stay.outcome]}

    def _environment_slices(self) -> Iterator[Json]:
        """From the end of a turn until the answer, or until the rollout ends without one."""
        inside: set[int] = set()
        for event in self._log:
            if isinstance(event, events.TurnEnded | _ENDS_OF_VISITS) and event.rollout in inside:
                inside.remove(event.rollout)
                yield self._visit("e", event.rollout, event.at)
            if isinstance(event, events.TurnEnded):
                inside.add(event.rollout)
                yield self._visit("b", event.rollout, event.at)
        yield from (self._visit("e", rollout, self._log[-1].at) for rollout in inside)

    def _visit(self, edge: str, rollout: int, at: float) -> Json:
        where = {"pid": ENVIRONMENTS, "id": rollout, "ts": self._time(at)}
        return {"ph": edge, **where, "name": "environment", "cat": "environment", "args": {"rollout": rollout}}

    def _phase_slices(self) -> Iterator[Json]:
        marks = [event for event in self._outline if isinstance(event, events.Phase)]
        for mark, following in zip_longest(marks, marks[1:], fillvalue=self._log[-1]):
            start, end = self._time(mark.at), self._time(following.at)
            if end > start and isinstance(mark, events.Phase):
                yield _slice(RUN, PHASES, start, end, mark.phase, "phase")

    def _learner_slices(self) -> Iterator[Json]:
        """Updates, from the batch to the publication of its weights or, without one, to the next batch or phase; the
        learner's work during harvests, which starts after the update before it has ended; versions of the weights."""
        batch: events.Updated | None = None
        free_from = 0
        for event in [*self._outline, events.Phase(self._log[-1].at, "end")]:
            at = self._time(event.at)
            is_other_phase = isinstance(event, events.Phase) and event.phase != "learner"
            if batch is not None and (is_other_phase or isinstance(event, events.Updated | events.Published)):
                start = self._update_starts[batch.update] = max(self._time(batch.at), free_from)
                free_from = max(at, start + 1)
                facts = {"rollouts": len(batch.rollouts), "tokens": sum(batch.lengths), "version": batch.version}
                yield _slice(RUN, LEARNER, start, free_from, f"update {batch.update + 1}", "update", facts)
                batch = None
            if isinstance(event, events.Updated):
                batch = event
            elif isinstance(event, events.Streamed) and batch is None:
                start, free_from = max(free_from, self._time(event.at - event.seconds)), max(free_from, at)
                if free_from > start:
                    facts = {"rollouts": len(event.rollouts)}
                    name = f"streamed to update {event.update + 1}"
                    yield _slice(RUN, LEARNER, start, free_from, name, "streamed", facts)
            elif isinstance(event, events.Published):
                where = {"pid": RUN, "tid": VERSIONS, "ts": at}
                yield {"ph": "i", "s": "t", **where, "name": f"version {event.version}", "cat": "version"}

    def _counters(self) -> Iterator[Json]:
        """A sample of each counter at every change; only the last of several changes at the same time."""
        places = RolloutPlaces()
        shown: dict[str, int] = {}
        times = [self._time(event.at) for event in self._log]
        for event, time, following in zip_longest(self._log, times, times[1:]):
            places(event)
            if following == time:
                continue
            for name in COUNTERS:
                if shown.get(name) != (count := places.count[name]):
                    shown[name] = count
                    yield {"ph": "C", "pid": RUN, "ts": time, "name": name, "args": {"rollouts": count}}

    def _arrows(self) -> Iterator[Json]:
        """One flow per trained rollout: through its slices, to its update. Empty slices cannot hold an arrow."""
        update_of: dict[int, int] = {}
        for stay in self._slices:
            end = self._time(stay.end)
            if stay.update is not None and end > self._time(stay.start):
                step = "t" if stay.rollout in update_of else "s"
                yield _arrow(step, stay.rollout, SLOTS, FIRST_SLOT + stay.slot, end - 1)
                update_of[stay.rollout] = stay.update
        for rollout, update in update_of.items():
            yield _arrow("f", rollout, RUN, LEARNER, self._update_starts[update]) | {"bp": "e"}


def _named(kind: str, where: Json, name: str, place: int) -> Iterator[Json]:
    yield {"ph": "M", **where, "name": f"{kind}_name", "args": {"name": name}}
    yield {"ph": "M", **where, "name": f"{kind}_sort_index", "args": {"sort_index": place}}


def _slice(process: int, track: int, start: int, end: int, name: str, kind: str, facts: Json | None = None) -> Json:
    where = {"pid": process, "tid": track, "ts": start, "dur": end - start}
    return {"ph": "X", **where, "name": name, "cat": kind} | ({} if facts is None else {"args": facts})


def _arrow(kind: str, rollout: int, process: int, track: int, time: int) -> Json:
    return {"ph": kind, "id": rollout, "pid": process, "tid": track, "ts": time, "name": "trained in", "cat": "flow"}
