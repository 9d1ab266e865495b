"""What must hold for the trace of any run on any engine, and a small run to try it on.

`assert_valid_trace(log)` writes the trace, reads it back and checks the rules of the trace-event format as Perfetto's
importer has them, and that nothing of the event log is missing or stretched.
"""

from __future__ import annotations

import io
import json
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest

from sortedrl.core import Controller, Engine, EventLog, Prompt, Prompts, Schedule
from sortedrl.core.events import Event, Published, Started, Updated
from sortedrl.core.scoring import ScoreAtOnce
from sortedrl.log.reading import without_rolled_back
from sortedrl.observe.metrics import Metrics
from sortedrl.observe.trace import SLOTS, write_trace

PHASES_OF_EVENTS = {"M", "X", "b", "e", "i", "C", "s", "t", "f"}
Json = dict[str, Any]
Track = tuple[int, int]


def logged_run(engine: Engine, mode: str, prompts: Iterable[Prompt], **settings: Any) -> list[Event]:
    """The log of a run of a few updates on any engine that is ready to generate."""
    log: list[Event] = []
    schedule = Schedule(mode=mode, **{"prompts_per_cohort": None, **settings})
    scorer = ScoreAtOnce(lambda rollout: float(len(rollout)))
    controller = Controller(engine, Prompts(list(prompts)), scorer, schedule, log=EventLog(log.append))
    for _ in controller:
        controller.publish()
    return log


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
    assert_arrows_are_bound(timed, tracks, log)
    assert_slot_time_is_the_log_s(timed, tracks, log)
    found, expected = sum(end - start for _, start, end in visits(trace)), Metrics().fold(log).run_metrics()
    assert found / 1e9 == pytest.approx(expected.environment_seconds, rel=1e-9, abs=1e-9 * len(log))
    assert len([event for event in timed if event["ph"] == "i"]) == sum(isinstance(e, Published) for e in log)


def assert_all_is_named(trace: list[Json]) -> None:
    processes = {e["pid"] for e in trace if e["name"] == "process_name" and e["args"]["name"]}
    threads = [(e["pid"], e["tid"]) for e in trace if e["name"] == "thread_name" and e["args"]["name"]]
    assert len({tid for _, tid in threads}) == len(threads), "a track's number is its own"
    for event in trace:
        assert event["pid"] in processes
        assert event["ph"] == "C" or "tid" not in event or (event["pid"], event["tid"]) in threads
        assert event["name"] and (event["ph"] != "i" or event["s"] in ("g", "p", "t"))


def nanoseconds(microseconds: float) -> int:
    return round(microseconds * 1000)


def visits(trace: list[Json]) -> list[tuple[int, int, int]]:
    """Rollout, start and end of each time in an environment."""
    open_at: dict[int, int] = {}
    found = []
    for event in trace:
        if event["ph"] == "b":
            assert event["id"] not in open_at, "a rollout is in one environment at a time"
            open_at[event["id"]] = nanoseconds(event["ts"])
        elif event["ph"] == "e":
            found.append((event["id"], open_at.pop(event["id"]), nanoseconds(event["ts"])))
    assert not open_at
    return found


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


def assert_arrows_are_bound(
    timed: list[Json], tracks: dict[Track, list[tuple[int, int, Json]]], log: list[Event]
) -> None:
    """Each goes from a slice of its rollout, maybe through others of it, to the slice of its update."""
    flows: defaultdict[int, list[Json]] = defaultdict(list)
    for event in timed:
        if event["ph"] in "stf":
            flows[event["id"]].append(event)
    update_of = {rollout: e.update + 1 for e in log if isinstance(e, Updated) for rollout in e.rollouts}
    starts = {track: {start: (end, event) for start, end, event in found} for track, found in tracks.items()}
    for rollout, steps in flows.items():
        assert [step["ph"] for step in steps] == ["s", *"t" * (len(steps) - 2), "f"]
        assert steps[-1]["bp"] == "e"
        bound = [_enclosing(starts[step["pid"], step["tid"]], nanoseconds(step["ts"])) for step in steps]
        assert all(slice_["args"]["rollout"] == rollout for slice_ in bound[:-1])
        assert all(slice_["args"]["update"] == update_of[rollout] for slice_ in bound[:-1])
        assert bound[-1]["name"] == f"update {update_of[rollout]}"
    drawn = {
        event["args"]["rollout"]
        for track in tracks.values()
        for start, end, event in track
        if event.get("args", {}).get("update") is not None and end > start
    }
    assert set(flows) == drawn, "every trained rollout that took time has its arrow"


def _enclosing(by_start: dict[int, tuple[int, Json]], time: int) -> Json:
    start = max((start for start, (end, _) in by_start.items() if start <= time < end), default=None)
    assert start is not None, "an arrow begins and ends inside a slice"
    return by_start[start][1]


def assert_slot_time_is_the_log_s(
    timed: list[Json], tracks: dict[Track, list[tuple[int, int, Json]]], log: list[Event]
) -> None:
    run_metrics = Metrics().fold(log).run_metrics()
    busy = run_metrics.slots * run_metrics.seconds * (1 - run_metrics.bubble)
    stays = [(start, end) for (process, _), track in tracks.items() if process == SLOTS for start, end, _ in track]
    starts = sum(isinstance(event, Started) for event in log)
    assert len(stays) == starts
    rounding = 1e-9 * (starts + 1)
    assert sum(end - start for start, end in stays) / 1e9 == pytest.approx(busy, rel=1e-9, abs=rounding)
    running = [
        (nanoseconds(e["ts"]), e["args"]["rollouts"]) for e in timed if e["ph"] == "C" and e["name"] == "running"
    ]
    assert all(0 <= count <= run_metrics.slots for _, count in running)
    ended = nanoseconds(max(e["ts"] + e.get("dur", 0) for e in timed)) if timed else 0
    area = sum(count * (after - at) for (at, count), (after, _) in pairwise([*running, (ended, 0)]))
    assert area / 1e9 == pytest.approx(busy, rel=1e-9, abs=rounding), "the counter says the same"
