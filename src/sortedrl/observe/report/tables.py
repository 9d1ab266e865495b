"""The report's tables: formatted metrics, configurations side by side, sample responses."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from sortedrl.core.rollout import ENVIRONMENT
from sortedrl.core.wording import counted
from sortedrl.observe.metrics import RunMetrics
from sortedrl.observe.report.charts import part_name
from sortedrl.observe.report.runs import Run
from sortedrl.observe.report.series import Series

RESPONSES_OF_A_KIND = 2
MOST_REASONS = 20  # of rejections
MOST_CHARACTERS = 20_000  # of a response shown on the page
Line = dict[str, Any]
Kind = tuple[str, Callable[[Line], Any], Callable[[Line], bool]]  # tag, sort key, and filter


@dataclass(frozen=True, slots=True)
class Column:
    """How to print a metric: `form` is its format, applied to 100 x the value if it is a fraction."""

    field: str
    name: str
    unit: str
    meaning: str
    form: str
    is_fraction: bool = False

    def text(self, value: float | None) -> str:
        if value is None:
            return "unknown"
        return f"{self._number(value)} %" if self.is_fraction else self._number(value)

    def range(self, least: float, greatest: float) -> str:
        dash = " to " if "+" in self.form else "–"
        return f"{self._number(least)}{dash}{self._number(greatest)}{' %' if self.is_fraction else ''}"

    def _number(self, value: float) -> str:
        return format(100 * value if self.is_fraction else value, self.form)


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


HEADLINE = (
    Column("bubble", "bubble", "", "empty slot-time while the engine may run", ".1f", is_fraction=True),
    Column("idle", "idle", "", "empty slot-time over wall-clock", ".1f", is_fraction=True),
    Column("goodput", "goodput", "tokens/s", "tokens trained on per second of harvest time", ",.0f"),
    Column("waste", "waste", "", "fraction of generated tokens that were discarded", ".1f", is_fraction=True),
    Column("staleness_mean", "staleness", "mean", "of trained tokens, in versions", ".2f"),
    Column("staleness_max", "", "max", "maximum staleness of a trained token", ",.0f"),
    Column("sortedness", "sortedness", "", "log-length variance within updates that sorting removed", "z.2f"),
    Column(
        "length_bias",
        "length bias",
        "",
        "mean trained length relative to uncut responses, minus 1",
        "+z.1f",
        is_fraction=True,
    ),
    Column("mean_reward", "reward", "mean", "over all trained rollouts", "+.2f"),
    Column("updates", "updates", "", "made", ",.0f"),
    Column("wall_seconds", "wall-clock", "s", "from the first event to the last", ",.1f"),
)


def headline(series: Sequence[Series]) -> dict[str, Any]:
    """One row per series. Rewards are left out if a log has none, as in simulated runs."""
    has_rewards = any(run.run_metrics.mean_reward for one in series for run in one.runs)
    columns = [column for column in HEADLINE if has_rewards or column.field != "mean_reward"]
    return {"columns": columns, "rows": [_headline_row(one, columns) for one in series]}


def _headline_row(one: Series, columns: Sequence[Column]) -> dict[str, Any]:
    cells = []
    for column in columns:
        values = [value for run in one.measured if (value := getattr(run.run_metrics, column.field)) is not None]
        spread = column.range(min(values), max(values)) if len(values) > 1 else ""
        shown = max(values) if column.field == "staleness_max" else fmean(values) if values else None
        cells.append({"text": column.text(shown), "range": "" if len(set(values)) == 1 else spread})
    return {"label": one.label, "color": one.color, "sub": _runs_and_seeds(one.measured), "cells": cells}


def _runs_and_seeds(runs: Sequence[Run]) -> str:
    """Runs of one seed may differ, on a GPU for example, but they are not independent."""
    if len(runs) == 1:
        return ""
    seeds = list(dict.fromkeys(str(run.seed) for run in runs))
    if len(seeds) == 1:
        return f"{len(runs)} runs of one seed ({seeds[0]})"
    return f"{len(runs)} runs, seeds {', '.join(seeds)}"


def rejections(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """How often each reason occurred in each run, most frequent first."""
    total: Counter[str] = Counter()
    for run in runs:
        total.update(run.run_metrics.rejected_reasons)
    return [
        (reason, [f"{run.run_metrics.rejected_reasons.get(reason, 0):,}" for run in runs])
        for reason, _ in total.most_common(MOST_REASONS)
    ]


def all_metrics(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    columns = [dict(_flattened(run.run_metrics)) for run in runs]
    keys = list(dict.fromkeys(key for column in columns for key in column))
    return [(key, [_number(column.get(key)) for column in columns]) for key in keys]


def _flattened(run_metrics: RunMetrics) -> Iterable[tuple[str, Any]]:
    for name, value in asdict(run_metrics).items():
        if name == "rejected_reasons":  # has a table of its own
            continue
        if isinstance(value, dict):
            yield from ((f"{name}, {part_name(str(key))}", item) for key, item in value.items())
        elif not isinstance(value, tuple):
            yield name, value


def _number(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}" if isinstance(value, float) else str(value)


def differing_keys(runs: Sequence[Run]) -> list[str]:
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    return [key for key in keys if len({shown(run.settings.get(key)) for run in runs}) > 1]


def differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    keys = [key for key in differing_keys(runs) if key not in ("out", "resume")]
    return [(key, [shown(run.settings.get(key)) for run in runs]) for key in keys]


def changes(run: Run) -> list[tuple[str, str, str, str]]:
    """After how many updates, the setting, and its value before and after."""
    return [(f"{one.updates:,}", one.setting, shown(one.old), shown(one.new)) for one in run.changes]


def shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# Responses


def responses(one: Series) -> list[dict[str, Any]]:
    """The best, worst, longest and most-resumed responses on record, each once, later updates first."""
    written = [line for run in one.runs for line in run.responses]
    least, most = (pick((line["reward"] for line in written), default=0) for pick in (min, max))
    kinds: tuple[Kind, ...] = (
        ("Best", lambda line: (-line["reward"], -line["update"]), lambda line: line["reward"] > least),
        ("Worst", lambda line: (line["reward"], -line["update"]), lambda line: line["reward"] < most),
        ("Longest", lambda line: (-_tokens(line), -line["update"]), lambda line: True),
        (
            "Most resumed",
            lambda line: (-_versions(line), -line["update"]),
            lambda line: _versions(line) > 1,
        ),
    )
    tags: dict[int, list[str]] = {}
    for tag, order, qualifies in kinds:
        for line in sorted(filter(qualifies, written), key=order)[:RESPONSES_OF_A_KIND]:
            tags.setdefault(id(line), []).append(tag)
    by_id = {id(line): line for line in written}
    return [_response(by_id[key], names) for key, names in tags.items()]


def _response(line: dict[str, Any], tags: Sequence[str]) -> dict[str, Any]:
    segments = _segments(line)
    pieces = _pieces(line)
    facts = [
        f"reward {line['reward']:+.2f}",
        counted(_tokens(line), "token") + (" (truncated)" if line.get("truncated") else ""),
        counted(len(segments), "segment"),
        f"update {line.get('update')}",
        f"rollout {line.get('rollout')}",
        *([f"first {MOST_CHARACTERS:,} characters"] if len(line["response"]) > MOST_CHARACTERS else []),
    ]
    boundaries = ""
    if len(pieces) > 1:
        boundaries = "segments are shaded and labeled with their weight version"
        if any(version == ENVIRONMENT for version, _ in segments):
            boundaries += "; env: from the environment"
    elif len(segments) > 1:
        made = ", ".join(f"{counted(tokens, 'token')} by {_source(version)}" for version, tokens in segments)
        boundaries = f"{made}; segment boundaries were not recorded"
    return {
        "tags": ", ".join(tags),
        "facts": " · ".join(facts),
        "prompt": line.get("prompt"),
        "question": line.get("question", ""),
        "pieces": pieces,
        "boundaries": boundaries,
    }


def _pieces(line: dict[str, Any]) -> list[tuple[str, str]]:
    """The response split at its segment boundaries, if they were recorded, with the label of each segment."""
    text, segments, ends = str(line["response"])[:MOST_CHARACTERS], line.get("segments") or [], line.get("segment_ends")
    if not isinstance(ends, list) or len(ends) != len(segments):
        return [("", text)]
    edges = pairwise([0, *(min(end, len(text)) for end in ends[:-1]), len(text)])
    return [
        ("env" if version == ENVIRONMENT else f"v{version}", text[start:end])
        for (version, _), (start, end) in zip(segments, edges, strict=True)
        if end > start
    ]


def _segments(line: dict[str, Any]) -> list[tuple[int, int]]:
    return [(version, tokens) for version, tokens in line.get("segments") or [] if tokens]


def _versions(line: dict[str, Any]) -> int:
    """How many weight versions sampled it: an answer of the environment makes a new segment, but is no resume."""
    return len({version for version, _ in _segments(line) if version != ENVIRONMENT})


def _source(version: int) -> str:
    return "the environment" if version == ENVIRONMENT else f"version {version}"


def _tokens(line: dict[str, Any]) -> int:
    return sum(tokens for _, tokens in _segments(line))


def responses_lead(runs: Sequence[Run]) -> str:
    written = sum(len(run.responses) for run in runs)
    return f"Selected from the {written:,} responses that the runs recorded (save_rollouts per update)."
