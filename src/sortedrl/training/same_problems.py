"""Whether a resumed run has the problems that it started with: their number, ids, texts and answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sortedrl.core.rollout import Prompt
from sortedrl.core.wording import counted
from sortedrl.tasks.problem_digests import digests, why_changed

if TYPE_CHECKING:
    from sortedrl.learner.checkpoint import Checkpoint


def problem_digests(prompts: Sequence[Prompt]) -> str:
    """They cover the problem, not the tokens of its prompt: a chat template may write today's date into those."""
    return digests(prompt.payload for prompt in prompts)


def why_other_problems(saved: Checkpoint, train: Sequence[Prompt], held_out: Sequence[Prompt]) -> str | None:
    """How the problems differ from those of a checkpoint; None if they do not.

    With others, the rest of the data, the rewards of resumed rollouts and the gain over the first evaluation would not
    be those of the run.
    """
    before = saved.controller["prompts"]["size"]
    if len(train) != before:
        return f"the task has {counted(len(train), 'problem')} to train on, but had {before} when the run started"
    if [prompt.id for prompt in held_out] != saved.notes["before_ids"]:
        return "the task's held-out problems are not those of the run's first evaluation"
    saved_digests = saved.notes.get("problems")  # older versions did not save them
    if saved_digests is None:
        return None
    return _changed(train, saved_digests["train"], "problems to train on") or _changed(
        held_out, saved_digests["held_out"], "held-out problems"
    )


def _changed(prompts: Sequence[Prompt], before: str, what: str) -> str | None:
    return why_changed([prompt.id for prompt in prompts], problem_digests(prompts), before, what)
