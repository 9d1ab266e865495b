"""The settings of dynamic sampling in a simulated run: which groups are filtered."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, Field

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.group_filter import are_equal
from sortedrl.core.schedule import Schedule
from sortedrl.core.strategies.registry import group_filter
from sortedrl.engines.equal_groups import DrawnEqual, EqualGroups, RecordedEqual
from sortedrl.engines.lengths import ReplayedLengths


class SimulatedFilterSettings(BaseModel):
    help_group: ClassVar[str] = "dynamic sampling"

    filtered: Annotated[
        Annotated[float, Field(ge=0, lt=1)] | Literal["file"] | None,
        Field(
            description="this fraction of the groups has equal rewards and is not trained on; file: those whose "
            "rewards in --lengths are equal"
        ),
    ] = None


def equal_groups_of(settings: SimulatedFilterSettings, replayed: ReplayedLengths | None) -> EqualGroups | None:
    """The groups to filter; None without a filter. `replayed`: the lengths of a file or a run, if there is one."""
    if settings.filtered != "file":
        return None if settings.filtered is None else DrawnEqual(settings.filtered)
    if replayed is None or replayed.rewards is None:
        why = "there is no --lengths" if replayed is None else "not every response in --lengths has a reward"
        fix = 'Give a run folder, or a file with rows such as {"prompt": "p0", "length": 812, "reward": 1}.'
        raise ConfigurationError("filtered", "file", why, fix)
    return RecordedEqual(tuple(map(are_equal, replayed.rewards)))


def check_filter(settings: SimulatedFilterSettings, replayed: ReplayedLengths | None, schedule: Schedule) -> None:
    equal_groups_of(settings, replayed)
    group_filter(schedule)
