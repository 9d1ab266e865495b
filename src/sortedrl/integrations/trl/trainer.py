"""`SortedGRPOTrainer`: TRL's GRPOTrainer, with the scheduler in charge of generation and batch composition.

Why a subclass. `rollout_func` gets one row per prompt of a batch that TRL has already fixed, so it cannot swap prompts,
and its log-probabilities reach the loss only with TRL's own vLLM. `AsyncGRPOTrainer` has a replaceable rollout worker,
but a different config, fewer losses and its own vLLM server, so a GRPOTrainer script would need more than two changed
lines. So GRPOTrainer is subclassed where it fills its generation batch:

    _prepare_inputs                     gets an update from the scheduler instead of the data loader, distributes it
                                        over the optimizer steps and splits each step into micro-batches by length
    _generate_single_turn               returns that update's tokens and log-probabilities (in evaluation: samples)
    _calculate_rewards                  TRL's, on the whole update; rewards go to the event log. With `filter_groups`
                                        each group was scored when it was complete, and this returns the rewards
    _generate_and_score_completions     TRL's; then `old_per_token_logps` are set to the engine's log-probabilities
    _compute_loss                       TRL's; the engine's log-probabilities are also compared with TRL's
    _tool_call_loop                     only with tools: returns the turns, which ran beside generation (tools.py)

Everything else is TRL's: advantages, losses, KL, optimizer, logging, checkpoints, accelerate. The data loader still
counts the steps, but its rows are ignored. Each process runs its own scheduler and engine over its part of the prompts,
or rank 0 schedules for all and deals the rows of an update (`engine` is a function). TRL synchronizes gradients, so
processes meet at the optimizer step, as with GRPOTrainer. Sharded weights are gathered in `end_step`, by all ranks.

Invariants, checked at run time:
- at the end of the first step every method above has been called (`HookNeverFired`);
- a batch is published before the next is requested (`HookNeverFired`: the callback is missing);
- the prompts that TRL tokenized are those of the rollouts;
- on tokens of the current weights, engine and trainer agree on the log-probabilities (`EngineMismatch`).
"""

import inspect
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import trl
from accelerate.utils import gather
from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl.trainer.grpo_trainer import GRPOTrainer

from sortedrl.core.configuration import ConfigurationError, checked_fraction
from sortedrl.core.engine import Engine, Sampling
from sortedrl.core.schedule import Schedule
from sortedrl.core.user_values import reason_of
from sortedrl.integrations.trl import fields
from sortedrl.integrations.trl.engine import (
    MakeEngine,
    TrainerEngine,
    checked_mismatch,
    engine_spec,
    exhaust,
    is_function,
    longest_context,
)
from sortedrl.integrations.trl.environments import TrlEnvironments
from sortedrl.integrations.trl.group_rewards import rewards_of_update, total_rewards
from sortedrl.integrations.trl.rows import (
    Row,
    filled_up,
    first_turn,
    loss_mask,
    micro_batches,
    prompt_of,
    rows_by_rank,
    rows_in_groups,
    rows_needed,
    token_staleness,
    token_weights,
    weight_means,
)
from sortedrl.integrations.trl.run import (
    DatasetPrompts,
    FollowedRun,
    Ranks,
    ScheduledRun,
    columns_in_use,
    read_state,
    state_name,
    write_state,
)
from sortedrl.integrations.trl.tools import ToolUse


class HookNeverFired(RuntimeError):
    """TRL did not call a hook of the scheduler, so its batches did not come from the scheduler."""


_Host: Any = GRPOTrainer  # TRL lacks the type hints for type checking


class SortedGRPOTrainer(_Host):  # type: ignore[misc]
    """GRPOTrainer's arguments, and:

    schedule      a mode's name, or a `Schedule` whose sizes agree with the GRPOConfig
    engine        "embedded" (in this process, shares the trainer's weights), "vllm" (in this process, with a copy of
                  the weights), or any `core.engine.Engine`: each process has its own. Or a function without arguments
                  that makes an engine, such as a pool of servers: called on rank 0, which generates for all processes
    slots         responses that the engine decodes at once (vLLM max_num_seqs, SGLang max_running_requests); default:
                  the rollouts per update of this process
    reuse_kv_cache
                  of engine="vllm": keep the KV cache across weight updates (stale KV)
    off_policy_correction
                  "ppo_clip": the loss clips the ratio against the sampling policy. "decoupled": against the weights
                  before the update, weighted according to TRL's `vllm_importance_sampling_*` fields
    tool_threads  how many tools that are plain functions run at once; 0: in this thread, without a time limit
    tool_limit_seconds
                  a tool that takes longer is abandoned, and the result of the call is an error
    max_rejected_fraction
                  the run stops if more of the last four updates' worth of rollouts were rejected
    """

    def __init__(
        self,
        *positional: Any,
        schedule: Schedule | str = "partial+elevator",
        engine: str | Engine | MakeEngine = "embedded",
        slots: int | None = None,
        reuse_kv_cache: bool = False,
        off_policy_correction: str = "ppo_clip",
        tool_threads: int = 32,
        tool_limit_seconds: float = 60.0,
        max_rejected_fraction: float = 0.5,
        **named: Any,
    ) -> None:
        given = inspect.signature(_Host.__init__).bind(self, *positional, **named).arguments
        fields.check_arguments(given)
        fields.check_parts(schedule, engine, slots, reuse_kv_cache)
        max_rejected_fraction = checked_fraction("max_rejected_fraction", max_rejected_fraction)
        if given.get("args") is not None:
            fields.check_fields(given["args"], off_policy_correction=off_policy_correction, engine=engine)
        super().__init__(*positional, **named)
        fields.check_fields(self.args, off_policy_correction=off_policy_correction, engine=engine)
        fields.check_model(self, engine)
        self._ranks = Ranks(self.accelerator.process_index, self.accelerator.num_processes)
        self._is_shared = is_function(engine) and self._ranks.size > 1  # rank 0 generates for all
        self.schedule = fields.schedule_for(self.args, schedule, self._ranks.rank, is_shared=self._is_shared)
        fields.check_filter(self, self.schedule)
        own, known = self.schedule.max_context_tokens, longest_context(engine, self)
        self.schedule = replace(self.schedule, max_context_tokens=min(own or known, known))
        self.slots = self.schedule.rollouts_per_update if slots is None else slots
        self.tool_use: ToolUse | None = None
        if self.tools or self.environment_factories is not None:
            if self._is_shared:
                why = "with tools or environments every rank needs its own: their results do not reach other ranks"
                fix = "Pass engine='vllm', or an engine object with a URL for each rank."
                raise ConfigurationError("engine", "a function", why, fix)
            self.schedule = fields.with_tools(self.schedule, tool_threads, tool_limit_seconds)
            self.tool_use = ToolUse(self, self.schedule, threads=tool_threads, limit_seconds=tool_limit_seconds)
        self.sampling = Sampling(temperature=self.temperature)
        spec = engine_spec(engine, self, reuse_kv_cache) if isinstance(engine, str) else None
        is_here = self._ranks.rank == 0 or not self._is_shared
        self._engine = TrainerEngine(engine, self, spec, is_here=is_here)
        self.max_rejected_fraction = max_rejected_fraction
        # TRL enables the correction of decoupled PPO in its vLLM mode; its generation is replaced anyway.
        self._decoupled = off_policy_correction == "decoupled"
        self.use_vllm = self._decoupled
        self._run: ScheduledRun | FollowedRun | None = None
        self._resume_from: Path | None = None
        self._buffered_inputs: list[dict[str, Tensor]] | None = None  # TRL's own name: micro-batches of the update
        self._rows: list[Row] = []
        self._scheduled_rows: list[Row] = []  # of the scheduler of this process
        self._loss_inputs: dict[str, Tensor] | None = None
        self._fired: set[str] = set()
        self.add_callback(_StepWatcher(self))

    # Start and end of a run

    def train(self, *positional: Any, **named: Any) -> Any:
        fields.check_rows(self.args, len(self.train_dataset))
        try:
            trained = super().train(*positional, **named)
        except BaseException as error:
            try:
                self._end_run()
            except Exception as later:  # such as of an engine that is gone: the first error says why
                error.add_note(f"The end of the run failed, too: {reason_of(later)}")
            raise
        self._end_run()
        return trained

    def _end_run(self) -> None:
        run, self._run = self._run, None
        self._resume_from = self._buffered_inputs = None
        if run is not None:
            run.end()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        self._resume_from = None if checkpoint is None else Path(checkpoint)

    def begin_run(self) -> None:
        """Called when TRL has determined the number of steps and loaded the weights of a checkpoint."""
        self._step = 0
        self._fired.clear()
        rank = self._ranks.rank if self._engine.is_here else 0
        saved = None if self._resume_from is None else read_state(self._resume_from, rank, self._ranks.size)
        self._engine.update_weights(0 if saved is None else saved["controller"]["version"])
        if not self._engine.is_here:
            self._run = FollowedRun()
            return
        self._run = ScheduledRun(
            self,
            self._engine.ready(),
            self.prompts(),
            updates=-(-self.state.max_steps // fields.optimizer_steps_per_update(self.args)),
            log_path=Path(self.args.output_dir) / (f"events-{rank}.jsonl" if rank else "events.jsonl"),
            environments=None if self.tool_use is None else TrlEnvironments(self.tool_use),
            saved=saved,
        )

    def prompts(self) -> DatasetPrompts:
        """Of this process: all rows of the dataset if it schedules for all, else `rank`, `rank + processes`, ..."""
        first, step = (0, 1) if self._is_shared else (self._ranks.rank, self._ranks.size)
        rows = range(first, len(self.train_dataset), step)
        return DatasetPrompts(self.train_dataset, rows, self.args, self._prompt_tokens, self.schedule)

    def _prompt_tokens(self, row: int) -> Sequence[int]:
        messages = prompt_of(self.example(row))
        if self.tool_use is not None:
            messages = self.tool_use.with_observation(row, messages)
        tokens, *_ = self._tokenize_prompts([messages])
        return list(tokens[0])

    @property
    def run(self) -> ScheduledRun | FollowedRun:
        if self._run is None:
            raise self._never_fired(["on_train_begin"])
        return self._run

    def end_step(self) -> None:
        """Called after an optimizer step. At the end of an update, publish the weights."""
        self._require_fired(*(name for name in fields.HOOKS if self.tools or name != "_tool_call_loop"))
        if self._step % (self.args.steps_per_generation * self.num_iterations) == 0:
            self._publish()
            self._log_metrics()

    def _publish(self) -> None:
        """The only place where weights are gathered in training: all ranks do it together."""
        began, at_once, weights = time.perf_counter(), self._engine.is_sharded, self._engine.weights()
        self.run.publish(weights, at_once=at_once)
        if at_once:
            exhaust(weights)
            self._metrics["train"]["sortedrl/weight_update_seconds"] = [time.perf_counter() - began]

    def _require_fired(self, *hooks: str) -> None:
        silent = [name for name in hooks if name not in self._fired]
        if silent:
            raise self._never_fired(silent)

    def _never_fired(self, silent: Sequence[str]) -> HookNeverFired:
        return HookNeverFired(
            f"TRL {trl.__version__} never called {', '.join(silent)}, so the scheduler has no effect; "
            f"verified versions: {', '.join(fields.VERIFIED_VERSIONS)}"
        )

    # An update

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        if not self.model.training:
            return super()._prepare_inputs(generation_batch)
        self._fired.add("_prepare_inputs")
        steps = self.args.steps_per_generation
        if self._step % (steps * self.num_iterations) == 0 or self._buffered_inputs is None:
            if self.run.has_batch_in_hand:
                raise self._never_fired(["on_step_end"])
            scored = self._generate_and_score_completions(self._next_update())
            optimizer_steps = steps // self.args.gradient_accumulation_steps
            parts = micro_batches(scored, steps, optimizer_steps=optimizer_steps, trim=self.pad_to_multiple_of is None)
            tokens = gather(torch.stack([loss_mask(part).sum() for part in parts])).view(-1, steps).sum(dim=0)
            weights = token_weights(tokens, optimizer_steps)
            self._buffered_inputs = [part | {"token_weight": weights[i]} for i, part in enumerate(parts)]
        self._engine.sleep_until_update()  # an evaluation within an update has woken it
        return self._buffered_inputs[self._step % steps]

    def _next_update(self) -> list[dict[str, Any]]:
        """The dataset rows of the next update, one per rollout; sets `_rows` to the rollouts."""
        run, rows, steps = self.run, list[Row](), self.args.steps_per_generation
        if isinstance(run, ScheduledRun):
            rows = rows_in_groups(run.next_batch(), self.num_generations)
        self.model.train()  # the engine switches dropout off in the shared module
        self._engine.sleep_until_update()  # an evaluation, too, begins with a weight update
        if self._is_shared:
            parts = rows_by_rank(rows, self._ranks.size, self.num_generations, steps) if rows else None
            self._rows, version = self._ranks.scatter(parts and [(part, run.version) for part in parts])
            self._scheduled_rows = [row for part in parts or () for row in part]
            if isinstance(run, FollowedRun):
                run.version = version
        else:
            most = int(gather(torch.tensor([len(rows)], device=self.accelerator.device)).max())
            self._rows = self._scheduled_rows = filled_up(rows, rows_needed(most, self.num_generations, steps))
        if self.tool_use is not None and isinstance(run, ScheduledRun):
            self.tool_use.take(self._rows, run.controller.live)
        return [self.example(row.rollout.prompt.payload) for row in self._rows]

    def example(self, row: int) -> dict[str, Any]:
        """A row of the training data, with the columns that TRL would pass on."""
        return columns_in_use(dict(self.train_dataset[row]), self.args)

    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, multimodal_fields: Any, num_generations: int, *more: Any, **named: Any
    ) -> tuple[list[list[int]], list[list[float]]]:
        if not self.model.training:
            return self._evaluated(prompt_ids)
        self._fired.add("_generate_single_turn")
        rollouts = [row.rollout for row in self._rows]
        if [list(ids) for ids in prompt_ids] != [list(rollout.prompt.tokens) for rollout in rollouts]:
            raise HookNeverFired(f"TRL {trl.__version__} requests other prompts than those of the scheduler's update")
        turns = [first_turn(rollout) for rollout in rollouts]  # `_tool_call_loop` adds the others
        return [tokens for tokens, _ in turns], [logprobs for _, logprobs in turns]

    def _evaluated(self, prompt_ids: Any) -> tuple[list[list[int]], list[list[float]]]:
        run, step = self._run or FollowedRun(), self.state.global_step
        run.mark_phase("evaluation")
        self._engine.update_weights(run.version)
        if self._is_shared:
            made = self._ranks.on_rank_0(lambda all_ids: self._engine.sampled(all_ids, step), list(prompt_ids))
        else:
            made = self._engine.sampled(prompt_ids, step)
        run.mark_phase("learner")
        return [tokens for tokens, _ in made], [logprobs for _, logprobs in made]

    def _tool_call_loop(self, *positional: Any, **named: Any) -> Any:
        assert self.tool_use is not None
        if self.model.training:
            self._fired.add("_tool_call_loop")
            return self.tool_use.loop_result(self._rows)
        self.use_vllm = False  # else TRL looks for its own vLLM
        try:
            return super()._tool_call_loop(*positional, **named)
        finally:
            self.use_vllm = self._decoupled

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        if not self.model.training:
            rewards: Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
            return rewards
        self._fired.add("_calculate_rewards")
        self.run.mark_phase("scores")
        if self.schedule.filter_groups is not None:
            rewards = rewards_of_update(self, self._rows)
        else:
            if self.tool_use is not None:
                self.environments = self.tool_use.instances(self._rows)
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self.tool_use is not None:
            self.tool_use.release()
        trains = gather(torch.tensor([row.trains for row in self._rows], device=rewards.device))
        rewards[~trains] = torch.nan  # TRL leaves a row without a reward out of its group's statistics
        total = total_rewards(rewards, self.reward_weights)
        first = 0 if self._is_shared else self._ranks.rank * len(self._rows)
        ours = zip(self._scheduled_rows, total[first:].tolist(), strict=False)
        self.run.score({row.rollout.id: reward for row, reward in ours if row.trains})
        self.run.mark_phase("learner")
        return rewards

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        self._fired.add("_generate_and_score_completions")
        self._require_fired("_prepare_inputs")
        with nullcontext() if self.tool_use is None else self.tool_use.nothing_to_reset(self._rows):
            scored = super()._generate_and_score_completions(inputs)
        self._require_fired("_generate_single_turn", "_calculate_rewards")
        device = self.accelerator.device
        trains = torch.tensor([row.trains for row in self._rows], device=device)
        scored["completion_mask"] = scored["completion_mask"] * trains[:, None]
        scored["num_items_in_batch"] = gather(loss_mask(scored).sum()).sum()
        rollouts = [row.rollout for row in self._rows]
        width = scored["completion_ids"].shape[1]
        scored["staleness"] = token_staleness(rollouts, self.run.version, width).to(device)
        if not self._decoupled:
            scored["old_per_token_logps"] = scored["sampling_per_token_logps"]
        return scored

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        if not self.model.training:
            return super()._compute_loss(model, inputs)
        self._fired.add("_compute_loss")
        weights_are_new = self._step % (self.args.steps_per_generation * self.num_iterations) < (
            self.args.gradient_accumulation_steps
        )
        self._loss_inputs = inputs if weights_are_new else None
        try:
            loss = super()._compute_loss(model, inputs)
        finally:
            self._loss_inputs = None
        is_per_sequence = self.importance_sampling_level == "sequence"
        weight_means(self._metrics["train"], inputs["token_weight"].item(), has_ratio_per_sequence=is_per_sequence)
        return loss

    def _get_per_token_logps_and_entropies(self, *positional: Any, **named: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*positional, **named)
        mismatch = None if self._loss_inputs is None else checked_mismatch(found[0].detach(), self._loss_inputs)
        if mismatch is not None:
            self._metrics["train"]["sortedrl/mismatch"].append(mismatch)
        return found

    def _log_metrics(self) -> None:
        if self.run.metrics is None:
            return
        now = self.run.metrics.snapshot()
        for name in fields.LOGGED_METRICS:
            self._metrics["train"][f"sortedrl/{name}"] = [float(getattr(now, name))]
        if self.schedule.filter_groups is not None:  # TRL's mean lacks the filtered groups
            self._metrics["train"]["sortedrl/reward_mean"] = [self.run.reward_mean]

    # Checkpoints

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        run = self.run
        run.mark_phase("checkpoint")
        super()._save_checkpoint(model, trial)
        if run.has_batch_in_hand or isinstance(run, FollowedRun):  # saved by a callback in the middle of an update
            return
        folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        write_state(folder / state_name(self._ranks.rank), run.state() | {"processes": self._ranks.size})


class _StepWatcher(TrainerCallback):  # type: ignore[misc]
    """Forwards events that TRL reports only to callbacks: the start of a run, and each optimizer step."""

    def __init__(self, trainer: SortedGRPOTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self._trainer.begin_run()

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self._trainer.end_step()
