"""The event log: append-only, the same after a trip through a file, and honest about roll-backs."""

import io
import json
from pathlib import Path
from typing import get_args

import pytest

from scenarios import Run, run, scenario
from sortedrl.core import Event, EventLog, events
from sortedrl.core.events import FORMAT, RunBegan
from sortedrl.log import read_events
from sortedrl.log.lines import JsonLines, decode
from sortedrl.log.reading import SeveralRuns, UnknownFormat, last_run, lines_of, read_intact, without_rolled_back

ONE_OF_EACH: list[Event] = [
    events.RunBegan(0.0, 4, "partial", {"mode": "partial", "max_staleness": None, "oversubscribe": 1.5}),
    events.SlotsChanged(3.5, 6),
    events.SettingsChanged(3.5, {"engine": ["embedded", "vllm"], "engine_options": [{}, {"reuse_kv_cache": "True"}]}),
    events.Phase(0.0, "harvest"),
    events.Loaded(0.1, 0, 0, 2, ("p0", "p1")),
    events.Skipped(0.1, 2, ("p2",), (1,)),
    events.HarvestBegan(0.1, 0, 0),
    events.Submitted(0.1, 0, 0, 12, 0, 33.3),
    events.Gate(0.1, "held back"),
    events.Started(0.1, 0, 3),
    events.Preempted(0.2, 0, 20),
    events.TurnEnded(0.2, 0, 4, 4),
    events.Observed(0.2, 0, 2, 6),
    events.EnvironmentFailed(0.2, 1, "no answer in time"),
    events.Finished(0.3, 0, 8, 8, True),
    events.Aborted(0.3, 1, 5, 5, 0),
    events.Failed(0.3, 1, 0, 0, "lost, “quoted” and\nbroken"),
    events.Regenerated(0.3, 1, 5, "no score in time"),
    events.Scored(0.4, 0, -1.5),
    events.Rejected(0.4, 1, 0, "no reward"),
    events.Filtered(0.4, (2, 3), 31, "right", 1.0),
    events.Streamed(0.4, 0, 0.1, (0,)),
    events.Drafted(0.4, 30, 12, 40),
    events.Updated(0.5, 0, 0, 2, (0,), (8,), (-1.5,), (((0, 3), (2, 5)),), (1,)),
    events.Published(0.6, 3),
    events.RolledBack(0.7, 2),
    events.Lost(0.7),
]


def written(log: list[Event]) -> str:
    file = io.StringIO()
    sink = JsonLines(file)
    for event in log:
        sink(event)
    return file.getvalue()


def test_there_is_one_of_each_kind_here() -> None:
    assert {type(event) for event in ONE_OF_EACH} == set(get_args(Event))


@pytest.mark.parametrize("event", ONE_OF_EACH, ids=lambda event: type(event).__name__)
def test_an_event_is_the_same_after_a_trip_through_json(event: Event) -> None:
    line = written([event])
    assert line.count("\n") == 1
    assert json.loads(line)["event"] == type(event).__name__
    back = decode(line)
    assert back == event
    assert type(back) is type(event)


@pytest.mark.parametrize(("found", "age"), [(None, "an older"), (1, "an older"), (99, "a newer")])
def test_a_log_of_another_format_is_refused_by_every_reader(found: int | None, age: str, tmp_path: Path) -> None:
    fields = {"event": "RunBegan", "at": 0.0, "slots": 4, "mode": "partial", "settings": {}}
    path = tmp_path / "events.jsonl"
    path.write_text(json.dumps(fields | ({} if found is None else {"format": found})) + "\n")
    for read in (lambda: list(read_events(path)), lambda: read_intact(path), lambda: last_run(lines_of(path))):
        with pytest.raises(UnknownFormat, match=rf"format {found or 1}, .* {age} .*or start a new run"):
            read()
    path.write_text(json.dumps(fields | {"format": FORMAT}) + "\n")
    assert len(list(read_events(path))) == 1


def test_a_log_file_is_read_back_up_to_a_torn_last_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    whole = written(ONE_OF_EACH)
    path.write_text(whole, encoding="utf-8")
    assert list(read_events(path)) == ONE_OF_EACH
    path.write_text(whole[:-9], encoding="utf-8")
    assert list(read_events(path)) == ONE_OF_EACH[:-1]
    path.write_text("", encoding="utf-8")
    assert list(read_events(path)) == []


def test_every_sink_gets_every_event_in_order() -> None:
    first: list[Event] = []
    second: list[Event] = []
    log = EventLog(first.append, second.append)
    for event in ONE_OF_EACH:
        log.append(event)
    assert first == second == ONE_OF_EACH
    assert log.count == len(ONE_OF_EACH)


def test_what_was_rolled_back_does_not_count() -> None:
    phases = [events.Phase(float(i), str(i)) for i in range(6)]
    log: list[Event] = [*phases[:3], events.RolledBack(3.0, 2), phases[3], phases[4], events.RolledBack(5.0, 1)]
    assert [event.phase for event in without_rolled_back([*log, phases[5]])] == ["0", "3", "5"]
    assert without_rolled_back([*phases[:2], events.RolledBack(2.0, 0)]) == phases[:2]


def test_the_time_of_what_was_rolled_back_does_not_count() -> None:
    """The run went on 2 s after the mark, with a clock that counted on or with one that had gone back."""
    before, void = [events.Phase(1.0, "learner"), events.Phase(2.0, "checkpoint")], [events.Phase(3.0, "harvest")]
    after = [events.Phase(4.0, "harvest"), events.Phase(6.0, "end")]
    for late in (0.0, 50.0):
        mark = events.RolledBack(2.0 + late, 1)
        assert (
            without_rolled_back([*before, *void, mark, *(e._replace(at=e.at + late) for e in after)]) == before + after
        )


def test_a_roll_back_over_a_damaged_line_keeps_the_time(tmp_path: Path) -> None:
    phase = '{"event":"Phase","at":%r,"phase":"learner"}'
    path = tmp_path / "events.jsonl"
    lines = [phase % 1.0, "#", phase % 9.0, '{"event":"RolledBack","at":9.0,"events":1}', phase % 10.0]
    path.write_text("\n".join(lines) + "\n")
    read = read_intact(path)
    assert [event.at for event in read.events] == [1.0, 2.0]
    assert len(read.damage) == 1


def test_a_second_roll_back_may_reach_behind_the_first() -> None:
    phases = [events.Phase(float(i), str(i)) for i in range(4)]
    log: list[Event] = [*phases[:3], events.RolledBack(3.0, 1), phases[3], events.RolledBack(4.0, 2)]
    assert without_rolled_back(log) == phases[:1]


def run_of(count: int) -> list[Event]:
    return [RunBegan(0.0, 2, "partial", {}), *(events.Phase(float(i), str(count)) for i in range(count))]


def test_of_two_runs_in_one_log_only_the_last_one_counts(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with path.open("a") as file:
        for count in (5, 3):
            for event in run_of(count):
                JsonLines(file)(event)
    read = read_intact(path)
    assert (read.events, read.damage, read.earlier_runs) == (run_of(3), [], 1)
    assert read.notice == "it has the events of 2 runs, of which only the last one counts"
    assert last_run(lines_of(path))[0] == run_of(3)
    with pytest.raises(SeveralRuns, match="the events of 2 runs: give each run a log of its own"):
        without_rolled_back(read_events(path))


def test_a_run_that_was_rolled_back_as_a_whole_is_no_second_run(tmp_path: Path) -> None:
    """A verl job that starts from the beginning in its folder leaves such a log."""
    path = tmp_path / "events.jsonl"
    path.write_text(written([*run_of(5), events.RolledBack(5.0, 6), *run_of(3)]))
    assert without_rolled_back(read_events(path)) == run_of(3)
    assert read_intact(path) == (run_of(3), [], 0, 0)


def test_the_first_event_behind_lines_of_damage_starts_no_second_run(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("#\n" + written(run_of(3)))
    read = read_intact(path)
    assert (read.events, len(read.damage), read.notice) == (run_of(3), 1, "")


def test_a_roll_back_reaches_to_the_start_of_its_own_run(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(written([*run_of(5), *run_of(3), events.RolledBack(3.0, 2), events.Phase(3.0, "end")]))
    assert last_run(lines_of(path))[0] == [*run_of(3)[:2], events.Phase(0.0, "end")]


def test_an_update_is_in_the_log_before_its_batch_is_handed_out() -> None:
    result = Run(scenario("partial", [3, 1, 2, 5], rollouts_per_update=2))
    for batch in result.batches_in_turn():
        last = result.all(events.Updated)[-1]
        assert last.update == batch.update
        assert list(last.rollouts) == [rollout.id for rollout in batch]
        assert list(last.lengths) == [len(rollout) for rollout in batch]
        assert list(last.rewards) == [rollout.reward for rollout in batch]


def test_a_log_begins_with_the_settings_and_says_when_it_ends() -> None:
    result = run("april", [3, 1, 2, 5], slots=2, rollouts_per_update=2, max_staleness=3)
    began = result.events[0]
    assert isinstance(began, events.RunBegan)
    assert (began.slots, began.mode, began.settings["max_staleness"]) == (2, "april", 3)
    assert result.all(events.Phase)[-1] == events.Phase(result.engine.now(), "end")


def test_the_lifecycle_of_a_stopped_rollout_can_be_read_from_the_log() -> None:
    result = run("partial", [1, 9], slots=2, rollouts_per_update=1)
    names = [type(event).__name__ for event in result.events if getattr(event, "rollout", None) == 1]
    assert names == ["Submitted", "Started", "Aborted", "Submitted", "Started", "Finished", "Scored"]
    second = [event for event in result.all(events.Submitted) if event.rollout == 1][1]
    assert (second.prefix, second.attempt) == (1, 0)
    finished = result.all(events.Finished)[-1]
    assert (finished.made, finished.length) == (8, 9)


def test_the_version_of_each_update_and_publication_is_in_the_log() -> None:
    result = run("on-policy", [2] * 6, slots=2, rollouts_per_update=2, silent_updates=frozenset({1}))
    assert [event.version for event in result.all(events.Published)] == [1, 2]
    assert [event.version for event in result.all(events.Updated)] == [0, 1, 1]
