"""The report: one self-contained HTML page about one or several runs, built from their event logs.

Every number on it comes from `RunMetrics` (metrics.py) or from the folds for the charts (folds.py, timeline.py);
`as_json` returns the same metrics. The page makes no network requests and needs no server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sortedrl.observe.report import charts, tables
from sortedrl.observe.report import text as words
from sortedrl.observe.report.runs import Run
from sortedrl.observe.report.self_contained import render, write_page
from sortedrl.observe.report.series import Series, run_names, series_of

# The page


def page(runs: Sequence[Run], commands: Sequence[str | None], version: str) -> str:
    """The HTML. `commands[i]` reproduces `runs[i]`, or None if unknown; `version` is the version of sortedrl."""
    content = _content(runs, commands, series_of(runs))
    data = {
        "timelines": content["timelines"],
        "outcomes": {outcome[0]: outcome for outcome in charts.WORK},
        "outcomeColors": {outcome[0]: color for outcome, color in charts.WORK.items()},
    }
    drawn = _flat(content["charts"])
    return render("report.html.j2", content, drawn, version, data=data, scripts=["timeline.js"])


def write(path: Path, runs: Sequence[Run], commands: Sequence[str | None], version: str) -> None:
    """Write the page atomically, replacing an earlier one."""
    write_page(path, page(runs, commands, version))


def default_page(paths: Sequence[Path]) -> Path:
    """In the run folder if there is just one; in the current directory for several runs or a bare log."""
    return paths[0] / "report.html" if len(paths) == 1 and paths[0].is_dir() else Path("report.html")


def as_json(runs: Sequence[Run]) -> dict[str, Any]:
    """The metrics of every run, equal to those on the page."""
    label_of = {run.name: one.label for one in series_of(runs) for run in one.runs}
    return {
        "runs": [
            {
                "name": run.name,
                "path": str(run.path),
                "series": label_of[run.name],
                "seed": run.seed,
                "metrics": asdict(run.run_metrics),
                "slot_time": charts.slot_time_parts(run),
                "held_out": [{"update": h.mark.updates, **h.score} for h in run.held_out],
                "changes_on_resume": [asdict(change) for change in run.changes],
                "notices": list(run.notices),
            }
            for run in runs
        ],
        "conclusion": words.conclusion(series_of(runs), runs)["sentence"],
    }


def conclusion_lines(runs: Sequence[Run]) -> list[str]:
    """What the page says at its top: the conclusion, then what limits it."""
    found = words.conclusion(series_of(runs), runs)
    return [found["sentence"], *found["asides"]]


def _content(runs: Sequence[Run], commands: Sequence[str | None], series: Sequence[Series]) -> dict[str, Any]:
    longest = max(run.ended - run.began for run in runs)
    unit = charts.time_unit(longest)
    drawn = _charts(runs, series, unit, longest)
    responses = [
        (one.label, one.color, tables.responses(one)) for one in series if any(run.responses for run in one.runs)
    ]
    sections = [
        ("metrics", "Metrics"),
        ("slot-time", "Slot-time"),
        ("timeline", "Slot by slot"),
        ("lengths", "Lengths"),
        ("staleness", "Staleness"),
        *([("scoring", "Scoring")] if drawn["scoring"] or any(run.run_metrics.rejected for run in runs) else []),
        *([("learning", "Reward and score")] if drawn["learning"] else []),
        *([("learner", "Learner")] if drawn["learner"] else []),
        *([("rollouts", "Rollouts to read")] if responses else []),
        ("configuration", "Configuration"),
    ]
    names = run_names(series)
    by_outcome = [(name, color) for name, color in charts.WORK.items() if any(name in r.occupancy.parts for r in runs)]
    return {
        "title": f"SortedRL: {', '.join(one.label for one in series)}",
        "subtitle": words.subtitle(runs),
        "conclusion": words.conclusion(series, runs),
        "notices": [(run.name, run.notices) for run in runs if run.notices],
        "sections": sections,
        "metrics_lead": words.metrics_lead(series),
        "headline": tables.headline(series),
        "all_metrics": {"names": [names[run.name] for run in runs], "rows": tables.all_metrics(runs)},
        "rejections": {"names": [names[run.name] for run in runs], "rows": tables.rejections(runs)},
        "scoring_lead": words.scoring_lead(runs),
        "glossary": words.GLOSSARY,
        "legend": _legend(runs),
        "outcomes": by_outcome,
        "occupancy_lead": words.occupancy_lead(series, longest, unit),
        "timeline_lead": words.timeline_lead(series),
        "timeline_label": "Which rollout was in which slot over time. Arrows move, plus and minus zoom, 0 shows all.",
        "timelines": [shown for one in series for shown in charts.timelines(one.measured[0], one.label, unit)],
        "lengths_lead": words.lengths_lead(series),
        "staleness_lead": words.staleness_lead(series),
        "learning_lead": words.learning_lead(series),
        "learner_lead": "The learner's metrics from metrics.jsonl, one point per update.",
        "responses": responses,
        "responses_lead": tables.responses_lead(runs),
        "differences": {"names": [names[run.name] for run in runs], "rows": tables.differences(runs)},
        "changes": [(names[run.name], tables.changes(run)) for run in runs if run.changes],
        "reproduction": [
            (names[run.name], command, [(key, tables.shown(value)) for key, value in run.settings.items()])
            for run, command in zip(runs, commands, strict=True)
        ],
        "has_folders": any(run.has_configuration for run in runs),
        "series": series,
        "charts": drawn,
    }


def _charts(runs: Sequence[Run], series: Sequence[Series], unit: charts.TimeUnit, longest: float) -> dict[str, Any]:
    names = run_names(series)
    firsts = [one.measured[0] for one in series]
    top = charts.highest_length(firsts)
    rewarded = [one for one in series if any(p.reward for run in one.runs for p in run.points)]
    scored = [one for one in series if any(run.held_out for run in one.runs)]
    learning = []
    if rewarded:
        learning.append(charts.learning("reward", "Reward per update", "mean reward", series, unit, held_out=False))
    if scored:
        learning.append(
            charts.learning("held-out", "Held-out score", "fraction of problems solved", scored, unit, held_out=True)
        )
    return {
        "shares": charts.slot_time_fractions(runs, [names[run.name] for run in runs]),
        "occupancy": [charts.occupancy(r, i, names[r.name], unit, longest) for i, r in enumerate(firsts)],
        "bubble": charts.bubble_per_harvest(series),
        "lengths": [charts.lengths(r, i, names[r.name], top) for i, r in enumerate(firsts)],
        "staleness": charts.histogram(
            "staleness-histogram",
            "Staleness of trained tokens",
            "staleness (versions)",
            "trained tokens (%)",
            series,
            lambda run: run.run_metrics.staleness_histogram,
        ),
        "segments": charts.histogram(
            "segments-histogram",
            "Segments of trained rollouts",
            "segments",
            "trained rollouts (%)",
            series,
            lambda run: run.run_metrics.segments_histogram,
        ),
        "staleness_of_updates": charts.staleness_of_updates(series),
        "learning": learning,
        "scoring": list(charts.panel_charts(charts.SCORING_PANEL, series)),
        "learner": charts.learner_panels(series),
    }


def _flat(drawn: dict[str, Any]) -> list[charts.Chart]:
    """In the order of the page."""
    found: list[charts.Chart] = []
    for part in drawn.values():
        found += [part] if isinstance(part, charts.Chart) else part
    return found


def _legend(runs: Sequence[Run]) -> list[tuple[str, list[tuple[str, str]]]]:
    found = charts.legend(runs)
    headings = (("work", "Work"), ("bubble", "Bubble"), ("rest", "Remaining wall-clock time"))
    grouped = [(heading, [(name, color) for kind, name, color in found if kind == key]) for key, heading in headings]
    return [(heading, items) for heading, items in grouped if items]
