"""All schedules by name. To add one, write a class and add a line here."""

from __future__ import annotations

from sortedrl.core.schedule import ConfigurationError
from sortedrl.core.strategies.base import Strategy
from sortedrl.core.strategies.ours import ElevatorPartial, LookaheadPartial, PlannedOnPolicy, PlannedPartial
from sortedrl.core.strategies.paper import Baseline, CohortAtOnce, OnPolicy, Partial, UngatedOnPolicy
from sortedrl.core.strategies.peers import April, AsyncPool, TailBatching

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
    AsyncPool("async-pool"),
)
STRATEGIES: dict[str, Strategy] = {strategy.name: strategy for strategy in _ALL}


def strategy_named(mode: str) -> Strategy:
    if mode in STRATEGIES:
        return STRATEGIES[mode]
    import difflib  # slow to import, and needed only for this error

    near = difflib.get_close_matches(mode, STRATEGIES, n=1, cutoff=0.4)
    hint = f"Did you mean {near[0]}? " if near else ""
    raise ConfigurationError("mode", mode, "no such mode", f"{hint}Modes: {', '.join(STRATEGIES)}.")
