"""`sortedrl simulate`: what each schedule would gain on your response lengths."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from sortedrl.cli.output import ProgressBar, print_json, table_console
from sortedrl.cli.workload import print_dry_run, print_notices, spread, workload_line
from sortedrl.core.strategies.base import updates_left
from sortedrl.core.strategies.registry import strategy_named
from sortedrl.settings.schedule import prompts_per_cohort
from sortedrl.studies import simulate, tables
from sortedrl.studies.plan import BASELINES, Allowed, Option, choose, is_allowed, larger_updates, option
from sortedrl.studies.simulate import Case, SimulateSettings
from sortedrl.studies.workload_settings import simulated_schedule, simulated_workload

SETTINGS = SimulateSettings
WARM = " (warm)"
MUCH = 1.5  # if the choice has this many times the staleness of a slower mode, that mode is named, too
MILLION_TOKENS = 100  # trained on, for the hours in the sentence


def run(settings: SimulateSettings) -> int:
    workload, schedule = simulated_workload(settings), simulated_schedule(settings)
    rows = simulate.cases(workload, schedule, *settings.modes_and_expectations())
    if settings.dry_run:
        return print_dry_run(settings, schedule, workload.prompts)
    print_notices(settings, *_less_than_a_cohort(settings))
    with ProgressBar("simulating", quiet=settings.json_output) as progress:
        modes = simulate.compare(rows, settings.seeds, max_updates=settings.updates, on_progress=progress)
    if settings.json_output:
        return print_json(settings, {"modes": modes})
    limit = tables.digits(next(iter(modes.values()))["limit"], 5)
    source = f" ({workload.step_time.source})" if workload.step_time.source else ""
    head = f"{workload_line(settings)}\nlimit of this workload: {limit} tokens/s{source}"
    columns = tables.ANSWER if settings.filtered is None else tables.ANSWER | tables.FILTERED
    shown: list[RenderableType] = [head, "", tables.table_of("", modes, columns)]
    shown += ["", Text(conclusion(rows, modes), "bold")]
    if tables.several(modes):
        shown.append(spread(rows, modes, len(settings.seeds), settings.cohorts, settings.updates))
    if settings.details:
        for title, of in (("Throughput", tables.THROUGHPUT), ("Cost", tables.COST)):
            shown += ["", tables.table_of(title, modes, of)]
        shown += ["", tables.bubble_table(modes)]
    tables.show(table_console(), shown)
    return 0


def _less_than_a_cohort(settings: SimulateSettings) -> list[str]:
    per_cohort = prompts_per_cohort(settings) * settings.rollouts_per_prompt
    in_cohort = updates_left(per_cohort, simulated_schedule(settings).rollouts_needed)
    if settings.updates is None or settings.updates >= in_cohort:
        return []
    why = (
        f"updates = {settings.updates} ends each run within its first cohort, which has {in_cohort} updates: its long "
    )
    fix = "responses are not trained on, so gain and length bias say little. Leave it out; --cohorts 1 is a short run."
    return [why + fix]


# The answer in a sentence: the gain, with which mode, at what staleness, and how certain it is


def conclusion(rows: Sequence[Case], modes: Mapping[str, Mapping[str, Any]]) -> str:
    """Applies the rule of `plan` to the rows that need no earlier epoch. The first row is the reference."""
    first, base = rows[0], modes[rows[0].name]
    if not tables.several(modes):
        mode = first.schedule.mode
        pair = f"{mode} partial+elevator" if mode in BASELINES else f"baseline {mode}"
        return f"One mode alone has no gain. Compare it with another: --modes {pair}"
    options = {row.name: option(row.name, row.schedule, dict(modes[row.name])) for row in rows}
    comparable = [options[row.name] for row in rows if row.workload.expectation == first.workload.expectation]
    if not any(one.is_baseline or is_allowed(one, Allowed()) for one in comparable):
        return f"No mode here is free of length bias (more than {Allowed().length_bias:.0%}), so none is recommended."
    choice, _ = choose(comparable, Allowed())
    chosen = modes[choice.name]
    gain = _gain(chosen, base)
    known = {first.workload.expectation, "warm"}  # `oracle` lengths exist in simulations only
    usable = [options[row.name] for row in rows if row.workload.expectation in known]
    if choice.name == first.name or choice.is_baseline or gain < 1.02:
        has_partial = any(strategy_named(o.schedule.mode).keeps_tokens for o in comparable)
        return _nothing_gained(choice, _best([o for o in usable if o not in comparable]), modes, base, has_partial)
    text = (
        f"{choice.name} trains on {gain:.2f} times the tokens per second of {first.name}: "
        f"{MILLION_TOKENS} million tokens in {_hours(chosen)} hours instead of {_hours(base)}, at a mean staleness of "
        f"{chosen['staleness_mean']:.2f} updates (at most {chosen['staleness_max']:.0f})"
    )
    warm = modes.get(choice.name + WARM)
    if warm is not None and _gain(warm, base) > gain + 0.02:
        text += f", {_gain(warm, base):.2f} times after the first epoch (warm)"
    younger = _best([o for o in comparable if MUCH * o.staleness_mean < choice.staleness_mean and o.staleness_mean > 0])
    if younger is not None and _gain(modes[younger.name], base) > 1.02:
        younger_gain = _gain(modes[younger.name], base)
        text += f"; with less staleness, {younger.name} gives {younger_gain:.2f} times at {younger.staleness_mean:.2f}"
    fresh = _best([o for o in usable if strategy_named(o.schedule.mode).on_policy and o.staleness_mean == 0])
    if choice.staleness_mean > 0 and fresh is not None and _gain(modes[fresh.name], base) > 1.02:
        text += f"; without stale tokens, {fresh.name} gives {_gain(modes[fresh.name], base):.2f} times"
    return f"{text}.{larger_updates(choice)}"


def _nothing_gained(
    choice: Option,
    best: Option | None,
    modes: Mapping[str, Mapping[str, Any]],
    base: Mapping[str, Any],
    has_partial: bool,
) -> str:
    """No mode gains without an earlier epoch. The best one may gain after it, when lengths are known. Without a partial
    mode among them, that says nothing about whether you need one."""
    text = f"{choice.name} is as fast as any mode here without length bias"
    if best is not None and (later := _gain(modes[best.name], base)) > max(1.0, _gain(modes[choice.name], base)) + 0.02:
        return f"In a first epoch, {text}; after it, {best.name} gives {later:.2f} times."
    return f"{'You do not need this: ' if choice.is_baseline and has_partial else ''}{text}."


def _best(options: Sequence[Option]) -> Option | None:
    """The fastest of those without length bias."""
    return max((o for o in options if is_allowed(o, Allowed())), key=lambda o: o.run_of_limit, default=None)


def _gain(run_metrics: Mapping[str, Any], base: Mapping[str, Any]) -> float:
    before = base["trained_tokens_per_hour"]
    return float(run_metrics["trained_tokens_per_hour"] / before) if before else 0.0


def _hours(run_metrics: Mapping[str, Any]) -> str:
    hourly = run_metrics["trained_tokens_per_hour"]
    return tables.digits(MILLION_TOKENS * 1e6 / hourly, 3) if hourly else "infinitely many"
