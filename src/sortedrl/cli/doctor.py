"""`sortedrl doctor`: check what is installed and whether it works here."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

from pydantic import Field

from sortedrl.cli.output import around_code_of_others, print_settings, table_console
from sortedrl.models import BUILT_IN_MODEL
from sortedrl.settings.base import Settings
from sortedrl.studies import doctor


class DoctorSettings(Settings):
    """Show what is installed and what is missing, and test whether it works here."""

    full: Annotated[
        bool, Field(description="run the parts that import PyTorch, too: about 10 s on a quiet machine")
    ] = False


SETTINGS = DoctorSettings


def run(settings: DoctorSettings) -> int:
    """Exit code 1 if the self-test failed."""
    if settings.dry_run:
        tests = doctor.SELF_TESTS if settings.full else doctor.SELF_TESTS[:1]
        print_settings({"full": settings.full}, {"self_test": list(tests)}, as_object=settings.json_output)
        return 0
    installed = doctor.installation()
    if not settings.json_output:
        doctor.show_installation(table_console(), installed)
    with around_code_of_others(settings):
        checks = doctor.self_test(BUILT_IN_MODEL, full=settings.full)
    if settings.json_output:
        print(json.dumps({**asdict(installed), "self_test": [asdict(check) for check in checks]}))
    else:
        doctor.show_checks(table_console(), checks)
    return int(any(check.failed for check in checks))
