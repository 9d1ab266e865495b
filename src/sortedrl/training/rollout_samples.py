"""A sample of each update's responses, as lines of rollouts.jsonl: to read what the policy does."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from transformers import PreTrainedTokenizerBase

from sortedrl.core.batch import Batch
from sortedrl.core.rollout import Rollout


def sampled(batch: Batch, count: int) -> list[Rollout]:
    """At most `count` rollouts of the batch, evenly from its shortest to its longest."""
    count = min(count, len(batch))
    return [batch.rollouts[place * (len(batch) - 1) // max(1, count - 1)] for place in range(count)]


def line_of(rollout: Rollout, update: int, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """`update`: how many were done with the one that it is in."""
    response = str(tokenizer.decode(rollout.tokens))
    return {
        "update": update,
        "rollout": rollout.id,
        "prompt": rollout.prompt.id,
        "question": rollout.prompt.payload.question,
        "response": response,
        "reward": rollout.reward,
        "detail": rollout.detail,
        "truncated": rollout.truncated,
        "segments": [[segment.version, len(segment)] for segment in rollout.segments],
        "segment_ends": [*_inner_ends(rollout, tokenizer), len(response)],
    }


def _inner_ends(rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Where each segment but the last ends in the response, in characters."""
    return [len(tokenizer.decode(rollout.tokens[:end])) for end in accumulate(map(len, rollout.segments[:-1]))]
