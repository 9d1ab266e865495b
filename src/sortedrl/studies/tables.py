"""The terminal's view of a study: rich tables, plain when piped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from sortedrl.observe.metrics import BUBBLE_PARTS
from sortedrl.studies.plan import Option, Plan, UpdateSize, is_faster, takes_other_time

WIDEST = 250  # columns of a table
_HISTOGRAM_LEVELS = " ▁▂▃▄▅▆▇█"


def answer_table(modes: Mapping[str, Mapping[str, Any]]) -> Table:
    """The deciding metrics, in 80 columns. Tokens per second and gain include the learner's time."""
    table = _table("", "mode", "tokens/s", "gain", "empty\nslots", "tokens\nwasted", "mean\nstaleness", "length\nbias")
    base = next(iter(modes.values()))["trained_tokens_per_hour"]
    for name, f in modes.items():
        hourly = f["trained_tokens_per_hour"]
        table.add_row(
            name,
            digits(hourly / 3600, 4),
            f"{hourly / base if base else 0.0:.2f}x",
            f"{f['bubble']:.0%}",
            f"{f['waste']:.0%}",
            f"{f['staleness_mean']:.2f}",
            f"{f['length_bias']:+z.0%}",
        )
    return table


def digits(value: float, count: int) -> str:
    """A number with so many significant digits, and all digits before the point: never 1.115e+04."""
    before_point = len(f"{abs(value):.0f}") if abs(value) >= 0.5 else 1
    return f"{value:,.{max(0, count - before_point)}f}"


def gain_table(modes: Mapping[str, Mapping[str, Any]]) -> Table:
    """Goodput counts only the time in which the engine can run; tokens per hour include the learner's time."""
    table = _table("Throughput", "mode", "bubble", "goodput", "of limit", "kept", "waste", "trained tok/h")
    base = next(iter(modes.values()))
    for name, f in modes.items():
        times = f["goodput"] / base["goodput"] if base["goodput"] else 0.0
        hourly = f["trained_tokens_per_hour"]
        whole = hourly / base["trained_tokens_per_hour"] if base["trained_tokens_per_hour"] else 0.0
        table.add_row(
            name,
            f"{f['bubble']:.1%}",
            f"{digits(f['goodput'], 4)} ({times:.2f}x)",
            f"{f['of_limit']:.3f}",
            digits(f["kept"], 4),
            f"{f['waste']:.1%}",
            f"{hourly:,.0f} ({whole:.2f}x)",
        )
    return table


def cost_table(modes: Mapping[str, Mapping[str, Any]]) -> Table:
    """The last column is an upper bound of the prefill on resume: a prefix cache saves some of it."""
    table = _table(
        "Cost",
        "mode",
        "staleness mean",
        "max",
        "tokens by staleness",
        "rollouts by segments",
        "sorted",
        "length bias",
        "longest wait",
        "sent again",
    )
    for name, f in modes.items():
        table.add_row(
            name,
            f"{f['staleness_mean']:.2f}",
            f"{f['staleness_max']:.0f}",
            sparkline(f["staleness_histogram"]),
            sparkline(f["segments_histogram"]),
            known(f["sortedness"], "z.2f"),
            known(f["length_bias"], "+z.1%"),
            f"{f['longest_wait_updates']:.0f}",
            f"{f['re_prefill_tokens'] / max(1, f['generated_tokens']):.1%}",
        )
    return table


def bubble_table(modes: Mapping[str, Mapping[str, Any]]) -> Table:
    table = _table(
        "Where slots are empty (fraction of slot-time)",
        "mode",
        "bubble",
        *BUBBLE_PARTS,
        "median harvest",
        "worst",
        "idle",
    )
    for name, f in modes.items():
        harvests = f["bubble_per_harvest"] or [0.0]
        table.add_row(
            name,
            f"{f['bubble']:.1%}",
            *(f"{f['bubble_parts'][part]:.1%}" for part in BUBBLE_PARTS),
            f"{median(harvests):.1%}",
            f"{max(harvests):.1%}",
            f"{f['idle']:.1%}",
        )
    return table


def plan_view(plan: Plan) -> list[RenderableType]:
    speed = "Speed of the whole run" if any(map(takes_other_time, plan.options)) else "Goodput"
    frontier = _options_table(f"{speed} vs. token staleness (Pareto frontier)", plan.staleness_frontier)
    bias = _options_table(f"{speed} vs. length bias (Pareto frontier)", plan.bias_frontier)
    sizes = _table(
        "By update size (U) over slots (Q), with cohort size in proportion",
        "U/Q",
        "best baseline",
        "best other allowed mode",
        "gain",
    )
    for row in plan.by_update_size:
        best = "none" if row.best is None else f"{row.best.schedule.mode} {row.best.run_of_limit:.2f}"
        sizes.add_row(f"{row.ratio:.3g}", f"{row.baseline.run_of_limit:.2f}", best, _gain_at(row))
    head = [Text(plan.reason, "bold")]
    if plan.needed:
        head += [Text(f"Settings (keys of sortedrl train, arguments of Schedule): {settings_of(plan.choice)}")]
    return [*head, "", frontier, "", bias, "", sizes]


def settings_of(option: Option) -> str:
    """What to set for this option, as TOML keys and as arguments of `Schedule` alike."""
    schedule = option.schedule
    found = [f'mode = "{schedule.mode}"', f"prompts_per_cohort = {schedule.prompts_per_cohort}"]
    if schedule.oversubscribe is not None:
        found.append(f"oversubscribe = {schedule.oversubscribe:g}")
    if schedule.max_staleness is not None:  # as it was asked for: the speed and the staleness are those under it
        found.append(f"max_staleness = {schedule.max_staleness}")
    return ", ".join(found)


def _gain_at(row: UpdateSize) -> str:
    """The gain, and the faster mode that the bounds exclude, if any."""

    def times(option: Option) -> str:
        return f"{option.run_of_limit / row.baseline.run_of_limit if row.baseline.run_of_limit else 0.0:.2f}x"

    gains = row.best is not None and is_faster(row.best, row.baseline)
    text = times(row.best) if row.best is not None else times(row.baseline)
    if row.excluded is None:
        return text if gains else f"{text}: you do not need this"
    return f"{text}; {row.excluded.schedule.mode} would give {times(row.excluded)} ({row.excluded_because})"


def bench_table(modes: Mapping[str, Mapping[str, Any]]) -> Table:
    """Measured throughput, next to the simulator's prediction if there is one. Columns without a value are left out."""
    base = next(iter(modes.values()))
    rows = {name: _bench_row(f, base) for name, f in modes.items()}
    shown = [column for column in next(iter(rows.values())) if any(row[column] for row in rows.values())]
    table = _table("Measured on the engine", "mode", *shown)
    for name, row in rows.items():
        table.add_row(name, *(row[column] for column in shown))
    return table


def _bench_row(f: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, str]:
    """By column; an empty text means that the value was not measured."""
    return {
        "kept tok/s": f"{f['kept']:,.0f} ({f['kept'] / base['kept'] if base['kept'] else 0.0:.2f}x)",
        "goodput": f"{f['goodput']:,.0f}",
        "bubble": f"{f['bubble']:.1%}",
        "of limit": f"{f['of_limit']:.3f}" if f["of_limit"] is not None else "",
        "waste": f"{f['waste']:.1%}",
        "staleness": f"{f['staleness_mean']:.2f}",
        "sorted": known(f["sortedness"], "z.2f"),
        "length bias": known(f["length_bias"], "+z.1%"),
        "preemptions": str(f["preemptions"]),
        "predicted goodput, bubble": _prediction(f),
        "scheduler overhead": f"{f['own_fraction']:.1%}" if "own_fraction" in f else "",
    }


def _prediction(f: Mapping[str, Any]) -> str:
    if "predicted" not in f:
        return ""
    p = f["predicted"]
    return f"{p['goodput'] / f['goodput'] - 1:+.1%}, {100 * (p['bubble'] - f['bubble']):+.1f} points"


def show(console: Console, parts: Sequence[RenderableType]) -> None:
    for part in parts:
        if isinstance(part, Table):
            _print_table(console, part)
        else:
            console.print(part)


def _print_table(console: Console, table: Table) -> None:
    """In a narrow terminal the lines of a table wrap: rich would cut the numbers in its cells."""
    width = console.width
    least = Measurement.get(console, console.options.update_width(WIDEST), table).minimum
    console.width = next((w for w in range(max(width, least), WIDEST) if not _is_cut(console, table, w)), width)
    console.print(table)
    console.width = width


def _is_cut(console: Console, table: Table, width: int) -> bool:
    """Whether rich cuts the text of a cell at this width. It marks such places with an ellipsis."""
    return any("…" in segment.text for segment in console.render(table, console.options.update_width(width)))


def known(value: float | None, form: str) -> str:
    """A metric that may be unknown."""
    return "unknown" if value is None else format(value, form)


def sparkline(histogram: Mapping[Any, float]) -> str:
    """One bar per key from 0 (or 1) up, scaled to the largest value."""
    if not histogram:
        return ""
    counts = {int(key): value for key, value in histogram.items()}
    first = min(1, *counts)
    whole = max(counts.values())
    return "".join(
        _HISTOGRAM_LEVELS[max(counts.get(k, 0) > 0, round(8 * counts.get(k, 0) / whole))]
        for k in range(first, max(counts) + 1)
    )


def _options_table(title: str, options: Sequence[Option]) -> Table:
    table = _table(title, "schedule", "of\nlimit", "staleness", "max", "length\nbias", "waste", "sorted")
    for o in options:
        table.add_row(
            o.name,
            f"{o.run_of_limit:.3f}",
            f"{o.staleness_mean:.2f}",
            f"{o.staleness_max:.0f}",
            f"{o.length_bias:+z.1%}",
            f"{o.waste:.1%}",
            known(o.sortedness, "z.2f"),
        )
    return table


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
        box=SIMPLE_HEAD,
    )
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right")
    return table
