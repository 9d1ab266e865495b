"""What a run waits for: its wall-clock time, split into generation, environments, learner, scoring, weight updates,
evaluation, checkpoints and the rest.

The part of a harvest in which slots are empty because of environments (docs/metrics.md, bubble) counts as environments.

A busy engine does not prove that generation is the bottleneck: with a slow reward the engine may continue while the
next update waits for scores. The end of a harvest, after the last response was finished that has a score by then,
counts as scoring to the extent that

- slots are empty for another reason: the engine has nothing left to do, or
- the scoring backlog grows: the engine continues, but scores cannot keep up.

If slots are full and the backlog does not grow, scoring keeps up, and the time counts as generation.
"""

from collections.abc import Mapping
from typing import NamedTuple

GENERATION, LEARNER, SCORING, WEIGHTS, OTHER = "generation", "learner", "scoring", "weights", "other"
NOT_IN_ALL_RUNS = ENVIRONMENTS, EVALUATION, CHECKPOINTS = "environments", "evaluation", "checkpoints"
PARTS = (GENERATION, ENVIRONMENTS, LEARNER, SCORING, WEIGHTS, EVALUATION, CHECKPOINTS, OTHER)
_PART_OF_PHASE = {"harvest": GENERATION, "learner": LEARNER, "scores": SCORING, "weights": WEIGHTS}
_PART_OF_PHASE |= {"evaluation": EVALUATION, "checkpoint": CHECKPOINTS}
_NAMES = {WEIGHTS: "weight updates"}
FASTER_ENVIRONMENTS = (
    "Slots are empty while environments work: make them faster, or use a partial mode with a larger oversubscribe, "
    "which opens more rollouts and makes them staler"
)


class Moment(NamedTuple):
    """A time, and the empty slot-seconds per slot up to then: those because of environments, and all others."""

    at: float
    empty: float
    in_environments: float = 0.0


class WallClock:
    """A fold over the events that change what the run waits for.

    With overlap the phase stays `harvest` while the learner steps: the run waits for it from `Updated` to `Published`.
    """

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._part = self._part_of_phase = OTHER
        self._since = Moment(0.0, 0.0)
        self.unscored: dict[int, Moment] = {}  # when each finished response without a score was finished
        self._last_scored = Moment(0.0, 0.0)  # when the latest response that has a score was finished
        self._last_score = Moment(0.0, 0.0)  # when the latest score arrived
        self._backlog_before = self._finished = 0  # of the current part

    def begin(self, now: Moment) -> None:
        self._since = self._last_scored = self._last_score = now

    def finish(self, rollout: int, now: Moment) -> None:
        self.unscored[rollout] = now
        self._finished += 1

    def score(self, rollout: int, now: Moment) -> None:
        self._last_score = now
        finished = self.unscored.pop(rollout, None)
        if finished is not None and finished.at > self._last_scored.at:
            self._last_scored = finished

    def forget(self, rollout: int) -> None:
        """It was rejected, or will be regenerated."""
        self.unscored.pop(rollout, None)

    def phase(self, phase: str, now: Moment) -> None:
        self._part_of_phase = _PART_OF_PHASE.get(phase, OTHER)
        self._turn_to(self._part_of_phase, now)

    def update(self, now: Moment) -> None:
        self._turn_to(LEARNER, now)

    def publish(self, now: Moment) -> None:
        self._turn_to(self._part_of_phase, now)

    def fractions(self, now: Moment) -> dict[str, float]:
        """Of the time up to now, by part. They add up to 1."""
        seconds = dict(self._seconds)
        self._add_current(seconds, now)
        total = sum(seconds.values())
        return {part: value / total if total else 0.0 for part, value in seconds.items()}

    def _turn_to(self, part: str, now: Moment) -> None:
        if part == self._part:
            return
        self._add_current(self._seconds, now)
        self._part, self._since = part, now
        self._backlog_before, self._finished = len(self.unscored), 0

    def _add_current(self, seconds: dict[str, float], now: Moment) -> None:
        """Add the time since the current part began."""
        scoring = environments = 0.0
        if self._part == GENERATION:
            scoring = self._waited_for_scores(now)
            environments = now.in_environments - self._since.in_environments
        seconds[SCORING] += scoring
        seconds[ENVIRONMENTS] += environments
        seconds[self._part] += max(0.0, now.at - self._since.at - scoring - environments)

    def _waited_for_scores(self, now: Moment) -> float:
        began = max(self._since, self._last_scored)
        ended = now if self.unscored else self._last_score
        seconds = ended.at - began.at
        if seconds <= 0:
            return 0.0
        empty = min(1.0, (ended.empty - began.empty) / seconds)
        busy = max(0.0, 1.0 - empty - (ended.in_environments - began.in_environments) / seconds)
        growth = max(0, len(self.unscored) - self._backlog_before) / max(1, self._finished)
        return seconds * (empty + busy * min(1.0, growth))


def bottleneck(fractions: Mapping[str, float]) -> str:
    """The part that a run waits for most."""
    return max((part for part in fractions if part != OTHER), key=lambda part: fractions[part])


def bottleneck_line(fractions: Mapping[str, float]) -> str:
    """The bottleneck with its share of wall-clock time, then the other parts that the run has."""
    largest = bottleneck(fractions)
    shown = [part for part in fractions if part != largest and (part not in NOT_IN_ALL_RUNS or fractions[part])]
    others = ", ".join(f"{part_name(part)} {fractions[part]:.0%}" for part in shown)
    line = f"bottleneck: {part_name(largest)}, {fractions[largest]:.0%} of wall-clock time ({others})"
    return f"{line}. {FASTER_ENVIRONMENTS}" if largest == ENVIRONMENTS else line


def part_name(part: str) -> str:
    return _NAMES.get(part, part)
