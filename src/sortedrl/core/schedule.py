"""The settings of a schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from sortedrl.core.configuration import ConfigurationError, checked_bool, checked_float, checked_int, checked_text
from sortedrl.core.rollout import Rollout

# Of the settings that are numbers: what each must be. A whole number is at least 1 unless it is named here.
_LEAST: dict[str, int | None] = {"seed": None, "max_retries": 0}
_NUMBERS: dict[str, tuple[Callable[[float], bool], str]] = {
    "oversubscribe": (lambda x: x <= 1e6, "of 1 or more, or leave it out for no cap"),
    "max_environment_seconds": (lambda x: x > 0, "of seconds above 0"),
    "score_wait_seconds": (lambda x: x >= 0, "of seconds, 0 or more"),
    "max_filtered_fraction": (lambda x: 0 <= x <= 1, "from 0 to 1"),
    "revisit_filtered": (lambda x: 0 < x <= 1, "above 0, up to 1"),
}
_NAMES = {  # of the settings that are text: what each names, and where a Python object goes
    "mode": ("a mode", "An instance of your own goes to Controller(..., strategy=...)."),
    "filter_groups": ("a filter", "A function of your own goes to Controller(..., filter_groups=...)."),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What a user sets. Names contain the unit; None means the default of the mode."""

    mode: str = "partial+elevator"
    rollouts_per_update: int = 128
    prompts_per_cohort: int | None = 512  # None: one cohort holds the whole epoch
    rollouts_per_prompt: int = 1
    whole_groups: bool = False  # a batch holds whole groups only, as GRPO and RLOO need
    oversubscribe: float | None = None  # cap on started rollouts, as a multiple of what the update needs
    max_staleness: int | None = None  # in versions
    max_response_tokens: int = 8192
    count_observations: bool = False  # max_response_tokens counts the environment's tokens, too
    max_prompt_tokens: int | None = None  # a longer prompt is rejected at load
    max_turns: int | None = None  # of the policy in one rollout
    max_context_tokens: int | None = None  # of prompt and response together, with the environment's tokens
    max_environment_seconds: float = 300.0  # an environment that answers later has failed
    max_wait_updates: int | None = None  # elevator: a rollout that waited this long is started next
    keep_seed: bool = False  # regenerate with the seed of the aborted attempt
    overlap: bool = False  # the engine generates while the learner steps
    max_retries: int = 2
    score_wait_seconds: float = 60.0
    filter_groups: str | None = None  # equal_rewards, or your.module:name: which complete groups are trained on
    revisit_filtered: float = 1.0  # probability that a prompt whose last group was filtered is loaded in the next epoch
    max_filtered_fraction: float = 0.95  # of four updates' worth of rollouts; more ends the run
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = _checked(field.name, str(field.type), getattr(self, field.name))
            object.__setattr__(self, field.name, value)  # as plain Python numbers: JSON cannot write NumPy's
        if self.oversubscribe is not None and self.oversubscribe < 1.0:
            why = "fewer rollouts would start than the update needs, so no harvest could end"
            fix = "Set it to 1.0 (exactly what is needed) or more."
            raise ConfigurationError("oversubscribe", self.oversubscribe, why, fix)

    def check_cohort(self) -> None:
        """Raise a ConfigurationError if a cohort cannot fill an update.

        The constructor does not: with TRL, a schedule has the size of an update only after it was given."""
        rollouts = self.rollouts_per_cohort
        if rollouts is not None and rollouts < self.rollouts_per_update:
            enough = math.ceil(self.rollouts_per_update / self.rollouts_per_prompt)
            cohort = f"{self.prompts_per_cohort} prompts x {self.rollouts_per_prompt} rollouts = {rollouts} rollouts"
            why = f"a cohort of {cohort} cannot fill one update of {self.rollouts_per_update}"
            fix = f"Set prompts_per_cohort to {enough} or more, or rollouts_per_update to {rollouts} or less."
            raise ConfigurationError("prompts_per_cohort", self.prompts_per_cohort, why, fix)

    def response_length(self, rollout: Rollout) -> int:
        """The tokens that `max_response_tokens` counts."""
        return rollout.length if self.count_observations else rollout.policy_length

    def room_for(self, rollout: Rollout) -> int:
        """How many more tokens the policy may sample for it."""
        left = self.max_response_tokens - self.response_length(rollout)
        if self.max_context_tokens is None:
            return left
        return min(left, self.max_context_tokens - len(rollout.prompt.tokens) - rollout.length)

    @property
    def rollouts_per_cohort(self) -> int | None:
        return None if self.prompts_per_cohort is None else self.prompts_per_cohort * self.rollouts_per_prompt

    @property
    def rollouts_needed(self) -> int:
        """Rollouts for one update: rounded up to whole groups with `whole_groups`."""
        if not self.whole_groups:
            return self.rollouts_per_update
        return math.ceil(self.rollouts_per_update / self.rollouts_per_prompt) * self.rollouts_per_prompt

    def prompts_for(self, updates: int) -> int:
        """Prompts that so many updates need, if none of them is larger than needed and no rollout is rejected."""
        return math.ceil(updates * self.rollouts_needed / self.rollouts_per_prompt)


def _checked(key: str, kind: str, value: Any) -> Any:
    """The value with the type of its field. Raises a ConfigurationError."""
    if value is None and kind.endswith("| None"):
        return None
    if kind == "bool":
        return checked_bool(key, value)
    if key == "max_staleness" and value == 0 and not isinstance(value, bool):
        fix = "For 0 use mode = on-policy+planned. Otherwise set it to 1 or more."
        raise ConfigurationError(key, value, "no token at all may be stale", fix)
    if kind.startswith("int"):
        return checked_int(key, value, _LEAST.get(key, 1))
    if kind.startswith("float"):
        return checked_float(key, value, *_NUMBERS[key])
    return checked_text(key, value, *_NAMES[key])
