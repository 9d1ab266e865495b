"""What must hold for the timeline and the trace of any run on any engine.

`assert_valid_trace(log)` writes the trace, reads it back and checks the rules of the trace-event format as Perfetto's
importer has them, and that nothing of the event log is missing or stretched.
"""

import io
import json
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from operator import attrgetter
from typing import Any

import pytest

from sortedrl.core.events import Event, Published, Started
from sortedrl.log.reading import without_rolled_back
from sortedrl.observe.metrics import Metrics
from sortedrl.observe.timeline import OUTCOMES, Slice, slices
from sortedrl.observe.trace import SLOTS, write_trace

PHASES_OF_EVENTS = {"M", "X", "i"}
Json = dict[str, Any]
Track = tuple[int, int]


def written_trace(log: Iterable[Event]) -> list[Json]:
    file = io.StringIO()
    write_trace(log, file)
    written: list[Json] = json.loads(file.getvalue())["traceEvents"]
    return written


def assert_adds_up(log: list[Event]) -> None:
    """Every stay in a slot is in one slice, and slices add up to the busy slot-time of the metrics."""
    found, run_metrics = slices(log), Metrics().fold(log).run_metrics()
    busy = run_metrics.slots * run_metrics.seconds * (1 - run_metrics.bubble)
    assert sum(s.end - s.start for s in found) == pytest.approx(busy, rel=1e-9, abs=1e-9)
    by_slot: defaultdict[int, list[Slice]] = defaultdict(list)
    for s in found:
        assert s.outcome in OUTCOMES and s.start <= s.end and s.made >= 0
        by_slot[s.slot].append(s)
    for stays in by_slot.values():
        ordered = sorted(stays, key=attrgetter("start", "end"))
        assert all(before.end <= after.start for before, after in pairwise(ordered))
    assert len(found) == sum(isinstance(event, Started) for event in log)


def assert_valid_trace(log: list[Event]) -> None:
    trace = written_trace(log)
    log = without_rolled_back(log)
    assert {event["ph"] for event in trace} <= PHASES_OF_EVENTS
    timed = [event for event in trace if event["ph"] != "M"]
    assert trace[len(trace) - len(timed) :] == timed, "names come first"
    assert all(before["ts"] <= after["ts"] for before, after in pairwise(timed)), "events are in time order"
    assert all(event["ts"] >= 0 for event in timed)
    assert_all_is_named(trace)
    tracks = slices_by_track(timed)
    assert_no_overlap(tracks)
    assert_slot_time_is_the_log_s(tracks, log)
    assert len([event for event in timed if event["ph"] == "i"]) == sum(isinstance(e, Published) for e in log)


def assert_all_is_named(trace: list[Json]) -> None:
    processes = {e["pid"] for e in trace if e["name"] == "process_name" and e["args"]["name"]}
    threads = [(e["pid"], e["tid"]) for e in trace if e["name"] == "thread_name" and e["args"]["name"]]
    assert len({tid for _, tid in threads}) == len(threads), "a track's number is its own"
    for event in trace:
        assert event["pid"] in processes
        assert "tid" not in event or (event["pid"], event["tid"]) in threads
        assert event["name"] and (event["ph"] != "i" or event["s"] in ("g", "p", "t"))


def nanoseconds(microseconds: float) -> int:
    return round(microseconds * 1000)


def slices_by_track(timed: list[Json]) -> dict[Track, list[tuple[int, int, Json]]]:
    """Start, end and event of every slice."""
    tracks: defaultdict[Track, list[tuple[int, int, Json]]] = defaultdict(list)
    for event in timed:
        if event["ph"] == "X":
            start = nanoseconds(event["ts"])
            tracks[event["pid"], event["tid"]].append((start, start + nanoseconds(event["dur"]), event))
    return tracks


def assert_no_overlap(tracks: dict[Track, list[tuple[int, int, Json]]]) -> None:
    for track in tracks.values():
        assert all(start <= end for start, end, _ in track)
        assert all(end <= start for (_, end, _), (start, _, _) in pairwise(track)), "slices of a track do not overlap"


def assert_slot_time_is_the_log_s(tracks: dict[Track, list[tuple[int, int, Json]]], log: list[Event]) -> None:
    run_metrics = Metrics().fold(log).run_metrics()
    busy = run_metrics.slots * run_metrics.seconds * (1 - run_metrics.bubble)
    stays = [(start, end) for (process, _), track in tracks.items() if process == SLOTS for start, end, _ in track]
    starts = sum(isinstance(event, Started) for event in log)
    assert len(stays) == starts
    rounding = 1e-9 * (starts + 1)
    assert sum(end - start for start, end in stays) / 1e9 == pytest.approx(busy, rel=1e-9, abs=rounding)
