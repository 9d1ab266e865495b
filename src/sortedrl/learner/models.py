"""Forward passes of the learner: log-probabilities of trained tokens, a critic's values, LoRA, recomputation."""

import copy
import hashlib
import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from sortedrl.core.configuration import ConfigurationError
from sortedrl.learner.batching import UpdateBatch
from sortedrl.learner.losses import selected_logprobs, token_scores
from sortedrl.learner.settings import require

# Compiled attention depends on whether the number of tokens in a row is a multiple of this.
COMPILED_WIDTH_MULTIPLE = 8


class TokenScorer:
    """Log-probabilities of trained tokens under a causal language model, without logits for all positions.

    The model's trunk computes hidden states, and its head is applied in chunks to those that predict a trained token.
    If a model's logits are not simply head(trunk), for example capped or rescaled, a forward pass over two tokens at
    the start detects it, and the model's own logits are used.
    """

    def __init__(self, model: PreTrainedModel, temperature: float, *, compiled: bool = False) -> None:
        self.model = model
        self._temperature = temperature
        self._scores = torch.compile(token_scores, dynamic=True) if compiled else token_scores
        head: nn.Module | None = model.get_output_embeddings()
        self._head = head if head is not None and self._gives_the_logits(head) else None

    @torch.no_grad()
    def _gives_the_logits(self, head: nn.Module) -> bool:
        """Whether the logits are exactly head(trunk).

        The head's output is replaced by large numbers for this check: a cap would not show on small ones.
        """
        tokens_bt = torch.tensor([[0, 1]], device=self.model.device)
        inputs: list[Tensor] = []

        def probe(_: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
            inputs.append(arguments[0])
            return torch.full_like(output, 4096.0)

        handle = head.register_forward_hook(probe)
        try:
            logits = self.model(input_ids=tokens_bt, use_cache=False).logits
        finally:
            handle.remove()
        if len(inputs) != 1 or not bool((logits == 4096.0).all()):
            return False
        return bool(torch.allclose(inputs[0], self._hidden(tokens_bt), rtol=1e-2, atol=1e-3))

    def _hidden(self, tokens_bt: Tensor) -> Tensor:
        hidden_bth: Tensor = self.model.base_model(input_ids=tokens_bt, use_cache=False).last_hidden_state
        return hidden_bth

    def __call__(self, batch: UpdateBatch, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies, both [rollouts, response tokens] and 0 outside the mask."""
        row_n, place_n = batch.trained_positions()
        logprobs_n, entropy_n = self.at(batch.tokens_bt, row_n, place_n, entropy_gradient)
        return scattered(logprobs_n, batch.mask_br), scattered(entropy_n, batch.mask_br)

    def at(
        self, tokens_bt: Tensor, row_n: Tensor, place_n: Tensor, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the tokens at these places, none of them the first of its row, and entropies."""
        if self._head is not None:
            head, features_btf = self._head, self._hidden(tokens_bt)
        else:
            head, features_btf = nn.Identity(), self.model(input_ids=tokens_bt, use_cache=False).logits
        return selected_logprobs(
            features_btf[row_n, place_n - 1],
            tokens_bt[row_n, place_n],
            head,
            self._temperature,
            entropy_gradient,
            scores=self._scores,
        )


class ValueModel(nn.Module):
    """A critic: a copy of the policy's trunk with a scalar head that starts at 0."""

    def __init__(self, policy: PreTrainedModel) -> None:
        super().__init__()
        self.trunk: Any = copy.deepcopy(policy.base_model)
        self.head = nn.Linear(policy.config.get_text_config().hidden_size, 1, device=policy.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, batch: UpdateBatch) -> Tensor:
        """The value of the state before each trained token, [rollouts, response tokens], 0 outside the mask."""
        row_n, place_n = batch.trained_positions()
        hidden_bth = self.trunk(input_ids=batch.tokens_bt, use_cache=False).last_hidden_state
        values_n = self.head(hidden_bth[row_n, place_n - 1].float()).squeeze(-1)
        return scattered(values_n, batch.mask_br)


@torch.no_grad()
def response_logprobs(model: PreTrainedModel, context: Sequence[int], response: Sequence[int]) -> list[float]:
    """The log-probability of each response token after its context, at temperature 1."""
    if not response:
        return []
    tokens_t = torch.tensor([*context, *response], device=model.device)
    logits_rv = model(input_ids=tokens_t[None], use_cache=False).logits[0, len(context) - 1 : -1].float()
    chosen: list[float] = logits_rv.log_softmax(-1).gather(1, tokens_t[len(context) :, None])[:, 0].tolist()
    return chosen


def cast_weights(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast the weights in place.

    Buffers stay as they are: a rotary frequency in bf16 is off by up to 0.4%, which at position 1,000 is several
    radians, and engines compute with fp32 frequencies.
    """
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)


def scattered(values_n: Tensor, mask_br: Tensor) -> Tensor:
    return torch.zeros_like(mask_br, dtype=values_n.dtype).masked_scatter(mask_br, values_n)


def with_adapters(module: PreTrainedModel, rank: int) -> Any:
    """The module with its linear layers replaced by LoRA layers; only those are trained."""
    try:
        peft = importlib.import_module("peft")
    except ModuleNotFoundError as missing:
        raise ValueError(f"lora_rank = {rank} needs peft, which is not installed: pip install peft") from missing
    return peft.get_peft_model(
        module, peft.LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear")
    )


def checkpoint_layers(module: PreTrainedModel, above_tokens: int = 0) -> None:
    """Recompute activations in the backward pass, in forward passes over more than `above_tokens` tokens.

    Layers do so only in training mode. The flag is set on the layers but not on their submodules, because dropout must
    stay off: log-probabilities must match those of the sampling policy. Layers that drop out themselves (OPT's) have
    the probability as a number, which is set to 0. So nothing is random, and the state of the random number generator
    is left alone: an engine in this process may sample with it at the same time.
    """
    module.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": False, "preserve_rng_state": False}
    )
    layers = [layer for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer)]
    for layer in layers:
        layer.training = True
        for name in [name for name, value in vars(layer).items() if "dropout" in name and isinstance(value, float)]:
            setattr(layer, name, 0.0)

    def choose(_: nn.Module, __: tuple[Any, ...], inputs: Mapping[str, Any]) -> None:
        for layer in layers:
            layer.gradient_checkpointing = inputs["input_ids"].numel() > above_tokens

    if above_tokens:
        module.base_model.register_forward_pre_hook(choose, with_kwargs=True)


def compile_layers(module: PreTrainedModel) -> None:
    """Compile each decoder layer: its elementwise operations become few kernels. Sizes of micro-batches stay dynamic.

    All layers run the same code, so it is compiled once for all of them, in the first update, and again for the first
    micro-batch of a single rollout.
    """
    import torch._inductor.config as inductor  # takes seconds

    # It decides by the number of tokens whether to fuse, so each side of its two limits would be compiled by itself.
    fuses_by_size = "mix_order_reduction"
    options = {f"triton.{fuses_by_size}": False} if hasattr(inductor.triton, fuses_by_size) else None
    for layer in module.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.compile(dynamic=True, options=options)


def avoid_plans_per_shape(device: torch.device) -> None:
    """Attention without cuDNN, in this process.

    cuDNN plans every new shape, and nearly every micro-batch has its own: on an H200 the learner is 1.2x as fast
    without it. It is a setting of the process because recomputation in the backward pass must use the same kernels.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def checksum(weights: Iterable[Tensor]) -> str:
    """The same for the same weights on any device: sums of their bits as integers do not depend on the order."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [
        (tuple(weight.shape), int(weight.detach().view(integers[weight.element_size()]).sum(dtype=torch.int64)))
        for weight in weights
    ]
    return hashlib.sha256(repr(sums).encode()).hexdigest()


def require_same_model(name: str, own: Mapping[str, str], saved: Mapping[str, str]) -> None:
    """Refuse a state that belongs to another initial model: `dtype`, and `frozen`, a checksum of its frozen weights."""
    if own["dtype"] != saved["dtype"]:
        fix = f"Set dtype to {saved['dtype']}: auto is bfloat16 on a GPU and float32 on a CPU."
        raise ConfigurationError("dtype", own["dtype"], f"the state was saved with weights in {saved['dtype']}", fix)
    if own["frozen"] != saved["frozen"]:
        why = "its weights are not those that the run started with, and a state with LoRA or a KL penalty needs them"
        fix = "Restore the model's files (on the hub: its revision), or start a new run."
        raise ConfigurationError("model", name, why, fix)


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: weight for name, weight in module.named_parameters() if weight.requires_grad}


@torch.no_grad()
def copy_into(own: Mapping[str, Tensor], saved: Mapping[str, Tensor], what: str) -> None:
    """Copy saved tensors into a model's own; raises a ValueError if they are those of another model."""
    differing = sorted(own.keys() ^ saved.keys())
    differing += [name for name in own.keys() & saved.keys() if own[name].shape != saved[name].shape]
    why = f"this model has {len(own)}, and {len(differing)} names or shapes differ, first {differing[:1]}"
    fix = "resume with the model and the lora_rank that the state was saved with"
    require(not differing, f"{what} state", f"{len(saved)} tensors", f"{why}: {fix}")
    for name, tensor in own.items():
        tensor.copy_(saved[name])
