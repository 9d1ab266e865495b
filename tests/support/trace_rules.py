"""What must hold for the timeline and the trace of any run on any engine.

`assert_valid_trace(log)` writes the trace, reads it back and checks the rules of the trace-event format as Perfetto's
importer has them, and that nothing of the event log is missing or stretched.
"""

import io
import json
from collections import defaultdict
from collections.abc import Iterable
from itertools import groupby, pairwise
from typing import Any

import pytest

from sortedrl.core.events import Event, Published, Started, Updated
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
        assert event["pid"] != SLOTS or event["ph"] == "M" or event["cat"] in OUTCOMES


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


def assert_tokens_agree(log: list[Event]) -> None:
    """Slices have the tokens of the log: in all, of each update, and by version."""
    run_metrics = Metrics().fold(log).run_metrics()
    found = slices(log)
    assert sum(s.made for s in found) == run_metrics.generated_tokens
    assert sum(s.made for s in found if s.update is not None) == run_metrics.trained_tokens
    assert sum(s.made for s in found if s.outcome == "dropped") <= run_metrics.dropped_tokens
    by_rollout: defaultdict[int, list[Slice]] = defaultdict(list)
    for s in found:
        if s.made and s.update is not None:
            by_rollout[s.rollout].append(s)
    for event in log:
        if isinstance(event, Updated):
            for rollout, segments in zip(event.rollouts, event.segments, strict=True):
                of_versions = groupby(by_rollout[rollout], key=lambda s: s.version)
                assert tuple((version, sum(s.made for s in group)) for version, group in of_versions) == segments
                assert {s.update for s in by_rollout[rollout]} <= {event.update}
