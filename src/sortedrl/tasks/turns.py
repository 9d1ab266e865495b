"""The turns of a rollout, from its recorded segments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sortedrl.core.rollout import Rollout


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of the policy, and the observation that followed: None if there is none yet, or if a limit ended the
    rollout there. `is_cut`: the limit cut the turn itself."""

    response: Sequence[int]
    logprobs: Sequence[float]
    observation: Sequence[int] | None = None
    is_cut: bool = False


def turns_of(rollout: Rollout, eos_token_id: int | None = None) -> list[Turn]:
    """With an EOS token, a last turn without it counts as cut."""
    turns: list[Turn] = []
    tokens: list[int] = []
    logprobs: list[float] = []
    for segment in rollout.segments:
        if segment.is_environment:
            turns.append(Turn(tokens, logprobs, list(segment.tokens)))
            tokens, logprobs = [], []
        else:
            tokens = [*tokens, *segment.tokens]
            logprobs = [*logprobs, *segment.logprobs]
    if tokens:
        turns.append(Turn(tokens, logprobs, None, eos_token_id is not None and tokens[-1] != eos_token_id))
    return turns
