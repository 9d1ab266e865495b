"""The supported releases of verl, checked by version and by every hook that the adapter uses."""

from __future__ import annotations

import importlib
import inspect

WORKS_WITH = "verl >= 0.9.1, < 0.10 (pip install 'verl==0.9.1' 'TransferQueue>=0.1.10')"
OLDEST, TOO_NEW = (0, 9, 1), (0, 10, 0)

# module, attribute path, parameters that it must take
HOOKS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("verl.trainer.ppo.v1.trainer_base", "register_trainer", ("name",)),
    ("verl.trainer.ppo.v1.trainer_base", "PPOTrainer._build_replay_buffer", ()),
    ("verl.trainer.ppo.v1.trainer_base", "PPOTrainer.get_llm_client", ()),
    ("verl.trainer.ppo.v1.trainer_base", "PPOTrainer.on_init_end", ()),
    ("verl.trainer.ppo.v1.trainer_base", "PPOTrainer.on_train_begin", ()),
    ("verl.trainer.ppo.v1.trainer_base", "PPOTrainer.prepare_step", ()),
    ("verl.trainer.ppo.v1.trainer_base", "PPOTrainer.on_sample_end", ()),
    ("verl.trainer.ppo.v1.trainer_base", "PPOTrainer.on_step_end", ()),
    ("verl.trainer.ppo.v1.trainer_base", "PPOTrainer.on_validate_begin", ()),
    ("verl.trainer.ppo.v1.trainer_base", "PPOTrainer._get_required_batch_multiple", ("dp_size",)),
    ("verl.trainer.ppo.v1.trainer_base", "PPOTrainer._balance_batch", ("batch",)),
    ("verl.trainer.ppo.v1.trainer_base", "PPOTrainer._update_actor", ("batch", "metrics")),
    ("verl.trainer.ppo.v1.trainer_base", "PPOTrainer._update_critic", ("batch", "metrics")),
    ("verl.trainer.ppo.v1.trainer_base", "PPOTrainer._compute_metrics", ("batch", "metrics", "timing_raw")),
    ("verl.trainer.ppo.v1.trainer_base", "PPOTrainer._save_checkpoint", ()),
    ("verl.trainer.ppo.v1.trainer_base", "PPOTrainer._load_checkpoint", ()),
    ("verl.trainer.ppo.v1.replay_buffer", "ReplayBufferAsync.sample", ("global_steps", "partition_id", "batch_size")),
    ("verl.trainer.ppo.v1.agent_loop_tq", "AgentLoopManagerTQ.generate_sequences", ("prompts",)),
    ("verl.trainer.ppo.v1.agent_loop_tq", "AgentLoopWorkerTQ", ()),
    ("verl.workers.rollout.llm_server", "LLMServerManager.get_client", ("client_cls",)),
    ("verl.workers.rollout.llm_server", "LLMServerClient.generate", ("request_id", "prompt_ids", "sampling_params")),
    ("verl.checkpoint_engine", "CheckpointEngineManager.abort_replicas", ("reject_request",)),
    ("verl.checkpoint_engine", "CheckpointEngineManager.resume_generation_replicas", ()),
    ("verl.checkpoint_engine", "CheckpointEngineManager.sleep_replicas", ()),
    ("verl.checkpoint_engine", "CheckpointEngineManager.update_weights", ("global_steps",)),
)


def why_unfit() -> str | None:
    """None if this verl is supported, otherwise one line with its version, what is missing, and what works."""
    import verl

    version = str(verl.__version__)
    if not OLDEST <= _numbers(version) < TOO_NEW:
        return f"trainer_mode=sortedrl does not support verl {version}. It works with {WORKS_WITH}."
    missing = [f"{module}.{path}" for module, path, parameters in HOOKS if not _has(module, path, parameters)]
    if missing:
        return (
            f"trainer_mode=sortedrl does not support this verl {version}: it lacks {', '.join(missing)}. "
            f"It works with {WORKS_WITH}."
        )
    return None


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split("+")[0].split(".")[:3]
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in parts)


def _has(module: str, path: str, parameters: tuple[str, ...]) -> bool:
    try:
        found = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
        return not parameters or set(parameters) <= set(inspect.signature(found).parameters)  # type: ignore[arg-type]
    except (ImportError, AttributeError):
        return False
