"""The HTTP endpoint that verifiers' model client posts each turn to: vLLM's `/inference/v1/generate`.

The sampling parameters of a request are ignored: the run's own decide. The header `X-Session-ID` names the trace.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aiohttp import web

from sortedrl.integrations.verifiers.episode import Refused
from sortedrl.tasks.environment_calls import Turn

SESSION = "X-Session-ID"
_MAX_REQUEST_BYTES = 256 * 1024 * 1024


class Endpoint:
    """`turn_for(trace, prompt)` gives the turn; it may take as long as it likes."""

    def __init__(self, turn_for: Callable[[str, Sequence[int]], Awaitable[Turn]]) -> None:
        self._turn_for = turn_for
        app = web.Application(client_max_size=_MAX_REQUEST_BYTES)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_get("/v1/models", _models)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.0)

    async def start(self) -> str:
        """Returns its base URL, on a free port of this machine."""
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def close(self) -> None:
        await self._runner.cleanup()

    async def _generate(self, request: web.Request) -> web.Response:
        try:
            body = json.loads(await request.read())
            trace, prompt = request.headers[SESSION], _token_ids(body["token_ids"])
        except (KeyError, TypeError, ValueError) as error:
            return _refusal(f"expected token_ids and the header {SESSION}: {type(error).__name__}: {error}")
        try:
            return web.json_response(_answer(trace, await self._turn_for(trace, prompt)))
        except Refused as error:
            # Harnesses end an episode in order if the context is full. For them this is the same.
            return _refusal(f"This model's maximum context length is reached: {error}")


def _token_ids(found: Any) -> list[int]:
    """Raises ValueError."""
    if not isinstance(found, list) or not all(type(token) is int and token >= 0 for token in found):
        raise ValueError("token_ids must be a list of integers, none of them negative")
    return found


async def _models(_: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": []})


def _refusal(reason: str) -> web.Response:
    return web.json_response({"error": {"message": reason, "type": "BadRequestError", "code": 400}}, status=400)


def _answer(trace: str, turn: Turn) -> dict[str, Any]:
    tokens = list(turn.response)
    content = [
        {"token": f"token_id:{token}", "logprob": min(logprob, 0.0)}
        for token, logprob in zip(tokens, turn.logprobs, strict=True)
    ]
    choice = {
        "index": 0,
        "token_ids": tokens,
        "logprobs": {"content": content},
        "finish_reason": "length" if turn.is_cut else "stop",
    }
    return {"request_id": trace, "choices": [choice]}
