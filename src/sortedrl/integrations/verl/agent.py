"""The agent loop side: verl's manager, workers and client, extended with tickets.

A `Ticket` travels with a row of the dataset from the scheduler to an agent loop worker. The worker keeps it in a
context variable during the agent loop, so that the client can find it, although the code in between does not pass it
on. Without a ticket (validation), all three behave like verl's own.
"""

from __future__ import annotations

import asyncio
from array import array
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import ray
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from sortedrl.integrations.verl.exchange import Aborted, Failed, Finished, Made, Report, Scored

TICKET = "sortedrl_ticket"  # the field of a row
_ABORTED = ("abort", "aborted")
_LIMITS = ("max_tokens", "max_new_tokens")  # what agent loops call it
_RETRY_SECONDS = 0.05


@dataclass(frozen=True)
class Ticket:
    """The data of a rollout for a worker. `kept`: its prefix, as (tokens, logprobs, version)."""

    dispatch: int
    max_new_tokens: int
    prefix: tuple[tuple[array[int], array[float], int], ...]
    resumable: bool  # the mode keeps the tokens of aborted rollouts


class RolloutAborted(BaseException):
    """Ends an agent loop whose rollout was aborted. Not an Exception, because agent loops may catch those."""


class Visit:
    """One run of an agent loop for a ticket."""

    def __init__(self, ticket: Ticket, exchange: Any) -> None:
        self.ticket = ticket
        self.exchange = exchange
        self.calls = 0
        self.made = 0

    async def report(self, *reports: Report) -> None:
        await self.exchange.report.remote(list(reports))


VISIT: ContextVar[Visit | None] = ContextVar("sortedrl_visit", default=None)


class SortedClient(LLMServerClient):  # type: ignore[misc]
    """Requests the remaining tokens of a rollout, and reports every generated token."""

    def __init__(self, config: Any, load_balancer_handle: Any = None, *, exchange: Any, **kwargs: Any) -> None:
        super().__init__(config=config, load_balancer_handle=load_balancer_handle, **kwargs)
        self.exchange = exchange

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> TokenOutput:
        visit = VISIT.get()
        if visit is None:
            return await super().generate(request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **kwargs)
        ticket = visit.ticket
        visit.calls += 1
        if visit.calls == 1:
            if not await visit.exchange.start.remote(ticket.dispatch):
                raise RolloutAborted
        elif ticket.resumable:
            raise RuntimeError(
                "a mode that resumes aborted rollouts supports only single-turn agent loops, but this one requested a "
                "second turn. Use trainer.v1.sortedrl.mode=on-policy+planned"
            )
        elif await visit.exchange.is_stopped.remote(ticket.dispatch):
            raise RolloutAborted
        whole = _kept_output(ticket) if visit.calls == 1 else TokenOutput(token_ids=[], log_probs=[], num_preempted=0)
        limit = self._limit(visit, len(prompt_ids), sampling_params)
        plain = {name: value for name, value in sampling_params.items() if name not in _LIMITS}
        before = visit.made
        while True:
            left = limit - (visit.made - before)
            output = await super().generate(
                request_id,
                prompt_ids=list(prompt_ids) + whole.token_ids,
                sampling_params={**plain, "max_tokens": left},
                **kwargs,
            )
            await self._take(visit, output, whole)
            if output.stop_reason not in _ABORTED or len(output.token_ids) >= left:
                whole.stop_reason = output.stop_reason if len(output.token_ids) < left else "length"
                return whole
            if await visit.exchange.is_stopped.remote(ticket.dispatch):
                raise RolloutAborted
            await asyncio.sleep(_RETRY_SECONDS)  # aborted, but not by us: continue

    def _limit(self, visit: Visit, prompt_length: int, sampling_params: dict[str, Any]) -> int:
        """Limit for this call: the minimum of what the agent loop requests, the rollout has left, and verl allows."""
        rollout = self.config.actor_rollout_ref.rollout
        asked = [int(sampling_params[name]) for name in _LIMITS if sampling_params.get(name)]
        room = int(rollout.prompt_length) + int(rollout.response_length) - prompt_length
        return max(1, min([*asked, visit.ticket.max_new_tokens - visit.made, room]))

    async def _take(self, visit: Visit, output: TokenOutput, whole: TokenOutput) -> None:
        """Append the tokens from a server, and report them."""
        version = output.extra_fields.get("global_steps")
        if version is None:
            raise RuntimeError("the rollout server does not report the weight version of its tokens (`global_steps`)")
        count = len(output.token_ids)
        if count:
            logprobs = output.log_probs if output.log_probs else [0.0] * count
            whole.token_ids.extend(output.token_ids)
            whole.log_probs.extend(logprobs)
            visit.made += count
            await visit.report(
                Made(visit.ticket.dispatch, array("i", output.token_ids), array("f", logprobs), int(version))
            )
        if output.num_preempted:
            whole.num_preempted += output.num_preempted
        _note_versions(whole, int(version))


def _kept_output(ticket: Ticket) -> TokenOutput:
    """The response so far, in the format of a server's answer."""
    whole = TokenOutput(token_ids=[], log_probs=[], num_preempted=0)
    for tokens, logprobs, version in ticket.prefix:
        whole.token_ids.extend(tokens)
        whole.log_probs.extend(logprobs)
        _note_versions(whole, version)
    return whole


def _note_versions(output: TokenOutput, version: int) -> None:
    output.extra_fields.setdefault("min_global_steps", version)
    output.extra_fields["max_global_steps"] = output.extra_fields["global_steps"] = version


# The plain class underneath verl's Ray actor class, which Ray does not allow to be subclassed.
_PlainWorker: Any = AgentLoopWorkerTQ.__ray_metadata__.modified_class.__ray_actor_class__


class SortedAgentLoopWorker(_PlainWorker):  # type: ignore[misc]
    """Runs one agent loop per row with a ticket, and reports how it ends."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Ray sends inherited methods by value, and verl's constructor would then not find its own class.
        super().__init__(*args, **kwargs)

    async def _run_prompt(
        self, prompt: dict[str, Any], sampling_params: dict[str, Any], trajectory: dict[str, Any], trace: bool = False
    ) -> None:
        ticket: Ticket | None = prompt.pop(TICKET, None)
        if ticket is None:
            await super()._run_prompt(prompt, sampling_params, trajectory, trace)
            return
        visit = Visit(ticket, self.llm_client.exchange)
        VISIT.set(visit)  # local to this task: verl runs every row in its own task
        try:
            await self._run_agent_loop(
                dict(sampling_params), trajectory=trajectory, trace=trace, session_id=ticket.dispatch, **prompt
            )
        except RolloutAborted:
            await visit.report(Aborted(ticket.dispatch))
        except Exception as error:
            await visit.report(Failed(ticket.dispatch, f"{type(error).__name__}: {error}"))

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
        """Score the trajectories and put them into the TransferQueue, as verl does."""
        visit = VISIT.get()
        if visit is None:
            await super()._agent_loop_postprocess(output, validate, **kwargs)
            return
        ticket = visit.ticket
        outputs = output if isinstance(output, list) else [output]
        if not outputs:
            raise RuntimeError("the agent loop returned nothing")
        await visit.report(Finished(ticket.dispatch, truncated=visit.made >= ticket.max_new_tokens))
        await super()._agent_loop_postprocess(outputs, validate, **kwargs)
        reward = outputs[-1].reward_score
        if reward is None:
            raise RuntimeError("the reward function returned no reward")
        keys = tuple(f"{kwargs['uid']}_{ticket.dispatch}_{index}" for index in range(len(outputs)))
        await visit.report(Scored(ticket.dispatch, float(reward), keys))


class SortedAgentLoopManager(AgentLoopManagerTQ):  # type: ignore[misc]
    """Distributes rows with tickets round-robin over the workers: they arrive one or two at a time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(SortedAgentLoopWorker)
        self._next_worker = 0

    def wait_until_ready(self) -> None:
        """Wait for the workers: a harvest during their slow start would look like an engine without memory."""
        ray.get([worker.__ray_ready__.remote() for worker in self.agent_loop_workers])

    def generate_sequences(self, prompts: Any) -> None:
        if TICKET not in prompts:
            super().generate_sequences(prompts)
            return
        workers = self.agent_loop_workers
        chunks = prompts.chunk(min(len(workers), len(prompts)))
        first, self._next_worker = self._next_worker, (self._next_worker + len(chunks)) % len(workers)
        ray.get(
            [
                workers[(first + place) % len(workers)].generate_sequences.remote(chunk)
                for place, chunk in enumerate(chunks)
            ]
        )
