"""The scheduler inside TRL: `SortedGRPOTrainer` in the place of `GRPOTrainer`.

    from sortedrl.integrations.trl import SortedGRPOTrainer

    trainer = SortedGRPOTrainer(model, reward_funcs, args, train_dataset, schedule="partial+elevator")
    trainer.train()

Files: `trainer` (what TRL calls), `fields` (GRPOConfig's fields: mapped or refused), `run` (the scheduler's side: it
knows nothing of TRL), `rows` (an update as the rows that TRL wants).
"""

from __future__ import annotations

from sortedrl.core.schedule import ConfigurationError

try:
    import trl  # noqa: F401
except ModuleNotFoundError as missing:
    raise ConfigurationError(
        "trl", None, f"{missing.name} is not installed", "pip install 'sortedrl[trl]'"
    ) from None  # fmt: skip

from sortedrl.integrations.trl.fields import check_version

check_version()  # before the trainer: a class that does not fit is not even built

from sortedrl.integrations.trl.trainer import EngineMismatch, HookNeverFired, SortedGRPOTrainer  # noqa: E402

__all__ = ["EngineMismatch", "HookNeverFired", "SortedGRPOTrainer"]
