"""`sortedrl simulate`: what each schedule would gain on your response lengths."""

from __future__ import annotations

import json

from sortedrl import __version__
from sortedrl.cli.output import ProgressBar, table_console
from sortedrl.cli.workload import print_dry_run, print_notices, workload_line
from sortedrl.core.strategies.base import updates_left
from sortedrl.settings.base import as_json
from sortedrl.settings.schedule import prompts_per_cohort
from sortedrl.studies import answer, simulate, tables
from sortedrl.studies.simulate import SimulateSettings
from sortedrl.studies.workload_settings import simulated_schedule, simulated_workload

SETTINGS = SimulateSettings


def run(settings: SimulateSettings) -> int:
    workload, schedule = simulated_workload(settings), simulated_schedule(settings)
    rows = simulate.cases(workload, schedule, *settings.modes_and_expectations())
    if settings.dry_run:
        return print_dry_run(settings, schedule, workload.prompts)
    print_notices(settings, *_less_than_a_cohort(settings))
    with ProgressBar("simulating", quiet=settings.json_output) as progress:
        modes = simulate.compare(rows, settings.seeds, max_updates=settings.updates, on_progress=progress)
    if settings.json_output:
        print(json.dumps({"modes": modes, "settings": as_json(settings), "version": __version__}))
        return 0
    limit = next(iter(modes.values()))["limit"]
    console = table_console()
    source = f" ({workload.step_time.source})" if workload.step_time.source else ""
    console.print(
        f"{workload_line(settings)}\nlimit of this workload: {tables.digits(limit, 5)} tokens/s{source}\n",
        highlight=False,
    )
    columns = tables.ANSWER if settings.filtered is None else tables.ANSWER | tables.FILTERED
    tables.show(console, [tables.table_of("", modes, columns)])
    console.print(f"\n{answer.conclusion(rows, modes)}", style="bold", highlight=False)
    if tables.several(modes):
        error = answer.spread(rows, modes, len(settings.seeds), settings.cohorts, settings.updates)
        console.print(error, highlight=False)
    if settings.details:
        throughput = tables.table_of("Throughput", modes, tables.THROUGHPUT)
        cost = tables.table_of("Cost", modes, tables.COST)
        tables.show(console, ["", throughput, "", cost, "", tables.bubble_table(modes)])
    return 0


def _less_than_a_cohort(settings: SimulateSettings) -> list[str]:
    per_cohort = prompts_per_cohort(settings) * settings.rollouts_per_prompt
    in_cohort = updates_left(per_cohort, simulated_schedule(settings).rollouts_needed)
    if settings.updates is None or settings.updates >= in_cohort:
        return []
    why = (
        f"updates = {settings.updates} ends each run within its first cohort, which has {in_cohort} updates: its long "
    )
    fix = "responses are not trained on, so gain and length bias say little. Leave it out; --cohorts 1 is a short run."
    return [why + fix]
