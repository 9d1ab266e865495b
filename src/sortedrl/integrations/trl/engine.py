"""The engine of a `SortedGRPOTrainer`: created on first use, fed with the trainer's weights, also for evaluations;
and the comparison of its log-probabilities with the trainer's.

Weights that accelerate has sharded over ranks are gathered tensor by tensor. FSDP2 and ZeRO-3 are recognized by the
model itself. ZeRO-1 and ZeRO-2 leave the weights whole. Gathering is a collective: all ranks iterate to the end
together. A rank never holds more than one gathered tensor, or adapted layer, beyond those that the reader of the
iterator keeps.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeGuard, cast

import torch
from accelerate.utils import is_peft_model
from torch import Tensor
from torch.distributed.tensor import DTensor

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.engine import Engine, EngineBase, EngineSpec, Request, missing_members, with_defaults
from sortedrl.core.rollout import Prompt
from sortedrl.core.schedule import Schedule
from sortedrl.core.seeds import derive_seed
from sortedrl.core.wording import kind_of
from sortedrl.engines.generate import generate
from sortedrl.engines.registry import make_engine
from sortedrl.integrations.trl.rows import loss_mask
from sortedrl.models.merged_weights import WholeWeights, merged_weights

MakeEngine = Callable[[], Engine]
MISMATCH_LIMIT = 0.5  # mean nats per token; rounding gives 1e-5 in float32 and 1e-2 in bfloat16, wrong weights give 5


def is_function(wanted: str | Engine | MakeEngine) -> TypeGuard[MakeEngine]:
    return not isinstance(wanted, str) and not hasattr(wanted, "poll")


def exhaust(weights: Iterator[Any] | None) -> None:
    for _ in weights or ():
        pass


class TrainerEngine:
    """`wanted`: a name, for which `spec` is, an engine of the user's, or a function that makes one, on rank 0 alone.

    `trainer`: its model may be wrapped or sharded by accelerate later. `is_here` is False where rank 0 generates.
    """

    def __init__(
        self, wanted: str | Engine | MakeEngine, trainer: Any, spec: EngineSpec | None, *, is_here: bool
    ) -> None:
        self.is_here = is_here
        self._wanted = wanted
        self._trainer = trainer
        self._spec = spec
        self._engine: EngineBase | None = None
        self._shares_weights = wanted == "embedded" and not is_peft_model(trainer.model)
        self._evaluated = (0, 0)  # a step, and the responses that its evaluations have sampled

    def ready(self) -> EngineBase:
        if self._engine is None:
            self._engine = self._new_engine()
        return self._engine

    @property
    def is_sharded(self) -> bool:
        """Then `weights` is a collective: all ranks call it, and read it to the end."""
        return is_sharded(self._trainer.model)

    def update_weights(self, version: int) -> None:
        weights = self.weights()
        if self.is_here:
            self.ready().update_weights(weights, version)
        if self.is_sharded:
            exhaust(weights)

    def weights(self) -> Iterator[tuple[str, Tensor]] | None:
        """For the engine, before the next step: None if it shares the trainer's module."""
        if self._shares_weights:
            return None
        return whole_weights(self._trainer.model, on_host=self.is_here and self.ready().has_own_device)

    def sleep_until_update(self) -> None:
        if self.is_here:
            self.ready().sleep_until_update()

    def sampled(self, prompt_ids: Any, step: int) -> list[tuple[list[int], list[float]]]:
        """One response, or turn, to each prompt of a batch of an evaluation after `step` optimizer steps: its tokens
        and log-probabilities."""
        schedule: Schedule = self._trainer.schedule
        limit, context = schedule.max_response_tokens, schedule.max_context_tokens
        assert context is not None
        longest = max(map(len, prompt_ids), default=0)
        if longest >= context and self._trainer.tool_use is None:  # with tools, a later turn may have no room
            why = f"it leaves no room for a response within {context} tokens"
            raise ConfigurationError("eval_dataset", f"a prompt of {longest} tokens", why, "Leave such prompts out.")
        requests = [
            Request(i, Prompt(str(i), tuple(ids)), (), min(limit, context - len(ids)), seed, self._trainer.sampling)
            for i, (ids, seed) in enumerate(zip(prompt_ids, self._new_seeds(step, len(prompt_ids)), strict=True))
        ]
        responses = {r.request.id: r for r in generate(self.ready(), [r for r in requests if r.max_new_tokens > 0])}
        for id, response in responses.items():
            if response.failure is not None:
                raise RuntimeError(f"prompt {id} of an evaluation failed: {response.failure}")
        made = [responses.get(request.id) for request in requests]
        return [(r.tokens, r.logprobs) if r else ([], []) for r in made]

    def _new_seeds(self, step: int, count: int) -> list[int]:
        """They differ in all batches and turns of a step. A resumed run has the same ones from its next step on."""
        first = self._evaluated[1] if self._evaluated[0] == step else 0
        self._evaluated = step, first + count
        return [derive_seed(self._trainer.schedule.seed, step, i) for i in range(first, first + count)]

    def _new_engine(self) -> EngineBase:
        if isinstance(self._wanted, str):
            assert self._spec is not None
            module = _module_to_decode_with(self._trainer.model) if self._wanted == "embedded" else None
            return make_engine(self._wanted, replace(self._spec, module=module))
        if not is_function(self._wanted):
            return with_defaults(cast(Engine, self._wanted))
        made = self._wanted()
        if missing := missing_members(made):
            why = f"it returned {kind_of(made)} without {', '.join(missing)}"
            name = getattr(self._wanted, "__name__", "a function")
            raise ConfigurationError("engine", name, why, "Return an engine, such as ServerPool([...]).")
        return with_defaults(made)


def engine_spec(wanted: str, trainer: Any, reuse_kv_cache: bool) -> EngineSpec:
    """Of an engine that is named. `trainer` is a GRPOTrainer with a schedule and slots."""
    args, on_cpu = trainer.args, trainer.accelerator.device.type == "cpu"
    options: dict[str, Any] = {}
    if wanted == "vllm":
        options = {
            "enable_sleep_mode": args.vllm_enable_sleep_mode,
            "reuse_kv_cache": reuse_kv_cache,
            "gpu_memory_utilization": args.vllm_gpu_memory_utilization,
            "enforce_eager": on_cpu,
        }
        if args.world_size > 1:
            options["distributed_executor_backend"] = "external_launcher"
    return EngineSpec(
        model=trainer.model.config._name_or_path,
        slots=trainer.slots,
        max_length=longest_context(wanted, trainer),
        eos_token_ids=frozenset(trainer.eos_token_ids),
        tokenizer=trainer._tokenizer,
        dtype="bfloat16" if args.bf16 and not on_cpu else str(trainer.model.dtype).removeprefix("torch."),
        seed=trainer.schedule.seed % (1 << 32),  # as much as vLLM takes
        options=options,
    )


def _module_to_decode_with(model: Any) -> Any:
    """The trainer's own module, or a copy without adapters, which gets the merged weights."""
    if not is_peft_model(model):
        return model
    module = copy.deepcopy(model).unload()
    module.requires_grad_(False)
    return module


def longest_context(wanted: str | Engine | MakeEngine, trainer: Any) -> int:
    """Tokens of prompt and response: as many as vLLM's setting, or the model and a server allow, unless the schedule
    bounds prompts."""
    if wanted == "vllm" and trainer.args.vllm_max_model_length:
        return int(trainer.args.vllm_max_model_length)
    positions = getattr(trainer.model.config.get_text_config(), "max_position_embeddings", None)
    known = [limit for limit in (positions, getattr(wanted, "max_length", None)) if limit is not None]
    limit: int | None = min(known, default=None)
    schedule: Schedule = trainer.schedule
    max_new_tokens, prompt = schedule.max_response_tokens, schedule.max_prompt_tokens
    if limit is not None and max_new_tokens + (prompt or 1) > limit:
        why = f"with a prompt it exceeds the longest context, {limit} tokens"
        raise ConfigurationError("max_completion_length", max_new_tokens, why, "Lower it.")
    if prompt is not None:
        return max_new_tokens + prompt
    if limit is None:
        why = "the model configuration has no maximum context length"
        raise ConfigurationError("max_prompt_tokens", None, why, "Set it in a Schedule.")
    return limit


class EngineMismatch(RuntimeError):
    """The engine and the trainer disagree on log-probabilities."""


def checked_mismatch(logps: Tensor, inputs: dict[str, Tensor]) -> float | None:
    """Mean nats per token, only on tokens of the current weights: on stale tokens the two differ legitimately. None if
    there are none. Raises EngineMismatch."""
    fresh = loss_mask(inputs).bool() & (inputs["staleness"] == 0)
    if not bool(fresh.any()):
        return None
    mismatch = (logps - inputs["sampling_per_token_logps"])[fresh].abs().mean().item()
    if not mismatch < MISMATCH_LIMIT:
        raise EngineMismatch(
            f"on tokens of the current weights, engine and trainer differ by {mismatch:.2f} nats per token (limit "
            f"{MISMATCH_LIMIT}): the engine does not hold the trainer's weights, or the trainer's dropout is on "
            "(then set disable_dropout=True)"
        )
    return mismatch


# Sharded weights


def is_sharded(model: Any) -> bool:
    """Whether reading the weights is a collective."""
    return any(isinstance(weight, DTensor) or _is_zero3(weight) for weight in model.parameters())


def whole_weights(model: Any, *, on_host: bool = False) -> Iterator[tuple[str, Tensor]]:
    """As `merged_weights`, from the model of a trainer: wrapped or not. Gathered ones are tensors of their own."""
    access = _Gathered(on_host) if is_sharded(model) else None
    for name, weight in merged_weights(model, access):
        yield name.removeprefix("base_model.model."), weight


class _Gathered(WholeWeights):
    def __init__(self, on_host: bool) -> None:
        self._on_host = on_host

    @torch.no_grad()
    def whole(self, tensor: Any) -> Any:
        gathered = self._gathered(tensor.detach() if not _is_zero3(tensor) else tensor)
        return gathered.cpu() if self._on_host else gathered

    def _gathered(self, tensor: Any) -> Any:
        if isinstance(tensor, DTensor):
            on_device: Any = tensor.to(tensor.device_mesh.device_type)  # from the CPU if it is offloaded
            return on_device.full_tensor()
        if _is_zero3(tensor):
            import deepspeed

            with deepspeed.zero.GatheredParameters([tensor]):
                return tensor.detach().clone()
        return tensor


def _is_zero3(weight: Any) -> bool:
    return hasattr(weight, "ds_id")
