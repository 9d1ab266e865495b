"""Files of a run that hold what no run writes: wrong types, impossible numbers, control characters, deep nesting.

`report`, `watch` and every other command that reads them end with a line or a stated loss, never with a traceback, and
send no control character from a file to the terminal.
"""

import copy
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console as Terminal

from run_folders import EVALUATION, SETTINGS, SUMMARY, UPDATE, run_folder
from sortedrl.cli import main
from sortedrl.core.wording import printable
from sortedrl.observe import watch
from sortedrl.observe.console import PanelConsole, PlainConsole
from sortedrl.observe.report import build as report
from sortedrl.observe.report.runs import read_runs
from sortedrl.observe.watch import Follower

IN_THE_CHART_LIBRARY = {"\t"}
HOSTILE = "\x1b]0;owned\x07\x1b[31mred\x9b2J\r\u202e\nnext"
WRONG: list[Any] = [
    None, True, "x", HOSTILE, [], [1], {}, {"a": 1}, -1, 1e308, float("nan"), float("inf"), 10**400, 0.5,
]  # fmt: skip


def variants(content: Any, wrong: Any) -> Iterator[Any]:
    """Copies with one value, at any depth, replaced."""
    yield wrong
    for key in content if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else ():
        for inner in variants(content[key], wrong):
            changed = copy.copy(content)
            changed[key] = inner
            yield changed


def control_characters(text: str) -> set[str]:
    return {one for one in text if (ord(one) < 32 and one != "\n") or 127 <= ord(one) < 160 or one == "\u202e"}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: ascii(wrong)[:12])
def test_a_wrong_value_anywhere_in_the_metrics_costs_a_line(tmp_path: Path, wrong: Any) -> None:
    folder = run_folder(tmp_path / "run")
    said: list[str] = []
    follower = Follower(folder, PlainConsole(said.append))
    with (folder / "metrics.jsonl").open("a") as file:
        for line in (EVALUATION, UPDATE):
            file.writelines(json.dumps(variant) + "\n" for variant in variants(line, wrong))
    follower.catch_up()
    (read,) = read_runs([folder])
    assert not control_characters(report.page([read], "0")) - IN_THE_CHART_LIBRARY
    assert any("metrics.jsonl: skipped" in notice for notice in read.notices)
    assert not control_characters("".join(said))


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: ascii(wrong)[:12])
def test_a_wrong_value_in_the_summary_or_the_settings_does_not_end_a_command(tmp_path: Path, wrong: Any) -> None:
    folder = run_folder(tmp_path / "run")
    for variant in variants(SUMMARY, wrong):
        (folder / "summary.json").write_text(json.dumps(variant))
        assert "ended" in watch.outcome_line(folder, watch.Watched(watch.ENDED, "end", 1.0, process_is_there=False))
    for variant in variants(SETTINGS, wrong):
        (folder / "config.json").write_text(json.dumps(variant))
        json.dumps(watch.state(folder))
        runs = read_runs([folder])
        report.as_json(runs)
    report.page(runs, "0")


def test_no_control_character_of_a_log_reaches_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_folder(tmp_path / f"run{HOSTILE}", mode=f"partial{HOSTILE}", reason=HOSTILE, task=HOSTILE)
    other = run_folder(tmp_path / "other", mode=f"baseline{HOSTILE}", task=f"{HOSTILE}2")
    with (other / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(UPDATE | {"update": 2, "seconds": 3.0, "rejected_most": HOSTILE}) + "\n")
    for words in (["report", str(tmp_path), "--out", str(tmp_path / "page.html")], ["report", str(tmp_path / HOSTILE)]):
        main(words)
        assert not control_characters("".join(capsys.readouterr())), words
    assert not control_characters((tmp_path / "page.html").read_text()) - IN_THE_CHART_LIBRARY
    for folder in (tmp_path / f"run{HOSTILE}", other):
        for command in ("watch", "trace"):
            main([command, str(folder)])
            assert not control_characters("".join(capsys.readouterr())), command
        terminal = io.StringIO()
        console = PanelConsole(Terminal(file=terminal, force_terminal=True, width=80))
        with console:
            Follower(folder, console)
            console.log(HOSTILE)
        shown = terminal.getvalue()
        assert "owned" in shown and not any(part in shown for part in (HOSTILE[:4], "\x1b[31mred", "\x9b", "\u202e"))


def test_printable_text_shows_what_it_leaves_out() -> None:
    assert printable("a\x1b[1m\x9b\n\u202eé ") == "a\\x1b[1m\\x9b\\n\\u202eé "


def test_a_folder_in_place_of_the_metrics_is_named_in_the_error(tmp_path: Path, refused: Any) -> None:
    folder = run_folder(tmp_path / "run")
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").mkdir()
    refusal = refused("report", folder)
    assert f"runs = '{folder / 'metrics.jsonl'}'" in refusal and "Is a directory" in refusal


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("run.toml", f"seed = {DEEP}", ["train", "--config", "run.toml", "--dry-run"]),
        ("study.toml", f"seeds = {DEEP}", ["compare", "study.toml", "--dry-run"]),
        ("results.jsonl", DEEP, ["compare", "--from", "results.jsonl"]),
        ("lengths.json", DEEP, ["simulate", "--lengths", "lengths.json"]),
        ("lengths.jsonl", f"{DEEP}\n", ["plan", "--lengths", "lengths.jsonl"]),
        ("profile.json", DEEP, ["simulate", "--profile", "profile.json"]),
        ("run/config.json", DEEP, ["train", "--resume", "run"]),
        ("model/config.json", DEEP, ["train", "--model", "model", "--dry-run"]),
        ("run/events.jsonl", f"{DEEP}\n", ["report", "run"]),
        ("run/events.jsonl", f"{DEEP}\n", ["trace", "run"]),
    ],
)
def test_a_file_that_is_nested_too_deeply_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Any, name: str, content: str, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(content)
    assert len(refused(*words)) < 500


def test_a_run_that_does_not_fit_into_memory_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Any
) -> None:
    folder = run_folder(tmp_path / "run")

    def too_large(*words: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(sys.modules["sortedrl.observe.report.runs"], "read_intact", too_large)
    assert refused("report", folder) == "sortedrl: report needs more memory than there is\n"


def test_runs_of_different_tasks_are_not_compared(tmp_path: Path, told: Any) -> None:
    """In the terminal as on the page: their tokens per second say nothing about the schedules."""
    run_folder(tmp_path / "one", mode="baseline", task="knights")
    run_folder(tmp_path / "two", mode="partial", task="countdown")
    printed = told("report", tmp_path, "--out", tmp_path / "page.html").out
    assert "beats" not in printed and " x the tokens" not in printed
    said = "These runs have different tasks (task: knights, countdown) and are not compared"
    assert said in printed and said in (tmp_path / "page.html").read_text()
