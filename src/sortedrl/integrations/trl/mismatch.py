"""The comparison of the engine's log-probabilities with the trainer's."""

from __future__ import annotations

from torch import Tensor

from sortedrl.integrations.trl.rows import loss_mask

MISMATCH_LIMIT = 0.5  # mean nats per token; rounding gives 1e-5 in float32 and 1e-2 in bfloat16, wrong weights give 5


class EngineMismatch(RuntimeError):
    """The engine and the trainer disagree on log-probabilities."""


def mismatch_of(logps: Tensor, inputs: dict[str, Tensor]) -> float | None:
    """Mean nats per token, only on tokens of the current weights: on stale tokens the two differ legitimately. None if
    there are none."""
    fresh = loss_mask(inputs).bool() & (inputs["staleness"] == 0)
    if not bool(fresh.any()):
        return None
    return (logps - inputs["sampling_per_token_logps"])[fresh].abs().mean().item()


def check_mismatch(mismatch: float) -> None:
    if not mismatch < MISMATCH_LIMIT:
        raise EngineMismatch(
            f"on tokens of the current weights, engine and trainer differ by {mismatch:.2f} nats per token (limit "
            f"{MISMATCH_LIMIT}): the engine does not hold the trainer's weights, or the trainer's dropout is on "
            "(then set disable_dropout=True)"
        )
