"""A server that speaks as vLLM or as SGLang does, and goes wrong in one way that a test chooses.

It is a real HTTP server on loopback. Its tokens follow from the prompt alone (`expected_token`), so that a token that
is lost, doubled, misaligned or made by other weights shows in what is trained on.
"""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

PROMPT_TOKENS = 4
END = 1  # the end token
VOCABULARY = 100
OTHER_WEIGHTS = 40  # is added to each token after a restart
Act = Callable[["NastyServer", web.Request, dict[str, Any]], Awaitable[web.StreamResponse | None]]
Alter = Callable[["NastyServer", list[bytes], dict[str, Any]], list[bytes]]


def response_length(seed: int) -> int:
    return 3 + seed * 5 % 7


def expected_token(seed: int, place: int) -> int:
    """Of the response to the prompt that begins with `seed`."""
    return END if place == response_length(seed) - 1 else 10 + (seed * 7 + place * 3) % 45


def expected_logprob(token: int) -> float:
    return -0.01 - token / 100


class NastyServer:
    """`act` may answer a request for generation itself; `alter` may change the lines of its stream. Both see every
    request. `routes` replaces the answers of other routes, by path."""

    def __init__(self, dialect: str, loop: asyncio.AbstractEventLoop) -> None:
        self.dialect = dialect
        self.act: Act | None = None
        self.alter: Alter | None = None
        self.routes: dict[str, Callable[[], Awaitable[web.Response]]] = {}
        self.asked = 0  # requests for generation so far
        self.ignores_budget = False
        self.drops_kept_connections = False  # as a server whose keep-alive ran out while it was too busy to read
        self._answered: set[Any] = set()  # connections
        self.weights = "default"
        self.started = 1000.0
        self.shift = 0  # of tokens: other weights
        self.restart_at: int | None = None  # as this request for generation after a weight update comes
        self._asked_since_update: int | None = None
        self._loop = loop
        self._do(self._start())

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _start(self) -> None:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await self._listen(0)
        self.port = self._socket.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def _listen(self, port: int) -> None:
        assert self._runner.server is not None
        self._socket = await self._loop.create_server(self._runner.server, "127.0.0.1", port)

    async def vanish(self, seconds: float | None) -> None:
        """No port, every connection reset; back after so many seconds, if any."""
        self._socket.close()
        self.drop_connections()
        if seconds is not None:
            self._loop.call_later(seconds, lambda: self._loop.create_task(self._listen(self.port)))

    def drop_connections(self) -> None:
        assert self._runner.server is not None
        for connection in list(self._runner.server.connections):
            if connection.transport is not None:
                connection.transport.abort()

    def close(self) -> None:
        self._do(self._close())

    async def _close(self) -> None:
        self._socket.close()
        self.drop_connections()
        await self._runner.cleanup()

    # Routes

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        is_kept = request.protocol in self._answered
        self._answered.add(request.protocol)
        if is_kept and self.drops_kept_connections:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if path in self.routes:
            return await self.routes[path]()
        if path in ("/inference/v1/generate", "/generate"):
            return await self._generate(request)
        body = await request.json() if request.body_exists else {}
        if path == "/update_weights_from_disk":
            self.weights, self.shift, self._asked_since_update = body["weight_version"], 0, 0
        if path == "/update_weight_version":
            self.weights, self.shift, self._asked_since_update = body["new_version"], 0, 0
        return web.json_response(self.answers()[path]) if path != "/metrics" else web.Response(text=self.metrics())

    def metrics(self, running: object = 4) -> str:
        return f"# TYPE x gauge\nvllm:num_requests_running {running}\nprocess_start_time_seconds {self.started}\n"

    def answers(self) -> dict[str, Any]:
        config = {
            "model_config": {"max_model_len": 512, "logprobs_mode": "processed_logprobs"},
            "scheduler_config": {"max_num_seqs": 8},
        }
        load = {"num_running_reqs": 0, "num_waiting_reqs": 0, "max_running_requests": 8}
        routes = ["/health", "/abort_requests", "/abort_request", "/pause", "/resume", "/collective_rpc"]
        yes: dict[str, Any] = {path: {"success": True} for path in routes}
        return yes | {
            "/server_info": {"vllm_config": config, "max_req_input_len": 512, "startup_time": {"e2e": self.started}},
            "/weight_info": {"weight_version": self.weights},
            "/model_info": {"weight_version": self.weights},
            "/v1/loads": {"loads": [load]},
            "/update_weight_version": {"success": True},
            "/update_weights_from_disk": {"success": True, "message": ""},
            "/reset_prefix_cache": {"success": True},
            "/pause_generation": {},
            "/continue_generation": {},
            "/flush_cache": {},
        }

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not body.get("stream"):
            return web.json_response({"choices": []})
        self.asked += 1
        if self._asked_since_update is not None:
            self._asked_since_update += 1
            if self.restart_at == self._asked_since_update:
                self._restart()
        if self.act is not None:
            answer = await self.act(self, request, body)
            if answer is not None:
                return answer
        lines = self.lines(body)
        if self.alter is not None:
            lines = self.alter(self, lines, body)
        return await self.stream(request, lines)

    def restart(self) -> None:
        """For any thread."""

        async def restart() -> None:
            self._restart()

        self._do(restart())

    def _restart(self) -> None:
        """Another process at the same address, with the weights of its start; every connection broke before."""
        self.drop_connections()
        self.started += 50
        self.weights, self.shift, self.restart_at = "default", OTHER_WEIGHTS, None

    async def stream(self, request: web.Request, lines: list[bytes], pause: float = 0.002) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            for line in lines:
                await response.write(b"data: " + line + b"\n\n")
                await asyncio.sleep(pause)
        except ConnectionError:  # it was closed, as it may be
            pass
        return response

    # What a stream says

    def made(self, body: dict[str, Any]) -> list[int]:
        context = body.get("token_ids") or body["input_ids"]
        parameters = body["sampling_params"]
        room = parameters.get("max_tokens") or parameters["max_new_tokens"]
        seed, first = context[0], len(context) - PROMPT_TOKENS
        if self.ignores_budget:
            return [20 + place % 30 for place in range(first, first + 400)]
        places = range(first, min(response_length(seed), first + room))
        return [expected_token(seed, place) + self.shift for place in places]

    def lines(self, body: dict[str, Any]) -> list[bytes]:
        made = self.made(body)
        limit = body["sampling_params"].get("max_tokens") or body["sampling_params"]["max_new_tokens"]
        lines = []
        for count, token in enumerate(made, start=1):
            is_last = count == len(made)
            end = None if not is_last else "stop" if token == END + self.shift else "length"
            if self.ignores_budget and count >= limit:
                end = None
            lines.append(self.event([token], [expected_logprob(token)], count, end))
        return [*lines, b"[DONE]"]

    def event(self, tokens: list[Any], logprobs: list[Any], count: Any, end: Any = None) -> bytes:
        """One event in the server's dialect, with whatever values."""
        if self.dialect == "vllm":
            choice = {
                "index": 0,
                "token_ids": tokens,
                "finish_reason": end,
                "logprobs": {"content": [{"logprob": value} for value in logprobs]},
                "weight_versions": [{"version": self.weights, "start": 0, "end": count}] if end else None,
            }
            return json.dumps({"choices": [choice], "usage": {"completion_tokens": count}}).encode()
        pairs = [[value, token, None] for value, token in zip(logprobs, tokens, strict=False)]
        about = {
            "completion_tokens": count,
            "output_token_logprobs": pairs,
            "finish_reason": {"type": end} if end is not None else None,
            "weight_version": self.weights,
        }
        return json.dumps({"output_ids": tokens, "meta_info": about}).encode()


class ServerLoop:
    """An event loop in a thread, for the servers of a module."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
