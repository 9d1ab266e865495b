"""Draws the figures of docs/evidence.md: paired differences of a study, by seed, with mean and 95% interval.

    python benchmarks/studies/difference_picture.py headline order_searching    # docs/img/study-NAME.svg

One row per contrast that has the primary contrast's outcome, the primary one first. A small dot is one seed. The bar is
the 95% t interval of the mean, the large dot the mean. Times to a threshold count up to the horizon of the comparison.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from xml.sax.saxutils import escape

from sortedrl.studies.compare.comparison import Compared, Comparison, compare
from sortedrl.studies.compare.results import read_results
from sortedrl.studies.compare.study import read_study

STUDIES = Path(__file__).parent
PICTURES = STUDIES.parents[1] / "docs" / "img"
LABELS, WIDTH, ROW, TOP, FOOT, RIGHT = 450, 420, 30, 44, 40, 20
# Property and color of each class, light and dark. No CSS variables: many SVG viewers do not support them.
COLORS = {
    "paper": ("fill", "#ffffff", "#0d1117"),
    "ink": ("fill", "#1f2328", "#e6edf3"),
    "soft": ("fill", "#59636e", "#9198a1"),
    "axis": ("stroke", "#9aa4ae", "#4b535d"),
    "seed": ("fill", "#9aa4ae", "#6b7681"),
    "mean": ("fill", "#2a7ab8", "#5aa7e0"),
    "bar": ("stroke", "#2a7ab8", "#5aa7e0"),
}


def style() -> str:
    light, dark = (
        "".join(f".{name}{{{values[0]}:{values[place]}}}" for name, values in COLORS.items()) for place in (1, 2)
    )
    font = "text{font:12px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}.title{font-weight:600}"
    return f"{font}{light}@media(prefers-color-scheme:dark){{{dark}}}"


def seed_differences(comparison: Comparison, row: Compared) -> list[float]:
    """Arm minus minus, per seed. Censored times count up to the horizon, as in the mean difference."""
    horizon = math.inf if row.censoring is None or row.censoring.horizon is None else row.censoring.horizon
    values = {
        (run.arm, run.seed): min(horizon, value)
        for run in comparison.finished
        if (value := run.outcomes[row.outcome]) is not None
    }
    return [values[row.arm, seed] - values[row.minus, seed] for seed in row.seeds]


def tick_step(low: float, high: float) -> float:
    """A round step with three to seven ticks in this range."""
    power = 10.0 ** math.floor(math.log10((high - low) / 3))
    return max(step * power for step in (1, 2, 2.5, 5) if step * power <= (high - low) / 3)


def picture(comparison: Comparison) -> str:
    outcome = comparison.primary.outcome
    rows = [row for row in comparison.contrasts if row.outcome == outcome and row.difference is not None]
    seeds = [seed_differences(comparison, row) for row in rows]
    ends = [value for of_row in seeds for value in of_row]
    intervals = [row.difference.t_interval for row in rows if row.difference is not None]  # None: one seed
    ends += [end for interval in intervals if interval is not None for end in (interval.low, interval.high)]
    low, high = min(0.0, *ends), max(0.0, *ends)
    margin = 0.04 * (high - low or 1.0)
    low, high = low - margin, high + margin
    height = TOP + ROW * len(rows) + FOOT

    def x(value: float) -> float:
        return LABELS + WIDTH * (value - low) / (high - low)

    step = tick_step(low, high)
    ticks = [step * n for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
    bottom = TOP + ROW * len(rows)
    parts = [
        f'<text class="ink title" x="12" y="24">{escape(comparison.study.question or comparison.study.name)}</text>'
    ]
    parts += [
        f'<path class="axis" stroke-width="{1.5 if tick == 0 else 0.4}" d="M{x(tick):.1f} {TOP}V{bottom}"/>'
        for tick in ticks
    ]
    for tick in ticks:
        text = f"{tick:+.6g}" if tick else "0"
        parts.append(f'<text class="soft" text-anchor="middle" x="{x(tick):.1f}" y="{bottom + 16}">{text}</text>')
    parts.append(
        f'<text class="soft" text-anchor="middle" x="{LABELS + WIDTH / 2}" y="{bottom + 33}">'
        f"difference in {outcome.replace('_', ' ')}</text>"
    )
    for place, (row, values, interval) in enumerate(zip(rows, seeds, intervals, strict=True)):
        assert row.difference is not None
        y = TOP + ROW * place + ROW / 2
        parts.append(f'<text class="ink" text-anchor="end" x="{LABELS - 12}" y="{y + 4}">{escape(label(row))}</text>')
        if interval is not None:
            parts.append(f'<path class="bar" stroke-width="3" d="M{x(interval.low):.1f} {y}H{x(interval.high):.1f}"/>')
        parts += [f'<circle class="seed" cx="{x(value):.1f}" cy="{y}" r="2.5"/>' for value in values]
        parts.append(f'<circle class="mean" cx="{x(row.difference.mean):.1f}" cy="{y}" r="5"/>')
    width = LABELS + WIDTH + RIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"><style>{style()}</style>'
        f'<rect class="paper" width="{width}" height="{height}"/>{"".join(parts)}</svg>\n'
    )


def label(row: Compared) -> str:
    return f"{row.name}{' (primary)' if row.primary else ''}"


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    for name in sys.argv[1:]:
        comparison = compare(read_study(STUDIES / f"{name}.toml"), read_results(STUDIES / f"{name}.jsonl"))
        (PICTURES / f"study-{name}.svg").write_text(picture(comparison), encoding="utf-8")


if __name__ == "__main__":
    main()
