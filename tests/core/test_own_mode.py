"""A mode of your own: found by its import path wherever a mode is named, and told what it does wrong."""

import json
import os
import pickle
from dataclasses import dataclass
from pathlib import Path

import pytest

import forked
from scenarios import Run, scenario
from sortedrl.core import ConfigurationError, Rollout, SchedulerState, strategy_named
from sortedrl.core.buffer import Group
from sortedrl.core.strategies.decisions import StrategyError
from sortedrl.core.strategies.paper import Partial

EXAMPLES = Path(__file__).parents[2] / "examples"
HERE = __name__


class EndsNoHarvest(Partial):
    def enough(self, s: SchedulerState) -> bool:
        return False


class StartsNothing(Partial):
    def may_start(self, rollout: Rollout, s: SchedulerState) -> bool:
        return False


class LoadsNothing(Partial):
    def to_load(self, s: SchedulerState) -> int:
        return 0


class TakesNothing(Partial):
    def take(self, s: SchedulerState) -> list[list[Group]]:
        return []


class HarvestsTooEarly(Partial):
    def enough(self, s: SchedulerState) -> bool:
        return True


class TakesTwice(Partial):
    def take(self, s: SchedulerState) -> list[list[Group]]:
        return [self.certain(s), self.certain(s)]


class TakesUnready(Partial):
    def take(self, s: SchedulerState) -> list[list[Group]]:
        return [[group for group in s.buffer.groups() if group.missing]]


@dataclass(frozen=True)
class NeedsAnArgument(Partial):
    patience: int


an_instance = Partial("any name")
not_a_mode = 3


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("EndsNoHarvest", "enough() is false with 12 ready, and may_start() starts none of the 0 that wait"),
        ("StartsNothing", "enough() is false with 0 ready, and may_start() starts none of the 12 that wait"),
        ("LoadsNothing", "to_load() returned 0 with no rollout loaded and 12 prompts left"),
        ("TakesNothing", "take() returned no batch; enough() was true with 4 rollouts ready"),
        ("HarvestsTooEarly", "take() returned an empty batch; enough() was true with 0 rollouts ready"),
        ("TakesTwice", "take() returned group 0 2 times"),
        ("TakesUnready", "which is not ready in this cohort"),
    ],
)
def test_a_mistake_in_a_mode_ends_the_run_with_its_name(name: str, said: str) -> None:
    plan = scenario(f"{HERE}:{name}", list(range(1, 13)), slots=4, rollouts_per_update=4, prompts_per_cohort=12)
    with pytest.raises(StrategyError) as caught:
        Run(plan).to_end()
    assert f"{HERE}:{name}" in str(caught.value) and said in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_an_instance_gets_its_path_as_its_name_and_runs_to_the_end() -> None:
    plan = scenario(f"{HERE}:an_instance", list(range(1, 13)), slots=4, rollouts_per_update=4, prompts_per_cohort=12)
    assert strategy_named(plan.schedule.mode).name == f"{HERE}:an_instance"
    trained = [rollout.id for batch in Run(plan).to_end().batches for rollout in batch.rollouts]
    assert sorted(trained) == list(range(12))


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("no_such_module:Mode", "no module 'no_such_module'"),
        (f"{HERE}:TakesTwise", "did you mean 'TakesTwice'? Name a class"),
        (f"{HERE}:not_a_mode", "it is not a mode"),
        (f"{HERE}:NeedsAnArgument", "patience"),
        ("part:ial:", "no module"),
    ],
)
def test_a_wrong_path_is_refused(path: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        strategy_named(path)
    assert said in str(caught.value) and "derived from sortedrl.core.Strategy" in str(caught.value)


def test_simulate_takes_the_example_by_its_path() -> None:
    """In the processes that it simulates with, too."""
    words = ["simulate", "--json", "--modes", "baseline", "partial", "bring_your_own_mode:LongestFirst"]
    words += ["--expectations", "cold", "oracle", "--cohorts", "2", "--slots", "16", "--rollouts-per-update", "16"]
    words += ["--prompts-per-cohort", "64", "--step-time", "memory-bound"]
    done = forked.run(words, cwd=EXAMPLES, environment=dict(os.environ))
    assert done.returncode == 0, done.stderr
    modes = json.loads(done.stdout)["modes"]
    long_first = modes["bring_your_own_mode:LongestFirst (oracle)"]
    assert long_first["bubble"] < modes["partial"]["bubble"]  # long responses no longer start at a cohort's end
    cold = modes["bring_your_own_mode:LongestFirst"]
    assert cold == modes["partial"] | {"mode": "bring_your_own_mode:LongestFirst"}  # no length is known yet
