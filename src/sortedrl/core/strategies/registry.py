"""All schedules by name, and your own by import path (docs/design.md, "A mode of your own")."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.strategies.base import Strategy
from sortedrl.core.strategies.ours import ElevatorPartial, LookaheadPartial, PlannedOnPolicy, PlannedPartial
from sortedrl.core.strategies.paper import Baseline, CohortAtOnce, OnPolicy, Partial, UngatedOnPolicy
from sortedrl.core.strategies.peers import April, AsyncPool, FilterRounds, TailBatching

_ALL: tuple[Strategy, ...] = (
    Baseline("baseline"),
    Baseline("baseline+longest-first", longest_first=True),
    CohortAtOnce("cohort-at-once"),
    CohortAtOnce("cohort-at-once+longest-first", longest_first=True),
    CohortAtOnce("cohort-at-once+sorted", order="ascending"),
    CohortAtOnce("cohort-at-once+sorted-descending", order="descending"),
    OnPolicy("on-policy"),
    UngatedOnPolicy("on-policy+ungated"),
    PlannedOnPolicy("on-policy+planned"),
    Partial("partial"),
    PlannedPartial("partial+planned"),
    LookaheadPartial("partial+lookahead"),
    ElevatorPartial("partial+elevator"),
    April("april"),
    TailBatching("tail-batching"),
    FilterRounds("filter-rounds"),
    FilterRounds("filter-rounds+refill", refill=2),
    AsyncPool("async-pool"),
)
STRATEGIES: dict[str, Strategy] = {strategy.name: strategy for strategy in _ALL}


def strategy_named(mode: str) -> Strategy:
    if mode in STRATEGIES:
        return STRATEGIES[mode]
    if ":" in mode:
        return _from_import_path(mode)
    import difflib  # slow to import, and needed only for this error

    near = difflib.get_close_matches(mode, STRATEGIES, n=1, cutoff=0.4)
    hint = f"Did you mean {near[0]}? " if near else ""
    modes = ", ".join(STRATEGIES)
    raise ConfigurationError("mode", mode, "no such mode", f"{hint}Modes: {modes}, or your own as your.module:Class.")


@cache
def _from_import_path(path: str) -> Strategy:
    """Your own strategy: a class that needs nothing but its name, or an instance."""
    from sortedrl.core.import_path import fault_in_your_code, import_object

    fix = "Name a class derived from sortedrl.core.Strategy, or an instance of one (docs/design.md)."
    try:
        found = import_object(path, lambda value: isinstance(value, Strategy))
    except ValueError as error:
        raise ConfigurationError("mode", path, str(error), fix) from None
    if isinstance(found, Strategy):
        return replace(found, name=path)
    if not (isinstance(found, type) and issubclass(found, Strategy)):
        raise ConfigurationError("mode", path, "it is not a mode", fix)
    try:
        return found(name=path)
    except (Exception, SystemExit) as error:
        raise ConfigurationError("mode", path, f"it raised {fault_in_your_code(error)}", fix) from error
