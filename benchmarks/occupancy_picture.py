"""Draws the README's picture from the event logs of two simulated runs: slots in use over time, before and after.

python benchmarks/occupancy_picture.py docs/occupancy.svg

Filled areas are used slot-time; tinted areas are slot-time that was empty while the engine could run. Every column of
the picture is the mean over its time span, so areas match the logs.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from svg_style import TEXT, style

from sortedrl import Schedule
from sortedrl.core import events
from sortedrl.engines.step_time import PRESETS
from sortedrl.observe.run_metrics import RunMetrics
from sortedrl.studies.workload import Workload, run

UPDATES = 12
WIDTH, HEIGHT = 820, 92  # of a panel's drawing
LEFT, RIGHT, TOP, GAP, FOOT = 44, 20, 66, 62, 64
STEP_TIME = "h200-8b"

COLORS = {
    **TEXT,
    "edge": ("stroke", "#d0d7de", "#30363d"),
    "axis": ("stroke", "#9aa4ae", "#4b535d"),
    "update": ("stroke", "#59636e", "#9198a1"),
    "before": ("fill", "#d4722c", "#e8904f"),
    "after": ("fill", "#2a7ab8", "#5aa7e0"),
    "empty-before": ("fill", "#f8e6d8", "#33241a"),
    "empty-after": ("fill", "#dceaf5", "#16273a"),
}
SIZES = ".title{font-size:15px;font-weight:600}.small{font-size:11px}"


@dataclass(frozen=True)
class Panel:
    mode: str
    expectation: str
    words: str
    css: str


PANELS = (
    Panel("baseline", "cold", "every update waits for its longest response", "before"),
    Panel("partial+elevator", "cold", "stopped early, kept, resumed; freed slots are refilled", "after"),
)


@dataclass(frozen=True)
class Occupancy:
    changes: tuple[tuple[float, int], ...]  # (time, slots in use from then on)
    updates: tuple[float, ...]
    run_metrics: RunMetrics

    @property
    def end(self) -> float:
        return self.updates[-1]


def occupancy(panel: Panel) -> Occupancy:
    log: list[events.Event] = []
    workload = Workload(step_time=PRESETS[STEP_TIME], expectation=panel.expectation)
    run_metrics = run(workload, Schedule(mode=panel.mode), log.append, max_updates=UPDATES)
    changes: list[tuple[float, int]] = [(0.0, 0)]
    inside: set[int] = set()
    for event in log:
        if isinstance(event, events.Started):
            inside.add(event.rollout)
        elif isinstance(event, events.Finished | events.Aborted | events.Failed | events.Preempted):
            inside.discard(event.rollout)
        else:
            continue
        changes.append((event.at, len(inside)))
    updates = tuple(event.at for event in log if isinstance(event, events.Updated))
    return Occupancy(tuple(changes), updates, run_metrics)


def column_means(data: Occupancy, seconds_per_column: float) -> list[float]:
    """The mean number of slots in use in each column of time up to the last update."""
    columns = [0.0] * (int(data.end / seconds_per_column) + 1)
    for (begin, running), (end, _) in pairwise((*data.changes, (data.end, 0))):
        end = min(end, data.end)
        for column in range(int(begin / seconds_per_column), int(end / seconds_per_column) + 1):
            left, right = column * seconds_per_column, (column + 1) * seconds_per_column
            columns[column] += running * max(0.0, min(end, right) - max(begin, left))
    spans = [min(seconds_per_column, data.end - i * seconds_per_column) for i in range(len(columns))]
    return [total / span if span > 1e-9 else 0.0 for total, span in zip(columns, spans, strict=True)]


def drawn_panel(panel: Panel, data: Occupancy, top: int, seconds: float) -> str:
    per_column = seconds / WIDTH
    slots, bottom = data.run_metrics.slots, top + HEIGHT
    right = LEFT + data.end / per_column
    path = [f"M{LEFT} {bottom}"]
    for i, running in enumerate(column_means(data, per_column)):
        path.append(f"V{bottom - HEIGHT * running / slots:.1f}H{min(LEFT + i + 1, right):.1f}")
    marks = "".join(f"M{LEFT + at / per_column:.1f} {bottom + 2}v5" for at in data.updates)
    run_metrics = (
        f"{UPDATES} updates in {data.end:,.0f} s, goodput {data.run_metrics.goodput:,.0f} tok/s, "
        f"{data.run_metrics.bubble:.0%} of slot-time empty"
    )
    return (
        f'<text x="{LEFT}" y="{top - 26}"><tspan class="title ink">{panel.mode}</tspan>'
        f'<tspan dx="10" class="soft">{panel.words}</tspan></text>'
        f'<text x="{LEFT}" y="{top - 9}" class="ink">{run_metrics}</text>'
        f'<rect class="empty-{panel.css}" x="{LEFT}" y="{top}" width="{right - LEFT:.1f}" height="{HEIGHT}"/>'
        f'<path class="{panel.css}" d="{"".join(path)}V{bottom}Z"/><path class="update" fill="none" d="{marks}"/>'
        f'<text x="{LEFT - 6}" y="{top + 10}" class="soft" text-anchor="end">{slots}</text>'
        f'<text x="{LEFT - 6}" y="{bottom}" class="soft" text-anchor="end">0</text>'
    )


def drawn_axis(top: int, seconds: float) -> str:
    per_column = seconds / WIDTH
    ticks = range(0, int(seconds) + 1, 100)
    lines = "".join(f"M{LEFT + t / per_column:.1f} {top}v4" for t in ticks)
    labels = "".join(
        f'<text x="{LEFT + t / per_column:.1f}" y="{top + 17}" class="soft" text-anchor="middle">{t or "0 s"}</text>'
        for t in ticks
    )
    return f'<path class="axis" fill="none" d="M{LEFT} {top}h{WIDTH}{lines}"/>{labels}'


def picture(before: Occupancy, after: Occupancy) -> str:
    seconds = max(before.end, after.end)
    tops = (TOP, TOP + HEIGHT + GAP + 8)
    axis = tops[1] + HEIGHT + 14
    width, height = LEFT + WIDTH + RIGHT, axis + FOOT
    gain = after.run_metrics.goodput / before.run_metrics.goodput
    middle = LEFT + WIDTH * (after.end + seconds) / seconds / 2
    notes = (
        "Slots in use over time; ticks under a panel are updates of 128 rollouts. Simulated, generation only:",
        "lognormal lengths, limit 8,192, step time fitted to 8B on an H200; a first epoch: no length is known.",
    )
    footer = "".join(
        f'<text x="{LEFT}" y="{height - 28 + 15 * i}" class="small soft">{note}</text>' for i, note in enumerate(notes)
    )
    drawn = "".join(
        drawn_panel(panel, data, top, seconds) for panel, data, top in zip(PANELS, (before, after), tops, strict=True)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="slots in use over time: {PANELS[0].mode} leaves {before.run_metrics.bubble:.0%} of slot-time '
        f"empty, "
        f'{PANELS[1].mode} {after.run_metrics.bubble:.0%}"><style>{style(COLORS, SIZES)}</style>'
        f'<rect class="paper edge" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8"/>{drawn}'
        f'<text class="title ink" x="{middle:.0f}" y="{tops[1] + HEIGHT / 2:.0f}" text-anchor="middle">'
        f"{gain:.2f}x the goodput</text>{drawn_axis(axis, seconds)}"
        f"{footer}</svg>\n"
    )


def main(path: Path) -> None:
    before, after = map(occupancy, PANELS)
    path.write_text(picture(before, after), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
