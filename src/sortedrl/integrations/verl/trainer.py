"""The trainer mode `sortedrl`: verl's V1 PPO trainer, whose batches come from the scheduler.

One step of verl is one update:

    prepare_step      nothing: the scheduler submits
    sample            the next batch of `core.Controller`, as keys of the TransferQueue
    on_sample_end     servers rest and give their memory to the training engine (on GPUs of their own: nothing)
    (verl)            old log-probabilities, reference, values, advantages, critic, actor
    on_step_end       version + 1; weights to the servers; they wake

Scheduler and engine belong to the pump's thread, which generates during the rest of the step with `overlap`.
verl's `global_steps` and the scheduler's version are the same number, always: both count weight publications.
"""

import json
import logging
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import transfer_queue
from omegaconf import open_dict
from transfer_queue import KVBatchMeta
from verl.checkpoint_engine import CheckpointEngineManager
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils import tensordict_utils
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.debug import marked_timer
from verl.workers.rollout.llm_server import LLMServerManager

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.controller import CARRY_ON_SECONDS, Batch, Controller
from sortedrl.core.engine import Request
from sortedrl.core.events import Event, EventLog, Filtered
from sortedrl.core.prompts import Prompts
from sortedrl.core.rejections import RejectionWatch, TooManyRejected
from sortedrl.core.wording import counted
from sortedrl.integrations.verl.agent import DatasetPrompts, rows_with_tickets
from sortedrl.integrations.verl.client import SortedClient
from sortedrl.integrations.verl.engine import VerlEngine
from sortedrl.integrations.verl.exchange import open_exchange
from sortedrl.integrations.verl.pump import Pump
from sortedrl.integrations.verl.settings import Settings, keeps_unequal, settings_of, slots_of
from sortedrl.integrations.verl.weight_check import MOST_OTHERS, Fresh, OtherRollouts, check_weights, fresh_responses
from sortedrl.integrations.verl.worker_loop import Ticket
from sortedrl.log.atomic_write import write_atomically
from sortedrl.log.recorder import Recorder
from sortedrl.observe.metrics import Metrics
from sortedrl.observe.run_metrics import Snapshot

PARTITION = "train"
STATE_FILE = "sortedrl.json"
SHOWN = (
    *("bubble", "bubble_now", "idle", "goodput", "waste", "rejected", "filtered_fraction"),
    *("staleness_mean", "staleness_max"),
)
_logger = logging.getLogger(__name__)
_MANAGER = "sortedrl.integrations.verl.agent.SortedAgentLoopManager"


class SchedulerBatches(ReplayBufferAsync):  # type: ignore[misc]
    """The trainer asks its replay buffer for a batch: in training it gets the scheduler's next one."""

    next_batch: Any = None

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        if partition_id != PARTITION:
            found: tuple[KVBatchMeta, dict[str, Any]] = super().sample(global_steps, partition_id, batch_size)
            return found
        return self.next_batch(), {}


class PPOTrainerSortedRL(PPOTrainer):  # type: ignore[misc]
    def __init__(self, config: Any) -> None:
        try:
            self.sortedrl: Settings = settings_of(config)
        except ConfigurationError as error:  # one line, and one that Ray can carry to the driver
            raise ValueError(str(error)) from None
        with open_dict(config):  # verl makes the manager that this names, after the trainer
            config.actor_rollout_ref.rollout.agent.agent_loop_manager_class = _MANAGER
        super().__init__(config)
        self.exchange = open_exchange()
        self.metrics = Metrics()
        self._has_begun = False  # then there are an engine, a controller and their thread
        self._restored: dict[str, Any] | None = None
        self._fresh: list[Fresh] = []  # of the current batch
        self._other_rollouts = OtherRollouts(self._find_fresh, self._difference_of_copies)

    def _build_replay_buffer(self) -> ReplayBufferAsync:
        sampler = self.config.trainer.v1.sampler
        return SchedulerBatches(
            trainer_mode=self.trainer_mode,
            trainer_config=self.config.trainer.v1.get(self.trainer_mode, {}),
            max_off_policy_threshold=None,  # the schedule bounds staleness itself
            max_off_policy_strategy="wait",
            sampler_kwargs=sampler.sampler_kwargs,
        )

    def get_llm_client(self) -> SortedClient:
        client: SortedClient = self.llm_server_manager.get_client(client_cls=SortedClient, exchange=self.exchange)
        return client

    # The hooks, in the order in which verl calls them

    def on_init_end(self) -> None:
        self.checkpoint_manager.update_weights(self.global_steps)

    def on_train_begin(self) -> None:
        self.agent_loop_manager.wait_until_ready()
        self.engine = self._engine()
        self.controller = self._controller(self.engine)
        self._batches = iter(self.controller)
        overlap = self.sortedrl.schedule.overlap
        self.pump = Pump(self._generate if overlap else None, on_error=self.recorder.flush)  # Ray may end this process
        self.replay_buffer.next_batch = partial(self.pump.call, self._next_batch, then_generate=True)
        self._has_begun = True

    def prepare_step(self) -> dict[str, Any]:
        return {}

    def on_sample_end(self) -> None:
        self.pump.call(self._free_memory_for_training)
        if self.curr_step_profile:
            self._stop_rollout_profiling()

    def on_step_end(self) -> None:
        with marked_timer("update_weights", self.timing_raw, color="red"):
            self.pump.call(self._publish_to_servers, then_generate=not self._is_last_step)

    def on_validate_begin(self) -> None:
        """Servers have the requests that they have, but get no others than those of the validation."""
        if self._has_begun:
            self.pump.call(partial(self.controller.mark_phase, "evaluation"), then_generate=False)

    def on_validate_end(self) -> None:
        if self._has_begun and self.sortedrl.schedule.overlap and not self._is_last_step:
            self.pump.call(partial(self.controller.mark_phase, "harvest"), then_generate=True)

    def _compute_metrics(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        super()._compute_metrics(batch, metrics, *args, **kwargs)
        snapshot = self.pump.call(self._snapshot)
        metrics.update({f"sortedrl/{name}": getattr(snapshot, name) for name in SHOWN})
        metrics["sortedrl/reward_mean"] = self._reward_mean  # with filtered groups, which verl's means lack

    def _snapshot(self) -> Snapshot:
        snapshot = self.metrics.snapshot()
        if self._is_last_step:
            self.controller.mark_phase("end")
        self.recorder.flush()
        return snapshot

    @property
    def _is_last_step(self) -> bool:
        return bool(self.global_steps >= self.total_training_steps)

    # Batches

    def _next_batch(self) -> KVBatchMeta:
        batch = self._scheduled_batch()
        keys_of = [(rollout, self.engine.loops[rollout.id].keys) for rollout in batch]
        keys = [key for _, found in keys_of for key in found]
        self._fresh = fresh_responses(keys_of, batch.version) if self.sortedrl.checks_weights else []
        tags = (transfer_queue.kv_list(PARTITION) or {}).get(PARTITION, {})
        rewards = [rollout.reward or 0.0 for rollout in batch] + [reward for _, reward in batch.filtered_rewards]
        self._reward_mean = fmean(rewards)
        self.engine.trained(batch)
        self.engine.forget_all_but(self.controller.live)
        return KVBatchMeta(partition_id=PARTITION, keys=keys, tags=[tags[key] for key in keys])

    def _scheduled_batch(self) -> Batch:
        self._extend_data()
        batch = next(self._batches, None)
        if batch is None:  # there are epochs to spare, so only rejected rollouts can be missing
            rejected = counted(self.metrics.run_metrics().rejected, "rollout")
            raise TooManyRejected(
                f"the data ended after {self.global_steps - 1} of {self.total_training_steps} updates. "
                f"Rejected: {rejected}, {self._rejections.most_frequent()}"
            )
        return batch

    def _generate(self) -> None:
        """With overlap, between two pieces of work for the pump."""
        self.controller.carry_on(until=self.engine.now() + CARRY_ON_SECONDS)

    def _extend_data(self) -> None:
        """Enough for the rest even if half of it is rejected: verl counts in steps, and ends the run by them."""
        updates = 1 + self.total_training_steps - self.global_steps
        prompts = 2 * self.sortedrl.schedule.prompts_for(updates) / self.controller.kept_fraction
        self._training_prompts.extend(math.ceil(prompts))

    def _drop_filtered(self, event: Event) -> None:
        """A sink: filtered trajectories leave the TransferQueue at once, and other prompts take their place."""
        if isinstance(event, Filtered):
            self.engine.drop(event.rollouts)
            self._extend_data()

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        """A batch is padded so that it splits into as many mini-batches as a batch of the configured size."""
        return self.sortedrl.minibatches * dp_size * int(self.config.actor_rollout_ref.rollout.n)

    def _balance_batch(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """verl's, which gives every rank its rows; then each rank's rows in the order in which they train."""
        batch = super()._balance_batch(batch, *args, **kwargs)
        lengths = [tag["seq_len"] for tag in batch.tags]
        batch.reorder(minibatch_order(lengths, self._ranks, self.sortedrl.minibatches))
        return batch

    @property
    def _ranks(self) -> int:
        """Data-parallel ones; known after verl's `_balance_batch`."""
        return int(max(self.actor_rollout_wg._dispatch_info["actor"])) + 1

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """verl's, which are the learner's log-probabilities; then the check that the servers have its weights."""
        batch = super()._compute_old_log_prob(batch, metrics)
        if self.sortedrl.checks_weights:
            difference = self._difference(self._fresh) if self._fresh else None
            if self.sortedrl.schedule.overlap:
                difference = self._other_rollouts.check(difference)
            if difference is not None:
                metrics["sortedrl/logprob_difference"] = difference
        return batch

    def _difference(self, fresh: Sequence[Fresh]) -> float | None:
        fields, keys = ["responses", "old_log_probs"], [response.key for response in fresh]
        found = transfer_queue.kv_batch_get(keys=keys, partition_id=PARTITION, select_fields=fields)
        tokens, logprobs = ([row.tolist() for row in found[name]] for name in fields)
        return check_weights(fresh, tokens, logprobs)

    def _find_fresh(self) -> list[Fresh]:
        """Copies of finished rollouts in the TransferQueue, as many as all ranks can share; the originals may go at any
        time."""

        def copied() -> list[Fresh]:
            live, version = self.controller.live, self.controller.version
            finished = [(live[id], loop.keys) for id, loop in self.engine.loops.items() if id in live and loop.keys]
            fresh = fresh_responses(finished, version, most=max(MOST_OTHERS, self._ranks))
            fresh = fresh[: len(fresh) - len(fresh) % self._ranks]
            return [response._replace(key=copy) for response, copy in zip(fresh, _copies(fresh), strict=True)]

        return self.pump.call(copied)

    def _difference_of_copies(self, fresh: list[Fresh]) -> float | None:
        keys = [response.key for response in fresh]
        tags = transfer_queue.kv_list(PARTITION)[PARTITION]
        batch = KVBatchMeta(partition_id=PARTITION, keys=keys, tags=[tags[key] for key in keys])
        try:
            super()._compute_old_log_prob(batch, {})
            return self._difference(fresh)
        finally:
            _clear(keys)

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        with self._minibatches_of(self.config.actor_rollout_ref.actor, batch):
            return super()._update_actor(batch, metrics)

    def _update_critic(self, batch: Any, metrics: dict[str, Any]) -> Any:
        with self._minibatches_of(self.config.critic, batch):
            return super()._update_critic(batch, metrics)

    @contextmanager
    def _minibatches_of(self, settings: Any, batch: Any) -> Iterator[None]:
        """Batches differ in size; the number of optimizer steps must not, or a few left over would make one alone."""
        usual = settings.ppo_mini_batch_size
        prompts = len(batch) // int(self.config.actor_rollout_ref.rollout.n)
        settings.ppo_mini_batch_size = prompts // self.sortedrl.minibatches
        try:
            yield
        finally:
            settings.ppo_mini_batch_size = usual

    # Weights

    def _publish_to_servers(self) -> None:
        """Once a step, for the rollouts and for a validation."""
        if self.controller.version < self.global_steps:  # else the checkpoint needed the new version
            self.controller.publish(self._sync)
        self.controller.update_engine()

    def _sync(self, version: int) -> None:
        """What `publish` hands to the engine as the weights: brings the learner's to the servers."""
        self._pending_sync_metrics = dict(self.checkpoint_manager.update_weights(version) or {})  # verl logs them
        self.engine.wake()

    def _free_memory_for_training(self) -> None:
        self.engine.sleep()
        self.checkpoint_manager.sleep_replicas()

    # Checkpoints: verl's, with the scheduler's state in the same folder

    def _save_checkpoint(self) -> None:
        self.pump.call(self._publish_and_save)

    def _publish_and_save(self) -> None:
        """The state has the version of the saved weights. With overlap, `publish` aborts what runs and updates the
        servers at once: the checkpoint is written in between, when no rollout is at a server."""
        if self.sortedrl.schedule.overlap:
            self.controller.publish(self._save_and_sync)
        else:
            self.controller.publish(self._sync)
            self._save()

    def _save_and_sync(self, version: int) -> None:
        self._save()
        self._sync(version)

    def _save(self) -> None:
        self.controller.mark_phase("checkpoint")
        self.engine.scores.wait_for_all(self.sortedrl.schedule.score_wait_seconds)
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
        folder.mkdir(parents=True, exist_ok=True)
        state = {"controller": self.recorder.state(), "engine": self.engine.state()}
        write_atomically(folder / STATE_FILE, json.dumps(state))
        super()._save_checkpoint()  # writes last which checkpoint is the newest

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if not self.global_steps:
            return
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
        if self.config.trainer.resume_mode == "resume_path":
            folder = Path(self.config.trainer.resume_from_path)
        try:
            self._restored = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(
                f"{folder} has no {STATE_FILE}: this checkpoint was written in another trainer mode. Resume it in that "
                "mode, or start again with trainer.resume_mode=disable."
            ) from None
        except ValueError as error:
            fix = "Resume an earlier checkpoint with trainer.resume_mode=resume_path"
            raise ValueError(f"{folder / STATE_FILE} is damaged ({error}). {fix}.") from None

    # Parts

    def _engine(self) -> VerlEngine:
        rollout = self.config.actor_rollout_ref.rollout
        engine = VerlEngine(
            self.exchange,
            self.checkpoint_manager,
            self.agent_loop_manager,
            slots=slots_of(self.sortedrl, int(rollout.max_num_seqs) * len(self.llm_server_manager.get_replicas())),
            send=self._send,
            clear=_clear,
            max_start_seconds=self.sortedrl.schedule.max_environment_seconds,
        )
        if self._restored is not None:
            engine.restore(self._restored["engine"], self._restored["controller"]["version"])
        return engine

    def _controller(self, engine: VerlEngine) -> Controller:
        schedule = self.sortedrl.schedule
        data = self.config.data
        arguments = dict(data.get("apply_chat_template_kwargs") or {})
        tokenizer = deepcopy(self.tokenizer)  # of the pump's thread: fast tokenizers are not thread-safe
        prompts = DatasetPrompts(self.train_dataset, tokenizer, arguments)
        self._training_prompts = Prompts(prompts, seed=schedule.seed, shuffle=bool(data.shuffle))
        log = EventLog(self.metrics)
        metric = self.sortedrl.filter_metric
        controller = Controller(
            engine,
            self._training_prompts,
            engine.scores,
            schedule,
            environments=engine.turns,
            filter_groups=None if metric is None else keeps_unequal(metric),
            log=log,
        )
        self.recorder = Recorder(
            controller,
            self.sortedrl.folder,
            saved=None if self._restored is None else self._restored["controller"],
            folds=log.sinks,
        )
        self._rejections = RejectionWatch(
            schedule.rollouts_needed, max_fraction=self.sortedrl.max_rejected_fraction, log=_logger.warning
        )
        log.sinks += [self._drop_filtered, self._rejections]  # last: the event is in the file before the run stops
        return controller

    def _send(self, requests: Sequence[tuple[Request, Ticket]]) -> None:
        rows = [self.train_dataset[int(request.prompt.id)] for request, _ in requests]
        batch = rows_with_tickets(rows, requests, self.sortedrl.schedule.rollouts_per_prompt)
        tensordict_utils.assign_non_tensor_data(batch, "global_steps", self.global_steps)
        self.agent_loop_manager.generate_sequences(batch)


class PPOTrainerSeparate(PPOTrainerSortedRL):
    """With GPUs of their own for the servers, `rollout.nnodes` x `rollout.n_gpus_per_node` (`hybrid_engine=False`).

    verl's own `separate_async` trainer is not the base: it forces the batch size by the mini-batch size, and in 0.9.1
    it ends with an error at the default log level. One of verl's checkpoint engines (nccl and others) brings weights to
    the servers. That aborts all requests and frees the KV cache, so resumed rollouts are prefilled again.
    """

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


def _clear(keys: Collection[str]) -> None:
    transfer_queue.kv_clear(keys=list(keys), partition_id=PARTITION)


def _copies(responses: Sequence[Fresh]) -> list[str]:
    """Their trajectories under other keys."""
    if not responses:
        return []
    keys = [response.key for response in responses]
    rows = transfer_queue.kv_batch_get(keys=keys, partition_id=PARTITION)
    tags = transfer_queue.kv_list(PARTITION)[PARTITION]
    copies = [f"check{key}" for key in keys]
    transfer_queue.kv_batch_put(keys=copies, partition_id=PARTITION, fields=rows, tags=[tags[key] for key in keys])
    return copies


def minibatch_order(lengths: Sequence[int], ranks: int, minibatches: int) -> list[int]:
    """The new order of an update's rows: every rank keeps its rows, distributed by length over its mini-batches.

    verl gives each data-parallel rank consecutive rows and splits them into mini-batches from front to back. Updates
    are sorted by length: in that order, the first optimizer step would see the short responses, the last the long ones.
    """
    per_rank = len(lengths) // ranks
    order: list[int] = []
    for first in range(0, len(lengths), per_rank):
        by_length = sorted(range(first, first + per_rank), key=lambda row: lengths[row])
        order += [row for start in range(minibatches) for row in by_length[start::minibatches]]
    return order
