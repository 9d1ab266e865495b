"""What verl's trainer has when it begins to fit, without a trainer: real servers' control, workers and queue."""

from collections.abc import Callable, Collection, Sequence
from types import SimpleNamespace
from typing import Any

import ray
import transfer_queue
from verl.checkpoint_engine import CheckpointEngineManager
from verl.trainer.ppo.v1 import AgentLoopManagerTQ
from verl.utils import tensordict_utils
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.llm_server import LLMServerManager
from verl_config import compose

from sortedrl.core.engine import Request
from sortedrl.integrations.verl.agent import SortedAgentLoopManager, rows_with_tickets
from sortedrl.integrations.verl.client import SortedClient
from sortedrl.integrations.verl.engine import VerlEngine
from sortedrl.integrations.verl.exchange import open_exchange
from sortedrl.integrations.verl.worker_loop import Ticket

Row = dict[str, Any]  # fields of the dataset: agent_name, raw_prompt, ...


class DrivenEngine(VerlEngine):
    """Brings the version to the servers itself, as the trainer's weight sync does."""

    stack: "Stack"

    def update_weights(self, weights: Any, version: int) -> None:
        ray.get(self.stack.server.update_weights.remote({}, version))
        self.version = version
        super().update_weights(weights, version)


class Stack:
    def __init__(self, *more: str, row: Callable[[Request], Row], **changed: Any) -> None:
        ray.init(num_cpus=8, include_dashboard=False, configure_logging=False)
        self.config = compose("partial", *more, slots=16, workers=2, **changed)
        self.config.transfer_queue.enable = True
        transfer_queue.init(self.config.transfer_queue)
        no_training = SimpleNamespace(world_size=1, workers=[None])
        self.servers = LLMServerManager.create(config=self.config, worker_group=no_training)
        settings = omega_conf_to_dataclass(self.config.actor_rollout_ref.rollout.checkpoint_engine)
        self.control = CheckpointEngineManager(settings, actor_wg=None, replicas=self.servers.get_replicas())
        self.exchange = open_exchange()
        client = self.servers.get_client(client_cls=SortedClient, exchange=self.exchange)
        self.manager: AgentLoopManagerTQ = SortedAgentLoopManager.create(
            config=self.config, llm_client=client, teacher_client=None, reward_loop_worker_handles=None
        )
        self.manager.wait_until_ready()
        self.row = row
        self.made = 0
        self.sent: list[int] = []
        self.cleared: list[str] = []

    def close(self) -> None:
        transfer_queue.close()
        ray.shutdown()

    @property
    def server(self) -> Any:
        return self.servers.server_handles[0]

    def engine(self, slots: int, *, max_start_seconds: float = 300.0, version: int = 0) -> DrivenEngine:
        ray.get(self.exchange.collect.remote(0.0))
        ray.get(self.server.update_weights.remote({}, version))
        self.control.resume_generation_replicas()
        self.sent.clear()
        engine = DrivenEngine(
            self.exchange,
            self.control,
            self.manager,
            slots=slots,
            send=self.send,
            clear=self.clear,
            max_start_seconds=max_start_seconds,
        )
        engine.stack = self
        engine.restore({"count": self.made, "keys": {}, "rewards": {}}, version)  # dispatch numbers go on
        self.made += 1_000_000
        return engine

    def send(self, requests: Sequence[tuple[Request, Ticket]]) -> None:
        self.sent += [request.id for request, _ in requests]
        rows = [{"index": request.id, **self.row(request)} for request, _ in requests]
        batch = rows_with_tickets(rows, requests, group_size=1)
        tensordict_utils.assign_non_tensor_data(batch, "global_steps", 0)
        self.manager.generate_sequences(batch)

    def clear(self, keys: Collection[str]) -> None:
        self.cleared += keys

    def open_loops(self) -> int:
        """Agent loops in the workers that have not ended."""
        workers = self.manager.agent_loop_workers
        return sum(ray.get([worker.__ray_call__.remote(lambda self: len(self._loops)) for worker in workers]))
