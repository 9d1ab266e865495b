"""`sortedrl doctor`: check what is installed and whether it works here."""

from __future__ import annotations

import json
from dataclasses import asdict

from sortedrl.cli.output import print_settings, table_console
from sortedrl.models import BUILT_IN_MODEL
from sortedrl.settings.base import Settings
from sortedrl.studies import doctor


class DoctorSettings(Settings):
    """Show what is installed and what is missing, and test whether it works here."""


SETTINGS = DoctorSettings


def run(settings: DoctorSettings) -> int:
    """Exit code 1 if the self-test failed."""
    if settings.dry_run:
        print_settings({}, {"self_test": list(doctor.SELF_TESTS)}, as_object=settings.json_output)
        return 0
    installed = doctor.installation()
    if not settings.json_output:
        doctor.show_installation(table_console(), installed)
    checks = doctor.self_test(BUILT_IN_MODEL)
    if settings.json_output:
        print(json.dumps({**asdict(installed), "self_test": [asdict(check) for check in checks]}))
    else:
        doctor.show_checks(table_console(), checks)
    return int(any(check.failed for check in checks))
