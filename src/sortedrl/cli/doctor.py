"""`sortedrl doctor`: check what is installed and whether it works here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

from pydantic import Field
from rich.table import Table
from rich.text import Text

from sortedrl.cli.output import around_code_of_others, print_settings, table_console
from sortedrl.models import BUILT_IN_MODEL
from sortedrl.settings.base import Settings
from sortedrl.settings.install_hint import install_hint
from sortedrl.studies import doctor
from sortedrl.studies.doctor import HOSTS, SELF_TESTS, Check, Installation

STATES = {True: Text("passed", "green"), False: Text("FAILED", "bold red"), None: Text("skipped", "yellow")}


class DoctorSettings(Settings):
    """Show what is installed and what is missing, and test whether it works here."""

    full: Annotated[
        bool, Field(description="run the parts that import PyTorch, too: about 10 s on a quiet machine")
    ] = False


SETTINGS = DoctorSettings


def run(settings: DoctorSettings) -> int:
    """Exit code 1 if the self-test failed."""
    if settings.dry_run:
        tests = SELF_TESTS if settings.full else SELF_TESTS[:1]
        print_settings({"full": settings.full}, {"self_test": list(tests)}, as_object=settings.json_output)
        return 0
    installed = doctor.installation()
    if not settings.json_output:
        show_installation(installed)
    with around_code_of_others(settings):
        checks = doctor.self_test(BUILT_IN_MODEL, full=settings.full)
    if settings.json_output:
        print(json.dumps({**asdict(installed), "self_test": [asdict(check) for check in checks]}))
    else:
        show_checks(checks)
    return int(any(check.passed is False for check in checks))


def show_installation(installed: Installation) -> None:
    console = table_console()
    devices = ", ".join([*installed.gpus, f"{installed.cpu_cores} CPU cores"])
    head = f"sortedrl {installed.version}, Python {installed.python}, {installed.system}\ndevices: {devices}\n"
    console.print(head, highlight=False)
    packages = _table("package", "version", "for")
    for one in installed.packages:
        version = one.version or "-"
        shown = version if one.fits or one.version is None else f"{version}, needs {one.least}"
        packages.add_row(one.name, shown, one.extra or "adapter" * (one.name in HOSTS))
    extras = _table("extra", "", "")
    for extra, names in installed.missing.items():
        state = Text(f"missing: {', '.join(names)}", "yellow") if names else Text("present", "green")
        extras.add_row(extra, state, Text(install_hint(extra)) if names else "")
    console.print(packages, "", extras)


def show_checks(checks: Sequence[Check]) -> None:
    table = _table("self-test", "", "seconds", "")
    for check in checks:
        table.add_row(check.name, STATES[check.passed], f"{check.seconds:.1f}", Text(check.detail))
    table_console().print("", table)


def _table(*columns: str) -> Table:
    return Table(*columns, box=None, header_style="bold", pad_edge=False)
