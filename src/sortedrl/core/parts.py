"""The parts of a controller: those that were passed are checked, the others get their defaults."""

import logging

from sortedrl.core.events import EventLog
from sortedrl.core.group_filter import GroupFilter, Keeps
from sortedrl.core.rejections import RejectionWatch
from sortedrl.core.schedule import Schedule
from sortedrl.core.strategies.base import Strategy
from sortedrl.core.strategies.registry import group_filter, strategy_named
from sortedrl.core.wording import kind_of

Filter = Keeps | GroupFilter  # what Controller(filter_groups=...) takes
_log = logging.getLogger("sortedrl.core.controller")


def strategy_and_filter(
    schedule: Schedule, strategy: Strategy | None = None, filter_groups: Filter | None = None
) -> tuple[Strategy, GroupFilter | None]:
    """Those that were passed, or that the schedule names. Raises ConfigurationError if they do not fit together."""
    strategy = strategy or strategy_named(schedule.mode)
    schedule.check_cohort()
    strategy.check(schedule)
    found = filter_groups if isinstance(filter_groups, GroupFilter) else group_filter(schedule, filter_groups)
    if found is not None:
        strategy.check_filter()
    return strategy, found


def default_log(schedule: Schedule) -> EventLog:
    """Nothing but a watch that warns, and stops a run that rejects too many rollouts."""
    return EventLog(RejectionWatch(schedule.rollouts_needed, log=_log.warning))


_OPTIONAL = {"environments", "strategy", "expectation", "sampling", "log", "stream_to"}
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


def check_parts(**parts: object) -> None:
    """Refuse what was passed in a wrong place, such as a class, or a list of prompts. Raises TypeError."""
    for name, part in parts.items():
        needed, instead = _PARTS[name]
        is_left_out = part is None and name in _OPTIONAL
        is_function = callable(part) and name == "stream_to"
        if not (is_left_out or is_function) and (isinstance(part, type) or not hasattr(part, needed)):
            raise TypeError(f"{name} is {kind_of(part)}: pass {instead}")
