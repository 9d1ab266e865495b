"""A run as Chrome-trace JSON (the trace-event format), which ui.perfetto.dev and chrome://tracing open.

    process "slots"   one track per slot with the slices of observe/timeline.py
    process "run"     tracks: phases; learner (one slice per update, and per part that was streamed to it during the
                      harvest); weight versions, as instants

Viewers derive a slice's color from its name, which starts with its outcome.

Invariants (tests/support/trace_rules.py): times are whole nanoseconds since the run started; events are in time order;
slices of a track do not overlap. Slices of slots are as long as in the timeline, to the nanosecond.
"""

import json
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import Any, TextIO

from sortedrl.core import events
from sortedrl.core.events import Event
from sortedrl.log.reading import without_rolled_back
from sortedrl.observe.timeline import slices, slot_counts

RUN, SLOTS = 1, 2  # processes
# Tracks; their numbers are unique across processes, since viewers may mix them up.
PHASES, LEARNER, VERSIONS, FIRST_SLOT = 101, 102, 103, 1001
_OUTLINE = (events.RunBegan, events.SlotsChanged, events.Phase, events.Updated, events.Streamed, events.Published)
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

    def events(self) -> list[Json]:
        timed = [*self._slot_slices(), *self._phase_slices(), *self._learner_slices()]
        timed.sort(key=lambda event: event["ts"])
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
        tracks = {PHASES: "phases", LEARNER: "learner", VERSIONS: "weight versions"}
        tracks |= {FIRST_SLOT + slot: f"slot {slot}" for slot in range(max(counts, default=0))}
        for process, name in processes.items():
            yield from _named("process", {"pid": process}, name, process)
        for track, name in tracks.items():
            where = {"pid": RUN if track < FIRST_SLOT else SLOTS, "tid": track}
            yield from _named("thread", where, name, track)

    def _slot_slices(self) -> Iterator[Json]:
        for stay in slices(self._log):
            facts = {key: getattr(stay, key) for key in ("rollout", "attempt", "version", "harvest")}
            facts |= {"tokens": stay.made, "update": None if stay.update is None else stay.update + 1}
            where = SLOTS, FIRST_SLOT + stay.slot, self._time(stay.start), self._time(stay.end)
            yield _slice(*where, f"{stay.outcome} #{stay.rollout}", stay.outcome, facts)

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
                start, free_from = max(self._time(batch.at), free_from), max(at, free_from)
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


def _named(kind: str, where: Json, name: str, place: int) -> Iterator[Json]:
    yield {"ph": "M", **where, "name": f"{kind}_name", "args": {"name": name}}
    yield {"ph": "M", **where, "name": f"{kind}_sort_index", "args": {"sort_index": place}}


def _slice(process: int, track: int, start: int, end: int, name: str, kind: str, facts: Json | None = None) -> Json:
    where = {"pid": process, "tid": track, "ts": start, "dur": end - start}
    return {"ph": "X", **where, "name": name, "cat": kind} | ({} if facts is None else {"args": facts})
