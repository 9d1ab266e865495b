"""The agent loop side: verl's dataset as prompts and as rows, its manager and its workers, extended with tickets.

A `Ticket` travels with a row of the dataset from the scheduler to an agent loop worker. The worker keeps it in a
context variable during the agent loop, so that the client can find it, although the code in between does not pass it
on. Without a ticket (validation), both behave like verl's own.
"""

import asyncio
from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy
import ray
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.utils import tensordict_utils
from verl.utils.dataset.rl_dataset import collate_fn

from sortedrl.core.engine import Request
from sortedrl.core.rollout import Prompt
from sortedrl.integrations.verl.engine import WORKER_SECONDS
from sortedrl.integrations.verl.exchange import LoopEnded, LoopFailed, LoopScored, TurnAborted, reason_for_report
from sortedrl.integrations.verl.settings import metric_of, value_of
from sortedrl.integrations.verl.worker_loop import WORKER_LOOP, RolloutAborted, Ticket, WorkerLoop

TICKET = "sortedrl_ticket"  # the field of a row
SINGLE_TURN = "single_turn_agent"  # verl's name of its loop that calls `generate` once

# The plain class underneath verl's Ray actor class, which Ray does not allow to be subclassed.
_PlainWorker: Any = AgentLoopWorkerTQ.__ray_metadata__.modified_class.__ray_actor_class__


class SortedAgentLoopWorker(_PlainWorker):  # type: ignore[misc]
    """Runs one agent loop per row with a ticket, and reports how it ends."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Ray sends inherited methods by value, and verl's constructor would then not find its own class.
        super().__init__(*args, **kwargs)
        self._loops: dict[int, asyncio.Task[Any]] = {}  # by dispatch
        self._metric = metric_of(self.config)

    async def stop_loops(self, dispatches: Sequence[int]) -> None:
        """Cancel those of these agent loops that run here, wherever they wait."""
        for dispatch in dispatches:
            if dispatch in self._loops:
                self._loops[dispatch].cancel()

    async def _run_prompt(
        self, prompt: dict[str, Any], sampling_params: dict[str, Any], trajectory: dict[str, Any], trace: bool = False
    ) -> None:
        ticket: Ticket | None = prompt.pop(TICKET, None)
        if ticket is None:
            await super()._run_prompt(prompt, sampling_params, trajectory, trace)
            return
        is_single_turn = prompt["agent_name"] == SINGLE_TURN
        loop = WorkerLoop(ticket, self.llm_client.exchange, is_single_turn=is_single_turn)
        WORKER_LOOP.set(loop)  # local to this task: verl runs every row in its own task
        task = asyncio.current_task()
        assert task is not None
        self._loops[ticket.dispatch] = task
        try:
            await self._run_agent_loop(
                dict(sampling_params), trajectory=trajectory, trace=trace, session_id=ticket.dispatch, **prompt
            )
        except (RolloutAborted, asyncio.CancelledError):
            await loop.report(TurnAborted(ticket.dispatch))
        except Exception as error:
            await loop.report(LoopFailed(ticket.dispatch, reason_for_report(error)))
        finally:
            loop.is_over = True
            del self._loops[ticket.dispatch]

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
        """Score the trajectories and put them into the TransferQueue, as verl does."""
        loop = WORKER_LOOP.get()
        if loop is None:
            await super()._agent_loop_postprocess(output, validate, **kwargs)
            return
        ticket = loop.ticket
        outputs = output if isinstance(output, list) else [output]
        if not outputs:
            raise RuntimeError("the agent loop returned nothing")
        fault = loop.fault_of(outputs) if loop.turns > 1 else None
        if fault is not None:
            raise RuntimeError(fault)
        if not loop.is_single_turn:
            await loop.report(LoopEnded(ticket.dispatch))
        await super()._agent_loop_postprocess(outputs, validate, **kwargs)
        reward = outputs[-1].reward_score
        if reward is None:
            raise RuntimeError("the reward function returned no reward")
        keys = tuple(f"{kwargs['uid']}_{ticket.dispatch}_{index}" for index in range(len(outputs)))
        extra_info = outputs[-1].extra_fields.get("reward_extra_info") or {}
        metric = None if self._metric is None else value_of(self._metric, extra_info)
        await loop.report(LoopScored(ticket.dispatch, float(reward), keys, metric))


class SortedAgentLoopManager(AgentLoopManagerTQ):  # type: ignore[misc]
    """Distributes rows with tickets round-robin over the workers: they arrive one or two at a time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(SortedAgentLoopWorker)
        self._numbers = count()

    def wait_until_ready(self, limit_seconds: float | None = None) -> None:
        """Wait for the workers: a harvest during their slow start would look like an engine without memory."""
        ray.get([worker.__ray_ready__.remote() for worker in self.agent_loop_workers], timeout=limit_seconds)

    def stop_loops(self, dispatches: Sequence[int]) -> None:
        """Cancel these agent loops, without waiting until they have ended."""
        for worker in self.agent_loop_workers:
            worker.stop_loops.remote(list(dispatches))

    def generate_sequences(self, prompts: Any) -> None:
        if TICKET not in prompts:
            super().generate_sequences(prompts)
            return
        workers = self.agent_loop_workers
        chunks = prompts.chunk(min(len(workers), len(prompts)))
        sent = [workers[next(self._numbers) % len(workers)].generate_sequences.remote(chunk) for chunk in chunks]
        ray.get(sent, timeout=WORKER_SECONDS)


class DatasetPrompts(Sequence[Prompt]):
    """verl's dataset, read as prompts; a prompt's id is its row. Of its tokens, the scheduler needs the number."""

    def __init__(self, dataset: Any, tokenizer: Any, template_arguments: dict[str, Any]) -> None:
        self._dataset, self._tokenizer, self._template_arguments = dataset, tokenizer, template_arguments

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return Prompt(str(index), range(self._tokens_in(index)))

    def _tokens_in(self, index: int) -> int:
        messages = list(self._dataset[index]["raw_prompt"])
        text = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, **self._template_arguments
        )
        return len(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def rows_with_tickets(rows: list[Any], requests: Sequence[tuple[Request, Ticket]], group_size: int) -> Any:
    """The requests' rows of the dataset, each with its ticket, as verl sends them to agent loop workers."""
    fields = collate_fn(rows)
    fields["uid"] = numpy.array([str(request.id // group_size) for request, _ in requests], dtype=object)
    fields[TICKET] = numpy.empty(len(requests), dtype=object)
    fields[TICKET][:] = [ticket for _, ticket in requests]
    return tensordict_utils.get_tensordict(fields)
