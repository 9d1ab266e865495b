"""The client that agent loops call: a turn of the policy is one call of `generate`.

The call waits for a slot, sends the request, and reports every token. An abort parks the agent loop inside the call:
the client reports the tokens so far and waits for the next slot. So the state of an agent loop, which is local to its
coroutine, survives a stop. Without a ticket (validation), the client behaves like verl's own.
"""

import asyncio
from array import array
from typing import Any

from ray.exceptions import RayActorError
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from sortedrl.integrations.verl.exchange import LoopEnded, Made, Report, ServerFailed, TurnFinished, reason_for_report
from sortedrl.integrations.verl.worker_loop import WORKER_LOOP, RolloutAborted, Ticket, WorkerLoop

_ABORTED = ("abort", "aborted")
_LIMITS = ("max_tokens", "max_new_tokens")  # what agent loops call it
_RETRY_SECONDS = 0.05


class SortedClient(LLMServerClient):  # type: ignore[misc]
    def __init__(self, config: Any, load_balancer_handle: Any = None, *, exchange: Any, **kwargs: Any) -> None:
        super().__init__(config=config, load_balancer_handle=load_balancer_handle, **kwargs)
        self.exchange = exchange

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> TokenOutput:
        loop = WORKER_LOOP.get()
        if loop is None:
            return await super().generate(request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **kwargs)
        async with loop.turn:
            return await self._turn(loop, request_id, list(prompt_ids), sampling_params, **kwargs)

    async def _turn(
        self, loop: WorkerLoop, request_id: str, prompt: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> TokenOutput:
        """Sample a turn, in one or more stays at the servers."""
        observation = loop.begin_turn(prompt)
        whole = _kept_output(loop.ticket) if observation is None else _nothing()
        room = self._room(loop, len(prompt))
        if loop.is_full or room <= len(whole.token_ids):
            loop.refuse_turn()
            whole.stop_reason = "length"
            return whole
        limit = min([room, *(int(sampling_params[name]) for name in _LIMITS if sampling_params.get(name))])
        plain = {name: value for name, value in sampling_params.items() if name not in _LIMITS}
        allowed = await loop.enter(observation)
        while True:
            left = max(1, min(limit - len(whole.token_ids), allowed))
            try:
                output = await super().generate(
                    request_id,
                    prompt_ids=prompt + whole.token_ids,
                    sampling_params={**plain, "max_tokens": left},
                    **kwargs,
                )
                made = _taken(loop, output, whole)
            except Exception as error:
                is_gone = isinstance(error, RayActorError)
                await loop.report(ServerFailed(loop.ticket.dispatch, reason_for_report(error), is_gone))
                allowed = await loop.enter()
                continue
            if loop.is_over:  # a second task of it called, and it did not wait for that
                raise RolloutAborted
            allowed -= len(output.token_ids)
            if output.stop_reason not in _ABORTED or len(output.token_ids) >= left:
                loop.is_full = allowed <= 0 or len(whole.token_ids) >= room
                whole.stop_reason = output.stop_reason if len(output.token_ids) < left else "length"
                loop.end_turn(whole.token_ids)
                await loop.report(*made, *_end_of_turn(loop))
                return whole
            await loop.report(*made)
            if await loop.has_slot():
                await asyncio.sleep(_RETRY_SECONDS)  # aborted, but not by us: continue
            else:
                allowed = await loop.enter()

    def _room(self, loop: WorkerLoop, prompt_length: int) -> int:
        """How many tokens fit after this prompt: `response_length` counts all tokens after the context's first one."""
        rollout = self.config.actor_rollout_ref.rollout
        first = min(loop.contexts[-1].prompt_length, int(rollout.prompt_length))
        return first + int(rollout.response_length) - prompt_length


def _end_of_turn(loop: WorkerLoop) -> list[Report]:
    finished = TurnFinished(loop.ticket.dispatch, truncated=loop.is_full)
    return [finished, LoopEnded(loop.ticket.dispatch)] if loop.is_single_turn else [finished]


def _taken(loop: WorkerLoop, output: TokenOutput, whole: TokenOutput) -> list[Report]:
    """Append the tokens from a server, and return the report of them."""
    version = output.extra_fields.get("global_steps")
    if version is None:
        raise RuntimeError("the rollout server does not report the weight version of its tokens (`global_steps`)")
    count = len(output.token_ids)
    if not count and output.stop_reason not in _ABORTED:
        raise RuntimeError("the rollout server returned no tokens")
    if output.num_preempted:
        whole.num_preempted += output.num_preempted
    if not count:
        return []
    logprobs = output.log_probs if output.log_probs else [0.0] * count
    whole.token_ids.extend(output.token_ids)
    whole.log_probs.extend(logprobs)
    _note_versions(whole, int(version))
    return [Made(loop.ticket.dispatch, array("i", output.token_ids), array("f", logprobs), int(version))]


def _nothing() -> TokenOutput:
    return TokenOutput(token_ids=[], log_probs=[], num_preempted=0)


def _kept_output(ticket: Ticket) -> TokenOutput:
    """The first turn so far, in the format of a server's answer."""
    whole = _nothing()
    for tokens, logprobs, version in ticket.prefix:
        whole.token_ids.extend(tokens)
        whole.log_probs.extend(logprobs)
        _note_versions(whole, version)
    return whole


def _note_versions(output: TokenOutput, version: int) -> None:
    output.extra_fields.setdefault("min_global_steps", version)
    output.extra_fields["max_global_steps"] = output.extra_fields["global_steps"] = version
