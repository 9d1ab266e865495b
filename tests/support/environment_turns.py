"""Turns of rollouts with environments: said by the policy, answered by the environments of a run."""

from collections.abc import Sequence
from typing import Any

from chat_tokenizer import chat_tokenizer
from processes import PATIENCE_SECONDS, wait_until
from sortedrl.core.rollout import Prompt, Rollout, Segment, State
from sortedrl.core.turns import Answer
from sortedrl.tasks.environments import TaskEnvironments
from sortedrl.tasks.task import Problem

TOKENIZER = chat_tokenizer()


def rollout_of(number: int = 0, answer: Any = None) -> Rollout:
    """`answer`: of its problem."""
    problem = Problem(f"p{number}", "question", answer)
    return Rollout(number, Prompt(problem.id, [3, 4], problem), 0, 0, 0, 0)


def speak(rollout: Rollout, text: str = "go", *, ends: bool = True) -> None:
    """A turn of the policy, in two chunks."""
    tokens = [*TOKENIZER(text)["input_ids"], *([TOKENIZER.eos_token_id] if ends else [])]
    for part in (tokens[:2], tokens[2:]):
        rollout.append(Segment(part, [-0.5] * len(part), 0))


def collected(source: Any, count: int, seconds: float = PATIENCE_SECONDS) -> list[Any]:
    """So many answers or scores, as they come."""
    found: list[Any] = []

    def all_came() -> bool:
        source.wait(1.0)
        found.extend(source.collect())
        return len(found) >= count

    wait_until(all_came, seconds)
    return found


def answers_of(environments: TaskEnvironments, rollouts: Sequence[Rollout], call: int = 0) -> dict[int, Answer]:
    """To what was said last, by rollout; all of them are submitted first."""
    for rollout in rollouts:
        environments.submit(rollout, call)
    found = collected(environments, len(rollouts))
    assert environments.pending == 0 and all(answer.call == call for answer in found)
    return {answer.rollout_id: answer for answer in found}


def turn(environments: TaskEnvironments, rollout: Rollout, text: str = "go", call: int = 0) -> Answer:
    """The policy says `text`; an observation is added to the rollout."""
    speak(rollout, text)
    answer = answers_of(environments, [rollout], call)[rollout.id]
    if answer.observation is not None:
        rollout.observe(list(answer.observation))
    return answer


def shown(answer: Answer) -> str:
    assert answer.observation is not None, answer
    return str(TOKENIZER.decode(answer.observation))


def end_by(limit: str, rollout: Rollout) -> None:
    rollout.truncated, rollout.ended_by, rollout.state = True, limit, State.FINISHED
