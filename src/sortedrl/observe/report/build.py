"""The report: one self-contained HTML page about one or several runs, built from their event logs.

Every number on it comes from `RunMetrics` (metrics.py) or from the folds for the charts (runs.py, timeline.py);
`as_json` returns the same metrics. The page makes no network requests and needs no server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from sortedrl.observe.report import charts, text
from sortedrl.observe.report.runs import ReportedRun, run_names, series_of
from sortedrl.observe.report.self_contained import render


def as_json(runs: Sequence[ReportedRun]) -> dict[str, Any]:
    """The metrics of every run, equal to those on the page."""
    series = series_of(runs)
    label_of = {run.name: one.label for one in series for run in one.runs}
    return {
        "runs": [
            {
                "name": run.name,
                "path": str(run.path),
                "series": label_of[run.name],
                "seed": run.seed,
                "metrics": asdict(run.run_metrics),
                "slot_time": run.slot_time,
                "held_out": [{"update": one.updates, **one.score} for one in run.held_out],
                "changes_on_resume": [change._asdict() for change in run.changes],
                "notices": list(run.notices),
            }
            for run in runs
        ],
        "conclusion": text.conclusion(series, runs)[0],
    }


def page(runs: Sequence[ReportedRun], version: str) -> str:
    """The HTML; `version` is the version of sortedrl."""
    series = series_of(runs)
    of_run = run_names(series)
    names = [of_run[run.name] for run in runs]
    firsts = [one.measured[0] for one in series]
    unit = charts.time_unit(max(run.ended - run.began for run in runs))
    drawn = {
        "shares": [charts.slot_time_fractions(runs, names)],
        "timelines": [charts.timeline(one.measured[0], i, one.label, unit) for i, one in enumerate(series)],
        "lengths": [charts.lengths(run, i, of_run[run.name]) for i, run in enumerate(firsts)],
        "staleness": charts.curves("staleness", series, unit),
        "learning": [*charts.curves("reward", series, unit), *charts.curves("held-out", series, unit)],
    }
    content = {
        "conclusion": text.conclusion(series, runs),
        "runs": runs,
        "series": series,
        "names": names,
        "of_each_run": list(zip(names, runs, strict=True)),
        "has_several_runs": any(len(one.runs) > 1 for one in series),
        "text": text,
        "charts": drawn,
    }
    return render("report.html.j2", content, [chart for section in drawn.values() for chart in section], version)
