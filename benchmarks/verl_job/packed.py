"""Packed sequences for verl's learner where flash-attn is not installed, for this benchmark alone.

verl's `use_remove_padding=True` gives the model one long row of sequences, with positions that start again at 0. It
needs an attention that keeps them apart. This module registers one with transformers, under the name `packed`:

    varlen           PyTorch's own FlashAttention 2 for sequences of different lengths (`torch.nn.attention.varlen`)
    varlen_repeated  the same, with keys and values repeated for grouped queries
    rows             one call of scaled_dot_product_attention per sequence: slower, but it runs everywhere

`python packed.py MODEL OUT.json` tries them on this machine, in this order: outputs and gradients against float32, and
then an update of 128 rows, which is timed. It names the first one that passes. verl loads this module in all its
processes (VERL_USE_EXTERNAL_MODULES); PACKED_ATTENTION names the OUT.json to read the kind from at the first use.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

NAME = "packed"
KINDS = ("varlen", "varlen_repeated", "rows")
TOLERANCE = 0.03  # of the largest value: bfloat16 has 8 bits
_trying: str | None = None  # the trial's kind
_last: tuple[Any, list[int]] = (None, [])  # the lengths are the same in all layers, and reading them waits for the GPU


def lengths_of(position_ids: torch.Tensor) -> list[int]:
    """Of the sequences in a packed row, whose positions are 0, 1, 2, ... in each."""
    global _last
    if _last[0] is not position_ids:
        (starts,) = torch.nonzero(position_ids[0] == 0, as_tuple=True)
        bounds = [*starts.tolist(), position_ids.shape[1]]
        _last = position_ids, [end - start for start, end in pairwise(bounds)]
    return _last[1]


def attend(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    *,
    scaling: float,
    position_ids: Any,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: tensors are (1, heads, tokens, size), the result (1, tokens, heads, size)."""
    assert attention_mask is None and query.shape[0] == 1, "for packed rows only"
    lengths = lengths_of(position_ids)
    return attention(_trying or chosen(), query[0], key[0], value[0], lengths, scaling).unsqueeze(0), None


@functools.cache
def chosen() -> str:
    found = json.loads(Path(os.environ["PACKED_ATTENTION"]).read_text(encoding="utf-8"))
    return found["kind"] or "rows"


def attention(kind: str, query: Any, key: Any, value: Any, lengths: Sequence[int], scaling: float) -> torch.Tensor:
    """Causal within each sequence. Tensors are (heads, tokens, size), the result (tokens, heads, size)."""
    if kind == "rows":
        return _row_by_row(query, key, value, lengths, scaling)
    from torch.nn.attention.varlen import varlen_attn

    if kind == "varlen_repeated":
        times = query.shape[0] // key.shape[0]
        key, value = key.repeat_interleave(times, 0), value.repeat_interleave(times, 0)
    bounds = torch.tensor([0, *lengths], device=query.device).cumsum(0).to(torch.int32)
    tensors = [tensor.transpose(0, 1).contiguous() for tensor in (query, key, value)]
    longest = max(lengths)
    takes = inspect.signature(varlen_attn).parameters  # of several releases of PyTorch
    causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in takes else {"is_causal": True}
    shared: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in takes else {}
    return varlen_attn(*tensors, bounds, bounds, longest, longest, scale=scaling, **causal, **shared)


def _row_by_row(query: Any, key: Any, value: Any, lengths: Sequence[int], scaling: float) -> torch.Tensor:
    parts = zip(*(tensor.split(list(lengths), dim=1) for tensor in (query, key, value)), strict=True)
    rows = [
        scaled_dot_product_attention(*(x.unsqueeze(0) for x in part), is_causal=True, scale=scaling, enable_gqa=True)[0]
        for part in parts
    ]
    return torch.cat(rows, dim=1).transpose(0, 1)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Nothing is hidden that `attention` does not hide itself."""


def register(module: ModuleType | None = None) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, _no_mask)


def is_correct(kind: str, device: str) -> bool:
    """Outputs and gradients in bfloat16, against float32 row by row."""
    generator = torch.Generator(device).manual_seed(0)
    lengths = [1, 300, 17, 1000, 64]

    def drawn(heads: int) -> torch.Tensor:
        return torch.randn(heads, sum(lengths), 128, generator=generator, device=device)

    inputs, weight = [drawn(12), drawn(2), drawn(2)], drawn(12).transpose(0, 1)

    def found(kind: str, dtype: torch.dtype) -> list[torch.Tensor]:
        tensors = [tensor.to(torch.bfloat16).to(dtype).requires_grad_() for tensor in inputs]
        out = attention(kind, *tensors, lengths, 128**-0.5)
        return [out, *torch.autograd.grad((out.float() * weight).sum(), tensors)]

    expected, made = found("rows", torch.float32), found(kind, torch.bfloat16)
    worst = max(((a - b.float()).abs().max() / a.abs().max()).item() for a, b in zip(expected, made, strict=True))
    print(f"{kind}: {worst:.4f} of the largest value", flush=True)
    return worst < TOLERANCE


def update_seconds(model: Any, lengths: Sequence[int], most_tokens: int, repeats: int = 2) -> float:
    """Of a forward and a backward pass over rows of these lengths, in micro-batches as verl packs them: the last of
    `repeats`. The loss is arbitrary."""
    from verl.utils.experimental.torch_functional import FusedLinearForPPO
    from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

    count = -(-sum(lengths) // most_tokens)
    work = calculate_workload(torch.tensor(lengths)).tolist()
    device, seconds = model.device, 0.0
    for _ in range(repeats):
        began = time.perf_counter()
        for rows in get_seqlen_balanced_partitions(work, count, equal_size=False):
            positions = torch.cat([torch.arange(lengths[row], device=device) for row in rows])[None]
            tokens = torch.randint(16, model.config.vocab_size, positions.shape, device=device)
            hidden = model.model(input_ids=tokens, position_ids=positions, use_cache=False)[0]
            logprobs, _ = FusedLinearForPPO()(hidden, model.lm_head.weight, tokens.roll(-1, 1))
            logprobs.mean().backward()
        model.zero_grad()
        _wait(device)
        seconds = time.perf_counter() - began
    return seconds


def _wait(device: Any) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize(device)


def tried(kind: str, measure: Callable[[], float]) -> float | None:
    """Seconds; None if this kind is wrong or does not run here."""
    global _trying
    _trying = kind
    try:
        return measure() if is_correct(kind, "cuda" if torch.cuda.is_available() else "cpu") else None
    except Exception as error:
        print(f"{kind}: {error!r}"[:500], flush=True)
        return None


def main() -> None:
    from transformers import AutoModelForCausalLM

    folder, out = sys.argv[1:3]
    lengths = json.loads(os.environ["PACKED_LENGTHS"])
    most = int(os.environ.get("PACKED_TOKENS", "32768"))
    register()
    on_gpu = torch.cuda.is_available()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation=NAME)
    model = model.to("cuda" if on_gpu else "cpu").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    seconds: dict[str, float] = {}
    for kind in KINDS:
        value = tried(kind, lambda: update_seconds(model, lengths, most))
        if value is not None:
            seconds[kind] = value
            break
    best = next(iter(seconds), None)
    found = {"kind": best, "seconds": seconds, "tokens": sum(lengths), "rows": len(lengths)}
    Path(out).write_text(json.dumps(found), encoding="utf-8")
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
elif os.environ.get("PACKED_ATTENTION"):
    import wrapt

    wrapt.register_post_import_hook(register, "verl.workers.engine.fsdp.transformer_impl")
