"""`sortedrl report`: write an HTML page about one or several runs."""

import json
import sys
from pathlib import Path
from typing import ClassVar

from sortedrl import __version__
from sortedrl.cli.output import ProgressBar, print_settings
from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.wording import printable
from sortedrl.observe import watch
from sortedrl.observe.report import build as report
from sortedrl.observe.report import runs as report_runs
from sortedrl.observe.report import text
from sortedrl.settings.base import Settings
from sortedrl.studies.measurements import check_is_no_folder


class ReportSettings(Settings):
    """Write one self-contained HTML page about one or several runs."""

    positional: ClassVar[tuple[str, ...]] = ("runs",)

    runs: tuple[Path, ...] = ()
    """run folders, folders of runs, or event logs; default: the newest in runs/"""
    out: Path | None = None
    """page to write; default: report.html in the run folder, or in this folder for several runs"""

    def check(self) -> None:
        check_is_no_folder("out", self.out, "report.html")
        if self.out is not None and self.out.suffix not in (".html", ".htm"):
            raise ConfigurationError("out", str(self.out), "the page is HTML", f"Use {self.out.with_suffix('.html')}.")


SETTINGS = ReportSettings


def run(settings: ReportSettings) -> int:
    """With --json the page is written only if --out names it."""
    paths = settings.runs or [watch.newest_run(Path("runs"))]
    page = settings.out or (paths[0] if len(paths) == 1 and paths[0].is_dir() else Path()) / "report.html"
    if settings.dry_run:
        return print_settings(settings, {"page": str(page)})
    with ProgressBar("reading runs", quiet=settings.json_output) as progress:
        runs = report_runs.read_runs(paths, progress)
    if settings.out is not None or not settings.json_output:
        report.write_page(page, report.page(runs, __version__))
    if settings.json_output:
        written = str(page) if settings.out is not None else None
        print(json.dumps({**report.as_json(runs), "page": written, "version": __version__}))
        return 0
    for line in text.conclusion(report_runs.series_of(runs), runs):
        print(printable(line))
    for run in runs:
        for notice in run.notices:
            print(printable(f"{run.name}: {notice}"), file=sys.stderr)
    print(printable(f"report in {page} ({page.stat().st_size / 1e6:.1f} MB)"))
    return 0
