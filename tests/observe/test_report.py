"""The report without a browser: what it reads, what it says, and what it makes of a damaged log."""

import html
import io
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from run_folders import run_folder
from scenarios import MODES, Run, run, scenario
from simulated_logs import NEEDS, SCHEDULE, SMALL, figures_of, simulated_log
from sortedrl.cli import main
from sortedrl.core import events
from sortedrl.core.events import Event, RunBegan, SlotsChanged
from sortedrl.log.lines import JsonLines, written
from sortedrl.log.reading import read_events
from sortedrl.observe.report import build as report
from sortedrl.observe.report import charts as report_charts
from sortedrl.observe.report import text
from sortedrl.observe.report.runs import Outline, Series, read_runs, series_of, slot_time
from sortedrl.observe.timeline import OUTCOMES, slices
from sortedrl.studies.workload import run as simulate


def events_of(mode: str, lengths: Sequence[int] = (3, 9, 2, 17, 5, 8, 1, 12), **knobs: Any) -> list[Event]:
    return run(mode, list(lengths), rollouts_per_update=2, **NEEDS.get(mode, {}), **knobs).events


# Folds


@pytest.mark.parametrize("mode", MODES)
def test_the_charts_slot_time_adds_up_to_the_figures(mode: str) -> None:
    log = events_of(mode, learner_seconds=2.0, weight_update_seconds=1.0)
    run_metrics = figures_of(log)
    found = slot_time(run_metrics, stays := slices(log))
    assert sum(found.values()) == pytest.approx(1)
    assert {part: share for part, share in run_metrics.idle_parts.items() if share} == {
        part: share for part, share in found.items() if part not in OUTCOMES
    }
    whole = run_metrics.wall_seconds * run_metrics.slots
    for outcome in OUTCOMES:
        seconds = math.fsum(stay.end - stay.start for stay in stays if stay.outcome == outcome)
        assert found.get(outcome, 0.0) == pytest.approx(seconds / whole)


def resumed_with_other_slots(mode: str, slots: int, then: int) -> list[Event]:
    lengths = [3, 9, 2, 17, 5, 8, 1, 12]
    plan = scenario(mode, lengths, rollouts_per_update=2, slots=slots, learner_seconds=2.0, **NEEDS.get(mode, {}))
    first = Run(plan).updates(2)
    second = Run(replace(plan, slots=then), state=first.checkpoint(), last_time=first.events[-1].at).to_end()
    return [*first.events, *second.events]


@pytest.mark.parametrize("then", [2, 5])
@pytest.mark.parametrize("mode", ["partial", "baseline", "april"])
def test_the_charts_of_a_run_with_other_slots_after_a_resume(mode: str, then: int, tmp_path: Path) -> None:
    """The parts add up to the metrics. One line less, and it is still read."""
    log = resumed_with_other_slots(mode, 3, then)
    path = tmp_path / "events.jsonl"
    path.write_text(written(log))
    shown_run = read_runs([path])[0]
    assert shown_run.slot_counts == (3, then)
    assert shown_run.notices == (), "nothing is missing"
    assert sum(shown_run.slot_time.values()) == pytest.approx(1)
    assert shown_run.run_metrics.slots == then
    page = report.page([shown_run], "0")
    assert f"3, then {then} slots" in page and "changed on resume" in page and "incomplete" not in page
    path.write_text(written([event for event in log if not isinstance(event, SlotsChanged)]))
    assert read_runs([path])[0].slot_counts == (3,)


def test_what_each_resume_changed_is_in_the_log() -> None:
    """A change that is not a pair, as in a log of another hand, is left out."""
    row = events.Updated(2.0, 0, 0, 0, (0, 1), (1, 3), (0.0, 0.0), (((0, 1),), ((0, 3),)), (1, 1))
    changed = events.SettingsChanged(3.0, {"device": ["cuda", "cpu"], "odd": 3})
    log = [
        RunBegan(0.0, 4, "partial", {}),
        row,
        SlotsChanged(3.0, 6),
        changed,
        row._replace(update=1),
        SlotsChanged(4.0, 2),
    ]
    found = [(one.updates, one.setting, one.old, one.new) for one in Outline.of(log).changes]
    assert found == [(1, "slots", 4, 6), (1, "device", "cuda", "cpu"), (2, "slots", 6, 2)]
    assert Outline.of(log[:2]).changes == []


def test_update_points_hold_every_update() -> None:
    log = events_of("partial", range(1, 25))
    updates = [event for event in log if isinstance(event, events.Updated)]
    assert len(updates) > 4
    points = Outline.of(log).points
    assert [point.updates for point in points] == list(range(1, len(updates) + 1))
    assert [point.length_quantiles[2] for point in points] == pytest.approx([median(u.lengths) for u in updates])
    assert points[-1].rollouts == figures_of(log).trained


# Several runs


def test_of_two_runs_in_one_log_the_last_one_is_shown_with_a_notice(tmp_path: Path) -> None:
    first, second = (simulated_log(tmp_path / f"{mode}.jsonl", mode) for mode in ("baseline", "partial"))
    both = tmp_path / "both.jsonl"
    both.write_text(first.read_text() + second.read_text())
    (shown,) = read_runs([both])
    (alone,) = read_runs([second])
    assert (shown.run_metrics, shown.points, shown.began) == (alone.run_metrics, alone.points, alone.began)
    notice = "Event log: it has the events of 2 runs, of which only the last one counts."
    assert shown.notices == (notice, *alone.notices)


def test_seeds_of_one_mode_are_one_series(tmp_path: Path) -> None:
    paths = [
        simulated_log(tmp_path / f"{mode}-{seed}.jsonl", mode, seed=seed)
        for mode in ("baseline", "partial")
        for seed in (0, 1, 2)
    ]
    runs = read_runs(paths)
    series = series_of(runs)
    assert [one.label for one in series] == ["baseline", "partial"]
    assert [len(one.runs) for one in series] == [3, 3]
    goodputs = [figures_of(list(read_events(path))).goodput for path in paths[3:]]
    assert series[1].mean("goodput") == pytest.approx(sum(goodputs) / 3)
    (staleness,) = report_charts.curves("staleness", series, "s")
    low, high, mean = staleness.views["updates"]["data"][3:6]
    columns = list(zip(*[[point.staleness for point in run.points] for run in series[1].runs], strict=False))
    assert low["y"] == pytest.approx([min(column) for column in columns])
    assert high["y"] == pytest.approx([max(column) for column in columns])
    assert mean["y"] == pytest.approx([sum(column) / 3 for column in columns])


def test_a_run_without_an_update_changes_no_mean(tmp_path: Path) -> None:
    """One of three seeds was killed in its first harvest."""
    for seed in range(2):
        simulated_log(tmp_path / f"partial-{seed}/events.jsonl", seed=seed)
    simulated_log(tmp_path / "baseline/events.jsonl", "baseline")
    before = read_runs([tmp_path])
    killed = simulated_log(tmp_path / "a-killed/events.jsonl", seed=2)
    lines = killed.read_text().splitlines(keepends=True)
    first_update = next(place for place, line in enumerate(lines) if '"Updated"' in line)
    killed.write_text("".join(lines[: first_update - 1]))
    runs = read_runs([tmp_path])
    assert len(runs) == len(before) + 1
    series, expected = series_of(runs), series_of(before)
    assert report.as_json(runs)["conclusion"] == report.as_json(before)["conclusion"]
    assert sorted(map(str, text.headline(series)["rows"])) == sorted(map(str, text.headline(expected)["rows"]))
    curves, others = (report_charts.curves("staleness", some, "s")[0].views for some in (series, expected))
    assert sorted(map(str, curves["updates"]["data"])) == sorted(map(str, others["updates"]["data"]))
    assert [run.name for run in runs if any("No update was made" in notice for notice in run.notices)] == ["a-killed"]


def test_the_slot_timeline_of_a_large_run_shows_its_first_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sortedrl.observe.report.runs.MOST_SLICES", 40)
    (run,) = read_runs([simulated_log(tmp_path / "log.jsonl")])
    stays = slices(list(read_events(tmp_path / "log.jsonl")))
    assert run.slices == tuple(stay for stay in stays if stay.start < run.slices_until) and len(run.slices) <= 40
    update_times = [run.began + point.seconds for point in run.points]
    assert run.slices_until in update_times and run.slices_until < run.ended
    shown = report_charts.timeline(run, 0, "partial", "s")
    assert shown.title == f"partial: first {update_times.index(run.slices_until) + 1} updates"
    *bars, _ = shown.views[""]["data"]
    ends = [base + width for trace in bars for base, width in zip(trace["base"], trace["x"], strict=True)]
    assert max(ends) == pytest.approx(run.slices_until - run.began) and len(ends) == len(run.slices)
    assert set(report_charts.WORK) == set(OUTCOMES), "each has its color"


def test_a_run_without_an_update_has_no_conclusion(tmp_path: Path) -> None:
    path = simulated_log(tmp_path / "early/events.jsonl")
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:6]))
    runs = read_runs([path])
    assert report.as_json(runs)["conclusion"] == "No update was made in early: there is nothing to measure yet."
    assert "on-policy" not in report.as_json(runs)["conclusion"]


def test_rejections_are_listed_by_reason(tmp_path: Path) -> None:
    log = run("partial", [3, 9, 2, 17, 5, 8, 1, 12], rollouts_per_update=2, unscorable=frozenset({1, 4, 6})).events
    (tmp_path / "events.jsonl").write_text(written(log))
    runs = read_runs([tmp_path])
    reasons = runs[0].run_metrics.rejected_reasons
    assert sum(reasons.values()) == runs[0].run_metrics.rejected == 3
    assert text.conclusion(series_of(runs), runs)[-1].startswith("Rejected: 3 rollouts, most often: ")
    page = report.page(runs, "0")
    rows = page.split('<table id="rejections">')[1].split("</table>")[0]
    assert "3 of 8 rollouts were rejected" in page and all(html.escape(reason) in rows for reason in reasons)
    calm = simulated_log(tmp_path / "calm" / "events.jsonl")
    assert 'id="rejected"' not in report.page(read_runs([calm]), "0")


def test_runs_of_one_mode_with_other_settings_are_told_apart(tmp_path: Path) -> None:
    one = simulated_log(tmp_path / "one.jsonl")
    other = tmp_path / "other.jsonl"
    with other.open("w", encoding="utf-8") as file:
        simulate(SMALL, replace(SCHEDULE, mode="partial", max_staleness=2), JsonLines(file))
    runs = read_runs([one, other])
    assert [series.label for series in series_of(runs)] == ["partial (max_staleness None)", "partial (max_staleness 2)"]
    page = report.page(runs, "0")
    assert "differ in more than the mode: max_staleness" in page


def test_the_verdict_says_what_the_gain_costs(tmp_path: Path) -> None:
    runs = read_runs([simulated_log(tmp_path / f"{mode}.jsonl", mode) for mode in ("baseline", "partial")])
    base, best = (run.run_metrics for run in runs)
    assert best.goodput > base.goodput
    sentence = report.as_json(runs)["conclusion"]
    assert f"{best.goodput / base.goodput:.2f}x the tokens per second of baseline" in sentence
    assert f"{best.staleness_mean:.2f} versions old on average" in sentence
    slower = replace(runs[1], run_metrics=replace(best, goodput=0.1))
    worse = report.as_json([slower, runs[0]])["conclusion"]
    assert worse.startswith("No other run is faster than baseline")


# The command


def test_json_has_the_figures_of_the_fold(tmp_path: Path, told: Any) -> None:
    path = simulated_log(tmp_path / "log.jsonl")
    printed = json.loads(told("report", path, "--json").out)
    assert printed["runs"][0]["metrics"] == json.loads(json.dumps(asdict(figures_of(list(read_events(path))))))
    assert printed["page"] is None
    assert not list(tmp_path.glob("*.html")), "with --json a page is written only where --out says so"


def test_names_that_cannot_be_encoded_lose_characters_and_not_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder whose name is not UTF-8, and a terminal that is ASCII."""
    folder = tmp_path / os.fsdecode(b"run\xff-\xc3\xa9")
    simulated_log(folder / "events.jsonl")
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["report", str(folder)]) == 0
    terminal.seek(0)
    assert f"report in {tmp_path}/run?-?/report.html" in terminal.read()
    assert "run?-é" in (folder / "report.html").read_text(encoding="utf-8")


def test_a_page_is_written_and_replaced(tmp_path: Path, told: Any) -> None:
    path = simulated_log(tmp_path / "events.jsonl")
    for _ in range(2):
        assert str(tmp_path / "report.html") in told("report", tmp_path).out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["events.jsonl", "report.html"]
    told("report", path, "--out", tmp_path / "deep" / "er.html")
    assert (tmp_path / "deep" / "er.html").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "no such file or folder"),
        (["empty"], "no events.jsonl in it"),
        (["noise.jsonl"], "the start of a run is not in it"),
        (["good.jsonl", "--out", "empty"], "a folder, not a file"),
        (["good.jsonl", "--out", "page.pdf"], "Use page.html"),
        (["good.jsonl", "--out", "good.jsonl/page.html"], "Name a file that can be written"),
        ([], "there is no run"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Any, words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "noise.jsonl").write_text("noise\n")
    simulated_log(tmp_path / "good.jsonl")
    assert said in refused("report", *words)


def test_a_missing_package_is_one_line_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Any
) -> None:
    path = simulated_log(tmp_path / "log.jsonl")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert "pip install '.[report]'" in refused("report", path, "--out", tmp_path / "page.html")


def test_the_chart_library_is_the_release_that_its_folder_names_with_its_licence() -> None:
    bundle = report.PAGE / report.PLOTLY
    assert "plotly.js (basic - minified) v4.1.1" in bundle.read_text(encoding="utf-8")[:200]
    assert "MIT License" in (bundle.parent / "LICENSE").read_text()
    assert "</script" not in bundle.read_text(encoding="utf-8"), "it can stand inside a page"


# What only a run folder has


def test_a_line_that_is_too_deep_to_parse_is_skipped(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    deep = "[" * 100_000
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(f'{{"update": 3, "rew\n{deep}\n')
    (folder / "config.json").write_text(deep)
    (read,) = read_runs([folder])
    assert read.notices[-1] == "metrics.jsonl: skipped 2 unreadable lines."


def test_means_over_runs_compare_the_same_updates(tmp_path: Path) -> None:
    """Not the same number of points: an update of one run may be lost."""
    (run,) = read_runs([run_folder(tmp_path / "run")])
    every = [run.points[0]._replace(updates=n, staleness=float(n)) for n in range(1, 9)]
    one = Series("mine", "#000000", (replace(run, points=tuple(every[1::2])), replace(run, points=tuple(every))))
    (chart,) = report_charts.curves("staleness", [one], "s")
    *_, mean = chart.views["updates"]["data"]
    assert mean["x"] == mean["y"] == [2, 4, 6, 8]


def test_a_folder_of_runs_stands_for_all_of_them(tmp_path: Path) -> None:
    for seed in (0, 1):
        run_folder(tmp_path / "compared" / f"partial-seed{seed}", seed=seed)
    runs = read_runs([tmp_path / "compared"])
    assert [run.name for run in runs] == ["partial-seed0", "partial-seed1"]
    (series,) = series_of(runs)
    assert len(series.runs) == 2
    page = report.page([replace(runs[0], name="<b>named</b>", notices=("It ends.",)), runs[1]], "0")
    assert "<b>named" not in page and "&lt;b&gt;named" in page, "what a run says is text, not markup"
    assert '<th scope="row">seed</th>' in page, "configurations are held side by side"
    assert "2 runs, seeds 0, 1" in page


@pytest.mark.slow
def test_a_trained_run_s_report_and_summary_agree_to_the_last_digit(tmp_path: Path, told: Any) -> None:
    """A real run: the log's fold, summary.json and the last line of metrics.jsonl have the same numbers."""
    folder = tmp_path / "run"
    flags = ["--updates", "5", "--slots", "16", "--rollouts-per-update", "16", "--prompts-per-cohort", "8"]
    told("train", *flags, "--eval-problems", "10", "--threads", "1", "--out", folder)
    (printed,) = json.loads(told("report", folder, "--json").out)["runs"]
    summary = json.loads((folder / "summary.json").read_text())
    assert printed["metrics"] == summary["metrics"]
    assert printed["held_out"][-1] == {"update": 5, **summary["score_after"]}
    assert printed["notices"] == []
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (read,) = read_runs([folder])
    rewards = [line["reward"] for line in lines if "reward" in line]
    assert [point.reward for point in read.points] == pytest.approx(rewards, rel=1e-12)
