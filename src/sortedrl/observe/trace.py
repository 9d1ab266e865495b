"""A run as Chrome-trace JSON (the trace-event format), which ui.perfetto.dev and chrome://tracing open.

    process "slots"   one track per slot with the slices of observe/timeline.py, colored by outcome
    process "environments"   rollouts in their environments, on as many tracks as were there at a time
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
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, TextIO

from sortedrl.core import events
from sortedrl.core.events import Event
from sortedrl.log.reading import without_rolled_back
from sortedrl.observe.run_state import RolloutPlaces
from sortedrl.observe.timeline import Slice, Visit, slices, slot_counts, visits

RUN, SLOTS, ENVIRONMENTS = 1, 2, 3  # processes
PHASES, LEARNER, VERSIONS, FIRST_SLOT, FIRST_ENVIRONMENT = (
    101,
    102,
    103,
    1001,
    10_000_001,
)  # tracks; unique across processes, since viewers may mix them up
COLORS = {
    "trained": "good",
    "filtered": "grey",
    "stepped": "olive",
    "kept": "yellow",
    "lookahead": "rail_response",
    "dropped": "terrible",
    "preempted": "bad",
    "failed": "black",
    "running": "gray",
}
_OUTLINE = frozenset(
    {events.RunBegan, events.SlotsChanged, events.Phase, events.Updated, events.Streamed, events.Published}
)
COUNTERS = ("running", "waiting", "resumable", "environment", "ready")
Json = dict[str, Any]


class _Span(NamedTuple):
    """Nanoseconds since the run started."""

    start: int
    end: int


def trace_events(log: Iterable[Event]) -> list[Json]:
    """Names of processes and tracks first, then everything in time order."""
    kept = without_rolled_back(log)
    if not kept:
        return []
    began = kept[0].at
    stays, in_environments = slices(kept), visits(kept)
    outline = [*(event for event in kept[:-1] if type(event) in _OUTLINE), kept[-1]]
    updates = _learner_spans(outline, began)
    timed = [
        *_slot_slices(stays, began),
        *_environment_slices(in_environments, began),
        *_phase_slices(outline, began),
        *_learner_slices(outline, updates),
        *_streamed_slices(outline, updates, began),
        *_versions(outline, began),
        *_counters(kept, began),
        *_arrows(stays, updates, began),
    ]
    timed.sort(key=lambda event: (event["ts"], event["ph"] != "X"))  # a slice comes before arrows into it
    for event in timed:
        event["ts"] /= 1000  # the format counts in microseconds
        if "dur" in event:
            event["dur"] /= 1000
    return [*_names(outline, 1 + max((visit.lane for visit in in_environments), default=-1)), *timed]


def write_trace(log: Iterable[Event], file: TextIO) -> None:
    """One event per line."""
    encode = json.JSONEncoder(separators=(",", ":")).encode
    file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
    file.write(",\n".join(map(encode, trace_events(log))))
    file.write("\n]}\n")


def _nanoseconds(at: float, began: float) -> int:
    return round((at - began) * 1e9)


def _span(start: float, end: float, began: float) -> _Span:
    return _Span(_nanoseconds(start, began), _nanoseconds(end, began))


def _slice(process: int, track: int, span: _Span, name: str, **more: Any) -> Json:
    return {
        "ph": "X", "pid": process, "tid": track, "ts": span.start, "dur": span.end - span.start, "name": name, **more
    }  # fmt: skip


def _names(log: Sequence[Event], environments: int) -> Iterator[Json]:
    counts = slot_counts(log)
    mode = next((event.mode for event in log if isinstance(event, events.RunBegan)), "")
    processes = {RUN: f"run, {mode}", SLOTS: f"slots, {', then '.join(map(str, counts))}"}
    tracks = {PHASES: "phases", LEARNER: "learner", VERSIONS: "weight versions"}
    tracks |= {FIRST_SLOT + slot: f"slot {slot}" for slot in range(max(counts, default=0))}
    if environments:
        processes[ENVIRONMENTS] = f"environments, {environments} at a time"
        tracks |= {FIRST_ENVIRONMENT + lane: f"environment {lane}" for lane in range(environments)}
    for process, name in processes.items():
        yield from _named("process", {"pid": process}, name, process)
    for track, name in tracks.items():
        process = RUN if track < FIRST_SLOT else SLOTS if track < FIRST_ENVIRONMENT else ENVIRONMENTS
        yield from _named("thread", {"pid": process, "tid": track}, name, track)


def _named(kind: str, where: Json, name: str, place: int) -> Iterator[Json]:
    yield {"ph": "M", **where, "name": f"{kind}_name", "args": {"name": name}}
    yield {"ph": "M", **where, "name": f"{kind}_sort_index", "args": {"sort_index": place}}


def _slot_slices(stays: Iterable[Slice], began: float) -> Iterator[Json]:
    for stay in stays:
        yield _slice(
            SLOTS,
            FIRST_SLOT + stay.slot,
            _span(stay.start, stay.end, began),
            f"{stay.outcome} #{stay.rollout}",
            cat=stay.outcome,
            cname=COLORS[stay.outcome],
            args={
                "rollout": stay.rollout,
                "attempt": stay.attempt,
                "tokens": stay.made,
                "version": stay.version,
                "harvest": stay.harvest,
                "update": None if stay.update is None else stay.update + 1,
            },
        )


def _environment_slices(visits: Iterable[Visit], began: float) -> Iterator[Json]:
    for visit in visits:
        span = _span(visit.start, visit.end, began)
        if span.end > span.start:
            yield _slice(
                ENVIRONMENTS,
                FIRST_ENVIRONMENT + visit.lane,
                span,
                f"environment #{visit.rollout}",
                cat="environment",
                args={"rollout": visit.rollout, "turn": visit.turn, "failures": visit.failures},
            )


def _phase_slices(log: Sequence[Event], began: float) -> Iterator[Json]:
    marks = [event for event in log if isinstance(event, events.Phase)]
    ends = [*(mark.at for mark in marks[1:]), log[-1].at]
    for mark, end in zip(marks, ends, strict=bool(marks)):
        span = _span(mark.at, end, began)
        if span.end > span.start:
            yield _slice(RUN, PHASES, span, mark.phase, cat="phase")


def _learner_spans(log: Sequence[Event], began: float) -> dict[int, _Span]:
    """By update: from its batch to the publication of its weights or, without one, to the next batch or phase."""
    spans: dict[int, _Span] = {}
    open_update: events.Updated | None = None
    free_from = 0

    def close(at: float) -> None:
        nonlocal open_update, free_from
        if open_update is not None:
            span = _span(open_update.at, at, began)
            start = max(span.start, free_from)
            free_from = max(span.end, start + 1)
            spans[open_update.update] = _Span(start, free_from)
            open_update = None

    for event in log:
        if isinstance(event, events.Updated):
            close(event.at)
            open_update = event
        elif isinstance(event, events.Published) or (isinstance(event, events.Phase) and event.phase != "learner"):
            close(event.at)
    close(log[-1].at)
    return spans


def _learner_slices(log: Iterable[Event], spans: dict[int, _Span]) -> Iterator[Json]:
    for event in log:
        if isinstance(event, events.Updated):
            sizes = {"rollouts": len(event.rollouts), "tokens": sum(event.lengths), "version": event.version}
            yield _slice(
                RUN, LEARNER, spans[event.update], f"update {event.update + 1}", cat="update", args=sizes
            )  # fmt: skip


def _streamed_slices(log: Iterable[Event], updates: dict[int, _Span], began: float) -> Iterator[Json]:
    """The learner's work during harvests, which starts after the update before it has ended."""
    free_from = 0
    for event in log:
        if isinstance(event, events.Updated):
            free_from = updates[event.update].end
        elif isinstance(event, events.Streamed):
            start = max(free_from, _nanoseconds(event.at - event.seconds, began))
            span = _Span(start, max(start, _nanoseconds(event.at, began)))
            free_from = span.end
            if span.end > span.start:
                name, sizes = f"streamed to update {event.update + 1}", {"rollouts": len(event.rollouts)}
                yield _slice(RUN, LEARNER, span, name, cat="streamed", args=sizes)


def _versions(log: Iterable[Event], began: float) -> Iterator[Json]:
    for event in log:
        if isinstance(event, events.Published):
            yield {
                "ph": "i",
                "s": "t",
                "pid": RUN,
                "tid": VERSIONS,
                "ts": _nanoseconds(event.at, began),
                "name": f"version {event.version}",
                "cat": "version",
            }


def _counters(log: Sequence[Event], began: float) -> Iterator[Json]:
    """A sample of each counter at every change; only the last of several changes at the same time."""
    places = RolloutPlaces()
    shown: dict[str, int] = {}
    times = [_nanoseconds(event.at, began) for event in log]
    for event, time, following in zip_longest(log, times, times[1:]):
        places(event)
        if following == time:
            continue
        counts = places.counts()._asdict()
        for name in COUNTERS:
            if shown.get(name) != counts[name]:
                shown[name] = counts[name]
                yield {"ph": "C", "pid": RUN, "ts": time, "name": name, "args": {"rollouts": counts[name]}}


def _arrows(stays: Iterable[Slice], updates: dict[int, _Span], began: float) -> Iterator[Json]:
    """One flow per trained rollout: through its slices, to its update. Empty slices cannot hold an arrow."""
    path_of: dict[int, list[tuple[int, _Span]]] = {}
    update_of: dict[int, int] = {}
    for stay in stays:
        span = _span(stay.start, stay.end, began)
        if stay.update is not None and span.end > span.start:
            path_of.setdefault(stay.rollout, []).append((FIRST_SLOT + stay.slot, span))
            update_of[stay.rollout] = stay.update
    for rollout, path in path_of.items():
        for place, (track, span) in enumerate(path):
            yield _arrow("t" if place else "s", rollout, SLOTS, track, span.end - 1)
        yield _arrow("f", rollout, RUN, LEARNER, updates[update_of[rollout]].start) | {"bp": "e"}


def _arrow(kind: str, rollout: int, process: int, track: int, time: int) -> Json:
    return {"ph": kind, "id": rollout, "pid": process, "tid": track, "ts": time, "name": "trained in", "cat": "flow"}
