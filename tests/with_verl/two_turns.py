"""An agent loop of a user: two turns, each a call of the server. Named in two_turns.yaml, as verl wants it."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput


class TwoTurns(AgentLoopBase):
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        prompt = list(await self.ct_build_initial_tokens(list(kwargs["raw_prompt"])))
        tokens: list[int] = []
        logprobs: list[float] = []
        for limit in ({"max_tokens": 4}, {}):
            output = await self.server_manager.generate(
                request_id=uuid4().hex, prompt_ids=prompt + tokens, sampling_params={**sampling_params, **limit}
            )
            tokens += output.token_ids
            logprobs += output.log_probs
        return AgentLoopOutput(
            prompt_ids=prompt, response_ids=tokens, response_mask=[1] * len(tokens), response_logprobs=logprobs,
            num_turns=4, metrics={}, extra_fields=output.extra_fields,
        )  # fmt: skip
