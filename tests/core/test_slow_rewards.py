"""Rewards that are slower than the engine: rollouts without a score must not pile up without bound. And scores that are
lost, or do not say of which attempt they are."""

from collections.abc import Callable
from typing import Any

import pytest

from instant_environments import InstantEnvironments
from paced import PacedEngine
from sortedrl.core import Answer, Controller, Prompt, Prompts, Rollout, Schedule, ScoreAtOnce, events
from sortedrl.core.events import Event, EventLog
from sortedrl.core.scoring import Score
from sortedrl.engines.simulated import SimulatedEngine
from sortedrl.engines.simulated_loop import SimulatedScorer
from sortedrl.engines.step_time import linear
from sortedrl.observe.metrics import Metrics

SLOTS, UPDATE = 8, 8


class Backlog:
    """A sink: the most rollouts that were loaded and not trained on, or finished and not scored, at one time."""

    def __init__(self) -> None:
        self.unscored = self.untrained = 0
        self._unscored_now = self._untrained_now = 0

    def __call__(self, event: Event) -> None:
        match event:
            case events.Loaded():
                self._untrained_now += event.rollouts
            case events.Updated():
                self._untrained_now -= len(event.rollouts)
            case events.Finished():
                self._unscored_now += 1
            case events.Scored():
                self._unscored_now -= 1
        self.unscored = max(self.unscored, self._unscored_now)
        self.untrained = max(self.untrained, self._untrained_now)


def backlog_of(prompts: int, seconds_per_score: float, *, whole_groups: bool = False) -> Backlog:
    """A run in which one reward after the other takes `seconds_per_score`; a response takes 10 s in one of 8 slots."""
    engine = SimulatedEngine(slots=SLOTS, step_time=linear(1.0, 0.0), length_of=lambda request: 10)
    free_at = 0.0

    def seconds_of(rollout: Rollout) -> float:
        nonlocal free_at
        free_at = max(free_at, engine.now()) + seconds_per_score
        return free_at - engine.now()

    backlog, metrics = Backlog(), Metrics()
    dataset, scorer = [Prompt(str(n), [1, 2]) for n in range(prompts)], SimulatedScorer(engine, seconds_of=seconds_of)
    sizes: dict[str, Any] = {"prompts_per_cohort": 4, "rollouts_per_prompt": 4, "rollouts_per_update": UPDATE}
    limits: dict[str, Any] = {"max_response_tokens": 20, "score_wait_seconds": 1000.0}
    schedule = Schedule(mode="partial+elevator", whole_groups=whole_groups, **sizes, **limits)
    controller = Controller(engine, Prompts(dataset), scorer, schedule, log=EventLog(backlog, metrics))
    for _ in controller:
        controller.publish()
    found = metrics.run_metrics()
    assert found.trained == 4 * prompts and found.rejected == found.regenerated == 0
    return backlog


@pytest.mark.parametrize("whole_groups", [False, True])
def test_rollouts_without_a_score_are_bounded(whole_groups: bool) -> None:
    """The engine finishes 0.8 rollouts per second, the reward 0.2."""
    short = backlog_of(64, 5.0, whole_groups=whole_groups)
    long = backlog_of(192, 5.0, whole_groups=whole_groups)
    assert long.unscored == short.unscored <= 4 * UPDATE + 2 * SLOTS
    assert long.untrained == short.untrained


def test_a_reward_that_keeps_up_holds_nothing_back() -> None:
    assert backlog_of(64, 1.0).unscored <= UPDATE


class Unreliable(ScoreAtOnce):
    """Loses the score of rollout 3 so many times, and does not count it; changes the others."""

    def __init__(self, losses: int, **changes: Any) -> None:
        super().__init__(lambda rollout: 1.0)
        self._losses, self._changes = losses, changes

    def submit(self, rollout: Rollout) -> None:
        is_lost = rollout.id == 3 and self._losses > 0
        self._losses -= is_lost
        if not is_lost:
            super().submit(rollout)

    def collect(self) -> list[Score]:
        return [score._replace(**self._changes) for score in super().collect()]


def scored_by(
    scorer: ScoreAtOnce, engine: Any, mode: str = "partial", environments: Any = None
) -> tuple[list[Rollout], dict[int, str]]:
    """The rollouts that are trained on, and the reasons of rejections."""
    log: list[Event] = []
    limits: dict[str, Any] = {"max_response_tokens": 5, "score_wait_seconds": 0.2}
    schedule = Schedule(mode=mode, rollouts_per_update=4, prompts_per_cohort=8, **limits)
    prompts = Prompts([Prompt(f"p{i}", [1]) for i in range(16)])
    controller = Controller(engine, prompts, scorer, schedule, environments=environments, log=EventLog(log.append))
    trained: list[Rollout] = []
    for batch in controller:
        trained += batch
        controller.publish()
    return trained, {event.rollout: event.reason for event in log if isinstance(event, events.Rejected)}


MODES = ["baseline", "cohort-at-once", "on-policy", "partial", "partial+elevator", "tail-batching"]


def paced() -> PacedEngine:
    return PacedEngine(slots=4, length_of=lambda request: 2)


def simulated() -> SimulatedEngine:
    return SimulatedEngine(slots=4, step_time=linear(1.0, 0.0), length_of=lambda request: 2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("engine", [paced, simulated])
def test_a_lost_score_costs_its_rollout_and_not_the_run(mode: str, engine: Callable[[], Any]) -> None:
    trained, rejected = scored_by(Unreliable(1), engine(), mode)
    assert sorted(rollout.id for rollout in trained) == list(range(16)) and not rejected
    assert [rollout.id for rollout in trained if rollout.attempt] == [3]
    trained, rejected = scored_by(Unreliable(99), engine(), mode)
    assert sorted(rollout.id for rollout in trained) == [id for id in range(16) if id != 3]
    assert rejected == {3: "no score in time, twice"}


def test_a_score_without_its_attempt_is_that_of_the_only_one() -> None:
    assert len(scored_by(Unreliable(0, attempt=None), paced())[0]) == 16
    trained, rejected = scored_by(Unreliable(1, attempt=None), paced())
    assert len(trained) == 15
    assert rejected[3].endswith("it was regenerated: a scorer passes attempt=rollout.attempt")


class GivesSets(InstantEnvironments):
    def submit(self, rollout: Rollout, call: int) -> None:
        self._done.append(Answer(rollout.id, call, reward=1.0, detail={1, 2}))


def test_a_detail_that_no_checkpoint_can_hold_names_who_gave_it() -> None:
    with pytest.raises(TypeError, match=r"^the detail of Unreliable's score of rollout \d+ is a set \("):
        scored_by(Unreliable(0, detail={1, 2}), paced())
    with pytest.raises(TypeError, match=r"^the detail of GivesSets's score of rollout \d+ is a set \("):
        scored_by(Unreliable(0), paced(), environments=GivesSets(lambda rollout: None))
