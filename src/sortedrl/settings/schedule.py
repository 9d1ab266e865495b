"""The settings of a schedule, for all commands that have one. core/schedule.py has what they mean and their rules."""

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, Field

from sortedrl.core.schedule import Schedule
from sortedrl.settings.base import SettingsGroup, values_for

MOST = 10_000_000  # of anything that is counted: more is a slip of the keyboard, and would fill the memory
RolloutsPerUpdate = Annotated[int, Field(ge=1, le=MOST, description="rollouts that one update trains on")]
UPDATES_PER_COHORT = 4  # by default; the paper found 8 harmful
RolloutsPerPrompt = Annotated[int, Field(ge=1, le=MOST, description="responses per prompt: the group of GRPO and RLOO")]
Oversubscribe = Annotated[
    float | None,
    Field(description="cap on started rollouts, as a multiple of what the update needs; default: the mode's own"),
]


class ScheduleSettings(SettingsGroup):
    """A command may set other defaults, with the types above."""

    help_group: ClassVar[str] = "schedule"

    rollouts_per_update: RolloutsPerUpdate = 128
    prompts_per_cohort: Annotated[
        int | None,
        Field(
            ge=1,
            le=MOST,
            description="prompts that are loaded together and trained on before the next ones are loaded; default: as "
            f"many as {UPDATES_PER_COHORT} updates need",
        ),
    ] = None
    rollouts_per_prompt: RolloutsPerPrompt = 1
    max_staleness: int | None = None
    """bound on staleness in versions, for partial modes; the scheduler waits to keep it"""
    overlap: bool = False
    """the engine keeps generating while the learner steps; partial modes only; real engines must be servers on GPUs of
    their own"""


def prompts_per_cohort(settings: ScheduleSettings) -> int:
    """As set, or as many as `UPDATES_PER_COHORT` updates need."""
    per_update = -(-settings.rollouts_per_update // settings.rollouts_per_prompt)
    return settings.prompts_per_cohort or UPDATES_PER_COHORT * per_update


def schedule_from(settings: BaseModel, **derived: Any) -> Schedule:
    """The schedule with every setting that has the name of one of its fields. `derived` fields win."""
    values = values_for(Schedule, settings, **derived)
    if isinstance(settings, ScheduleSettings):
        values["prompts_per_cohort"] = prompts_per_cohort(settings)
    schedule = Schedule(**values)
    schedule.check_cohort()
    return schedule


def score_wait_seconds(seconds_per_score: float) -> float:
    """How long a schedule waits for scores: the default, or longer if a score may take longer."""
    return max(Schedule().score_wait_seconds, 2 * seconds_per_score)
