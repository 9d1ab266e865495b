"""`sortedrl compare`: train with several modes, interleaved, and compare them."""

from __future__ import annotations

import json

from sortedrl.cli import train_extra
from sortedrl.cli.output import console_of_run, table_console
from sortedrl.cli.train import print_dry_run
from sortedrl.config import Compare
from sortedrl.studies import tables

SETTINGS = Compare


def run(settings: Compare) -> int:
    if settings.dry_run:
        return print_dry_run(settings)
    trainer = train_extra.trainer()
    console = console_of_run(settings, ends_with_reader=False)
    summaries = trainer.compare(settings, console.log, console)
    if settings.json_output:
        print(json.dumps({"runs": summaries}))
    else:
        tables.show(table_console(), [tables.comparison_table(summaries)])
    return 0
