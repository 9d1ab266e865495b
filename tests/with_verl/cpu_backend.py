"""verl on a CPU, for the tests: what verl lacks there, put in through verl's own registries.

Nothing of verl is replaced by a mock. Added are
- a CPU platform (`PlatformRegistry`), so that worker groups, FSDP 2 and the loss run on gloo and float32;
- FSDP's engine under the device name `cpu` (`EngineRegistry`);
- a rollout server with the interface of verl's vLLM server (`RolloutReplicaRegistry`): generate, abort, gate, weights.
  Its tokens come from our embedded engine, a real model. It rejects or parks late requests as the vLLM server does.

Loaded in every process by VERL_USE_EXTERNAL_MODULES=cpu_backend, chosen by VERL_PLATFORM=cpu and rollout.name=embedded.
"""

import asyncio
import os
import types
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import torch
import torch.distributed
import wrapt
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

ROLLOUT = "embedded"
LOSES_WEIGHTS = "CPU_BACKEND_LOSES_WEIGHTS"  # if set, the server gets only the version of new weights
DIES_AFTER = "CPU_BACKEND_DIES_AFTER"  # so many requests; only the server of replica 1
SERVER_NAME = "embedded_server_{}"
CONTROL_CALLS = 16  # that Ray lets into a server beside its requests; verl's own margin is larger


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _zero(*args: Any, **kwargs: Any) -> int:
    return 0


class CpuDevice(types.ModuleType):
    """The part of `torch.cuda`'s interface that verl calls, for a CPU."""

    def __init__(self) -> None:
        super().__init__("torch.cpu")
        for name in ("empty_cache", "synchronize", "set_device", "set_per_process_memory_fraction", "ipc_collect"):
            setattr(self, name, _nothing)
        for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
            setattr(self, name, _zero)
        self.is_available = lambda: True
        self.device_count = lambda: 1
        self.current_device = _zero
        self.mem_get_info = lambda *args: (1 << 30, 1 << 30)
        self.get_rng_state = torch.get_rng_state
        self.set_rng_state = torch.set_rng_state
        self.manual_seed = self.manual_seed_all = torch.manual_seed
        self.get_device_name = lambda *args: "CPU"


_DEVICE = CpuDevice()


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _DEVICE

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    set_device = synchronize = set_allocator_settings = empty_cache = profiler_start = profiler_stop = cudart = _nothing

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CPU_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def ray_resource_name(self) -> str:
        return "GPU"  # verl asks Ray for nothing else; Ray is started with a GPU that is only a number

    def ray_noset_envvars(self) -> list[str]:
        return []

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_gpus": num_gpus}

    def is_ipc_supported(self) -> bool:
        return False


def _use_gloo_alone() -> None:
    """verl asks for one backend for the CPU and one for the device, which here is the CPU; and gloo has no average."""
    init_process_group, all_reduce = torch.distributed.init_process_group, torch.distributed.all_reduce
    average = torch.distributed.ReduceOp.AVG

    def init(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        return init_process_group("gloo", *args, **kwargs)

    def reduce(tensor: torch.Tensor, op: Any = torch.distributed.ReduceOp.SUM, group: Any = None, **kwargs: Any) -> Any:
        if op != average:
            return all_reduce(tensor, op=op, group=group, **kwargs)
        done = all_reduce(tensor, op=torch.distributed.ReduceOp.SUM, group=group, **kwargs)
        tensor.div_(torch.distributed.get_world_size(group))
        return done

    torch.distributed.init_process_group, torch.distributed.all_reduce = init, reduce


_use_gloo_alone()


class EmbeddedServer:
    """A rollout server: verl's interface in front, our embedded engine behind."""

    def __init__(
        self, model_path: str, slots: int, prompt_length: int, response_length: int, dies_after: int = 0
    ) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from sortedrl.engines.embedded.engine import EmbeddedEngine

        torch.set_num_threads(1)
        max_length = prompt_length + response_length
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(model_path)
        self.model = model
        self.engine = EmbeddedEngine(model, slots=slots, eos_token_ids={tokenizer.eos_token_id}, max_length=max_length)
        self.response_length = response_length
        self.dies_after = dies_after
        self.global_steps = 0
        self.served = 0
        self.most_at_once = 0
        self._next = 0
        self._seen: Counter[int] = Counter()  # requests by prompt
        self._answers: dict[int, asyncio.Future[str]] = {}
        self._made: dict[int, tuple[list[int], list[float]]] = {}
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._rejects = False
        self._failures = 0
        self._stepping: asyncio.Task[None] | None = None

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **unused: Any
    ) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        from sortedrl.core.engine import Request, Sampling
        from sortedrl.core.rollout import Prompt

        while not self._is_open.is_set():
            if self._rejects:
                return TokenOutput(
                    token_ids=[], stop_reason="aborted", extra_fields={"global_steps": self.global_steps}
                )
            await self._is_open.wait()
        if self._failures:
            self._failures -= 1
            raise RuntimeError("the server lost the request")
        id, self._next = self._next, self._next + 1
        name = crc32(array("i", prompt_ids))  # the k-th response to a prompt is the same in every run
        seed, self._seen[name] = name + self._seen[name], self._seen[name] + 1
        sampling = Sampling(temperature=float(sampling_params.get("temperature", 1.0)))
        self._answers[id] = asyncio.get_running_loop().create_future()
        self._made[id] = ([], [])
        self.served += 1
        if self.served == self.dies_after:
            os._exit(1)
        self.most_at_once = max(self.most_at_once, len(self._answers))
        self.engine.submit(
            [Request(id, Prompt(str(id), list(prompt_ids)), (), self._budget(sampling_params), seed, sampling)]
        )
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step())
        version = self.global_steps
        stop_reason = await self._answers[id]
        tokens, logprobs = self._made.pop(id)
        return TokenOutput(
            token_ids=tokens, log_probs=logprobs, stop_reason=stop_reason, num_preempted=0,
            extra_fields={"global_steps": version},
        )  # fmt: skip

    def _budget(self, sampling_params: dict[str, Any]) -> int:
        return int(sampling_params.get("max_tokens") or self.response_length)

    async def _step(self) -> None:
        while self._answers:
            self._apply(self.engine.poll(self.engine.now() + 0.002))
            await asyncio.sleep(0)

    def _apply(self, changes: list[Any]) -> None:
        from sortedrl.core.engine import RequestFailed, RequestFinished, Tokens

        for change in changes:
            if isinstance(change, Tokens):
                self._made[change.id][0].extend(change.segment.tokens)
                self._made[change.id][1].extend(change.segment.logprobs)
            elif isinstance(change, RequestFinished):
                self._answers.pop(change.id).set_result("completed")
            elif isinstance(change, RequestFailed):
                self._answers.pop(change.id).set_exception(RuntimeError(change.reason))

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        self._rejects = reject_request
        self._is_open.clear()
        self._apply(self.engine.abort(list(self._answers)))
        for answer in self._answers.values():
            answer.set_result("aborted")
        self._answers.clear()

    async def resume_generation(self) -> None:
        self._rejects = False
        self._is_open.set()

    async def update_weights(self, weights: dict[str, Any], version: int) -> None:
        state = {name: torch.from_numpy(value.copy()) for name, value in weights.items()}
        self.engine.update_weights(state or None, version)
        self.global_steps = version

    async def fail_next(self, count: int) -> None:
        """The next requests raise errors."""
        self._failures = count

    async def counts(self) -> dict[str, int]:
        return {"served": self.served, "most_at_once": self.most_at_once, "global_steps": self.global_steps}

    async def log_probabilities(self, tokens: list[int]) -> list[float]:
        """Of every token but the first, under the weights that the server holds."""
        with torch.no_grad():
            logits = self.model(torch.tensor([tokens])).logits[0, :-1].double()
        return torch.log_softmax(logits, -1).gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()

    async def release_kv_cache(self) -> None:
        assert not self._answers, "the KV cache is released with requests inside"

    async def sleep(self) -> None:
        assert not self._answers, "asleep with requests inside"

    async def _done(self, *args: Any, **kwargs: Any) -> None: ...

    resume_kv_cache = wake_up = start_profile = stop_profile = _done


def _replica_class() -> Any:
    import ray
    from verl.workers.rollout.replica import RolloutReplica

    class EmbeddedReplica(RolloutReplica):
        async def launch_servers(self) -> None:
            path = self.model_config.path
            name = SERVER_NAME.format(self.replica_rank)
            dies_after = int(os.environ.get(DIES_AFTER, "0")) if self.replica_rank == 1 else 0
            self._server_handle = (
                ray.remote(EmbeddedServer)
                .options(name=name, num_cpus=0, max_concurrency=self.config.max_num_seqs + CONTROL_CALLS)
                .remote(
                    path, self.config.max_num_seqs, self.config.prompt_length, self.config.response_length, dies_after
                )
            )
            self.servers = [self._server_handle]
            self._server_address = name
            await self._server_handle.counts.remote()

    return EmbeddedReplica


def _adapter_class() -> Any:
    import ray
    from verl.workers.rollout.base import BaseRollout
    from verl.workers.rollout.utils import ensure_async_iterator

    class EmbeddedAdapter(BaseRollout):
        """Hands the weights to a server: that of the training worker's rank, or of its replica if it has GPUs of its
        own."""

        def __init__(self, *args: Any, replica_rank: int | None = None, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.replica_rank = int(os.environ.get("RANK", "0")) if replica_rank is None else replica_rank
            self.is_leader_rank = True

        async def resume(self, tags: list[str]) -> None: ...

        async def release(self) -> None: ...

        async def update_weights(self, weights: Any, global_steps: int = 0, **unused: Any) -> None:
            arrays = {name: _full(tensor).numpy() async for name, tensor in ensure_async_iterator(weights)}
            if os.environ.get(LOSES_WEIGHTS):
                arrays.clear()
            server = ray.get_actor(SERVER_NAME.format(self.replica_rank))
            await server.update_weights.remote(arrays, global_steps)

    return EmbeddedAdapter


def _full(tensor: Any) -> torch.Tensor:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().float().cpu().contiguous()


def __getattr__(name: str) -> Any:
    if name == "EmbeddedAdapter":  # verl looks the class up in this module by name
        return _adapter_class()
    raise AttributeError(name)


def _add_rollout(module: types.ModuleType) -> None:
    module._ROLLOUT_REGISTRY[(ROLLOUT, "async")] = f"{__name__}.EmbeddedAdapter"


def _add_replica(module: types.ModuleType) -> None:
    module.RolloutReplicaRegistry.register(ROLLOUT, _replica_class)


def _add_engine(module: types.ModuleType) -> None:
    from verl.workers.engine.base import EngineRegistry

    EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device=["cpu"])(
        module.FSDPEngineWithLMHead
    )


wrapt.register_post_import_hook(_add_rollout, "verl.workers.rollout.base")
wrapt.register_post_import_hook(_add_replica, "verl.workers.rollout.replica")
wrapt.register_post_import_hook(_add_engine, "verl.workers.engine.fsdp.transformer_impl")
