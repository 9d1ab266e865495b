"""Tasks whose environments another library plays (integrations/verifiers): it makes their prompts, observations and
rewards, in processes of its own."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol, runtime_checkable

from sortedrl.core.environment import Environments
from sortedrl.core.scoring import Scorer
from sortedrl.tasks.task import Problem


class ServedEnvironments(Protocol):
    """The processes of a run."""

    def wait_until_ready(self) -> None:
        """Wait until an episode can start. Raises WorkerError (workers.py)."""

    def source(self) -> tuple[Scorer, Environments]:
        """For training, then for evaluation: they share nothing. The scorer gets rollouts that a limit ended."""

    def close(self) -> None: ...


@runtime_checkable
class ServedTask(Protocol):
    name: str

    def train(self) -> Sequence[Problem]: ...

    def held_out(self) -> Sequence[Problem]: ...

    def prompt(self, problem: Problem, tokenizer: Any) -> Sequence[int]:
        """The tokens that an episode of this problem starts with."""

    def serve(
        self, tokenizer: Any, *, eos_token_ids: Collection[int], workers: int, limit_seconds: float
    ) -> ServedEnvironments:
        """Start to play, without waiting. `eos_token_ids` end a turn. `limit_seconds`: for one turn."""
