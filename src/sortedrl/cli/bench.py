"""`sortedrl bench`: measure the throughput of each schedule on a real engine."""

from __future__ import annotations

import json

from sortedrl import __version__
from sortedrl.cli.output import around_code_of_others, line_log, table_console
from sortedrl.cli.workload import print_dry_run
from sortedrl.settings.base import as_json
from sortedrl.studies import tables
from sortedrl.studies.bench import BenchSettings, bench_schedule, bench_workload, run_bench

SETTINGS = BenchSettings


def run(settings: BenchSettings) -> int:
    if settings.dry_run:
        return print_dry_run(settings, bench_schedule(settings), bench_workload(settings).prompts)
    with around_code_of_others(settings):
        found = run_bench(settings, line_log(settings))
    if settings.json_output:
        print(json.dumps({**found, "settings": as_json(settings), "version": __version__}))
        return 0
    measured = tables.table_of("Measured on the engine", found["modes"], tables.BENCH)
    tables.show(table_console(), [measured, "", tables.bubble_table(found["modes"])])
    return 0
