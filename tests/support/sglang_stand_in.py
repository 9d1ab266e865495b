"""A stand-in for an SGLang server: a real HTTP server that speaks the format of SGLang 0.5.23, over a toy model.

It is not SGLang. It answers the routes that `engines/servers/sglang.py` uses in the shapes that SGLang's source has, so
that our side of the wire can be tested where SGLang does not run. It adds switches for what can go wrong.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from safetensors.torch import load_file

from nasty_server import NastyServer, ServerLoop
from sortedrl.core.seeds import derive_seed

CALLS = {"/pause_generation": "pause", "/continue_generation": "continue", "/flush_cache": "flush"}


class SglangStandIn(NastyServer):
    """`incremental`: events carry what is new (--incremental-streaming-output) or all tokens so far.

    `runs_at_once` may be less than `max_running_requests`, as when memory is short: the others wait.
    """

    held_ends = 0  # responses that are whole and wait for their abort
    calls_ends_aborts = False  # as SGLang does when the abort comes in the step of the last token

    def __init__(
        self,
        model: Any,
        *,
        incremental: bool = True,
        max_running_requests: int = 64,
        runs_at_once: int = 64,
        step_seconds: float = 0.0,
        stream_interval: int = 8,
        api_key: str | None = None,
    ) -> None:
        self.model = model
        self.incremental = incremental
        self.max_running_requests = max_running_requests
        self.step_seconds = step_seconds
        self.stream_interval = stream_interval  # only reported
        self.api_key = api_key
        self.bodies: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self._slots = asyncio.Semaphore(runs_at_once)
        self._aborted: set[str] = set()  # prefixes of names, as SGLang takes them
        self._open: set[str] = set()
        self._running = 0
        self._own_loop = ServerLoop()
        super().__init__("sglang", self._own_loop.loop)

    def kill(self) -> None:
        """As `kill -9` does: no port, every connection reset."""
        self._do(self.vanish(None))

    def close(self) -> None:
        super().close()
        self._own_loop.close()

    # Routes

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        """A key is checked as SGLang does, but for the answer: it repeats what was sent."""
        sent = request.headers.get("Authorization", "")
        if self.api_key is not None and sent != f"Bearer {self.api_key}":
            return web.json_response({"error": f"Unauthorized: {sent}"}, status=401)
        if request.path.startswith("/inference"):  # vLLM's
            return web.Response(status=404)
        if request.path in CALLS:
            self.calls.append(CALLS[request.path])
        elif request.path == "/abort_request":
            self._aborted.add((await request.json())["rid"])
        elif request.path == "/update_weights_from_disk":
            body = await request.json()
            assert body["flush_cache"] is True and self.calls[-1] == "pause"
            self.calls.append(f"update {body['weight_version'].rpartition('-')[2]}")
            self.model.load_state_dict(load_file(Path(body["model_path"]) / "model.safetensors"), strict=False)
        return await super()._answer(request)

    def answers(self) -> dict[str, Any]:
        load = {
            "num_running_reqs": self._running,
            "num_waiting_reqs": len(self._open) - self._running,
            "max_running_requests": self.max_running_requests,
            "max_total_num_tokens": 4096,
        }
        info = {"max_req_input_len": 256, "startup_time": {"e2e": self.started}}
        info["stream_interval"] = self.stream_interval
        return super().answers() | {"/server_info": info, "/v1/loads": {"loads": [load]}}

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self._open.add(body["rid"])
        try:
            async with self._slots:
                self._running += 1
                try:
                    await self._respond(response, body)
                finally:
                    self._running -= 1
        finally:
            self._open.discard(body["rid"])
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _respond(self, response: web.StreamResponse, body: dict[str, Any]) -> None:
        parameters = body["sampling_params"]
        made: list[tuple[float, int, None]] = []
        reason: dict[str, Any] | None = None
        while reason is None:
            await asyncio.sleep(self.step_seconds)
            if self._is_aborted(body["rid"]):
                reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
                fresh: list[tuple[float, int, None]] = []
            else:
                seed = derive_seed(parameters.get("sampling_seed", len(self.bodies)), len(made))
                token, logprob = self._next([*body["input_ids"], *(t for _, t, _ in made)], parameters, seed)
                fresh = [(logprob, token, None)]
                made += fresh
                if token in parameters["stop_token_ids"]:
                    reason = {"type": "stop", "matched": token}
                elif len(made) == parameters["max_new_tokens"]:
                    reason = {"type": "length", "length": len(made)}
                if reason is not None and self.calls_ends_aborts:
                    self.held_ends += 1
                    while not self._is_aborted(body["rid"]):
                        await asyncio.sleep(0.01)
                    reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
            shown = fresh if self.incremental else made
            about = {
                "id": body["rid"],
                "finish_reason": reason,
                "completion_tokens": len(made),
                "weight_version": self.weights,
                "output_token_logprobs": shown,
            }
            event = {"text": "", "output_ids": [t for _, t, _ in shown], "meta_info": about}
            await _send(response, event)

    def _is_aborted(self, name: str) -> bool:
        return any(name.startswith(prefix) for prefix in self._aborted)

    def _next(self, context: list[int], parameters: dict[str, Any], seed: int) -> tuple[int, float]:
        temperature = parameters["temperature"]
        with torch.no_grad():
            logits = self.model(torch.tensor([context])).logits[0, -1].float()
        logprobs = torch.log_softmax(logits / (temperature or 1.0), -1)
        if temperature == 0:
            token = int(logprobs.argmax())
        else:
            noise = torch.Generator().manual_seed(seed)
            token = int(torch.multinomial(logprobs.exp(), 1, generator=noise))
        return token, float(logprobs[token])


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
