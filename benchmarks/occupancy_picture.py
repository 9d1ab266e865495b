"""Draws the README's picture from the event logs of two simulated runs: slots in use over time, before and after.

python benchmarks/occupancy_picture.py docs/occupancy.svg
"""

from __future__ import annotations

import sys
from pathlib import Path

from sortedrl import Schedule
from sortedrl.core import events
from sortedrl.engines.step_time import PRESETS
from sortedrl.studies.workload import Workload, run

SLOTS, UPDATES, WIDTH, HEIGHT, LEFT = 128, 12, 760, 96, 16
PANELS = (
    ("baseline", "cold", "baseline: every update waits for its longest response", "#d9772b"),
    ("partial+elevator", "warm", "partial+elevator: stopped early, kept, resumed", "#2b7fb8"),
)


Occupancy = tuple[list[tuple[float, int]], list[float], float]


def occupancy(mode: str, expectation: str) -> Occupancy:
    """(time, running) at every change; the times of updates; the bubble."""
    changes: list[tuple[float, int]] = [(0.0, 0)]
    updates: list[float] = []
    inside: set[int] = set()

    def sink(event: events.Event) -> None:
        if isinstance(event, events.Started):
            inside.add(event.rollout)
        elif isinstance(event, events.Finished | events.Stopped | events.Failed | events.Preempted):
            inside.discard(event.rollout)
        elif isinstance(event, events.Updated):
            updates.append(event.at)
        else:
            return
        changes.append((event.at, len(inside)))

    workload = Workload(step_time=PRESETS["h200-8b"], expectation=expectation)
    figures = run(workload, Schedule(mode=mode), sink, max_updates=UPDATES)
    return changes, updates, figures.bubble


def panel(
    top: int, end: float, title: str, colour: str, data: tuple[list[tuple[float, int]], list[float], float]
) -> str:
    changes, updates, bubble = data

    def x(time: float) -> float:
        return LEFT + WIDTH * time / end

    def y(running: int) -> float:
        return top + HEIGHT * (1 - running / SLOTS)

    points = [f"M{x(0):.1f} {y(0):.1f}"]
    last = -1.0
    for time, running in changes:
        if x(time) - last > 0.3:  # finer than a third of a pixel cannot be seen
            points.append(f"H{x(time):.1f}V{y(running):.1f}")
            last = x(time)
    points.append(f"H{x(changes[-1][0]):.1f}V{y(0):.1f}Z")
    marks = "".join(f'<path d="M{x(t):.1f} {top}v{HEIGHT}" stroke="#0006"/>' for t in updates)
    done = changes[-1][0]
    return (
        f'<text x="{LEFT}" y="{top - 8}" font-size="13">{title} ({bubble:.0%} of slot-time empty, '
        f"{UPDATES} updates in {done:.0f} s)</text>"
        f'<rect x="{LEFT}" y="{top}" width="{WIDTH * done / end:.1f}" height="{HEIGHT}" fill="#8882"/>'
        f'<path d="{"".join(points)}" fill="{colour}"/>{marks}'
    )


def main(path: Path) -> None:
    data = [occupancy(mode, expectation) for mode, expectation, _, _ in PANELS]
    end = max(changes[-1][0] for changes, _, _ in data)
    panels = "".join(
        panel(30 + i * (HEIGHT + 44), end, title, colour, data[i]) for i, (_, _, title, colour) in enumerate(PANELS)
    )
    height = 30 + len(PANELS) * (HEIGHT + 44)
    note = f"slots in use over time, {SLOTS} in all; lines: updates of 128; simulated, step time fitted to an H200"
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + 2 * LEFT} {height}" '
        f'font-family="system-ui,sans-serif" fill="#888"><rect width="100%" height="100%" fill="none"/>{panels}'
        f'<text x="{LEFT}" y="{height - 12}" font-size="11">{note}</text></svg>\n',
        encoding="utf-8",
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
