"""The mode with GPUs of their own for the servers: `actor_rollout_ref.hybrid_engine=False`.

verl's own `separate_async` trainer is not the base: it forces the batch size by the mini-batch size, and in 0.9.1 it
ends with an error at the default log level. The servers take `rollout.nnodes` x `rollout.n_gpus_per_node` GPUs, and the
weights reach them through one of verl's checkpoint engines (nccl and others). That update aborts all requests and frees
the KV cache, so resumed rollouts are prefilled again.
"""

from __future__ import annotations

from verl.checkpoint_engine import CheckpointEngineManager
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.llm_server import LLMServerManager

from sortedrl.integrations.verl.trainer import PPOTrainerSortedRL


class PPOTrainerSeparate(PPOTrainerSortedRL):
    _enable_hybrid_replicas = False  # verl reads it: no servers on the training GPUs

    def _setup(self) -> None:
        """verl makes a manager without servers and one that syncs to none. Ours take their place."""
        super()._setup()
        self.llm_server_manager = LLMServerManager.create(config=self.config, start_rank=0)
        self.checkpoint_manager = CheckpointEngineManager(
            config=omega_conf_to_dataclass(self.config.actor_rollout_ref.rollout.checkpoint_engine),
            actor_wg=self.actor_rollout_wg,
            replicas=self.llm_server_manager.get_replicas(),
        )

    def _free_memory_for_training(self) -> None:
        """Nothing: the servers keep theirs."""

    def _get_n_gpus_for_throughput(self) -> int:
        rollout = self.config.actor_rollout_ref.rollout
        return int(self.resource_pool_manager.get_n_gpus()) + int(rollout.nnodes) * int(rollout.n_gpus_per_node)
