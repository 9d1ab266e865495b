"""All schedules and filters by name, and your own by import path (docs/design.md, "A mode of your own")."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.group_filter import EQUAL_REWARDS, GroupFilter, Keeps, has_unequal_rewards
from sortedrl.core.schedule import Schedule
from sortedrl.core.strategies.base import Strategy
from sortedrl.core.strategies.ours import ElevatorPartial, LookaheadPartial, PlannedOnPolicy, PlannedPartial
from sortedrl.core.strategies.paper import Baseline, CohortAtOnce, OnPolicy, Partial, UngatedOnPolicy
from sortedrl.core.strategies.peers import April, AsyncPool, FilterRounds, TailBatching
from sortedrl.core.wording import kind_of

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
_MODE_FIX = "Name a class derived from sortedrl.core.Strategy, or an instance of one (docs/design.md)."
_FILTER_FIX = f"Set it to {EQUAL_REWARDS}, or to your.module:name; a function goes to Controller(filter_groups=...)."


def strategy_named(mode: str) -> Strategy:
    if mode in STRATEGIES:
        return STRATEGIES[mode]
    if ":" in mode:
        return _strategy_at(mode)
    import difflib  # slow to import, and needed only for this error

    near = difflib.get_close_matches(mode, STRATEGIES, n=1, cutoff=0.4)
    hint = f"Did you mean {near[0]}? " if near else ""
    modes = ", ".join(STRATEGIES)
    raise ConfigurationError("mode", mode, "no such mode", f"{hint}Modes: {modes}, or your own as your.module:Class.")


@cache
def _strategy_at(path: str) -> Strategy:
    """Your own strategy: a class that needs nothing but its name, or an instance."""
    found = _imported("mode", path, _MODE_FIX, lambda value: isinstance(value, Strategy))
    if isinstance(found, Strategy):
        return replace(found, name=path)
    if not (isinstance(found, type) and issubclass(found, Strategy)):
        raise ConfigurationError("mode", path, "it is not a mode", _MODE_FIX)
    try:
        return found(name=path)
    except (Exception, SystemExit) as error:
        from sortedrl.core.import_path import fault_in_your_code

        raise ConfigurationError("mode", path, f"it raised {fault_in_your_code(error)}", _MODE_FIX) from error


def group_filter(schedule: Schedule, keeps: Keeps | None = None) -> GroupFilter | None:
    """The filter of a run: `keeps`, or the one that the schedule names; None if there is none."""
    path = schedule.filter_groups
    if keeps is None and path is None:
        if schedule.revisit_filtered < 1:
            fix = f"Set filter_groups too, for example {EQUAL_REWARDS}, or leave it out."
            raise ConfigurationError("revisit_filtered", schedule.revisit_filtered, "no group is filtered", fix)
        return None
    name = str(path if keeps is None else getattr(keeps, "__qualname__", type(keeps).__qualname__))
    keeps = _filter_at(name) if keeps is None else keeps
    if not callable(keeps):
        raise ConfigurationError("filter_groups", path or keeps, f"it is {kind_of(keeps)}, not a function", _FILTER_FIX)
    if keeps is has_unequal_rewards and not (schedule.whole_groups and schedule.rollouts_per_prompt > 1):
        sizes = f"rollouts_per_prompt = {schedule.rollouts_per_prompt}, whole_groups = {schedule.whole_groups}"
        fix = "Set rollouts_per_prompt to 2 or more and whole_groups = true."
        raise ConfigurationError("filter_groups", name, f"it compares the rollouts of a group ({sizes})", fix)
    return GroupFilter(name, keeps, schedule)


def _filter_at(path: str) -> Any:
    if path == EQUAL_REWARDS:
        return has_unequal_rewards
    if ":" not in path:
        raise ConfigurationError("filter_groups", path, "no such filter", _FILTER_FIX)
    return _imported("filter_groups", path, _FILTER_FIX)


def _imported(key: str, path: str, fix: str, may_be: Callable[[Any], bool] = callable) -> Any:
    from sortedrl.core.import_path import import_object  # slow to import

    try:
        return import_object(path, may_be)
    except ValueError as error:
        raise ConfigurationError(key, path, str(error), fix) from None
