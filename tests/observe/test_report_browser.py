"""The report as a browser shows it: what its charts hold is what the event log says, nothing is asked of a network,
nothing goes wrong on the console, and a large run is usable at once."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import quantiles
from typing import Any

import pytest

from chromium import Chromium, chromium_or_skip
from sortedrl.cli import main
from sortedrl.core import Schedule
from sortedrl.core.events import Updated
from sortedrl.engines.step_time import PRESETS
from sortedrl.log.lines import JsonLines
from sortedrl.log.reading import read_events
from sortedrl.observe.metrics import Metrics
from sortedrl.observe.report.runs import MOST_SLICES
from sortedrl.observe.run_metrics import RunMetrics
from sortedrl.studies.workload import Workload, run

pytestmark = pytest.mark.slow

MODES = ("baseline", "on-policy", "partial+elevator")
MOST_BYTES = 8_000_000
WORKLOAD = Workload(
    step_time=PRESETS["h200-8b"], slots=32, prompts=256, learner_seconds_per_update=8.0, weight_update_seconds=1.0
)
SCHEDULE = Schedule(mode="baseline", rollouts_per_update=32, prompts_per_cohort=128)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(chromium_or_skip(), tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], Path]:
    """The logs of three modes, and the page about them."""
    folder = tmp_path_factory.mktemp("compared")
    logs = [write_log(folder / f"{mode}.jsonl", WORKLOAD, replace(SCHEDULE, mode=mode)) for mode in MODES]
    page = folder / "page.html"
    assert main(["report", *map(str, logs), "--out", str(page)]) == 0
    return logs, page


def write_log(path: Path, workload: Workload, schedule: Schedule) -> Path:
    with path.open("w", encoding="utf-8") as file:
        run(workload, schedule, JsonLines(file))
    return path


def drawn(browser: Chromium, chart: str) -> list[dict[str, Any]]:
    """What plotly has drawn, as it holds it itself."""
    traces: list[dict[str, Any]] = json.loads(
        browser.ask(
            f"JSON.stringify(document.getElementById('{chart}').data.map("
            "({name, x, y}) => ({name, x: Array.from(x), y: Array.from(y)})))"
        )
    )
    return traces


def figures_of(log: Path) -> RunMetrics:
    return Metrics().fold(read_events(log)).run_metrics()


def test_every_chart_holds_what_the_event_log_says(browser: Chromium, compared: tuple[list[Path], Path]) -> None:
    logs, page = compared
    browser.open(page)
    charts = browser.ask("[...document.querySelectorAll('.chart')].map(div => div.id)")
    checked = {"shares", "staleness"} | {f"{chart}-{i}" for chart in ("slots", "lengths") for i in range(len(MODES))}
    assert set(charts) == checked, "every chart of the page is checked below"
    all_metrics = [figures_of(log) for log in logs]

    shares = {trace["name"]: trace for trace in drawn(browser, "shares")}
    for i, run_metrics in enumerate(all_metrics):
        for part, share in run_metrics.idle_parts.items():
            shown = shares.get(part.replace("_", " ").replace("kv limited", "KV-limited"))
            assert (shown["x"][i] if shown else 0) == pytest.approx(100 * share, abs=1e-4)
        assert sum(trace["x"][i] for trace in shares.values()) == pytest.approx(100, abs=1e-3)

    for i, log in enumerate(logs):
        updates = [event for event in read_events(log) if isinstance(event, Updated)]
        assert drawn(browser, "staleness")[i]["y"] == pytest.approx(list(map(mean_staleness, updates)), rel=1e-6)
        traces = drawn(browser, f"lengths-{i}")
        for trace, share in zip(traces, (0.05, 0.95, 0.25, 0.75, 0.5), strict=True):
            assert trace["x"] == [update.update + 1 for update in updates]
            assert trace["y"] == pytest.approx([twentieths(u)[round(20 * share) - 1] for u in updates], rel=1e-6)


def twentieths(update: Updated) -> list[float]:
    return quantiles(update.lengths, n=20, method="inclusive")


def mean_staleness(update: Updated) -> float:
    segments = [segment for rollout in update.segments for segment in rollout]
    ages = sum((update.version - version) * tokens for version, tokens in segments)
    return ages / sum(tokens for _, tokens in segments)


def test_nothing_leaves_the_page_and_nothing_goes_wrong(browser: Chromium, compared: tuple[list[Path], Path]) -> None:
    _, page = compared
    browser.errors.clear()
    browser.requests.clear()
    browser.open(page)
    browser.prefer("dark")
    browser.resize(390, 800)
    browser.resize(1366, 900)
    browser.prefer("light")
    browser.ask("document.querySelectorAll('details').forEach(details => { details.open = true })")
    browser.ask("new Promise(resolve => setTimeout(resolve, 300))")
    assert browser.errors == []
    assert [url for url in browser.requests if not url.startswith(("data:", "blob:"))] == [page.resolve().as_uri()]
    assert page.stat().st_size < MOST_BYTES
    blocked = browser.ask("fetch('http://127.0.0.1:9/').then(() => 'sent', error => 'refused')")
    assert blocked == "refused", "the page's own policy refuses any request"
    policy = browser.ask("document.querySelector('[http-equiv=Content-Security-Policy]').content")
    assert policy.startswith("default-src 'none'")
    browser.errors.clear()


def test_a_run_of_50_000_rollouts_draws_no_more_than_a_small_one_might(browser: Chromium, tmp_path: Path) -> None:
    """Within two seconds on a quiet machine. What is drawn is counted: time would be that of the machine."""
    workload = replace(WORKLOAD, slots=128, prompts=50_176)
    log = write_log(tmp_path / "large.jsonl", workload, Schedule(mode="partial+elevator"))
    page = tmp_path / "large.html"
    assert main(["report", str(log), "--out", str(page)]) == 0
    assert page.stat().st_size < MOST_BYTES
    browser.errors.clear()
    browser.open(page)
    assert int(browser.ask("document.documentElement.dataset.ready")) < 60_000, "it hung"
    assert browser.ask("document.querySelectorAll('*').length") < 3 * MOST_SLICES
    assert "50,176 rollouts trained on" in browser.ask("document.querySelector('.kicker').textContent")
    assert browser.errors == []
    (title,) = browser.ask("[...document.querySelectorAll('#timeline h3')].map(title => title.textContent)")
    assert title.startswith("partial+elevator: first ") and title.endswith(" updates")
    bars = browser.ask("document.querySelectorAll('#slots-0 .point').length")
    assert 1_000 < bars <= MOST_SLICES, "of 50,000 slices"
