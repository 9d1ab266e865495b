"""The pictures of README and docs: true to the logs that they are drawn from, and those that their commands make."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "occupancy_picture.py"
TIMELINES = ROOT / "benchmarks" / "mode_timelines.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    sys.path.append(str(SCRIPT.parent))  # for the modules that the scripts share
    spec = importlib.util.spec_from_file_location("occupancy_picture", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_filled_area_is_the_used_slot_time(script: ModuleType) -> None:
    for panel in script.PANELS:
        data = script.occupancy(panel)
        seconds_per_column = data.end / 777
        columns = script.column_means(data, seconds_per_column)
        spans = [min(seconds_per_column, max(0.0, data.end - i * seconds_per_column)) for i in range(len(columns))]
        used = sum(mean * span for mean, span in zip(columns, spans, strict=True))
        share = used / (data.run_metrics.slots * data.run_metrics.seconds)
        assert 1 - share == pytest.approx(data.run_metrics.bubble, abs=1e-6)


def test_the_picture_is_the_one_that_its_command_makes(tmp_path: Path) -> None:
    made = tmp_path / "made.svg"
    subprocess.run([sys.executable, str(SCRIPT), str(made)], check=True, timeout=120)
    assert made.read_text() == (ROOT / "docs" / "occupancy.svg").read_text()
    assert ElementTree.parse(made).getroot().tag.endswith("svg")


def test_the_timelines_are_the_ones_that_their_command_makes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(TIMELINES), str(tmp_path)], check=True, timeout=120)
    made = {path.name: path.read_text() for path in tmp_path.glob("*.svg")}
    assert made == {path.name: path.read_text() for path in (ROOT / "docs" / "img").glob("*mode-*.svg")}
    page = "".join((ROOT / "docs" / name).read_text() for name in ("concepts.md", "dynamic_sampling.md"))
    assert made and all(f"img/{name}" in page for name in made)
