"""The entry point of group `verl.plugins`: registers the trainer mode `sortedrl` when verl is imported.

verl loads its plugins in every process and hides their errors. So this module must be fast and must not fail: it waits
until verl's own trainers are imported. When the mode is used, it checks the release of verl, by version and by every
hook that the adapter uses, and only then imports the other modules.
"""

import importlib
import inspect
import logging
from types import ModuleType

from packaging.version import Version

from sortedrl.settings.install_hint import install_hint

MODE = "sortedrl"
TRAINERS = "verl.trainer.ppo.v1"
WORKS_WITH = "verl >= 0.9.1, < 0.10 (pip install 'verl==0.9.1' 'TransferQueue>=0.1.10')"
OLDEST, TOO_NEW = (0, 9, 1), (0, 10)
# By module: attribute path, parameters that it must take.
HOOKS: dict[str, tuple[str, ...]] = {
    f"{TRAINERS}.trainer_base": (
        "register_trainer name",
        *("PPOTrainer.on_init_end", "PPOTrainer.on_train_begin", "PPOTrainer.on_sample_end", "PPOTrainer.on_step_end"),
        *("PPOTrainer.on_validate_begin", "PPOTrainer.on_validate_end", "PPOTrainer.prepare_step"),
        *("PPOTrainer._setup", "PPOTrainer._build_replay_buffer", "PPOTrainer.get_llm_client"),
        *("PPOTrainer._save_checkpoint", "PPOTrainer._load_checkpoint"),
        *("PPOTrainer._consume_sync_metrics", "PPOTrainer._get_n_gpus_for_throughput"),
        "PPOTrainer._get_required_batch_multiple dp_size",
        "PPOTrainer._balance_batch batch",
        "PPOTrainer._compute_old_log_prob batch metrics",
        "PPOTrainer._update_actor batch metrics",
        "PPOTrainer._update_critic batch metrics",
        "PPOTrainer._compute_metrics batch metrics timing_raw",
    ),
    f"{TRAINERS}.replay_buffer": ("ReplayBufferAsync.sample global_steps partition_id batch_size",),
    f"{TRAINERS}.agent_loop_tq": ("AgentLoopManagerTQ.generate_sequences prompts", "AgentLoopWorkerTQ"),
    "verl.workers.rollout.llm_server": (
        "LLMServerManager.create",
        "LLMServerManager.get_client client_cls",
        "LLMServerManager.get_replicas",
        "LLMServerClient.generate request_id prompt_ids sampling_params",
    ),
    "verl.checkpoint_engine": (
        "CheckpointEngineManager config actor_wg replicas",
        "CheckpointEngineManager.abort_replicas reject_request",
        "CheckpointEngineManager.resume_generation_replicas",
        "CheckpointEngineManager.sleep_replicas",
        "CheckpointEngineManager.update_weights global_steps",
    ),
}


def register(trainers: ModuleType) -> None:
    """Add the mode to verl's registry of V1 trainers."""
    trainers.register_trainer(MODE)(type("SortedRL", (trainers.PPOTrainer,), {"__new__": _make_trainer}))


def _make_trainer(cls: type, config: object) -> object:
    reason = why_unfit()
    if reason is not None:
        raise RuntimeError(reason)
    from sortedrl.integrations.verl.settings import has_own_gpus
    from sortedrl.integrations.verl.trainer import PPOTrainerSeparate, PPOTrainerSortedRL

    return (PPOTrainerSeparate if has_own_gpus(config) else PPOTrainerSortedRL)(config)


def why_unfit() -> str | None:
    """None if this verl is supported, otherwise one line with its version, what is missing, and what works."""
    import verl

    version = str(verl.__version__)
    if not OLDEST <= Version(version).release < TOO_NEW:
        return f"trainer_mode=sortedrl does not support verl {version}. It works with {WORKS_WITH}."
    missing = [
        f"{module}.{hook.split()[0]}" for module, hooks in HOOKS.items() for hook in hooks if not _has(module, hook)
    ]
    if not missing:
        return None
    lacks = f"it lacks {', '.join(missing)}"
    return f"trainer_mode=sortedrl does not support this verl {version}: {lacks}. It works with {WORKS_WITH}."


def _has(module: str, hook: str) -> bool:
    path, *parameters = hook.split()
    try:
        found = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
        return not parameters or set(parameters) <= set(inspect.signature(found).parameters)  # type: ignore[arg-type]
    except (ImportError, AttributeError):
        return False


try:
    import wrapt
except ImportError as error:
    hint = install_hint("verl")
    logging.getLogger(__name__).error("the trainer mode %s is not registered: %s. %s", MODE, error, hint)
else:
    wrapt.register_post_import_hook(register, TRAINERS)
