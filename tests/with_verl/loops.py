"""Agent loops of a user, with turns of the policy and tokens of their own in between. Named in loops.yaml, as verl
wants it."""

import asyncio
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop

TOOL_TOKENS = [4, 33, 5]


class ThreeTurns(AgentLoopBase):
    """Up to three turns of at most 12 tokens, with a tool call between them."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        self.prompt = list(await self.ct_build_initial_tokens(list(kwargs["raw_prompt"])))
        self.ids: list[int] = []
        self.mask: list[int] = []
        self.logprobs: list[float] = []
        self.versions: dict[str, Any] = {}
        await self.before_first_turn()
        for turn in range(3):
            if turn:
                await self.call_tool()
                self.add(TOOL_TOKENS, [0.0] * len(TOOL_TOKENS), 0)
            output = await self.generate(sampling_params)
            self.versions = {**output.extra_fields, **{k: v for k, v in self.versions.items() if k.startswith("min")}}
            self.add(output.token_ids, output.log_probs, 1)
            if output.stop_reason == "length" and len(output.token_ids) < 12:
                break
        return self.output(self.prompt, self.ids, self.mask)

    async def generate(self, sampling_params: dict[str, Any]) -> Any:
        return await self.server_manager.generate(
            request_id=uuid4().hex,
            prompt_ids=self.prompt + self.ids,
            sampling_params={**sampling_params, "max_tokens": 12},
        )

    def add(self, ids: list[int], logprobs: list[float], bit: int) -> None:
        self.ids, self.logprobs = self.ids + ids, self.logprobs + logprobs
        self.mask = self.mask + [bit] * len(ids)

    async def before_first_turn(self) -> None: ...

    async def call_tool(self) -> None:
        await asyncio.sleep(0.02)

    def output(self, prompt: list[int], ids: list[int], mask: list[int]) -> AgentLoopOutput:
        return AgentLoopOutput(
            prompt_ids=prompt, response_ids=ids, response_mask=mask, response_logprobs=self.logprobs[: len(ids)],
            num_turns=4, metrics={}, extra_fields=self.versions, reward_score=1.0,
        )  # fmt: skip


class SlowTool(ThreeTurns):
    async def call_tool(self) -> None:
        await asyncio.sleep(1.0)


class HangsInTool(ThreeTurns):
    async def call_tool(self) -> None:
        await asyncio.sleep(1000)


class HangsBeforeFirstTurn(ThreeTurns):
    async def before_first_turn(self) -> None:
        await asyncio.sleep(1000)


class FailsInTool(ThreeTurns):
    async def call_tool(self) -> None:
        raise OSError("the tool's server is gone")


class EncodesAgain(ThreeTurns):
    """Its history changes when it is encoded again: another first token of the response, trained on as sampled."""

    async def call_tool(self) -> None:
        self.ids = [1 + self.ids[0] % 40, *self.ids[1:]]


class NeverEnds(ThreeTurns):
    """Does not stop at response_length."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        self.prompt = list(await self.ct_build_initial_tokens(list(kwargs["raw_prompt"])))
        self.ids = []
        while True:
            self.ids = self.ids + (await self.generate(sampling_params)).token_ids + TOOL_TOKENS


class TwoContexts(ThreeTurns):
    """A second attempt at the same prompt, started at the same time; both are trained on."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        prompt = list(await self.ct_build_initial_tokens(list(kwargs["raw_prompt"])))
        self.prompt, self.ids = prompt, []
        outputs = await asyncio.gather(self.generate(sampling_params), self.generate(sampling_params))
        return [self._attempt(prompt, output) for output in outputs]

    def _attempt(self, prompt: list[int], output: Any) -> AgentLoopOutput:
        self.logprobs = output.log_probs
        self.versions = {**output.extra_fields, "reward_extra_info": {}}  # verl copies it to every output
        return self.output(prompt, output.token_ids, [1] * len(output.token_ids))


class Graded(ThreeTurns):
    """The rewards of a group are all different. Of every second group, the accuracies are equal."""

    names = ("acc",)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        output = await super().run(sampling_params, **kwargs)
        id = int(kwargs["uid"])
        output.reward_score = float(id)
        output.extra_fields["reward_extra_info"] = dict.fromkeys(self.names, id % 2 and id // 2 % 2)
        return output


class GradedOtherwise(Graded):
    names = ("format", "length")


class ScoredToolAgent(ToolAgentLoop):
    """verl's loop with tools; the reward is given here because these tests have no reward workers."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        output = await super().run(sampling_params, **kwargs)
        output.reward_score = 1.0
        return output
