"""Trackers and the Prometheus endpoint: real packages, a real run, and the same numbers everywhere."""

import json
import os
import re
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, fields
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from config_file import config_file
from forked import Command
from sortedrl.core.configuration import ConfigurationError
from sortedrl.observe import trackers
from sortedrl.observe.run_metrics import RunMetrics
from sortedrl.observe.trackers import METRICS, STEP, Endpoint, Tracker, Trackers, open_tracker, tracked

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "metrics.md"
LINES: list[dict[str, Any]] = [
    {"update": 0, "seconds": 1.0, "held_out": {"value": 0.25, "low": 0.1, "high": 0.4}},
    {"update": 1, "seconds": 2.0, "reward": 0.1, "bubble": 1 / 3, "rejected": 0, "seen by no tracker": 5},
    {"update": 2, "seconds": 3.0, "reward": 0.7, "bubble": 2 / 7, "rejected": 1, "stale_kl": 1e-9},
    {"update": 2, "seconds": 4.0, "held_out": {"value": 0.5, "low": 0.3, "high": 0.7}},
]


def points(lines: list[dict[str, Any]]) -> list[tuple[str, int, float]]:
    """All that trackers are given of these lines: (metric, update, value)."""
    return sorted((name, line["update"], value) for line in lines for name, value in tracked(line).items())


def test_a_line_gives_the_metrics_of_the_table_alone() -> None:
    assert tracked(LINES[0]) == {"held_out_score": 0.25}
    assert tracked(LINES[1]) == {"reward": 0.1, "bubble": 1 / 3, "rejected": 0}
    assert len(METRICS) <= 30 and STEP not in METRICS


def rows_of_the_document() -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in DOCS.read_text().splitlines() if line.startswith("| `")]


def test_the_document_explains_every_metric_of_the_table_and_no_other() -> None:
    documented = {row[0].strip("`"): row[1:] for row in rows_of_the_document() if len(row) == 4}
    assert tuple(sorted(documented)) == tuple(sorted(METRICS))
    assert all(unit and formula and healthy for unit, formula, healthy in documented.values())


def test_the_document_names_every_metric_of_a_run() -> None:
    named = set(re.findall(r"`(\w+)`", " ".join(row[0] for row in rows_of_the_document())))
    assert {field.name for field in fields(RunMetrics)} - named == {"mode", "slots"}


# Each tracker, for real: what was logged is read back from what it wrote


def log_lines(name: str, folder: Path) -> None:
    tracker = open_tracker(name, folder, {"mode": "partial"})
    for line in LINES:
        tracker.log(line[STEP], tracked(line))
    tracker.close()


def as_float32(value: float) -> float:
    single: float = struct.unpack("f", struct.pack("f", value))[0]
    return single


def read_tensorboard(folder: Path) -> list[tuple[str, int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return sorted(
        (tag, event.step, float(make_ndarray(event.tensor_proto)))
        for tag in found.Tags()["tensors"]
        for event in found.Tensors(tag)
    )


def test_tensorboard_has_every_point(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install '.[tensorboard]'")
    log_lines("tensorboard", tmp_path)
    assert read_tensorboard(tmp_path) == [(name, step, as_float32(value)) for name, step, value in points(LINES)]


def test_weights_and_biases_offline_writes_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="pip install '.[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    trackers.require_login(["wandb"])
    log_lines("wandb", tmp_path)
    (log,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert all(name.encode() in log.read_bytes() for name, _, _ in points(LINES))


def test_weights_and_biases_without_a_login_is_refused_in_one_line(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="pip install '.[wandb]'")
    code = (
        "from sortedrl.core.configuration import ConfigurationError\n"
        "from sortedrl.observe.trackers import require_login\n"
        "try: require_login(['wandb'])\n"
        "except ConfigurationError as error: print(error.key, error.fix)\n"
    )
    plain = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment = plain | {"PYTHONPATH": str(ROOT / "src"), "HOME": str(tmp_path), "NETRC": str(tmp_path / "no")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.stdout.startswith("tracker Log in with"), done.stderr


def test_trackio_has_every_point(tmp_path: Path) -> None:
    pytest.importorskip("trackio", reason="pip install '.[trackio]'")
    code = (
        "import sys; from pathlib import Path; import test_trackers\n"
        "test_trackers.log_lines('trackio', Path(sys.argv[1]))\n"
    )
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests' / 'observe'}",
        "TRACKIO_DIR": str(tmp_path / "trackio"),  # read when the package is imported
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-c", code, str(tmp_path / "my-run")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "", "stdout belongs to --json"
    assert read_trackio(tmp_path / "trackio") == points(LINES)


def read_trackio(folder: Path) -> list[tuple[str, int, float]]:
    import sqlite3

    (path,) = folder.glob("*.db")
    with sqlite3.connect(path) as database:
        rows = [json.loads(row) for (row,) in database.execute("select metrics from metrics order by id")]
    return sorted((name, row[STEP], value) for row in rows for name, value in row.items() if name != STEP)


# Missing packages, broken trackers


def test_a_missing_package_is_named_with_its_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None if name == "wandb" else find_spec(name))
    with pytest.raises(ConfigurationError) as raised:
        trackers.require_packages(["wandb"])
    assert raised.value.fix == "pip install '.[wandb]' in the SortedRL checkout."


def test_a_broken_tracker_is_named_and_switched_off_and_the_others_go_on() -> None:
    said: list[str] = []
    calls: list[tuple[str, Any]] = []

    def fail(*given: Any) -> None:
        calls.append(("broken", given))
        raise OSError("disk full")

    all_trackers = Trackers(said.append)
    all_trackers.add(Tracker("broken", fail, fail))
    all_trackers.add(Tracker("good", lambda update, values: calls.append(("good", update)), lambda: calls.clear()))
    for line in LINES:
        all_trackers.line(line)
    assert [update for name, update in calls if name == "good"] == [0, 1, 2, 2] and len(calls) == 1 + len(LINES)
    assert len(said) == 1 and "broken" in said[0] and "disk full" in said[0]
    all_trackers.close()
    assert not calls and len(said) == 1, "the good one was closed"


# Prometheus


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    served = Endpoint(0)
    yield served
    served.close()


def scraped(url: str) -> dict[str, float]:
    """The metrics of a page in the text format; every line is checked against it."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = answer.read().decode()
    assert not text or text.endswith("\n")
    found = {}
    for line in text.splitlines():
        parsed = re.fullmatch(r"# (?:HELP|TYPE) sortedrl_\w+ .+|sortedrl_([a-z_]+) (\S+)", line)
        assert parsed, line
        if parsed[1]:
            found[parsed[1]] = float(parsed[2])
    return found


def test_the_endpoint_serves_the_newest_value_of_each_metric(endpoint: Endpoint) -> None:
    assert scraped(endpoint.url) == {}
    for line in LINES:
        endpoint.log(line[STEP], tracked(line))
    newest = {name: value for line in LINES for name, value in tracked(line).items()}
    assert scraped(endpoint.url) == {STEP: 2, **newest}


def test_the_endpoint_listens_on_the_loopback_alone(endpoint: Endpoint) -> None:
    assert endpoint.url.startswith("http://127.0.0.1:")
    assert endpoint._server.server_address[0] == "127.0.0.1"


def test_other_paths_are_not_found_and_a_taken_port_is_refused(endpoint: Endpoint) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(endpoint.url.replace("/metrics", "/"), timeout=10)
    with pytest.raises(ConfigurationError, match="prometheus_port"):
        Endpoint(endpoint._server.server_port)


# One run: every number comes from the same fold


class Scraper:
    """A run in another process, scraped while it goes on. It is held until an update was seen."""

    def __init__(self, words: list[str], hold: Path) -> None:
        command = Command(words)
        command.wait_for_output("metrics at ")
        url = next(line for line in command.stderr.splitlines() if line.startswith("metrics at ")).split()[-1]
        self.seen: list[dict[str, float]] = []
        while command.process.is_alive():
            try:
                page = scraped(url)
            except (OSError, HTTPException):  # the run ends, perhaps within an answer
                break
            if page and (not self.seen or page != self.seen[-1]):
                self.seen.append(page)
            if page.get(STEP, 0) > 0:
                hold.unlink(missing_ok=True)
            time.sleep(0.01)
        done = command.wait()
        self.stdout = done.stdout
        assert done.returncode == 0, done.stderr


def test_json_metrics_file_tracker_and_prometheus_of_one_run_agree(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="pip install '.[train]'")
    pytest.importorskip("tensorboard", reason="pip install '.[tensorboard]'")
    import toy
    from sortedrl.core.events import Phase
    from sortedrl.log.reading import read_events
    from sortedrl.observe.metrics import Metrics
    from trace_rules import assert_valid_trace

    folder = tmp_path / "run"
    words = f"""train --json --model {toy.make_model(tmp_path / "model")} --out {folder}
        --scoring at-once --reward-workers 0 --slots 8 --rollouts-per-update 16 --prompts-per-cohort 8
        --max-response-tokens 24 --max-prompt-tokens 16 --eval-problems 10 --threads 1 --updates 4 --mode partial
        --rollouts-per-prompt 4 --tracker tensorboard"""
    hold = tmp_path / "hold"
    run = Scraper([*words.split(), *toy.held(hold, at=3 * 16), *config_file(tmp_path, prometheus_port=0)], hold)

    summary = json.loads(run.stdout)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    updates = [line for line in lines if "reward" in line]
    assert [line["update"] for line in updates] == [1, 2, 3, 4]

    # The tracker has every point of the metrics file.
    assert read_tensorboard(folder) == [(name, step, as_float32(value)) for name, step, value in points(lines)]
    # Prometheus showed lines of the metrics file, to the last digit, while the run went on.
    shown: dict[str, float] = {}
    pages = []
    for line in lines:
        shown = {**shown, STEP: line["update"], **tracked(line)}
        pages.append(shown)
    assert run.seen and all(page in pages for page in run.seen)
    assert any(0 < page[STEP] <= 4 for page in run.seen)
    assert_valid_trace(list(read_events(folder / "events.jsonl")))
    # Each line of the file is the fold over the event log so far, and the summary the fold over all of it.
    metrics = Metrics()
    done = 0
    for event in read_events(folder / "events.jsonl"):
        metrics(event)
        if isinstance(event, Phase) and event.phase == "weights":  # a line is written after its weight update
            run_metrics, line = metrics.run_metrics(), updates[done]
            done += 1
            for name in ("bubble", "idle", "goodput", "waste", "rejected"):
                assert getattr(run_metrics, name) == line[name], (name, done)
            assert run_metrics.staleness_mean == line["run_staleness_mean"]
    assert done == len(updates)
    whole = json.loads(json.dumps(asdict(metrics.run_metrics())))
    assert whole == summary["metrics"] == json.loads((folder / "summary.json").read_text())["metrics"]
    assert summary["score_after"]["value"] == tracked(lines[-1])["held_out_score"]
    for name in ("bubble", "goodput", "waste", "rejected"):
        assert summary["metrics"][name] == updates[-1][name], name
    assert summary["metrics"]["staleness_mean"] == updates[-1]["run_staleness_mean"]
