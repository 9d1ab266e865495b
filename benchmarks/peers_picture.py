"""Draws docs/img/peers.svg: the reward of training runs against wall-clock time, from beside_peers.py's results.

    python benchmarks/peers_picture.py [benchmarks/measured/h200-peers/beside_peers.jsonl]

One panel per seed, one line per trainer. A point is the mean reward of GOAL_UPDATES successive updates, at the end of
the last of them.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from xml.sax.saxutils import escape

from beside_peers import GOAL, GOAL_UPDATES, Runs, read_runs
from svg_style import TEXT, style
from trl_runs import Run

HERE = Path(__file__).parent
RESULTS = HERE / "measured" / "h200-peers" / "beside_peers.jsonl"
PICTURE = HERE.parent / "docs" / "img" / "peers.svg"
WIDTH, HEIGHT, LEFT, GAP, TOP, BELOW = 380, 200, 44, 40, 52, 40
LEGEND_ROW, LEGEND_COLUMNS = 20, 2
LINES = {  # stroke, light and dark
    "line0": ("stroke", "#57606a", "#9198a1"),
    "line1": ("stroke", "#2a7ab8", "#5aa7e0"),
    "line2": ("stroke", "#b35900", "#f0883e"),
    "line3": ("stroke", "#1a7f37", "#3fb950"),
    "line4": ("stroke", "#8250df", "#a371f7"),
}
COLORS = {**TEXT, "axis": ("stroke", "#9aa4ae", "#4b535d"), **LINES}


def points(run: Run) -> list[tuple[float, float]]:
    return [
        (run.update_ends[last], statistics.fmean(run.rewards[last + 1 - GOAL_UPDATES : last + 1]))
        for last in range(GOAL_UPDATES - 1, len(run.rewards))
    ]


def panel(runs: Runs, repeat: int, left: float, longest: float, highest: float) -> list[str]:
    def x(seconds: float) -> float:
        return left + WIDTH * seconds / longest

    def y(reward: float) -> float:
        return TOP + HEIGHT * (1 - reward / highest)

    parts = [f'<text class="soft" x="{left}" y="{TOP - 8}">seed {repeat}</text>']
    for half in range(int(2 * highest) + 1):
        at = y(half / 2)
        width = 1.2 if half / 2 == GOAL or half == 0 else 0.4
        parts.append(f'<path class="axis" stroke-width="{width}" d="M{left} {at:.1f}H{left + WIDTH}"/>')
        parts.append(f'<text class="soft" text-anchor="end" x="{left - 6}" y="{at + 4:.1f}">{half / 2:g}</text>')
    for seconds in range(0, int(longest) + 1, 20):
        parts.append(
            f'<text class="soft" text-anchor="middle" x="{x(seconds):.1f}" y="{TOP + HEIGHT + 18}">{seconds} s</text>'
        )
    for place, by_repeat in enumerate(runs.values()):
        if repeat in by_repeat:
            path = "L".join(f"{x(at):.1f} {y(reward):.1f}" for at, reward in points(by_repeat[repeat]))
            parts.append(f'<path class="line{place}" fill="none" stroke-width="2" d="M{path}"/>')
    return parts


def picture(runs: Runs) -> str:
    found = [run for by_repeat in runs.values() for run in by_repeat.values()]
    repeats = sorted({repeat for by_repeat in runs.values() for repeat in by_repeat})
    longest = max(run.seconds for run in found)
    highest = max(reward for run in found for _, reward in points(run)) * 1.05
    width = LEFT + len(repeats) * (WIDTH + GAP)
    rows = -(-len(runs) // LEGEND_COLUMNS)
    height = TOP + HEIGHT + BELOW + rows * LEGEND_ROW
    parts = [f'<text class="ink title" x="12" y="24">Reward while training, mean of {GOAL_UPDATES} updates</text>']
    for place, repeat in enumerate(repeats):
        parts += panel(runs, repeat, LEFT + place * (WIDTH + GAP), longest, highest)
    for place, name in enumerate(runs):
        column, row = divmod(place, rows)
        left, at = LEFT + column * (WIDTH + GAP), TOP + HEIGHT + BELOW + row * LEGEND_ROW
        parts.append(f'<path class="line{place}" stroke-width="3" d="M{left} {at}h22"/>')
        parts.append(f'<text class="ink" x="{left + 30}" y="{at + 4}">{escape(name)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
        f"<style>{style(COLORS, '.title{font-weight:600}')}</style>"
        f'<rect class="paper" width="{width}" height="{height}"/>{"".join(parts)}</svg>\n'
    )


def main() -> None:
    results = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    PICTURE.write_text(picture(read_runs(results)), encoding="utf-8")


if __name__ == "__main__":
    main()
