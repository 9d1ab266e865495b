"""`sortedrl profile`: measure an engine, to calibrate simulate and plan to your hardware."""

import json
from dataclasses import asdict

from sortedrl.cli.output import line_log, print_settings, stdout_reserved_for_json
from sortedrl.studies.profile import ProfileSettings, run_profile

SETTINGS = ProfileSettings


def run(settings: ProfileSettings) -> int:
    if settings.dry_run:
        return print_settings(settings, {})
    with stdout_reserved_for_json(settings):
        profile = run_profile(settings, line_log(settings))
    if settings.json_output:
        print(json.dumps(asdict(profile)))
    else:
        print(f"written to {settings.out}; try: sortedrl simulate --step-time {settings.out} --slots {settings.slots}")
    return 0
