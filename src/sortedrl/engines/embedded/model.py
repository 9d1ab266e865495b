"""How the embedded engine runs a model: a cache with one row per slot, attention over it, the forward pass.

Any Hugging Face causal LM with full or sliding attention runs through its own forward, with the cache passed as
`past_key_values` and explicit positions and masks. Llama-shaped models have a hand-written forward with the same
arithmetic: fewer kernels and less Python, which dominate a step of a small model or a small batch.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, pad, rms_norm, scaled_dot_product_attention, silu
from transformers import AttentionInterface, Cache, PreTrainedModel

_QUERIES_PER_BLOCK = 64  # of a CPU prefill: each block reads the keys up to its end
_GPU_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_SLOT_ATTENTION = "sortedrl_slots"
_LLAMA_SHAPED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

Masks = Mapping[str, Tensor | None]  # additive, by layer type; None: the kernel applies the causal mask


class UnsupportedModel(ValueError):
    """The embedded engine cannot run this model; the message has the reason."""


class SlotCache(Cache):  # type: ignore[misc]
    """Keys and values, [rows, heads, capacity, width] per layer, allocated at a layer's first write.

    The decoder sets the kind of the next forward pass: a prefill of whole contexts into some rows, or a step, in which
    each of the first rows writes at its position and the first `span` keys of these rows are read.
    """

    def __init__(self, rows: int, capacity: int) -> None:
        super().__init__(layers=[])
        self.rows = rows
        self.capacity = capacity
        self.span = 0
        self._stored: dict[int, list[Tensor]] = {}  # keys and values by layer
        self._prefill_rows: Tensor | None = None
        self._write_positions: Tensor | None = None
        self._write_at: dict[int, Tensor] = {}  # by number of heads

    def expect_prefill(self, rows: Tensor) -> None:
        self._prefill_rows = rows

    def expect_step(self, positions: Tensor, span: int) -> None:
        self._prefill_rows = None
        self._write_positions = positions
        self._write_at.clear()
        self.span = span

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores [rows, heads, tokens, width] and returns the keys and values visible to the queries of this pass."""
        if layer_idx not in self._stored:
            self._stored[layer_idx] = [self._allocated(key_states), self._allocated(value_states)]
        keys, values = self._stored[layer_idx]
        if self._prefill_rows is not None:
            length = key_states.shape[2]
            keys[self._prefill_rows, :, :length] = key_states
            values[self._prefill_rows, :, :length] = value_states
            return key_states, value_states
        write_at = self._flat_positions(key_states.shape[1])
        keys.flatten(0, 2).index_copy_(0, write_at, key_states.flatten(0, 2))
        values.flatten(0, 2).index_copy_(0, write_at, value_states.flatten(0, 2))
        rows = len(key_states)
        return keys[:rows, :, : self.span], values[:rows, :, : self.span]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions and masks are always passed explicitly

    def grow(self, capacity: int) -> None:
        extra = capacity - self.capacity
        for layer, stored in self._stored.items():
            self._stored[layer] = [pad(tensor, (0, 0, 0, extra)) for tensor in stored]
        self.capacity = capacity

    def move(self, sources: Tensor, targets: Tensor, length: int) -> None:
        for tensor in chain.from_iterable(self._stored.values()):
            tensor[targets, :, :length] = tensor[sources, :, :length]

    def _flat_positions(self, heads: int) -> Tensor:
        if heads not in self._write_at:
            assert self._write_positions is not None
            positions = self._write_positions
            numbers = torch.arange(len(positions) * heads, device=positions.device)
            per_head = positions[:, None].expand(-1, heads).flatten()
            self._write_at[heads] = numbers * self.capacity + per_head
        return self._write_at[heads]

    def _allocated(self, states: Tensor) -> Tensor:
        heads, width = states.shape[1], states.shape[3]
        return states.new_zeros(self.rows, heads, self.capacity, width)


class GeneralForward:
    """The model's own forward: a pass over [rows, tokens] that reads and writes its cache."""

    def __init__(self, model: PreTrainedModel, cache: SlotCache) -> None:
        self.kinds_of_layers = frozenset(_kinds_of_layers(model))
        self._model = model
        self._cache = cache
        self._attention = _SLOT_ATTENTION if uses_slot_attention(model) else "eager"

    def refresh(self, *, changed: bool = False) -> None:
        """Pick up changed weights; without `changed`, check whether they did. The model's own forward always reads the
        current ones."""

    def fill(self, tokens: Tensor, positions: Tensor, masks: Masks) -> None:
        """Write the keys and values of the tokens into the cache."""
        self._run(self._model.base_model, tokens, positions, masks)

    def logits(self, tokens: Tensor, positions: Tensor, masks: Masks) -> Tensor:
        """Logits [rows, vocabulary] after the last token of each row."""
        logits: Tensor = self._run(self._model, tokens, positions, masks).logits
        return logits[:, -1]

    def _run(self, module: nn.Module, tokens: Tensor, positions: Tensor, masks: Masks) -> Any:
        with _attention_set_to(self._model, self._attention):
            return module(
                input_ids=tokens,
                attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
                position_ids=positions,
                past_key_values=self._cache,
                use_cache=True,
            )


class LlamaForward(GeneralForward):
    """A hand-written forward of Llama-shaped models (also with biases or normalized queries and keys)."""

    def __init__(self, model: PreTrainedModel, cache: SlotCache) -> None:
        self._kinds = _kinds_of_layers(model)
        self.kinds_of_layers = frozenset(self._kinds)
        self._cache = cache
        trunk: Any = model.base_model
        self._trunk = trunk
        self._head = _Projections(model.get_output_embeddings())
        self._layers = [_LlamaLayer(layer) for layer in trunk.layers]

    def refresh(self, *, changed: bool = False) -> None:
        self._head.refresh(changed)
        for layer in self._layers:
            for projections in (layer.into_heads, layer.out_of_heads, layer.up, layer.down):
                projections.refresh(changed)

    def fill(self, tokens: Tensor, positions: Tensor, masks: Masks) -> None:
        self._hidden(tokens, positions, masks)

    def logits(self, tokens: Tensor, positions: Tensor, masks: Masks) -> Tensor:
        hidden = self._hidden(tokens, positions, masks)[:, -1]
        return self._head(_normalized(hidden, self._trunk.norm))[0]

    def _hidden(self, tokens: Tensor, positions: Tensor, masks: Masks) -> Tensor:
        hidden: Tensor = self._trunk.embed_tokens(tokens)
        cosine, sine = self._trunk.rotary_emb(hidden, positions)
        # The signs of the rotation are folded into the sine, so that only swapping halves remains.
        half = sine.shape[-1] // 2
        sine = torch.cat((-sine[..., :half], sine[..., half:]), dim=-1)[:, :, None]
        cosine = cosine[:, :, None]
        for index, layer in enumerate(self._layers):
            heads = (*tokens.shape, -1, layer.head_width)
            query, key, value = layer.into_heads(_normalized(hidden, layer.input_norm))
            query, key, value = query.reshape(heads), key.reshape(heads), value.reshape(heads)
            if layer.query_norm is not None:
                query, key = _normalized(query, layer.query_norm), _normalized(key, layer.key_norm)
            query, key = _rotated(query, cosine, sine), _rotated(key, cosine, sine)
            keys, values = self._cache.update(key.transpose(1, 2), value.transpose(1, 2), index)
            attended = _attend(query.transpose(1, 2), keys, values, masks[self._kinds[index]], layer.scaling)
            hidden = hidden + layer.out_of_heads(attended.transpose(1, 2).flatten(2))[0]
            gate, up = layer.up(_normalized(hidden, layer.output_norm))
            hidden = hidden + layer.down(silu(gate).mul_(up))[0]
        return hidden


def forward_for(model: PreTrainedModel, cache: SlotCache) -> GeneralForward:
    if type(model).__name__ in _LLAMA_SHAPED and uses_slot_attention(model):
        return LlamaForward(model, cache)
    return GeneralForward(model, cache)


class _LlamaLayer:
    """The parts of a decoder layer, looked up once because attribute access on modules is slow."""

    def __init__(self, layer: Any) -> None:
        attention = layer.self_attn
        self.head_width: int = attention.head_dim
        self.scaling: float = attention.scaling
        self.input_norm = layer.input_layernorm
        self.output_norm = layer.post_attention_layernorm
        self.query_norm = getattr(attention, "q_norm", None)
        self.key_norm = getattr(attention, "k_norm", None)
        self.into_heads = _Projections(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out_of_heads = _Projections(attention.o_proj)
        self.up = _Projections(layer.mlp.gate_proj, layer.mlp.up_proj)
        self.down = _Projections(layer.mlp.down_proj)


class _Projections:
    """Linear layers with the same input.

    Small ones on a CPU are fused into one product with a copy of the weights in the layout that it reads, which halves
    the time. In all other cases (large layers, GPU, adapters, layers that someone changed) they are called as they are.
    """

    def __init__(self, *layers: Any) -> None:
        self._layers = layers
        self._copied = all(_worth_a_copy(layer) for layer in layers)
        self._versions: list[int] | None = None

    def refresh(self, changed: bool) -> None:
        """Refresh copies of weights changed in place; changes that torch does not track (`.data`) need `changed`."""
        if not self._copied:
            return
        versions = [parameter._version for layer in self._layers for parameter in layer.parameters()]
        if changed or versions != self._versions:
            self._versions = versions
            self._sizes = [layer.out_features for layer in self._layers]
            self._weight = torch.cat([layer.weight for layer in self._layers]).t().contiguous().t()
            has_bias = self._layers[0].bias is not None
            self._bias = torch.cat([layer.bias for layer in self._layers]) if has_bias else None

    def __call__(self, hidden: Tensor) -> Sequence[Tensor]:
        if self._copied:
            return linear(hidden, self._weight, self._bias).split_with_sizes(self._sizes, dim=-1)
        return [layer(hidden) for layer in self._layers]


def _worth_a_copy(layer: Any) -> bool:
    """Up to a width of 512, products with the copy are exact too: their sums do not depend on the number of rows."""
    if type(layer) is not nn.Linear or layer.weight.device.type != "cpu" or layer.weight.is_inference():
        return False
    if "forward" in vars(layer) or layer._forward_hooks or layer._forward_pre_hooks:  # TRL's cast_lm_head_to_fp32
        return False
    return layer.in_features <= 512 and layer.weight.numel() <= 2**20


def _normalized(hidden: Tensor, norm: Any) -> Tensor:
    return rms_norm(hidden, (hidden.shape[-1],), norm.weight, norm.variance_epsilon)


def _rotated(states: Tensor, cosine: Tensor, signed_sine: Tensor) -> Tensor:
    return torch.addcmul(states * cosine, states.roll(states.shape[-1] // 2, dims=-1), signed_sine)


_spans_to_read: ContextVar[Mapping[range, int]] = ContextVar("spans_to_read")


@contextmanager
def reading(spans: Mapping[range, int]) -> Iterator[None]:
    """How many keys each block of rows reads in a step, for attention functions that take no such argument."""
    token = _spans_to_read.set(spans)
    try:
        yield
    finally:
        _spans_to_read.reset(token)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Attention of [rows, query heads, queries, width] over [rows, key heads, keys, width].

    The same as `sdpa` of transformers, without copying the keys for query heads that share them.
    """
    if query.device.type != "cpu":
        return _fused_attention(query, key, value, mask, scaling)
    assert mask is not None
    if query.shape[2] == 1:
        return _block_by_block(query, key, value, mask, scaling)
    return _query_by_query(query, key, value, mask, scaling)


def _fused_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    with sdpa_kernel(_GPU_KERNELS):
        if query.shape[2] > 1:
            return scaled_dot_product_attention(
                query, key, value, mask, is_causal=mask is None, scale=scaling, enable_gqa=True
            )
        # Query heads that share a key head become several queries of that head.
        rows, heads, _, width = query.shape
        grouped = query.reshape(rows, key.shape[1], -1, width)
        attended = scaled_dot_product_attention(grouped, key, value, mask, scale=scaling)
        return attended.reshape(rows, heads, 1, -1)


def _block_by_block(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
    """One query per row; each block of rows reads as many keys as its longest context."""
    attended = query.new_zeros(*query.shape[:3], value.shape[-1])
    for block, span in _spans_to_read.get().items():
        rows = slice(block.start, block.stop)
        attended[rows] = _one_query(
            query[rows], key[rows, :, :span], value[rows, :, :span], mask[rows, :, :, :span], scaling
        )
    return attended


def _query_by_query(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
    """Whole contexts, one query at a time, so that the sums are bitwise equal to those of the step."""
    contexts, heads, length, _ = query.shape
    attended = query.new_empty(contexts, length, heads, value.shape[-1])
    for start in range(0, length, _QUERIES_PER_BLOCK):
        end = min(start + _QUERIES_PER_BLOCK, length)
        block_mask = mask[0, 0, start:end, None, None, :end]
        for context in range(contexts):
            attended[context, start:end] = _one_query(
                query[context, :, start:end].transpose(0, 1).unsqueeze(2),
                key[context, None, :, :end].expand(end - start, -1, -1, -1),
                value[context, None, :, :end].expand(end - start, -1, -1, -1),
                block_mask,
                scaling,
            ).squeeze(2)
    return attended.transpose(1, 2)


def _one_query(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
    """One query per row and head.

    Query heads that share a key head are processed in turn: together, CPU libraries would add long contexts in an
    order that depends on the span.
    """
    rows, heads, _, width = query.shape
    sharing = heads // key.shape[1]
    if sharing == 1:
        return scaled_dot_product_attention(query, key, value, mask, scale=scaling)
    turns = query.reshape(rows, key.shape[1], sharing, width).tensor_split(sharing, dim=2)
    attended = [scaled_dot_product_attention(turn, key, value, mask, scale=scaling) for turn in turns]
    return torch.cat(attended, dim=2).reshape(rows, heads, 1, -1)


def _slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The interface of transformers: [rows, queries, heads, width] and no attention weights."""
    return _attend(query, key, value, attention_mask, scaling).transpose(1, 2), None


AttentionInterface.register(_SLOT_ATTENTION, _slot_attention)


@contextmanager
def _attention_set_to(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """Temporary, because the learner may use the same model with its own attention."""
    before = model.config._attn_implementation
    model.config._attn_implementation = implementation
    try:
        yield
    finally:
        model.config._attn_implementation = before


def uses_slot_attention(model: PreTrainedModel) -> bool:
    """Ours replaces `sdpa`; `eager` models may do more than plain attention and keep their own."""
    return bool(model.config._attn_implementation == "sdpa")


def check_supported(model: PreTrainedModel) -> None:
    name = type(model).__name__
    if model.get_output_embeddings() is None:
        raise UnsupportedModel(f"{name} has no language-model head: load a causal LM")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModel(
            f"{name}.forward takes no position_ids, but rows of different lengths need them: "
            "use a causal LM with rotary or learned positions, or another engine"
        )
    attention = model.config._attn_implementation
    if attention not in ("sdpa", "eager"):
        raise UnsupportedModel(
            f"{name} uses attention {attention!r}, but a slot cache needs masks: "
            'load it with attn_implementation="sdpa" (or "eager")'
        )
    unknown = set(_kinds_of_layers(model)) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedModel(
            f"{name} has layers of kind {sorted(unknown)}, but a slot holds only a KV cache per token: "
            "use a model with full or sliding attention, or another engine"
        )


def attention_window(model: PreTrainedModel) -> int | None:
    """The window of its sliding attention layers."""
    window: int | None = getattr(model.config.get_text_config(), "sliding_window", None)
    return window


def _kinds_of_layers(model: PreTrainedModel) -> list[str]:
    config = model.config.get_text_config()
    only_kind = "sliding_attention" if attention_window(model) else "full_attention"
    kinds: list[str] | None = getattr(config, "layer_types", None)
    return kinds or [only_kind] * config.num_hidden_layers
