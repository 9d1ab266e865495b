"""A running SGLang server as an engine, over HTTP. docs/engines.md has the command that starts it, and its options.

- Tokens in, tokens out (`/generate` with `input_ids`). Without `--incremental-streaming-output` every event repeats all
  tokens so far; that works, but the cost grows with every token. One process of the server sends all events: with one
  per token, the default, those of 128 responses of an 8B model came up to 0.2 s late.
- **EOS**: SGLang also ends a response at its model's own EOS tokens. They must be among `eos_token_ids`, which show
  that a response is complete if it is aborted in the step of its last token.
- SGLang reports log-probabilities after temperature but before top-p, so `top_p` must be 1.
- **Identity**: the startup timings (`/server_info`), which differ between any two starts, and the weight version that
  is set with every weight update (`/model_info`). It is also in every event of a response.
- **Seeds**: `seeded=True` sends `sampling_seed`, which SGLang uses only with `--enable-deterministic-inference`.
- **Weights**: between `/pause_generation` and `/continue_generation`. If a step fails, the server stays paused and is
  given up. `cuda_ipc=True` is for a server on the learner's GPU, which it does not report, so this is off by default.
"""

import asyncio
import hashlib
import json
import logging
from collections.abc import Sequence
from typing import Any

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.engine import Request
from sortedrl.core.seeds import derive_seed
from sortedrl.engines.servers.base import WEIGHT_UPDATE_SECONDS, HttpEngine, Source
from sortedrl.engines.servers.events import Logprob, ServerEvent, TokenId, msgspec, parsed
from sortedrl.engines.servers.messages import Delta, Identity, Malformed, Refused, reason_of
from sortedrl.engines.servers.requests import Sent
from sortedrl.engines.servers.weight_handles import WeightHandles

_log = logging.getLogger(__name__)

_EMPTY_SECONDS = 30.0
_MANY_SLOTS = 64


class _Logprob(msgspec.Struct, array_like=True, gc=False):
    logprob: Logprob
    token: TokenId


class _FinishReason(msgspec.Struct):
    type: str
    status_code: int | None = None
    message: Any = None


class _MetaInfo(msgspec.Struct, gc=False):
    completion_tokens: int
    output_token_logprobs: list[_Logprob] | None = None
    finish_reason: _FinishReason | None = None
    weight_version: str | None = None


class _Event(ServerEvent, gc=False):
    output_ids: list[int] | None = None
    meta_info: _MetaInfo | None = None


_decoder = msgspec.json.Decoder(_Event)


class SglangEngine(HttpEngine):
    """See the module docstring; `url` is, for example, http://127.0.0.1:30000."""

    start_command = (
        "python -m sglang.launch_server --model-path MODEL --host 127.0.0.1 --max-running-requests {slots} "
        "--incremental-streaming-output --stream-interval 8"
    )

    def __init__(self, url: str, *, cuda_ipc: bool = False, **options: Any) -> None:
        self.takes_handles = cuda_ipc
        super().__init__(url, **options)

    async def check_server(self) -> None:
        try:
            info = await self.call("GET", "/server_info")
            loads = await self._loads()
        except Refused as refusal:
            if refusal.is_about_the_key:
                raise
            raise self.misconfigured(
                f"the server has no /server_info or no /v1/loads ({refusal}): it is not SGLang 0.5.23 or newer"
            ) from None
        workers = info.get("tp_size", 1)
        if self.takes_handles and workers != 1:
            why = f"the server at {self.url} has {workers} workers, and the handles are valid on the learner's GPU only"
            fix = "Leave cuda_ipc out, or start the server with --tp-size 1."
            raise ConfigurationError("cuda_ipc", True, why, fix)
        if info.get("stream_interval") == 1 and self.slots >= _MANY_SLOTS:
            _log.warning(
                "%s sends a message per token, which can cost 10 %%: start it with --stream-interval 8", self.url
            )
        if info.get("max_req_input_len"):
            self.max_length = int(info["max_req_input_len"])
        self.kv_tokens = sum(load.get("max_total_num_tokens", 0) for load in loads) or None
        self.require_room("--max-running-requests", sum(load["max_running_requests"] for load in loads))

    async def count_running(self) -> int | None:
        return await self._count("num_running_reqs")

    async def identity(self) -> Identity:
        server, model = await asyncio.gather(self.call("GET", "/server_info"), self.call("GET", "/model_info"))
        started, weights = server.get("startup_time"), model.get("weight_version")
        process = None if started is None else hashlib.sha256(json.dumps(started).encode()).hexdigest()[:16]
        return Identity(process, None if weights is None else str(weights))

    async def _count(self, *states: str) -> int:
        counts = [load[state] for load in await self._loads() for state in states]
        if any(type(count) is not int or count < 0 for count in counts):
            raise Malformed(f"these are not counts of requests: {counts}")
        return sum(counts)

    async def _loads(self) -> list[dict[str, Any]]:
        answer = await self.call("GET", "/v1/loads", include="core")
        return list(answer["loads"])

    def submit(self, requests: Sequence[Request]) -> None:
        for top_p in (request.sampling.top_p for request in requests):
            if top_p != 1:
                raise ValueError(f"top_p = {top_p}: SGLang reports log-probabilities before top-p, so use 1")
        super().submit(requests)

    def generation(self, request: Request, name: str) -> tuple[str, dict[str, Any]]:
        context = [*request.prompt.tokens, *request.prefix_tokens]
        sampling = request.sampling
        parameters: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": 1.0,
            "top_k": -1,  # overrides the model's configuration
            "max_new_tokens": self.room_for(request),
            "ignore_eos": sampling.ignore_eos,
            "stop_token_ids": [] if sampling.ignore_eos else sorted(self._eos),
            "no_stop_trim": True,  # EOS is part of the response
            "skip_special_tokens": False,
        }
        if self._seeded:
            parameters["sampling_seed"] = derive_seed(request.seed, request.prefix_length)
        body = {
            "rid": name,
            "input_ids": context,
            "sampling_params": parameters,
            "stream": True,
            "return_logprob": True,
        }
        salt = self.kv_cache_reuse.salt(request, self.version)
        return "/generate", body | ({"extra_key": salt} if salt else {})

    def delta_of(self, data: bytes, sent: Sent) -> Delta:
        """An event has either the new tokens or all tokens so far: the server's count shows how many are new."""
        event = parsed(data, _decoder)
        about = event.meta_info
        if about is None:
            raise Malformed(f"an event has no meta_info: {data.decode(errors='replace')!r}")
        reason = about.finish_reason
        if reason is not None and reason.type == "abort" and reason.status_code:
            raise Refused(reason.status_code, str(reason.message))
        made, entries = about.completion_tokens, about.output_token_logprobs or []
        new = made - len(sent.tokens)
        if new < 0 or new > len(entries):
            raise Malformed(
                f"{len(sent.tokens)} tokens arrived, then {len(entries)} more, but the server counts {made}"
            )
        fresh = entries[len(entries) - new :]
        tokens, ids = [entry.token for entry in fresh], event.output_ids
        if new and ids and len(ids) == len(entries) and ids[-new:] != tokens:
            raise Malformed("the token ids and the log-probabilities belong to different tokens")
        end = reason.type if reason is not None else None
        return Delta(tokens, [entry.logprob for entry in fresh], end, weights=about.weight_version)

    async def abort_on_server(self, names: Sequence[str]) -> bool:
        await asyncio.gather(*(self.call("POST", "/abort_request", body={"rid": name}) for name in names))
        return True

    async def update_from(self, source: Source, version: int) -> str | None:
        tag = self.weights_name(version) if source is not None else None
        await self.call("POST", "/pause_generation", body={"mode": "abort"})
        await self._until_empty()
        forget = not self.kv_cache_reuse.survives_update_to(version)
        if source is not None:
            update: dict[str, Any] = {"flush_cache": forget, "weight_version": tag}
            if isinstance(source, WeightHandles):
                path, update["serialized_named_tensors"] = "/update_weights_from_tensor", [source.for_sglang()]
            else:
                path = "/update_weights_from_disk"
                update |= {"model_path": str(source), "load_format": "auto"}  # the server may have started with "dummy"
            answer = await self.call("POST", path, body=update, seconds=WEIGHT_UPDATE_SECONDS)
            if answer["success"] is not True:
                raise Refused(400, reason_of(answer))
        elif forget:
            await self.call("POST", "/flush_cache")
        await self.call("POST", "/continue_generation", body={})
        return tag

    async def _until_empty(self) -> None:
        """Wait until the server is empty: closed streams end with a delay, and the cache cannot be flushed before."""
        deadline = self.now() + _EMPTY_SECONDS
        while await self._count("num_running_reqs", "num_waiting_reqs"):
            if self.now() > deadline:
                raise Refused(500, f"requests are still running {_EMPTY_SECONDS:.0f} s after they were aborted")
            await asyncio.sleep(0.02)
