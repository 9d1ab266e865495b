"""A harness that sends the conversation from the environment server itself. verifiers' own `null` harness starts a
program per turn, which takes a second or more."""

from typing import Any

import httpx
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult

__all__ = ["InProcessChat"]


class InProcessChatConfig(HarnessConfig):
    adds: str = ""  # to the prompt


class InProcessChat(Harness[InProcessChatConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        messages += (
            [{"role": "user", "content": prompt + self.config.adds}]
            if isinstance(prompt, str)
            else [message_to_wire(message) for message in prompt or []]
        )
        async with httpx.AsyncClient(timeout=None) as client:
            reply = await client.post(
                f"{endpoint}/chat/completions",
                json={"model": ctx.model, "messages": messages},
                headers={"Authorization": f"Bearer {secret}"},
            )
        is_end = reply.status_code < 400 or "maximum context length" in reply.text
        return ProgramResult(0 if is_end else 1, "", reply.text)
