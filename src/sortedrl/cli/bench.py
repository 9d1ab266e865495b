"""`sortedrl bench`: measure the throughput of each schedule on a real engine."""

from sortedrl.cli.output import line_log, print_json, stdout_reserved_for_json, table_console
from sortedrl.cli.workload import print_dry_run
from sortedrl.studies import tables
from sortedrl.studies.bench import BenchSettings, bench_schedule, bench_workload, run_bench

SETTINGS = BenchSettings


def run(settings: BenchSettings) -> int:
    if settings.dry_run:
        return print_dry_run(settings, bench_schedule(settings), bench_workload(settings).prompts)
    with stdout_reserved_for_json(settings):
        found = run_bench(settings, line_log(settings))
    if settings.json_output:
        return print_json(settings, found)
    measured = tables.table_of("Measured on the engine", found["modes"], tables.BENCH)
    tables.show(table_console(), [measured, "", tables.bubble_table(found["modes"])])
    return 0
