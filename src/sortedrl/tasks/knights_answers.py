"""The reward of Knights & Knaves: reads an answer strictly, so that no text can count as several answers."""

import re
from collections.abc import Mapping, Sequence

from sortedrl.tasks.task import Reward

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_RESPONSE = re.compile(r"\s*<think>.*</think>\s*<answer>(?P<answer>.*)</answer>\s*", re.DOTALL)
_FILLER = r"(?:[\s,;.*-]|\(?\d+[).:]|\band\b)*+"  # list marks between statements


def read_response(response: str) -> str | None:
    """The content of the answer block, or None if the format is wrong.

    The correct format: thought, then answer, each tag exactly once, nothing before, between or after the two blocks.
    """
    if any(response.count(tag) != 1 for tag in _TAGS):
        return None
    match = _RESPONSE.fullmatch(response)
    return match["answer"] if match else None


def read_answer(text: str, names: Sequence[str]) -> dict[str, bool] | None:
    """Who is claimed to be a knight; None unless the text has one statement per character and nothing else.

    Anything beyond plain statements (a hedge, a negation, a second opinion, an unknown name) makes it invalid, so that
    no text can count as several answers.
    """
    listed = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    statement = re.compile(
        rf"{_FILLER}(?P<name>{listed})\**\s*(?:\bis(?:\s+a)?\b|[:=])\s*\**(?P<kind>knight|knave)\b{_FILLER}",
        re.IGNORECASE,
    )
    spelled = {name.lower(): name for name in names}
    said: dict[str, bool] = {}
    position = 0
    while position < len(text):
        match = statement.match(text, position)
        if match is None or spelled[match["name"].lower()] in said:
            return None
        said[spelled[match["name"].lower()]] = match["kind"].lower() == "knight"
        position = match.end()
    return said if len(said) == len(names) else None


def reward_function(response: str, answer: Mapping[str, bool]) -> Reward:
    """Logic-RL's reward. An answer in the wrong format is not parsed."""
    block = read_response(response)
    if block is None:
        return _reward(format_reward=-1.0, answer_reward=-2.0)
    said = read_answer(block, list(answer))
    if said is None:
        return _reward(format_reward=1.0, answer_reward=-2.0)
    return _reward(format_reward=1.0, answer_reward=2.0 if said == dict(answer) else -1.5)


def _reward(format_reward: float, answer_reward: float) -> Reward:
    return Reward(
        value=format_reward + answer_reward,
        correct=answer_reward > 0,
        parts={"format": format_reward, "answer": answer_reward},
    )
