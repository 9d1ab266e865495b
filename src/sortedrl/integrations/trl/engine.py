"""The engine of a `SortedGRPOTrainer`: created on first use, fed with the trainer's weights, also for evaluations."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from accelerate.utils import is_peft_model
from torch import Tensor

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.engine import Engine, EngineBase, EngineSpec, Request, Sampling, with_defaults
from sortedrl.core.generate import generate
from sortedrl.core.rollout import Prompt
from sortedrl.core.seeds import derive_seed
from sortedrl.engines.registry import make_engine
from sortedrl.models.merged_weights import merged_weights

if TYPE_CHECKING:
    from sortedrl.integrations.trl.trainer import SortedGRPOTrainer


class TrainerEngine:
    """`wanted`: a name, or an engine of the user's."""

    def __init__(self, trainer: SortedGRPOTrainer, wanted: str | Engine) -> None:
        self._trainer = trainer
        self._wanted = wanted
        self._engine: EngineBase | None = None
        self._shares_weights = wanted == "embedded" and not is_peft_model(trainer.model)
        self._evaluated = (0, 0)  # a step, and the responses that its evaluations have sampled

    def ready(self) -> EngineBase:
        if self._engine is None:
            self._engine = self._new_engine()
        return self._engine

    def update_weights(self, version: int) -> None:
        self.ready().update_weights(self.weights(), version)

    def weights(self) -> dict[str, Tensor] | None:
        """For the engine: None if it shares the trainer's module."""
        if self._shares_weights:
            return None
        model = self._trainer.model
        return dict(merged_weights(model.get_base_model() if is_peft_model(model) else model))

    @property
    def context(self) -> int:
        """Tokens of prompt and response."""
        trainer = self._trainer
        return (trainer.args.vllm_max_model_length if self._wanted == "vllm" else None) or _longest_context(trainer)

    def sampled(self, prompt_ids: Any, version: int) -> tuple[list[list[int]], list[list[float]]]:
        """One response, or turn, to each prompt of a batch of an evaluation."""
        self.update_weights(version)
        trainer = self._trainer
        sampling, limit = Sampling(temperature=trainer.temperature), trainer.schedule.max_response_tokens
        requests = [
            Request(i, Prompt(str(i), tuple(ids)), (), limit, seed, sampling)
            for i, (ids, seed) in enumerate(zip(prompt_ids, self._new_seeds(len(prompt_ids)), strict=True))
        ]
        context = trainer.schedule.max_context_tokens
        if context is not None:  # a later turn may have less room, or none
            requests = [r._replace(max_new_tokens=min(limit, context - len(r.prompt.tokens))) for r in requests]
        responses = {r.request.id: r for r in generate(self.ready(), [r for r in requests if r.max_new_tokens > 0])}
        for id, response in responses.items():
            if response.failure is not None:
                raise RuntimeError(f"prompt {id} of an evaluation failed: {response.failure}")
        made = [responses.get(request.id) for request in requests]
        return [r.tokens if r else [] for r in made], [r.logprobs if r else [] for r in made]

    def _new_seeds(self, count: int) -> list[int]:
        """They differ in all batches and turns of a step. A resumed run has the same ones from its next step on."""
        trainer = self._trainer
        step = trainer.state.global_step
        first = self._evaluated[1] if self._evaluated[0] == step else 0
        self._evaluated = step, first + count
        rank = trainer.accelerator.process_index
        return [derive_seed(trainer.args.seed, step, rank, i) for i in range(first, first + count)]

    def _new_engine(self) -> EngineBase:
        if not isinstance(self._wanted, str):
            return with_defaults(self._wanted)
        trainer = self._trainer
        on_cpu = trainer.accelerator.device.type == "cpu"
        options: dict[str, Any] = {}
        if self._wanted == "vllm":
            _require_one_process(trainer)
            options = {
                "enable_sleep_mode": trainer.args.vllm_enable_sleep_mode,
                "gpu_memory_utilization": trainer.args.vllm_gpu_memory_utilization,
                "enforce_eager": on_cpu,
            }
        spec = EngineSpec(
            model=trainer.model.config._name_or_path,
            slots=trainer.slots,
            max_length=self.context,
            eos_token_ids=frozenset(trainer.eos_token_ids),
            module=_module_to_decode_with(trainer.model) if self._wanted == "embedded" else None,
            tokenizer=trainer._tokenizer,
            dtype="bfloat16" if trainer.args.bf16 and not on_cpu else str(trainer.model.dtype).removeprefix("torch."),
            seed=trainer.schedule.seed,
            options=options,
        )
        return make_engine(self._wanted, spec)


def _module_to_decode_with(model: Any) -> Any:
    """The trainer's own module, or a copy without adapters, which gets the merged weights."""
    if not is_peft_model(model):
        return model
    module = copy.deepcopy(model).unload()
    module.requires_grad_(False)
    return module


def _require_one_process(trainer: SortedGRPOTrainer) -> None:
    if trainer.accelerator.num_processes > 1:
        raise ConfigurationError(
            "engine", "vllm", f"it supports one process, but there are {trainer.accelerator.num_processes}",
            "Use engine='embedded', or launch one process.",
        )  # fmt: skip


def _longest_context(trainer: SortedGRPOTrainer) -> int:
    """Prompt plus response: as long as the model allows, unless the schedule bounds prompts."""
    limit: int | None = getattr(trainer.model.config.get_text_config(), "max_position_embeddings", None)
    max_new_tokens, prompt = trainer.schedule.max_response_tokens, trainer.schedule.max_prompt_tokens
    if limit is not None and max_new_tokens + (prompt or 1) > limit:
        raise ConfigurationError(
            "max_completion_length",
            max_new_tokens,
            f"with a prompt it exceeds the model's {limit} positions",
            "Lower it.",
        )
    if prompt is not None:
        return max_new_tokens + prompt
    if limit is None:
        raise ConfigurationError(
            "max_prompt_tokens",
            None,
            "the model configuration has no maximum context length",
            "Set it in a Schedule.",
        )
    return limit
