"""Which groups of a simulated run have equal rewards, so that dynamic sampling filters them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sortedrl.core.rollout import Rollout
from sortedrl.core.seeds import derive_seed
from sortedrl.engines.lengths import number_of

EqualGroups = Callable[[Rollout], bool]  # whether the rewards of its group are equal


@dataclass(frozen=True)
class DrawnEqual:
    """Each visit of a prompt with the same probability, independent of its lengths."""

    fraction: float

    def __call__(self, rollout: Rollout) -> bool:
        return derive_seed(rollout.group, 11) % 1_000_000 < self.fraction * 1_000_000


@dataclass(frozen=True)
class RecordedEqual:
    """The prompts whose recorded rewards are equal, with the lengths that these have."""

    by_prompt: tuple[bool, ...]

    def __call__(self, rollout: Rollout) -> bool:
        return self.by_prompt[number_of(rollout.prompt) % len(self.by_prompt)]


def simulated_reward(equal: EqualGroups | None) -> Callable[[Rollout], float]:
    """1 in groups of equal rewards; in others, 0 and 1 in turn."""
    if equal is None:
        return lambda rollout: 0.0
    return lambda rollout: 1.0 if equal(rollout) else float(rollout.index_in_group % 2)
