"""A running vLLM server as an engine, over HTTP. docs/engines.md has the command that starts it, and its options.

- `--tokens-only` opens the route for tokens in, tokens out (`/inference/v1/generate`) and the one that aborts. vLLM
  then has no tokenizer to validate token ids with: one outside of the vocabulary crashes the server. With `vocabulary`
  set, the engine refuses such requests.
- Development mode has the routes for weight updates (`/collective_rpc`, `/pause`, `/reset_prefix_cache`). They run
  methods on the workers for any client, `--api-key` does not protect them, and vLLM listens on every interface by
  default. So the command binds to loopback.
- `/abort_requests` makes vLLM return the tokens that it has not streamed yet. If it is missing (0.25 without
  `--tokens-only`), the connection of an aborted request is closed.
- **Identity**: the start time of its process (`/metrics`), and since 0.32 the weight version that is set with every
  weight update (`/update_weight_version`, `/weight_info`). It is also in the last event of each response.
- **Seeds** cost one kernel launch per row, so they are sent only with `seeded=True`. vLLM replays a seed from its start
  when a request is resumed, so a resumed request gets a new seed.
- **Weights**: `reload_weights` on every worker between `/pause` and `/resume`, or a weight transfer by CUDA IPC or NCCL
  if the server has that backend; then a reset of the prefix cache (shared.py). If a step fails, the server
  stays paused and is given up.
"""

import asyncio
import logging
import math
from collections.abc import Sequence
from typing import Any

from sortedrl.core.engine import Request
from sortedrl.core.seeds import derive_seed
from sortedrl.engines.servers.base import WEIGHT_UPDATE_SECONDS, HttpEngine, Source
from sortedrl.engines.servers.events import Logprob, ServerEvent, TokenId, msgspec, parsed
from sortedrl.engines.servers.messages import Delta, Identity, Malformed, Refused
from sortedrl.engines.servers.requests import Sent
from sortedrl.engines.servers.weight_broadcast import Receiver, WeightBroadcast, can_broadcast
from sortedrl.engines.servers.weight_handles import WeightHandles
from sortedrl.engines.speculative import refused_drafts_of_server

_START = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --host 127.0.0.1 --tokens-only --logprobs-mode processed_logprobs "
    "--max-num-seqs {slots} --stream-interval 8"
)
_UNPICKLES = "VLLM_ALLOW_INSECURE_SERIALIZATION"
_WITH_HANDLES = f'{_UNPICKLES}=1 {_START} --weight-transfer-config \'{{{{"backend": "ipc"}}}}\''
_GENERATE = "/inference/v1/generate"
_RUNNING = "vllm:num_requests_running"
_STARTED = "process_start_time_seconds"
_NO_SUCH_ROUTE = (404, 405, 501)
_log = logging.getLogger(__name__)


class _Logprob(msgspec.Struct, gc=False):
    logprob: Logprob


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Logprob] | None = None


class _WeightSpan(msgspec.Struct, gc=False):
    version: str


class _Choice(msgspec.Struct, gc=False):
    token_ids: list[TokenId] | None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[_WeightSpan] | None = None


class _Usage(msgspec.Struct, gc=False):
    completion_tokens: int


class _Event(ServerEvent, gc=False):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None


_decoder = msgspec.json.Decoder(_Event)


class VllmServerEngine(HttpEngine):
    """See the module docstring; `url` is, for example, http://127.0.0.1:8000."""

    start_command = _START
    _can_abort = True  # until a request shows otherwise
    _counts_tokens: bool | None = None  # in its events; known with the first one
    _receiver: Receiver  # new whenever the server is checked: its process may be another one

    async def check_server(self) -> None:
        one_token = {"token_ids": [1], "sampling_params": {"max_tokens": 1, "detokenize": False}}
        try:
            info = await self.call("GET", "/server_info", config_format="json")
            await self.call("POST", _GENERATE, body=one_token)
        except Refused as refusal:
            if refusal.is_about_the_key:
                raise
            raise self.misconfigured(
                f"the server is not vLLM, or it runs without --tokens-only or development mode ({refusal})"
            ) from None
        model, scheduler = info["vllm_config"]["model_config"], info["vllm_config"]["scheduler_config"]
        self.max_length = int(model["max_model_len"])
        if (mode := model["logprobs_mode"]) != "processed_logprobs":
            raise self.misconfigured(f"the server runs with --logprobs-mode {mode}, not processed_logprobs")
        cache = info["vllm_config"].get("cache_config") or {}
        self.kv_tokens = int(cache.get("num_gpu_blocks") or 0) * int(cache.get("block_size") or 0) or None
        self.require_room("--max-num-seqs", scheduler["max_num_seqs"])
        if (why := refused_drafts_of_server(info["vllm_config"], seeded=self._seeded)) is not None:
            raise self.misconfigured(f"the server runs with a --speculative-config, but {why}")
        transfer = info["vllm_config"].get("weight_transfer_config") or {}
        unpickles = bool((info.get("vllm_env") or {}).get(_UNPICKLES))
        self.takes_handles = transfer.get("backend") == "ipc" and unpickles
        self.how_to_take_handles = _WITH_HANDLES.format(slots=self.slots)
        self.takes_broadcasts = transfer.get("backend") == "nccl" and can_broadcast()
        parallel = info["vllm_config"].get("parallel_config") or {}
        sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
        self._receiver = Receiver(math.prod(int(parallel.get(size) or 1) for size in sizes), self._transfer)

    async def count_running(self) -> int | None:
        counts = await self._metric(_RUNNING)
        return int(sum(map(float, counts))) if counts else None

    async def identity(self) -> Identity:
        started, answer = await asyncio.gather(self._metric(_STARTED), self._if_offered("GET", "/weight_info"))
        return Identity(started[0] if started else None, None if answer is None else str(answer["weight_version"]))

    async def _if_offered(self, method: str, path: str, **options: Any) -> Any:
        """The response; None if the server has no such route (before vLLM 0.32)."""
        try:
            return await self.call(method, path, **options)
        except Refused as refusal:
            if refusal.status not in _NO_SUCH_ROUTE:
                raise
            return None

    async def _metric(self, name: str) -> list[str]:
        """Its values as text, one per engine of the server."""
        lines = str(await self.call("GET", "/metrics")).splitlines()
        return [line.rpartition(" ")[2] for line in lines if line.startswith((f"{name} ", f"{name}{{"))]

    def generation(self, request: Request, name: str) -> tuple[str, dict[str, Any]]:
        context = [*request.prompt.tokens, *request.prefix_tokens]
        sampling = request.sampling
        parameters: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": self.room_for(request),
            "ignore_eos": True,  # EOS tokens are given explicitly and override the model's configuration
            "stop_token_ids": [] if sampling.ignore_eos else sorted(self._eos),
            "logprobs": 0,
            "detokenize": False,
        }
        if self._seeded:
            parameters["seed"] = derive_seed(request.seed, request.prefix_length)
        body = {
            "request_id": name,
            "token_ids": context,
            "sampling_params": parameters,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},  # counts in every event
        }
        salt = self.kv_cache_reuse.salt(request, self.version)
        return _GENERATE, body | ({"cache_salt": salt} if salt else {})

    def delta_of(self, data: bytes, sent: Sent) -> Delta:
        event = parsed(data, _decoder)
        if not event.choices:
            return Delta([], [])
        if len(event.choices) != 1:
            raise Malformed(f"{len(event.choices)} responses arrived instead of one")
        choice, usage = event.choices[0], event.usage
        spans = choice.weight_versions
        content = choice.logprobs.content if choice.logprobs is not None else None
        made = None if usage is None else usage.completion_tokens
        if made is None or not self._counts_tokens:
            self._note_count(made)
        return Delta(
            choice.token_ids or [],
            [entry.logprob for entry in content] if content else [],
            choice.finish_reason,
            made,
            " and ".join(dict.fromkeys(span.version for span in spans)) if spans else None,  # several are an error
        )

    def _note_count(self, made: int | None) -> None:
        """A server that counts its tokens must do so in every event; one that does not is named once."""
        if made is None and self._counts_tokens:
            raise Malformed("an event has no count of tokens (usage)")
        if made is None and self._counts_tokens is None:
            _log.warning("%s does not count its tokens (usage): lost or repeated events cannot be noticed", self.url)
        self._counts_tokens = made is not None

    async def abort_on_server(self, names: Sequence[str]) -> bool:
        if self._can_abort:
            try:
                await self.call(
                    "POST", "/abort_requests", body={"request_ids": [f"generate-tokens-{n}" for n in names]}
                )
            except Refused as refusal:
                self._can_abort = refusal.status not in _NO_SUCH_ROUTE
                return False
        return self._can_abort

    async def update_from(self, source: Source, version: int) -> str | None:
        keys_stay = self.kv_cache_reuse.survives_update_to(version)
        await self.call("POST", "/pause", mode="abort", clear_cache=str(not keys_stay).lower())
        if isinstance(source, WeightHandles):  # the server has copied the weights when the last step returns
            await self._transfer("/init_weight_transfer_engine", init_info={})
            await self._transfer("/start_weight_update")
            await self._transfer("/update_weights", update_info=source.for_vllm())
            await self._transfer("/finish_weight_update")
        elif isinstance(source, WeightBroadcast):
            await source.send_to(self._receiver)
        elif source is not None:
            reload = {"method": "reload_weights", "kwargs": {"weights_path": str(source)}}
            await self.call("POST", "/collective_rpc", body=reload, seconds=WEIGHT_UPDATE_SECONDS)
        tag = self.weights_name(version) if source is not None else None
        if tag and await self._if_offered("POST", "/update_weight_version", body={"new_version": tag}) is None:
            tag = None
        if not keys_stay:
            emptied = await self.call("POST", "/reset_prefix_cache")
            if isinstance(emptied, dict) and emptied.get("success") is False:
                raise Refused(500, "the prefix cache, which holds KV of the old weights, was not reset")
        await self.call("POST", "/resume")
        return tag

    async def _transfer(self, path: str, **body: Any) -> None:
        await self.call("POST", path, body=body or None, seconds=WEIGHT_UPDATE_SECONDS)
