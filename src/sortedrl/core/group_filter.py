"""Dynamic sampling: a complete group that teaches nothing is filtered, and the scheduler refills its place.

With GRPO a group whose rewards are all equal has no gradient. A filter sees the scored rollouts of one complete group
and returns True to keep it. The kept fraction of the last updates tells the strategies how much an unfinished rollout
will probably add to the coming update.
"""

import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from sortedrl.core.errors import UserError
from sortedrl.core.rollout import Rollout
from sortedrl.core.schedule import Schedule
from sortedrl.core.seeds import derive_seed
from sortedrl.core.wording import kind_of

Keeps = Callable[[Sequence[Rollout]], bool]  # whether to train on the scored rollouts of a group
EQUAL_REWARDS = "equal_rewards"
EQUAL_WITHIN = 1e-8
WINDOW_UPDATES = 4  # of rollouts in complete groups, for the kept fraction
LEAST_KEPT = 0.05  # of the kept fraction: a round of twenty times an update's rollouts is as large as it gets
TOO_FEW = "too few members"


class TooManyFiltered(UserError, RuntimeError):
    """So many groups were filtered that the run would hardly make an update."""


class FilterFailed(UserError, RuntimeError):
    """A filter raised an error or returned something else than True or False."""


def are_equal(values: Sequence[float]) -> bool:
    return max(values) - min(values) <= EQUAL_WITHIN


def has_unequal_rewards(rollouts: Sequence[Rollout]) -> bool:
    """The filter `equal_rewards`: keeps groups that have a gradient under GRPO and RLOO."""
    return not are_equal([rollout.reward or 0.0 for rollout in rollouts])


class GroupFilter:
    """Decides on every complete group once.

    `kept_fraction` is that of the last four updates' worth of rollouts. Until the first update's worth is decided on,
    the rest of it counts as kept."""

    def __init__(self, name: str, keeps: Keeps, schedule: Schedule) -> None:
        self.name = name
        self.keeps = keeps
        self._update_size = schedule.rollouts_needed
        self._max_fraction = schedule.max_filtered_fraction
        self._outcomes: deque[tuple[int, str]] = deque()  # rollouts, and why they were filtered (empty: kept)
        self._decided: Counter[str] = Counter()  # rollouts in `_outcomes`, by the same reasons
        self._lowest, self._highest = float("inf"), float("-inf")
        self._visit_probability = schedule.revisit_filtered
        self._seed = schedule.seed
        self._last_visit: dict[str, tuple[int, bool]] = {}  # by prompt: epoch, and whether its group was filtered

    @property
    def kept_fraction(self) -> float:
        decided = self._decided.total()
        undecided = max(0, self._update_size - decided)
        return max(LEAST_KEPT, (self._decided[""] + undecided) / (decided + undecided))

    def decide(self, group: Sequence[Rollout]) -> str:
        """Why the group is filtered; empty if it is kept."""
        rewards = [rollout.reward or 0.0 for rollout in group]
        self._lowest, self._highest = min(self._lowest, *rewards), max(self._highest, *rewards)
        if self.keeps is has_unequal_rewards and len(group) == 1:
            why = TOO_FEW
        elif self._is_kept(tuple(group)):
            why = ""
        elif self.keeps is has_unequal_rewards:
            why = self._kind_of_reward(rewards[0])
        else:
            why = self.name
        self._outcomes.append((len(group), why))
        self._decided[why] += len(group)
        while self._decided.total() - self._outcomes[0][0] >= WINDOW_UPDATES * self._update_size:
            rollouts, reason = self._outcomes.popleft()
            self._decided[reason] -= rollouts
        return why

    def note(self, prompt: str, epoch: int, *, is_kept: bool) -> None:
        """What became of a prompt's group, for its next visit. Groups of two epochs may be complete in any order."""
        if self._visit_probability < 1 and epoch >= self._last_visit.get(prompt, (0, False))[0]:
            self._last_visit[prompt] = epoch, not is_kept

    def age_if_skipped(self, prompt: str, epoch: int) -> int | None:
        """Epochs since the last visit of a prompt that is skipped in this epoch; None if it is loaded."""
        last, was_filtered = self._last_visit.get(prompt, (epoch, False))
        if not was_filtered or last >= epoch:
            return None
        draw = derive_seed(self._seed, epoch, zlib.crc32(prompt.encode())) % 1_000_000
        return epoch - last if draw >= self._visit_probability * 1_000_000 else None

    def _is_kept(self, group: tuple[Rollout, ...]) -> bool:
        try:
            kept: Any = self.keeps(group)
            if kept is None or isinstance(kept, str):
                raise TypeError(f"it returned {kind_of(kept)}: return True to keep the group, False to filter it")
            return bool(kept)
        except (Exception, SystemExit) as error:
            from sortedrl.core.import_path import fault_in_your_code  # slow to import

            raise FilterFailed(f"filter_groups = {self.name}: {fault_in_your_code(error)}") from error

    def _kind_of_reward(self, shared: float) -> str:
        """Rewards that most tasks would call right and wrong: the highest and the lowest so far."""
        if are_equal([self._lowest, self._highest]):
            return "equal"
        if shared >= self._highest - EQUAL_WITHIN:
            return "right"
        return "wrong" if shared <= self._lowest + EQUAL_WITHIN else "equal"

    def check_fraction(self) -> None:
        """Raise `TooManyFiltered` if too much of the last four updates' worth was filtered."""
        decided = self._decided.total()
        filtered = decided - self._decided[""]
        if decided < WINDOW_UPDATES * self._update_size or filtered <= self._max_fraction * decided:
            return
        right, wrong = self._decided["right"], self._decided["wrong"]
        if 2 * right > filtered:
            what = f"{right} of them in groups that are all right: the task is too easy for this model"
        elif 2 * wrong > filtered:
            what = f"{wrong} of them in groups that are all wrong: the task is too hard for this model"
        else:
            what = "most of them neither all right nor all wrong: does the reward tell responses apart?"
        found = f"{filtered} of the last {decided} rollouts were filtered ({self.name})"
        bound = f"more than the fraction of {self._max_fraction:g} that is allowed (max_filtered_fraction)"
        raise TooManyFiltered(f"{found}, {bound}; {what}")

    def state(self) -> dict[str, Any]:
        seen = [self._lowest, self._highest] if self._outcomes else []
        return {"outcomes": [*map(list, self._outcomes)], "rewards": seen, "last_visit": self._last_visit}

    def restore(self, state: dict[str, Any]) -> None:
        self._outcomes = deque((rollouts, why) for rollouts, why in state["outcomes"])
        self._decided = Counter()
        for rollouts, why in self._outcomes:
            self._decided[why] += rollouts
        self._last_visit = {prompt: (epoch, filtered) for prompt, (epoch, filtered) in state["last_visit"].items()}
        if state["rewards"]:
            self._lowest, self._highest = state["rewards"]
