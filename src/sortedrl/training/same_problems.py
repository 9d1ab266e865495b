"""Whether a resumed run has the problems that it started with: their number, ids, texts and answers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from sortedrl.core.rollout import Prompt

if TYPE_CHECKING:
    from sortedrl.learner.checkpoint import Checkpoint

DIGITS = 8  # per problem: a checkpoint has them all, so that an error can name the problem that changed


def problem_digests(prompts: Sequence[Prompt]) -> str:
    """`DIGITS` hexadecimal digits per problem.

    They cover the problem, not the tokens of its prompt: a chat template may write today's date into those.
    """
    return "".join(_digest(prompt.payload) for prompt in prompts)


def why_other_problems(saved: Checkpoint, train: Sequence[Prompt], held_out: Sequence[Prompt]) -> str | None:
    """How the problems differ from those of a checkpoint; None if they do not.

    With others, the rest of the data, the rewards of resumed rollouts and the gain over the first evaluation would not
    be those of the run.
    """
    before = saved.controller["prompts"]["size"]
    if len(train) != before:
        return f"the task has {len(train)} problems to train on, but had {before} when the run started"
    if [prompt.id for prompt in held_out] != saved.notes["before_ids"]:
        return "the task's held-out problems are not those of the run's first evaluation"
    digests = saved.notes.get("problems")  # older versions did not save them
    if digests is None:
        return None
    return _changed(train, digests["train"], "problems to train on") or _changed(
        held_out, digests["held_out"], "held-out problems"
    )


def _changed(prompts: Sequence[Prompt], before: str, what: str) -> str | None:
    old = [before[place : place + DIGITS] for place in range(0, len(before), DIGITS)]
    new = [_digest(prompt.payload) for prompt in prompts]
    changed = [prompt.id for prompt, was, now in zip(prompts, old, new, strict=True) if was != now]
    if not changed:
        return None
    if sorted(old) == sorted(new):
        return f"the {what} are in another order than when the run started"
    return f"{len(changed)} of {len(prompts)} {what} changed since the run started, the first is {changed[0]!r}"


def _digest(problem: Any) -> str:
    try:
        content = _content(problem)
    except RecursionError:  # an answer that contains itself
        content = problem.id, problem.question, problem.system
    data = repr(content).encode("utf-8", "backslashreplace")
    return hashlib.blake2b(data, digest_size=DIGITS // 2).hexdigest()


def _content(value: Any) -> Any:
    """The value, made of types whose text is the same in every process.

    The text of any other object may contain its address or the order of a set, so only its type counts.
    """
    if value is None or isinstance(value, str | bytes | bool | int | float):
        return value
    if isinstance(value, Enum):
        return type(value).__name__, value.name
    if isinstance(value, Mapping):
        return dict, sorted((repr(_content(key)), _content(inner)) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return [_content(inner) for inner in value]
    if isinstance(value, set | frozenset):
        return set, sorted(repr(_content(inner)) for inner in value)
    if is_dataclass(value):
        return type(value).__name__, [_content(getattr(value, field.name)) for field in fields(value)]
    if callable(as_list := getattr(value, "tolist", None)):  # numbers and arrays of numpy and torch
        return _content(as_list())
    return type(value).__name__
