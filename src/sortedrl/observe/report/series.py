"""Series: runs that differ only in their seed, with one name and one color across the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from sortedrl.observe.report.runs import ReportedRun

MODE_COLORS = {
    "baseline": "#d9772b",
    "on-policy": "#b5477f",
    "on-policy+planned": "#8b5fbf",
    "partial": "#2f9e8f",
    "partial+elevator": "#2b7fb8",
}
OTHER_COLORS = ("#6a8f2f", "#a0522d", "#4c6fd1", "#c25450", "#66788a", "#b8912a", "#3f8f63", "#9a4fb0")


@dataclass(frozen=True, slots=True)
class Series:
    """Runs that differ only in their seed."""

    label: str
    color: str
    runs: tuple[ReportedRun, ...]

    @property
    def measured(self) -> tuple[ReportedRun, ...]:
        """The runs with an update; all runs if none has one. One that ended before has no goodput to average."""
        return tuple(run for run in self.runs if run.run_metrics.updates) or self.runs

    @property
    def has_updates(self) -> bool:
        return any(run.run_metrics.updates for run in self.runs)

    def mean(self, field: str) -> float:
        """The mean over the measured runs of a metric that every run has."""
        return fmean(getattr(run.run_metrics, field) for run in self.measured)


def series_of(runs: Sequence[ReportedRun]) -> list[Series]:
    groups: list[list[ReportedRun]] = []
    for run in runs:
        for group in groups:
            if run.mode == group[0].mode and run.comparable_settings() == group[0].comparable_settings():
                group.append(run)
                break
        else:
            groups.append([run])
    labels, colors = _labels([group[0] for group in groups]), colors_of([group[0].mode for group in groups])
    return [Series(*one) for one in zip(labels, colors, map(tuple, groups), strict=True)]


def colors_of(modes: Sequence[str]) -> list[str]:
    """The color of each mode; another one for a mode without a color, and for each that has the same mode again."""
    spare = iter(OTHER_COLORS * (1 + len(modes) // len(OTHER_COLORS)))
    is_new = [mode in MODE_COLORS and mode not in modes[:place] for place, mode in enumerate(modes)]
    return [MODE_COLORS[mode] if new else next(spare) for mode, new in zip(modes, is_new, strict=True)]


def _labels(firsts: Sequence[ReportedRun]) -> list[str]:
    """The mode, plus the settings that distinguish series of the same mode."""
    labels = []
    for run in firsts:
        others = [other for other in firsts if other.mode == run.mode and other is not run]
        apart = [
            f"{key} {value}"
            for key, value in run.comparable_settings().items()
            if any(other.settings.get(key) != value for other in others)
        ]
        labels.append(f"{run.mode} ({', '.join(apart[:2])})" if apart else run.mode)
    return [
        label if labels.count(label) == 1 else f"{label}: {run.name}" for label, run in zip(labels, firsts, strict=True)
    ]


def run_names(series: Sequence[Series]) -> dict[str, str]:
    """A run's name on the page: its series, plus its seed or its own name if the series has several runs."""
    found = {}
    for one in series:
        seeds = [run.seed for run in one.runs]
        for run in one.runs:
            own = f"seed {run.seed}" if seeds.count(run.seed) == 1 else run.name
            found[run.name] = one.label if len(one.runs) == 1 else f"{one.label}, {own}"
    return found
