"""The report: one HTML page about one or several runs, built from their event logs. Styles, scripts and data are in it:
it makes no network requests and needs no server.

Every number on it comes from `RunMetrics` (metrics.py) or from the folds for the charts (runs.py, timeline.py);
`as_json` returns the same metrics.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.wording import printable
from sortedrl.log.atomic_write import write_atomically
from sortedrl.observe.report import charts, text
from sortedrl.observe.report.charts import Chart
from sortedrl.observe.report.runs import ReportedRun, run_names, series_of
from sortedrl.settings.install_hint import install_hint

PAGE = Path(__file__).parent / "page"
# The official plotly.js bundle for basic charts. The Python package ships only the full bundle, which is four times as
# large and takes ten times as long to start.
PLOTLY = "plotly-basic-4.1.1/plotly-basic.min.js"


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


# A page, of a report or of a study


def render(
    template: str, content: dict[str, Any], charts: Sequence[Chart], version: str, *, folder: Path = PAGE
) -> str:
    """The page from a template in `folder`. Charts are drawn by the page's own script."""
    environment = _environment(folder)
    from markupsafe import Markup

    data = [{"id": chart.id, "height": chart.height, "views": chart.views} for chart in charts]
    payload = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")  # it is inside a script
    html: str = environment.get_template(template).render(
        **content,
        version=version,
        css=Markup(_asset("report.css")),
        payload=Markup(payload),
        scripts=[Markup(_asset(name)) for name in (PLOTLY, "charts.js")],
    )
    return html


def write_page(path: Path, html: str) -> None:
    """Write the page atomically, replacing an earlier one. Of names that are not UTF-8, some characters are lost."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, html.encode("utf-8", errors="replace").decode("utf-8"))
    except OSError as error:
        raise ConfigurationError("out", str(path), f"{error.strerror}", "Name a file that can be written.") from None


def _environment(folder: Path) -> Any:
    try:
        import jinja2
    except ImportError:
        why = "this package is not installed"
        raise ConfigurationError("report", "jinja2", why, f"{install_hint('report')}.") from None
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, PAGE]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=_without_control_characters,
    )


def _without_control_characters(value: Any) -> Any:
    """Of text from a run. Lines and tabs of a response stay; `Markup` is ours."""
    return "\n".join(map(printable, value.expandtabs(4).split("\n"))) if type(value) is str else value


def _asset(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")
