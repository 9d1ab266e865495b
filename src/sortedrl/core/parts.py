"""The parts of a controller: those that were passed are checked, the others get their defaults."""

from __future__ import annotations

import logging

from sortedrl.core.events import EventLog
from sortedrl.core.group_filter import GroupFilter, Keeps
from sortedrl.core.rejections import RejectionWatch
from sortedrl.core.schedule import Schedule
from sortedrl.core.strategies.base import Strategy
from sortedrl.core.strategies.registry import group_filter, strategy_named
from sortedrl.core.wording import kind_of

_log = logging.getLogger("sortedrl.core.controller")


def strategy_of(schedule: Schedule, strategy: Strategy | None) -> Strategy:
    """The strategy that was passed, or the one that the schedule names. Raises ConfigurationError if they disagree."""
    strategy = strategy or strategy_named(schedule.mode)
    schedule.check_cohort()
    strategy.check(schedule)
    return strategy


def filter_of(schedule: Schedule, given: Keeps | GroupFilter | None, strategy: Strategy) -> GroupFilter | None:
    found = given if isinstance(given, GroupFilter) else group_filter(schedule, given)
    if found is not None:
        strategy.check_filter()
    return found


def default_log(schedule: Schedule) -> EventLog:
    """Nothing but a watch that warns, and stops a run that rejects too many rollouts."""
    return EventLog(RejectionWatch(schedule.rollouts_needed, log=_log.warning))


def check_parts(prompts: object, scorer: object, schedule: object) -> None:
    """Refuse what was passed in a wrong place, such as a list of prompts. Raises TypeError."""
    _require("prompts", prompts, "take", "Prompts(dataset), where the dataset is a list of Prompt(id, token_ids)")
    _require("scorer", scorer, "collect", "ScoreAtOnce(reward), where reward(rollout) returns a number")
    _require("schedule", schedule, "rollouts_needed", 'Schedule(mode="partial+elevator")')


def check_optional_parts(
    environments: object, strategy: object, expectation: object, sampling: object, log: object, stream_to: object
) -> None:
    for name, part, needed, instead in (
        ("environments", environments, "cancel", "an object with the methods of sortedrl.core.Environments"),
        ("strategy", strategy, "may_start", 'an instance with its name, such as MyStrategy("mine")'),
        ("expectation", expectation, "estimate", "SensedLengths(), or another object with its methods"),
        ("sampling", sampling, "top_p", "Sampling(temperature=1.0)"),
        ("log", log, "append", "EventLog(sink) and Recorder(controller, folder)"),
    ):
        if part is not None:
            _require(name, part, needed, instead)
    if stream_to is not None and not callable(stream_to):
        _require("stream_to", stream_to, "takes_part", "a function, such as learner.accumulate")


def _require(name: str, part: object, needed: str, instead: str) -> None:
    if isinstance(part, type) or not hasattr(part, needed):
        raise TypeError(f"{name} is {kind_of(part)}: pass {instead}")
