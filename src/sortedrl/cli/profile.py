"""`sortedrl profile`: measure an engine, to calibrate simulate and plan to your hardware."""

from __future__ import annotations

import json
from dataclasses import asdict

from sortedrl.cli.output import around_code_of_others, line_log, print_settings
from sortedrl.settings.base import as_json
from sortedrl.studies.profile import ProfileSettings, run_profile

SETTINGS = ProfileSettings


def run(settings: ProfileSettings) -> int:
    if settings.dry_run:
        return print_settings(as_json(settings), {}, as_object=settings.json_output)
    with around_code_of_others(settings):
        profile = run_profile(settings, line_log(settings))
    if settings.json_output:
        print(json.dumps(asdict(profile)))
    else:
        print(f"written to {settings.out}; try: sortedrl simulate --step-time {settings.out} --slots {settings.slots}")
    return 0
