"""The settings of a schedule, and the error for a wrong setting."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from numbers import Integral

from sortedrl.core.errors import UserError
from sortedrl.core.rollout import Rollout


class ConfigurationError(UserError, ValueError):
    """A setting that cannot work: its name, its value, why, and a fix to copy."""

    def __init__(self, key: str, value: object, why: str, fix: str) -> None:
        self.key, self.value, self.why, self.fix = key, value, why, fix
        super().__init__(self.text())

    def text(self, set_by: str = "") -> str:
        source = f" (set by {set_by})" if set_by else ""
        end = "" if self.why.endswith("?") else "."
        return f"{self.key} = {self.value!r}{source}: {self.why}{end} {self.fix}"

    def __reduce__(self) -> tuple[type[ConfigurationError], tuple[str, object, str, str]]:
        return type(self), (self.key, self.value, self.why, self.fix)


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
    seed: int = 0

    def __post_init__(self) -> None:
        for key in (field.name for field in fields(self)):
            value = getattr(self, key)
            if isinstance(value, Integral) and not isinstance(value, int):  # of NumPy, which JSON cannot write
                object.__setattr__(self, key, int(value))
        if not isinstance(self.seed, int):
            raise ConfigurationError("seed", self.seed, "not a whole number", "Set it to an int.")
        for key in ("rollouts_per_update", "rollouts_per_prompt", "max_response_tokens"):
            _at_least(key, getattr(self, key), 1)
        _at_least("max_retries", self.max_retries, 0)
        if self.prompts_per_cohort is not None:
            _at_least("prompts_per_cohort", self.prompts_per_cohort, 1)
            rollouts = self.prompts_per_cohort * self.rollouts_per_prompt
            if rollouts < self.rollouts_per_update:
                enough = math.ceil(self.rollouts_per_update / self.rollouts_per_prompt)
                raise ConfigurationError(
                    "prompts_per_cohort",
                    self.prompts_per_cohort,
                    f"a cohort of {self.prompts_per_cohort} prompts x {self.rollouts_per_prompt} rollouts = {rollouts}"
                    f" rollouts cannot fill one update of {self.rollouts_per_update}",
                    f"Set prompts_per_cohort to {enough} or more, or rollouts_per_update to {rollouts} or less.",
                )
        if self.oversubscribe is not None and not self.oversubscribe <= 1e6:
            raise ConfigurationError("oversubscribe", self.oversubscribe, "too large", "Leave it out for no cap.")
        if self.oversubscribe is not None and not self.oversubscribe >= 1.0:
            raise ConfigurationError(
                "oversubscribe",
                self.oversubscribe,
                "fewer rollouts would start than the update needs, so no harvest could end",
                "Set it to 1.0 (exactly what is needed) or more.",
            )
        if self.max_staleness is not None:
            _at_least("max_staleness", self.max_staleness, 1, hint=" For 0 use mode = on-policy.")
        if self.max_wait_updates is not None:
            _at_least("max_wait_updates", self.max_wait_updates, 1)
        for key in ("max_prompt_tokens", "max_turns", "max_context_tokens"):
            if getattr(self, key) is not None:
                _at_least(key, getattr(self, key), 1)
        if not self.max_environment_seconds > 0:
            raise ConfigurationError(
                "max_environment_seconds", self.max_environment_seconds, "must be above 0", "Set the seconds per call."
            )
        if not self.score_wait_seconds >= 0:
            raise ConfigurationError("score_wait_seconds", self.score_wait_seconds, "not a time", "Use 0 or more.")

    def response_length(self, rollout: Rollout) -> int:
        """The tokens that `max_response_tokens` counts."""
        return len(rollout) if self.count_observations else rollout.policy_length

    def room_for(self, rollout: Rollout) -> int:
        """How many more tokens the policy may sample for it."""
        left = self.max_response_tokens - self.response_length(rollout)
        if self.max_context_tokens is None:
            return left
        return min(left, self.max_context_tokens - len(rollout.prompt.tokens) - len(rollout))

    def limit_of_cut(self, rollout: Rollout) -> str:
        """The limit that cut its last turn."""
        has_room = self.response_length(rollout) < self.max_response_tokens
        return "max_context_tokens" if has_room else "max_response_tokens"

    def limit_reached(self, rollout: Rollout, observed: int) -> str:
        """The limit that leaves no room for another turn after an observation of so many tokens; empty if none does."""
        if self.max_turns is not None and rollout.observations + 1 >= self.max_turns:
            return "max_turns"
        if self.response_length(rollout) + observed * self.count_observations >= self.max_response_tokens:
            return "max_response_tokens"
        context = self.max_context_tokens
        if context is not None and len(rollout.prompt.tokens) + len(rollout) + observed >= context:
            return "max_context_tokens"
        return ""

    @property
    def rollouts_per_cohort(self) -> int | None:
        return None if self.prompts_per_cohort is None else self.prompts_per_cohort * self.rollouts_per_prompt

    @property
    def rollouts_needed(self) -> int:
        """Rollouts for one update: rounded up to whole groups with `whole_groups`."""
        if not self.whole_groups:
            return self.rollouts_per_update
        return math.ceil(self.rollouts_per_update / self.rollouts_per_prompt) * self.rollouts_per_prompt


def _at_least(key: str, value: int, least: int, hint: str = "") -> None:
    if not isinstance(value, Integral):
        kind = type(value).__name__
        raise ConfigurationError(key, value, f"this is a {kind}, not a whole number", f"Set it to an int.{hint}")
    if value < least:
        raise ConfigurationError(key, value, f"must be at least {least}", f"Set it to {least} or more.{hint}")
