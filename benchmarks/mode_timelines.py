"""Draws the pictures of docs/concepts.md: each mode as a timeline of eight slots, from the log of a simulated run.
With half of the groups filtered: those of docs/dynamic_sampling.md.

python benchmarks/mode_timelines.py docs/img

One row per slot, time from left to right, the same prompts and the same time span in every picture.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from svg_style import TEXT, style

from sortedrl import Schedule
from sortedrl.core import events
from sortedrl.core.group_filter import EQUAL_REWARDS
from sortedrl.engines.lengths import DrawnEqual
from sortedrl.studies.workload import Workload, run

SLOTS, COHORT, COHORTS = 8, 32, 8
SECONDS = 52_000  # of the simulator's memory-bound step time, whose unit is one decode step
WIDTH, ROW, LEFT, TOP, RIGHT, FOOT = 760, 11, 14, 44, 14, 30

COLORS = {
    **TEXT,
    "empty": ("fill", "#eef1f4", "#1b222b"),
    "finished": ("fill", "#2a7ab8", "#5aa7e0"),
    "kept": ("fill", "#8fc1e6", "#2f5f86"),
    "dropped": ("fill", "#d4722c", "#e8904f"),
    "filtered": ("fill", "#c9a227", "#b08d1e"),
    "update": ("stroke", "#1f2328", "#e6edf3"),
}
SIZES = ".title{font-size:14px;font-weight:600}"
WORDS = {
    "finished": "finished",
    "filtered": "finished, group filtered",
    "kept": "aborted, tokens kept",
    "dropped": "aborted, tokens discarded",
}


@dataclass(frozen=True)
class Stay:
    """One stay of a rollout in a slot."""

    slot: int
    begin: float
    end: float
    fate: str  # a key of WORDS


@dataclass(frozen=True)
class Timeline:
    mode: str
    stays: tuple[Stay, ...]
    updates: tuple[float, ...]

    @property
    def bubble(self) -> float:
        return 1 - sum(stay.end - stay.begin for stay in self.stays) / (SLOTS * SECONDS)


MODES = {
    "baseline": "cold",
    "on-policy": "cold",
    "on-policy+planned": "warm",
    "partial": "cold",
    "partial+elevator": "warm",
}
FILTERED_MODES = ("filter-rounds", "partial+elevator")
GROUPS_OF_TWO: dict[str, Any] = {
    "rollouts_per_prompt": 2,
    "whole_groups": True,
    "filter_groups": EQUAL_REWARDS,
    "max_filtered_fraction": 1.0,
}


def timeline(mode: str, expectation: str, *, filtered: float = 0.0) -> Timeline:
    log: list[events.Event] = []
    workload = Workload(slots=SLOTS, prompts=COHORT * COHORTS, expectation=expectation)
    schedule = Schedule(mode=mode, rollouts_per_update=SLOTS, prompts_per_cohort=COHORT)
    if filtered:
        workload, schedule = replace(workload, equal_groups=DrawnEqual(filtered)), replace(schedule, **GROUPS_OF_TWO)
    run(workload, schedule, log.append)
    not_trained = {id for event in log if isinstance(event, events.Filtered) for id in event.rollouts}
    stays: list[Stay] = []
    started: dict[int, events.Started] = {}
    for event in log:
        if isinstance(event, events.Started):
            started[event.rollout] = event
        elif isinstance(event, events.Finished | events.Aborted) and event.rollout in started:
            start = started.pop(event.rollout)
            fate = "finished" if isinstance(event, events.Finished) else "dropped" if event.dropped else "kept"
            fate = "filtered" if fate == "finished" and event.rollout in not_trained else fate
            if start.at < SECONDS:
                stays.append(Stay(start.slot, start.at, min(event.at, SECONDS), fate))
    updates = tuple(event.at for event in log if isinstance(event, events.Updated) and event.at <= SECONDS)
    return Timeline(mode, tuple(stays), updates)


def picture(drawn: Timeline) -> str:
    scale = WIDTH / SECONDS
    bottom = TOP + SLOTS * ROW
    width, height = LEFT + WIDTH + RIGHT, bottom + FOOT
    bars = "".join(
        f'<rect class="{stay.fate}" x="{LEFT + stay.begin * scale:.1f}" y="{TOP + stay.slot * ROW + 1}" '
        f'width="{max(0.5, (stay.end - stay.begin) * scale - 0.8):.1f}" height="{ROW - 2}"/>'
        for stay in drawn.stays
    )
    lines = "".join(f"M{LEFT + at * scale:.1f} {TOP - 4}V{bottom + 4}" for at in sorted(set(drawn.updates)))
    title = f"{len(drawn.updates)} updates in this time, {drawn.bubble:.0%} of slot time empty"
    legend, x = "", LEFT
    for fate in dict.fromkeys(stay.fate for stay in sorted(drawn.stays, key=lambda stay: list(WORDS).index(stay.fate))):
        legend += f'<rect class="{fate}" x="{x}" y="{bottom + 13}" width="10" height="9"/>'
        legend += f'<text class="soft" x="{x + 15}" y="{bottom + 22}">{WORDS[fate]}</text>'
        x += 35 + 7 * len(WORDS[fate])
    legend += f'<text class="soft" x="{x}" y="{bottom + 22}">vertical lines: updates</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{drawn.mode}: {title}"><style>{style(COLORS, SIZES)}</style>'
        f'<rect class="paper" width="{width}" height="{height}"/>'
        f'<text x="{LEFT}" y="20"><tspan class="ink title">{drawn.mode}</tspan>'
        f'<tspan class="soft" dx="10">{title}</tspan></text>'
        f'<rect class="empty" x="{LEFT}" y="{TOP}" width="{WIDTH}" height="{SLOTS * ROW}"/>{bars}'
        f'<path class="update" fill="none" stroke-width="1" d="{lines}"/>{legend}</svg>\n'
    )


def file_name(mode: str) -> str:
    return f"mode-{mode.replace('+', '-')}.svg"


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for mode, expectation in MODES.items():
        (folder / file_name(mode)).write_text(picture(timeline(mode, expectation)), encoding="utf-8")
    for mode in FILTERED_MODES:
        drawn = picture(timeline(mode, "cold", filtered=0.5))
        (folder / f"filtered-{file_name(mode)}").write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    main(parser.parse_args().folder)
