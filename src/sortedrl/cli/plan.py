"""`sortedrl plan`: which schedule to use, and whether you need one at all."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

from sortedrl import __version__
from sortedrl.cli.output import ProgressBar, table_console
from sortedrl.cli.workload import accuracy_line, print_dry_run, print_notices, workload_line
from sortedrl.settings.base import as_json
from sortedrl.studies import plan, tables
from sortedrl.studies.paste import lines_to_paste
from sortedrl.studies.plan import PlanSettings, allowed_by, plan_drafts
from sortedrl.studies.workload_settings import simulated_schedule, simulated_workload, step_time_of

SETTINGS = PlanSettings


def run(settings: PlanSettings) -> int:
    schedule = simulated_schedule(settings)
    workload = replace(simulated_workload(settings), expectation=settings.expectation, step_time=step_time_of(settings))
    if settings.dry_run:
        return print_dry_run(settings, schedule, workload.prompts)
    print_notices(settings)
    with ProgressBar("planning", quiet=settings.json_output, when_piped=True) as progress:
        found = plan.plan(workload, schedule, allowed_by(settings), settings.seeds, progress)
    drafts = None if settings.drafts == "none" else plan_drafts(settings, workload, (found.choice, found.baseline))
    if settings.json_output:
        drafted = {} if drafts is None else {"drafts": asdict(drafts)}
        print(json.dumps({**asdict(found), **drafted, "settings": as_json(settings), "version": __version__}))
        return 0
    console = table_console()
    console.print(f"{workload_line(settings)}\nexpected lengths: {settings.expectation}", highlight=False)
    tables.show(console, tables.plan_view(found))
    if drafts is not None:
        console.print(f"\n{drafts.reason}", style="bold", highlight=False)
    console.print(f"\n{accuracy_line(settings)}", highlight=False)
    if found.needed:
        choice, separate = found.choice, settings.separate_learner
        for line in lines_to_paste(choice.schedule, choice.slots, settings.controllers, separate=separate):
            print(line)
    return 0
