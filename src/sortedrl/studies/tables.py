"""The terminal's view of a study: rich tables, plain when piped."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from sortedrl.observe.metrics import BUBBLE_PARTS
from sortedrl.studies.plan import Option, Plan, takes_other_time

WIDEST = 250  # columns of a table
_HISTOGRAM_LEVELS = " ▁▂▃▄▅▆▇█"
Metrics = Mapping[str, Any]
Column = Callable[[Metrics, Metrics], str]  # of a mode and of the first one, which is empty if there is no other


def _times(key: str, form: str = "{}") -> Column:
    """The gain over the first mode; nothing if that is the only one."""
    return lambda f, base: form.format(f"{f[key] / base[key] if base[key] else 0.0:.2f}x") if base else ""


def _hourly(f: Metrics) -> float:
    return float(f["trained_tokens_per_hour"])


ANSWER: dict[str, Column] = {  # what decides, in 80 columns; tokens per second and gain include the learner's time
    "tokens/s": lambda f, base: digits(_hourly(f) / 3600, 4),
    "gain": _times("trained_tokens_per_hour"),
    "bubble": lambda f, base: f"{f['bubble']:.0%}",
    "waste": lambda f, base: f"{f['waste']:.0%}",
    "mean\nstaleness": lambda f, base: f"{f['staleness_mean']:.2f}",
    "length\nbias": lambda f, base: f"{f['length_bias']:+z.0%}",
}
FILTERED: dict[str, Column] = {"groups\nfiltered": lambda f, base: f"{f['filtered_fraction']:.0%}"}
# Goodput counts only the time in which the engine can run; tokens per hour include the learner's time.
THROUGHPUT: dict[str, Column] = {
    "bubble": lambda f, base: f"{f['bubble']:.1%}",
    "goodput": lambda f, base: f"{digits(f['goodput'], 4)}{_times('goodput', ' ({})')(f, base)}",
    "of limit": lambda f, base: f"{f['of_limit']:.3f}",
    "kept": lambda f, base: digits(f["kept"], 4),
    "waste": lambda f, base: f"{f['waste']:.1%}",
    "trained tok/h": lambda f, base: f"{_hourly(f):,.0f}{_times('trained_tokens_per_hour', ' ({})')(f, base)}",
}
# "sent again" is an upper bound of the prefill on resume: a prefix cache saves some of it.
COST: dict[str, Column] = {
    "staleness mean": lambda f, base: f"{f['staleness_mean']:.2f}",
    "max": lambda f, base: f"{f['staleness_max']:.0f}",
    "tokens by staleness": lambda f, base: sparkline(f["staleness_histogram"]),
    "rollouts by segments": lambda f, base: sparkline(f["segments_histogram"]),
    "sorted": lambda f, base: known(f["sortedness"], "z.2f"),
    "length bias": lambda f, base: known(f["length_bias"], "+z.1%"),
    "longest wait": lambda f, base: f"{f['longest_wait_updates']:.0f}",
    "sent again": lambda f, base: f"{f['re_prefill_tokens'] / max(1, f['generated_tokens']):.1%}",
}
BENCH: dict[str, Column] = {  # measured, beside a prediction if there is one; an empty text: it was not measured
    "kept tok/s": lambda f, base: f"{f['kept']:,.0f}{_times('kept', ' ({})')(f, base)}",
    "goodput": lambda f, base: f"{f['goodput']:,.0f}",
    "bubble": lambda f, base: f"{f['bubble']:.1%}",
    "of limit": lambda f, base: f"{f['of_limit']:.3f}" if f["of_limit"] is not None else "",
    "waste": lambda f, base: f"{f['waste']:.1%}",
    "staleness": lambda f, base: f"{f['staleness_mean']:.2f}",
    "sorted": lambda f, base: known(f["sortedness"], "z.2f"),
    "length bias": lambda f, base: known(f["length_bias"], "+z.1%"),
    "preemptions": lambda f, base: str(f["preemptions"]),
    "predicted goodput, bubble": lambda f, base: _prediction(f),
    "scheduler overhead": lambda f, base: f"{f['own_fraction']:.1%}" if "own_fraction" in f else "",
}


def bubble_table(modes: Mapping[str, Metrics]) -> Table:
    columns = "bubble", *BUBBLE_PARTS, "median harvest", "worst", "idle"
    rows = []
    for name, f in modes.items():
        harvests = f["bubble_per_harvest"] or [0.0]
        parts = (f["bubble_parts"][part] for part in BUBBLE_PARTS)
        values = f["bubble"], *parts, median(harvests), max(harvests), f["idle"]
        rows.append((name, *(f"{value:.1%}" for value in values)))
    return table("Where slots are empty (fraction of slot-time)", ("mode", *columns), rows)


def plan_view(plan: Plan) -> list[RenderableType]:
    speed = "Speed of the whole run" if any(map(takes_other_time, plan.options)) else "Goodput"
    frontier = _options_table(f"{speed} vs. token staleness (Pareto frontier)", plan.staleness_frontier)
    bias = _options_table(f"{speed} vs. length bias (Pareto frontier)", plan.bias_frontier)
    return [Text(plan.reason, "bold"), "", frontier, "", bias]


def show(console: Console, parts: Sequence[RenderableType]) -> None:
    """In a narrow terminal the lines of a table wrap: rich would cut the numbers in its cells."""
    for part in parts:
        width = console.width
        if isinstance(part, Table):
            console.width = max(width, Measurement.get(console, console.options.update_width(WIDEST), part).maximum)
        console.print(part)
        console.width = width


def digits(value: float, count: int) -> str:
    """A number with so many significant digits, and all digits before the point: never 1.115e+04."""
    before_point = len(f"{abs(value):.0f}") if abs(value) >= 0.5 else 1
    return f"{value:,.{max(0, count - before_point)}f}"


def known(value: float | None, form: str) -> str:
    """A metric that may be unknown."""
    return "unknown" if value is None else format(value, form)


def sparkline(histogram: Mapping[Any, float]) -> str:
    """One bar per key from 0 (or 1) up, scaled to the largest value."""
    if not histogram:
        return ""
    counts = {int(key): value for key, value in histogram.items()}
    whole, keys = max(counts.values()), range(min(1, *counts), max(counts) + 1)
    return "".join(_HISTOGRAM_LEVELS[max(counts.get(k, 0) > 0, round(8 * counts.get(k, 0) / whole))] for k in keys)


def _prediction(f: Metrics) -> str:
    if "predicted" not in f:
        return ""
    p = f["predicted"]
    return f"{p['goodput'] / f['goodput'] - 1:+.1%}, {100 * (p['bubble'] - f['bubble']):+.1f} points"


def _options_table(title: str, options: Sequence[Option]) -> Table:
    columns = "schedule", "of\nlimit", "staleness", "max", "length\nbias", "waste", "sorted"
    rows = []
    for o in options:
        stale = f"{o.staleness_mean:.2f}", f"{o.staleness_max:.0f}"
        sort = known(o.sortedness, "z.2f")
        rows.append((o.name, f"{o.run_of_limit:.3f}", *stale, f"{o.length_bias:+z.1%}", f"{o.waste:.1%}", sort))
    return table(title, columns, rows)


def several(modes: Mapping[str, Metrics]) -> bool:
    """Whether there are modes to compare: one has no gain over itself, however well it knows its lengths."""
    return len({f["mode"] for f in modes.values()}) > 1


def table_of(title: str, modes: Mapping[str, Metrics], columns: Mapping[str, Column]) -> Table:
    """Columns without any text are left out."""
    base = next(iter(modes.values())) if several(modes) else {}
    rows = {name: {column: cell(f, base) for column, cell in columns.items()} for name, f in modes.items()}
    shown = [column for column in columns if any(row[column] for row in rows.values())]
    return table(title, ("mode", *shown), ((name, *(row[one] for one in shown)) for name, row in rows.items()))


def table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    table = Table(
        title=title or None, title_justify="left", title_style="bold", show_edge=False, pad_edge=False,
        collapse_padding=True, box=SIMPLE_HEAD,
    )  # fmt: skip
    first, *others = columns
    table.add_column(first, no_wrap=True)
    for column in others:
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*row)
    return table
