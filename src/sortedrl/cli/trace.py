"""`sortedrl trace`: write a run as a timeline for ui.perfetto.dev."""

import json
import sys
from pathlib import Path
from typing import ClassVar

from sortedrl.cli.output import print_settings
from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.events import Event, Started
from sortedrl.core.wording import counted, printable
from sortedrl.log.atomic_write import atomic_writer
from sortedrl.log.paused_gc import paused_gc
from sortedrl.log.reading import read_intact
from sortedrl.observe.trace import write_trace
from sortedrl.observe.watch import newest_run
from sortedrl.settings.base import Settings
from sortedrl.studies.measurements import check_is_no_folder


class TraceSettings(Settings):
    """Write a run as Chrome-trace JSON, with one track per slot. Open it at ui.perfetto.dev."""

    positional: ClassVar[tuple[str, ...]] = ("run",)

    run: Path | None = None
    """run folder, or an event log; default: the newest in runs/"""
    out: Path | None = None
    """file to write; default: trace.json beside the event log"""

    def check(self) -> None:
        super().check()
        check_is_no_folder("out", self.out, "trace.json")


SETTINGS = TraceSettings


def run(settings: TraceSettings) -> int:
    path = settings.run or newest_run(Path("runs"))
    source = path / "events.jsonl" if path.is_dir() else path
    out = settings.out or source.with_name("trace.json")
    if settings.dry_run:
        return print_settings(settings, {"reads": str(source), "writes": str(out)})
    with paused_gc():
        log, unreadable = _intact_log(source)
        try:
            with atomic_writer(out) as file:
                write_trace(log, file)
        except OSError as error:
            fix = "Name a file in a folder that exists."
            raise ConfigurationError("out", str(out), f"{error.strerror}", fix) from None
    slices = sum(isinstance(event, Started) for event in log)
    if settings.json_output:
        print(json.dumps({"trace": str(out), "slices": slices, "unreadable_lines": unreadable}))
        return 0
    if unreadable:
        left_out = f"left out {counted(unreadable, 'unreadable line')} of {source}"
        print(f"sortedrl: {printable(left_out)}", file=sys.stderr)
    where = "open it at https://ui.perfetto.dev (the file stays on your machine)"
    print(f"{counted(slices, 'slice')} in {printable(str(out))}: {where}")
    return 0


def _intact_log(source: Path) -> tuple[list[Event], int]:
    """The readable events of a log, and the number of unreadable lines."""
    fix = "Name a run folder, as in runs/NAME, or an event log."
    try:
        read = read_intact(source)
    except OSError as error:
        raise ConfigurationError("run", str(source), f"{error.strerror}", fix) from None
    if not read.events:
        raise ConfigurationError("run", str(source), "it has no events", fix)
    if read.notice:
        print(f"sortedrl: {printable(str(source))}: {read.notice}", file=sys.stderr)
    return read.events, len(read.damage) + read.lost
