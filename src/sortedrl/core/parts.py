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
    """The one that was passed, or that the schedule names. Raises ConfigurationError if it does not fit."""
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


_PARTS = {  # a member that each part has, and what to pass
    "prompts": ("take", "Prompts(dataset), where the dataset is a list of Prompt(id, token_ids)"),
    "scorer": ("collect", "ScoreAtOnce(reward), where reward(rollout) returns a number"),
    "schedule": ("rollouts_needed", 'Schedule(mode="partial+elevator")'),
    "environments": ("cancel", "an object with the methods of sortedrl.core.Environments"),
    "strategy": ("may_start", 'an instance with its name, such as MyStrategy("mine")'),
    "expectation": ("estimate", "SensedLengths(), or another object with its methods"),
    "sampling": ("top_p", "Sampling(temperature=1.0)"),
    "log": ("append", "EventLog(sink) and Recorder(controller, folder)"),
    "stream_to": ("takes_part", "a function, such as learner.accumulate"),
}


def check_parts(*, optional: bool = False, **parts: object) -> None:
    """Refuse what was passed in a wrong place, such as a class, or a list of prompts. Raises TypeError."""
    for name, part in parts.items():
        needed, instead = _PARTS[name]
        if not (optional and part is None) and (isinstance(part, type) or not hasattr(part, needed)):
            raise TypeError(f"{name} is {kind_of(part)}: pass {instead}")
