"""One environment that ends or blocks its process costs no other environment anything."""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from counting_task import SHORT_LIMIT_SECONDS, CountingTask
from environment_turns import TOKENIZER, answers_of, collected, end_by, rollout_of, speak, turn
from paced import PacedEngine
from sortedrl.core import Controller, EventLog, Prompt, Prompts, RejectionWatch, Schedule, events
from sortedrl.core.rollout import Rollout
from sortedrl.core.turns import Answer
from sortedrl.tasks.environment_workers import WorkerHosts
from sortedrl.tasks.environments import TaskEnvironments
from sortedrl.tasks.task import Problem

LIMIT_SECONDS = 30.0
HEALTHY = "end"


def all_in_their_second_turn(environments: TaskEnvironments, rollouts: Sequence[Rollout]) -> dict[int, Answer]:
    for rollout in rollouts:
        speak(rollout)
    for id, answer in answers_of(environments, rollouts).items():
        assert answer.observation is not None, answer
        rollouts[id].observe(list(answer.observation))
        speak(rollouts[id])
    return answers_of(environments, rollouts)


@contextlib.contextmanager
def environments_of(does: str, workers: int = 1) -> Iterator[TaskEnvironments]:
    limit = SHORT_LIMIT_SECONDS if "block" in does or "slow" in does else LIMIT_SECONDS
    host = WorkerHosts(CountingTask(remembers="state" in does), workers=workers, limit_seconds=limit)
    with contextlib.closing(host):
        yield TaskEnvironments(TOKENIZER, host)


ENDS = {
    "dies": "exit code 3",
    "segfaults": "SIGSEGV",
    "blocks": "was killed",
    "blocks in a callback": "was killed",
    "state is slow": "was killed",
    "exits in a task": "SystemExit",
    "dies in a thread": "exit code 4",
    "clears modules": "sys.modules",
    "cancels all": "canceled",
    "eats memory": "MemoryError",
}
QUICK = ("dies", "dies in a thread", "clears modules")


@pytest.mark.parametrize(
    "does", [pytest.param(does, marks=[] if does in QUICK else [pytest.mark.slow]) for does in ENDS]
)
def test_only_the_culprit_has_an_error_and_the_others_an_answer(does: str) -> None:
    rollouts = [rollout_of(number, does if number == 2 else HEALTHY) for number in range(5)]
    with environments_of(does) as environments:
        answers = all_in_their_second_turn(environments, rollouts)
        assert {id: answer.reward for id, answer in answers.items() if id != 2} == {0: 2.0, 1: 2.0, 3: 2.0, 4: 2.0}
        assert ENDS[does] in str(answers[2].error)
        again = answers_of(environments, [rollouts[2]])  # from now on in a process of its own
        assert ENDS[does] in str(again[2].error)


@pytest.mark.parametrize("does", ["blocks for less than the limit", "stops the loop"])
def test_what_is_over_in_time_costs_nobody_anything(does: str) -> None:
    rollouts = [rollout_of(number, does if number % 2 else HEALTHY) for number in range(6)]
    with environments_of(does) as environments:
        answers = all_in_their_second_turn(environments, rollouts)
        assert [answers[id].reward for id in range(6)] == [2.0] * 6


def test_an_end_that_is_pending_and_a_replay_that_differs_are_not_held_against_a_rollout() -> None:
    """`finish` of rollout 1 is pending when the process ends; rollout 2 cannot be brought back."""
    bad, ended, random = rollout_of(0, "dies"), rollout_of(1, HEALTHY), rollout_of(2, "random")
    with environments_of("dies") as environments:
        for rollout in (bad, ended, random, random):
            turn(environments, rollout)
        end_by("max_turns", ended)
        environments.ends.submit(ended)
        assert "exit code 3" in str(turn(environments, bad).error)
        assert [(one.reward, one.error) for one in collected(environments.ends, 1)] == [(-1.0, None)]
        lost = turn(environments, random)
        assert lost.is_lost and not lost.counts, "it lost its instance by another's fault"


def run_of(mode: str, problems: int, does: str) -> tuple[list[str], list[str]]:
    """The problems of the rollouts that were trained on, and the reasons of rejections; problem 3 is bad."""
    prompts = [
        Prompt(f"p{number}", [1], Problem(f"p{number}", "question", does if number == 3 else HEALTHY))
        for number in range(problems)
    ]
    log: list[events.Event] = []
    trained: list[str] = []
    with environments_of(does, workers=2) as environments:
        engine = PacedEngine(slots=16, length_of=lambda request: len(request.prefix) + 3, step_seconds=0.001)
        schedule = Schedule(mode=mode, rollouts_per_update=8, rollouts_per_prompt=2, prompts_per_cohort=problems)
        parts = engine, Prompts(prompts, epochs=2), environments.ends, schedule
        controller = Controller(*parts, environments=environments, log=EventLog(log.append, RejectionWatch(8)))
        for batch in controller:
            trained += [rollout.prompt.id for rollout in batch]
            controller.publish()
    return trained, [event.reason for event in log if isinstance(event, events.Rejected)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "problems", "does"),
    [
        ("partial+elevator", 16, "dies"),
        ("baseline", 16, "segfaults"),
        ("on-policy", 16, "dies"),
        ("partial", 16, "blocks"),
        ("partial+elevator", 32, "dies in a thread"),
    ],
)
def test_one_environment_that_ends_its_process_is_rejected_alone(mode: str, problems: int, does: str) -> None:
    trained, rejected = run_of(mode, problems, does)
    expected = {f"p{number}": 4 for number in range(problems) if number != 3}
    assert Counter(trained) == expected, rejected
    assert len(rejected) == 4 and all(ENDS[does] in reason for reason in rejected), rejected
