import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from sortedrl.core.rollout import Prompt, Rollout, Segment
from sortedrl.core.scoring import Score, Scorer
from sortedrl.core.waiting import wait_briefly
from sortedrl.tasks.scoring import BackgroundScorer, DirectScorer, reward_function
from sortedrl.tasks.task import Problem, Reward


def rollout_of(rollout_id: int, tokens: Sequence[int] = (1, 2, 3), answer: Any = None) -> Rollout:
    problem = Problem(f"p{rollout_id}", "?", answer)
    segment = Segment(list(tokens), [0.0] * len(tokens), version=0)
    return Rollout(rollout_id, Prompt(problem.id, [0], problem), 0, 0, 0, 0, segments=[segment])


def length_reward(rollout: Rollout) -> Reward:
    return Reward(float(len(rollout)), len(rollout) > 2, {"length": float(len(rollout))})


def collect_all(scorer: Scorer, seconds: float = 20.0) -> dict[int, Score]:
    scored: dict[int, Score] = {}
    until = time.monotonic() + seconds
    while scorer.pending and time.monotonic() < until:
        scorer.wait(until - time.monotonic())
        scored |= {one.rollout_id: one for one in scorer.collect()}
    assert scorer.pending == 0
    return scored


@pytest.mark.parametrize("make", [DirectScorer, BackgroundScorer])
def test_rewards_come_with_plain_detail(make: Callable[..., Any]) -> None:
    scorer = make(length_reward)
    for rollout_id in range(20):
        scorer.submit(rollout_of(rollout_id, range(rollout_id)))
    scored = collect_all(scorer)
    assert [scored[rollout_id].reward for rollout_id in range(20)] == [float(n) for n in range(20)]
    assert json.loads(json.dumps(scored[3].detail)) == {"correct": True, "parts": {"length": 3.0}}


def test_submit_and_collect_do_not_block_while_a_reward_runs() -> None:
    gate = threading.Event()

    def reward(rollout: Rollout) -> Reward:
        gate.wait(60)
        return Reward(1.0, True)

    scorer = BackgroundScorer(reward, threads=1)
    began = time.monotonic()
    for rollout_id in range(50):
        scorer.submit(rollout_of(rollout_id))
    assert scorer.collect() == []
    scorer.wait(0.05)
    assert time.monotonic() - began < 30
    assert scorer.pending == 50
    gate.set()
    assert len(collect_all(scorer)) == 50


def test_a_hanging_reward_is_given_up_and_the_others_are_scored() -> None:
    forever = threading.Event()

    def reward(rollout: Rollout) -> Reward:
        if rollout.id < 3:
            forever.wait()
        return Reward(1.0, True)

    scorer = BackgroundScorer(reward, threads=2, limit_seconds=1.0)  # more hang than there are threads
    for rollout_id in range(8):
        scorer.submit(rollout_of(rollout_id))
    scored = collect_all(scorer)
    forever.set()
    assert {one for one in scored if scored[one].reward is None} == {0, 1, 2}
    assert "within 1 s" in str(scored[0].error)


def test_wait_returns_when_a_limit_passes() -> None:
    forever = threading.Event()

    def reward(rollout: Rollout) -> Reward:
        forever.wait()
        return Reward(1.0, True)

    scorer = BackgroundScorer(reward, limit_seconds=0.2)
    scorer.submit(rollout_of(0))
    began = time.monotonic()
    scorer.wait(120)
    assert time.monotonic() - began < 60
    assert [one.rollout_id for one in scorer.collect()] == [0]
    forever.set()


def test_a_rollout_submitted_again_is_answered_once_with_its_new_tokens() -> None:
    first_is_running, gate = threading.Event(), threading.Event()

    def reward(rollout: Rollout) -> Reward:
        if len(rollout) == 3:
            first_is_running.set()
            gate.wait(20)
        return length_reward(rollout)

    scorer = BackgroundScorer(reward, threads=2)
    rollout = rollout_of(7, range(3))
    scorer.submit(rollout)
    assert first_is_running.wait(10)
    rollout.drop_tokens()
    rollout.append(Segment([1] * 5, [0.0] * 5, version=1))
    scorer.submit(rollout)
    scorer.wait(10)
    gate.set()
    answers = scorer.collect()
    time.sleep(0.1)
    answers += scorer.collect()
    assert [(one.rollout_id, one.reward) for one in answers] == [(7, 5.0)]
    assert scorer.pending == 0


def test_tokens_dropped_while_waiting_are_still_scored_as_submitted() -> None:
    gate = threading.Event()

    def reward(rollout: Rollout) -> Reward:
        gate.wait(20)
        return length_reward(rollout)

    scorer = BackgroundScorer(reward)
    rollout = rollout_of(0, range(3))
    scorer.submit(rollout)
    rollout.drop_tokens()
    gate.set()
    assert collect_all(scorer)[0].reward == 3.0


class LetterTokenizer:
    """Token n is the n-th letter; 0 is special."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join("" if skip_special_tokens and not n else chr(96 + n) for n in token_ids)


class Echo:
    """Rewards a response that equals the answer."""

    name = "echo"

    def train(self) -> Sequence[Problem]:
        return []

    def held_out(self) -> Sequence[Problem]:
        return []

    def score(self, problem: Problem, response: str) -> Reward:
        return Reward(float(response == problem.answer), response == problem.answer)


@pytest.mark.parametrize("processes", [0, 1])
def test_a_reward_gets_the_text_without_special_tokens(processes: int) -> None:
    score = reward_function(Echo(), LetterTokenizer(), processes=processes)
    assert score(rollout_of(0, [1, 2, 0], answer="ab")).correct
    assert not score(rollout_of(0, [1, 2, 3], answer="ab")).correct


class Sleeper:
    """A scorer whose wait is a plain sleep, as a user may write it."""

    pending = 1

    def wait(self, timeout_seconds: float) -> None:
        time.sleep(timeout_seconds)


def test_a_deadline_that_has_just_passed_is_no_wait() -> None:
    """The clock moves between the check of a deadline and the wait for it."""
    wait_briefly(Sleeper(), -1e-9)
