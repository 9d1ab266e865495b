"""SortedRL in TRL: use `SortedGRPOTrainer` instead of `GRPOTrainer`.

    from sortedrl.integrations.trl import SortedGRPOTrainer

    trainer = SortedGRPOTrainer(model, reward_funcs, args, train_dataset, schedule="partial+elevator")
    trainer.train()

Files: `trainer` (the hooks that TRL calls), `fields` (fields of GRPOConfig: mapped or refused), `engine` (what
generates, and its weights), `run` (the scheduler's side, on one rank or several), `rows` (converts an update to TRL's
rows), `group_rewards` (dynamic sampling). For rollouts of several turns: `environments` (for the scheduler), `tools`
(the calls, and what the trainer needs of them).
"""

from sortedrl.core.configuration import ConfigurationError
from sortedrl.settings.install_hint import install_hint

try:
    import trl  # noqa: F401
except ModuleNotFoundError as missing:
    raise ConfigurationError("trl", None, f"{missing.name} is not installed", f"{install_hint('trl')}.") from None

from sortedrl.integrations.trl.fields import check_version

check_version()  # before the trainer class is created

from sortedrl.integrations.trl.engine import EngineMismatch  # noqa: E402
from sortedrl.integrations.trl.trainer import HookNeverFired, SortedGRPOTrainer  # noqa: E402

__all__ = ["EngineMismatch", "HookNeverFired", "SortedGRPOTrainer"]
