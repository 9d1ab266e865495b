"""The turns of a rollout, from its recorded segments."""

from __future__ import annotations

from collections.abc import Collection, Sequence
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


def turns_of(rollout: Rollout, eos_token_ids: Collection[int] | None = None) -> list[Turn]:
    """With EOS tokens, a last turn that ends with none of them counts as cut."""
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
        turns.append(Turn(tokens, logprobs, None, eos_token_ids is not None and tokens[-1] not in eos_token_ids))
    return turns
