"""Turns and latencies from the log of a run: what is recorded is what happened, and the simulator replays it."""

import json
from pathlib import Path
from typing import Any

import pytest

from sortedrl.cli import simulate
from sortedrl.cli.plan import limit_of_file
from sortedrl.core import Prompt, Schedule
from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.events import Loaded, RunBegan
from sortedrl.core.seeds import derive_seed
from sortedrl.engines.episodes import DrawnEpisodes, Episode, ReplayedEpisodes, read_episodes
from sortedrl.engines.lengths import LognormalLengths, ReplayedLengths
from sortedrl.engines.step_time import PRESETS
from sortedrl.log.lines import JsonLines
from sortedrl.log.reading import read_events
from sortedrl.studies.bench import BenchSettings
from sortedrl.studies.plan import PlanSettings
from sortedrl.studies.simulate import SimulateSettings
from sortedrl.studies.workload import Workload, run, with_mode
from sortedrl.studies.workload_settings import simulated_workload

LENGTHS = LognormalLengths(mu=4.0, limit=300)
DRAWN = DrawnEpisodes(lengths=LENGTHS, turns=3, observation_tokens=16, seconds_mean=2.0)
SCHEDULE = Schedule(rollouts_per_update=16, rollouts_per_prompt=4, prompts_per_cohort=16, max_response_tokens=1000)

RUN_BEGAN = json.dumps({"event": "RunBegan", **RunBegan(0.0, 2, "partial", {})._asdict()})


def workload(episodes: DrawnEpisodes | ReplayedEpisodes | None = DRAWN, **more: Any) -> Workload:
    return Workload(lengths=LENGTHS, episodes=episodes, step_time=PRESETS["h200-8b"], slots=16, prompts=32, **more)


def log_of(path: Path, work: Workload, schedule: Schedule = SCHEDULE) -> Path:
    """A run folder with the event log of a simulated run."""
    path.mkdir()
    with (path / "events.jsonl").open("w", encoding="utf-8") as file:
        run(work, schedule, JsonLines(file))
    return path


def is_record_of(recorded: Episode, drawn: Episode) -> bool:
    """Equal, with answers that are late only by the prefill of other rollouts."""
    late = [r - d for r, d in zip(recorded.seconds, drawn.seconds, strict=True)]
    return recorded[:2] == drawn[:2] and all(-1e-9 <= seconds <= 0.2 for seconds in late)


@pytest.mark.parametrize("mode", ["partial+elevator", "on-policy"])
def test_the_log_has_the_turns_and_latencies_that_were_drawn(tmp_path: Path, mode: str) -> None:
    schedule = with_mode(SCHEDULE, mode)
    log = log_of(tmp_path / "run", workload(), schedule) / "events.jsonl"
    recorded = [episode for of_prompt in read_episodes(log).by_prompt for episode in of_prompt]
    prompts = [id for event in read_events(log) if isinstance(event, Loaded) for id in event.prompts for _ in range(4)]
    attempts = [
        DRAWN(Prompt(id, (), int(id)), derive_seed(derive_seed(0, rollout), attempt))
        for rollout, id in enumerate(prompts)
        for attempt in range(1 if mode == "partial+elevator" else 5)
    ]
    assert len(recorded) == len(prompts) == 128, "every response once"
    assert all(any(is_record_of(episode, drawn) for drawn in attempts) for episode in recorded)


def test_a_replay_has_the_turns_of_the_log(tmp_path: Path) -> None:
    log = log_of(tmp_path / "run", workload()) / "events.jsonl"
    first = run(workload(), SCHEDULE)
    again = run(workload(read_episodes(log)), SCHEDULE)
    assert again.turns_mean == first.turns_mean == 3.0
    assert again.environment_tokens == first.environment_tokens
    assert again.mean_length == pytest.approx(first.mean_length, rel=0.15)
    assert again.goodput == pytest.approx(first.goodput, rel=0.15)


def test_a_cut_turn_and_a_slow_end_are_recorded(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    log.write_text(
        "\n".join(
            json.dumps(event)
            for event in [
                json.loads(RUN_BEGAN),
                {"event": "Loaded", "at": 0.0, "cohort": 0, "first": 0, "rollouts": 2, "prompts": ["p"]},
                {"event": "TurnEnded", "at": 1.0, "rollout": 0, "made": 5, "length": 5},
                {"event": "Observed", "at": 4.0, "rollout": 0, "tokens": 3, "length": 8},
                {"event": "Aborted", "at": 5.0, "rollout": 0, "made": 2, "length": 10, "dropped": 0},
                {"event": "Finished", "at": 6.0, "rollout": 0, "made": 4, "length": 14, "truncated": True},
                {"event": "TurnEnded", "at": 7.0, "rollout": 1, "made": 7, "length": 7},
                {"event": "Regenerated", "at": 7.5, "rollout": 1, "dropped": 7, "reason": "lost"},
                {"event": "TurnEnded", "at": 8.0, "rollout": 1, "made": 9, "length": 9},
                {"event": "Finished", "at": 8.5, "rollout": 1, "made": 0, "length": 9, "truncated": False},
            ]
        )
        + "\n"
    )
    found = read_episodes(log)
    assert found.by_prompt == ((Episode((5, 6), (3,), (3.0, 0.0)), Episode((9,), (), (0.5,))),)
    assert found.has_environment and found.most_observed == 3
    assert found.lengths() == ReplayedLengths(((11, 9),))


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([{"event": "Finished", "at": 6.0, "rollout": 7, "made": 4, "length": 14, "truncated": True}], "rollout 7"),
        ([{"event": "Observed", "at": 4.0, "rollout": 0, "tokens": 3, "length": 8}], r"Observed at 4 s contradicts"),
        ([{"event": "Loaded", "at": 0.0, "cohort": 0, "first": 0, "rollouts": 2, "prompts": []}], "Loaded at 0 s"),
    ],
)
def test_an_incomplete_log_is_refused(tmp_path: Path, events: list[dict[str, object]], reason: str) -> None:
    lines = [RUN_BEGAN, *(json.dumps(event) for event in events)]
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(ConfigurationError, match=f"{reason}.*the log is incomplete"):
        SimulateSettings(lengths=tmp_path).check()


SMALL = {"slots": 16, "rollouts_per_update": 16, "prompts_per_cohort": 16, "rollouts_per_prompt": 4, "cohorts": 2}


def test_a_log_of_two_runs_is_refused(tmp_path: Path) -> None:
    log = log_of(tmp_path / "run", workload()) / "events.jsonl"
    log.write_text(log.read_text() * 2)
    with pytest.raises(ValueError, match=r"events of 2 runs, .*; give each run a log of its own"):
        read_episodes(log)


def test_simulate_takes_a_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = log_of(tmp_path / "run", workload())
    settings = SimulateSettings(lengths=folder, modes=("partial+elevator",), **SMALL)
    settings.check()
    assert simulate.run(settings) == 0
    shown = capsys.readouterr().out
    assert "turns: 3 per response" in shown and "as in 128 responses of this run" in shown
    assert simulate.run(settings.model_copy(update={"json_output": True})) == 0
    found = json.loads(capsys.readouterr().out)["modes"]["partial+elevator"]
    assert found["turns_mean"] == 3.0 and found["environment_seconds"] > 0


def test_turns_of_a_log_are_neither_doubled_nor_forced_on_an_engine(tmp_path: Path) -> None:
    folder = log_of(tmp_path / "run", workload())
    with pytest.raises(ConfigurationError, match=r"turns = 2.*Leave out --turns"):
        SimulateSettings(lengths=folder, turns=2).check()
    with pytest.raises(ConfigurationError, match=r"environment_seconds = 9.*which are replayed. Leave it out"):
        SimulateSettings(lengths=folder, environment_seconds=9).check()
    with pytest.raises(ConfigurationError, match="responses of one turn"):
        BenchSettings(lengths=folder).check()


def test_a_log_of_one_turn_gives_lengths(tmp_path: Path) -> None:
    log = log_of(tmp_path / "run", workload(None)) / "events.jsonl"
    settings = SimulateSettings(lengths=log, **SMALL)
    assert settings.replayed_episodes is None and settings.replayed_lengths is not None
    assert settings.replayed_lengths.count == 128
    assert simulated_workload(settings).lengths == settings.replayed_lengths
    assert settings.response_limit() == 1000 > settings.replayed_lengths.longest, "that of the run"
    assert limit_of_file(PlanSettings(lengths=log)) == []
    bare = tmp_path / "bare"
    bare.write_text("12\n34\n")
    (_, said) = limit_of_file(PlanSettings(lengths=bare))
    assert said.startswith(f"the longest response in {bare} has 34 tokens: set the limit of your run")
    assert limit_of_file(PlanSettings(lengths=bare, max_response_tokens=34)) == limit_of_file(PlanSettings()) == []
    assert SimulateSettings(lengths=log, turns=3).response_limit() == 3 * settings.response_limit()
    BenchSettings(lengths=log).check()


@pytest.mark.parametrize(
    ("lines", "reason"),
    [([RUN_BEGAN], "no response is finished"), ([RUN_BEGAN, "{"], "line 2"), (None, "it has no events.jsonl")],
)
def test_a_log_without_responses_is_refused(tmp_path: Path, lines: list[str] | None, reason: str) -> None:
    if lines is not None:
        (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(ConfigurationError, match=reason):
        SimulateSettings(lengths=tmp_path).check()
