"""The decoder of the embedded engine: prefill and decode steps over rows of a KV cache.

A row holds one request. All rows in use are decoded together, one token per step:

    prefill   writes the keys and values of a context, except its last token, into a row
    begin     sets the row's last token, position, seed and sampling parameters
    step      feeds each live row its last token, samples the next one, and advances the row by one position

So every token is sampled by the same step, including the first after a prefill. On a CPU in fp32 the logits of a row
are therefore bitwise equal regardless of the other rows and of how the context got into the cache:
- matrix products have at least MIN_ROWS rows: for fewer, CPU libraries use kernels that add in a different order
  (also above a width of 512, from some number of rows on, if torch uses several threads);
- attention processes one query at a time (a prefill is a batch of such queries) under an additive mask, so masked keys
  add exact zeros.
Reading the KV cache dominates the cost of a step on a CPU, so rows are read in blocks, each up to its longest context,
and the engine keeps contexts of similar length together. On CUDA the step is captured into graphs, one per
(rows, key span), and prefill uses the fused causal kernel.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sortedrl.core.engine import Request
from sortedrl.engines.embedded.model import (
    Masks,
    SlotCache,
    attention_window,
    check_supported,
    forward_for,
    reading,
    uses_slot_attention,
)
from sortedrl.engines.embedded.sampling import TokenSampler, seed_key

MIN_ROWS = 16
_ROWS_PER_BLOCK = 8  # rows that a CPU step reads up to the same length
_SPAN_QUANTUM = 32  # keys are read up to the longest context, rounded up to this
_PREFILL_QUANTUM = 16  # prefill contexts are padded to a multiple of this
_FIRST_CAPACITY = 256  # initial capacity of the cache in tokens per row


class SlotDecoder:
    """Prefills and decodes the rows of one model. The engine assigns requests to rows."""

    def __init__(self, model: PreTrainedModel, *, slots: int, max_length: int) -> None:
        check_supported(model)
        self.device = model.device
        self.rows = _rounded_up(max(slots, MIN_ROWS), _ROWS_PER_BLOCK)
        self._capacity_limit = _rounded_up(max_length, 2 * _SPAN_QUANTUM)
        self.cache = SlotCache(self.rows, min(_FIRST_CAPACITY, self._capacity_limit))
        self._model = model
        self._forward = forward_for(model, self.cache)
        self._window = attention_window(model)
        self._own_attention = uses_slot_attention(model)
        self._graphs = _StepGraphs() if self.device.type == "cuda" else None
        self._sampler = TokenSampler(self.device)
        self._key_positions = torch.arange(self._capacity_limit, device=self.device)
        # One tensor per type, so that one operation sets or moves the whole state of some rows.
        self._integers = torch.zeros(5, self.rows, dtype=torch.int64, device=self.device)
        self._tokens, self._drawn, self._seeds, self._positions, self._live = self._integers
        self._place = self._integers[3:]  # position and live
        self._fractions = torch.ones(2, self.rows, device=self.device)
        self._temperatures, self._top_p = self._fractions

    def blocks(self, count: int) -> list[range]:
        """The blocks of rows for `count` requests, longest contexts first; a block is read as a whole.

        On a GPU there is one block, which shrinks only if that saves rows: moving rows is expensive there.
        """
        if self.device.type != "cpu" or not self._own_attention:
            return [range(self._rows_computed(count))]
        return [range(i, min(i + _ROWS_PER_BLOCK, count)) for i in range(0, count, _ROWS_PER_BLOCK)]

    @torch.no_grad()
    def follow_weights(self) -> None:
        """Call after the model's weights have changed; no row may be live."""
        self._forward.refresh(changed=True)

    @torch.inference_mode()
    def prefill(self, rows: Sequence[int], contexts: Sequence[Sequence[int]]) -> None:
        """Write the KV cache of the contexts into the rows; contexts of similar length waste the least padding."""
        self._forward.refresh()
        longest = max(map(len, contexts))
        length = _rounded_up(longest, _PREFILL_QUANTUM)
        self._reserve(length)
        padded = [[*context, *[0] * (length - len(context))] for context in contexts]
        tokens = torch.tensor(padded, device=self.device)
        self.cache.expect_prefill(torch.tensor(rows, device=self.device))
        self._switch_dropout_off()
        positions = self._key_positions[:length].clamp(max=longest - 1)  # a model may have none for the padding
        self._forward.fill(tokens, positions[None], self._prefill_masks(length))

    @torch.inference_mode()
    def begin(self, starts: Mapping[int, tuple[Request, Sequence[int]]]) -> None:
        """Decode these rows from the next step on: requests and their contexts, which are in the cache but for the last
        token. The number of response tokens so far determines the noise."""
        self._forward.refresh()
        rows = torch.tensor(list(starts), device=self.device)
        integers = [(c[-1], r.prefix_length, seed_key(r.seed), len(c) - 1, 1) for r, c in starts.values()]
        fractions = [(r.sampling.temperature, r.sampling.top_p) for r, _ in starts.values()]
        for state, values in zip(self._states(), (integers, fractions), strict=True):
            state[:, rows] = torch.tensor(values, device=self.device).t()

    @torch.inference_mode()
    def clear(self, rows: Sequence[int]) -> None:
        """Mark rows as empty: they take part in steps at position 0, and their output is ignored."""
        self._place[:, torch.tensor(rows, device=self.device)] = 0

    @torch.inference_mode()
    def move(self, targets_by_source: dict[int, int], longest: int) -> None:
        """Move rows simultaneously: a target may be the source of another move."""
        source = torch.tensor(list(targets_by_source), device=self.device)
        target = torch.tensor(list(targets_by_source.values()), device=self.device)
        self.cache.move(source, target, longest)
        for state in self._states():
            state[:, target] = state[:, source]
        vacated = set(targets_by_source) - set(targets_by_source.values())
        if vacated:
            self.clear(sorted(vacated))

    @torch.inference_mode()
    def step(self, lengths: Sequence[int], *, cut: bool) -> tuple[list[int], list[float]]:
        """One token and its log-probability per row; those of dead rows are meaningless.

        `lengths` are the context lengths of the rows, including the token to feed, and 0 for a dead row; further rows
        are dead. `cut`: at least one row has top-p below 1.
        """
        self._switch_dropout_off()
        rows = self._rows_computed(len(lengths))
        longest = max(lengths)
        self._reserve(longest)
        if self._graphs is not None:
            span = min(_rounded_up(longest, _graph_quantum(longest)), self.cache.capacity)
            step = partial(self._step, rows, {range(rows): span}, cut)
            drawn = self._graphs.run((rows, span, cut), step, self._states())
        else:
            longest_in = {block: max(lengths[block.start : block.stop]) for block in self.blocks(len(lengths))}
            spans = {block: _rounded_up(longest, _SPAN_QUANTUM) for block, longest in longest_in.items()}
            drawn = self._step(rows, spans, cut)
        tokens, logprobs = drawn.tolist()
        return list(map(int, tokens)), logprobs

    def _rows_computed(self, used: int) -> int:
        if self._graphs is None:
            return _rounded_up(max(used, MIN_ROWS), _ROWS_PER_BLOCK)
        power_of_two = 1 << (max(used, MIN_ROWS) - 1).bit_length()  # few shapes keep the number of graphs low
        return min(power_of_two, self.rows)

    def _step(self, rows: int, spans: Mapping[range, int], cut: bool) -> Tensor:
        positions = self._positions[:rows]
        span = max(spans.values())
        self.cache.expect_step(positions, span)
        masks = self._masks(positions[:, None, None], self._key_positions[:span])
        with reading(spans):
            logits = self._forward.logits(self._tokens[:rows, None], positions[:, None], masks)
        tokens, logprobs = self._sampler.draw(
            logits,
            self._seeds[:rows],
            self._drawn[:rows],
            self._temperatures[:rows],
            self._top_p[:rows] if cut else None,
        )
        self._tokens[:rows] = tokens
        self._positions[:rows] += self._live[:rows]
        self._drawn[:rows] += self._live[:rows]
        return torch.stack((tokens.double(), logprobs.double()))

    def _prefill_masks(self, length: int) -> Masks:
        """The same for every row: contexts are padded at the end, which the causal mask hides."""
        keys = self._key_positions[:length]
        masks = self._masks(keys[None, :, None], keys)
        fused = self.device.type != "cpu" and self._own_attention
        return {kind: None if fused and self._window_of(kind) is None else mask for kind, mask in masks.items()}

    def _masks(self, queries: Tensor, keys: Tensor) -> dict[str, Tensor]:
        """[rows, 1, queries, keys] for positions of queries [rows, queries, 1] and keys [keys]."""
        masks = {}
        for kind in self._forward.kinds_of_layers:
            hidden = keys > queries
            window = self._window_of(kind)
            if window is not None:
                hidden |= keys <= queries - window
            # Finite, so that a row without visible keys does not become NaN.
            lowest = torch.finfo(self._model.dtype).min
            mask = torch.zeros_like(hidden, dtype=self._model.dtype).masked_fill_(hidden, lowest)
            masks[kind] = mask[:, None]
        return masks

    def _window_of(self, kind: str) -> int | None:
        return self._window if kind == "sliding_attention" else None

    def _reserve(self, length: int) -> None:
        """Double the cache until contexts of this length fit; graphs of the old cache are dropped."""
        capacity = self.cache.capacity
        if length <= capacity:
            return
        while capacity < length:
            capacity *= 2
        capacity = min(capacity, self._capacity_limit)
        self.cache.grow(capacity)
        if self._graphs is not None:
            self._graphs = _StepGraphs()

    def _switch_dropout_off(self) -> None:
        if self._model.training:  # the learner uses the same module
            self._model.eval()

    def _states(self) -> tuple[Tensor, ...]:
        return self._integers, self._fractions


class _StepGraphs:
    """CUDA graphs of the step, captured at the first use of a shape. If capturing fails, the step runs eagerly."""

    def __init__(self) -> None:
        self._captured: dict[tuple[int, int, bool], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: Any = None
        self._refused = False

    def run(self, shape: tuple[int, int, bool], step: Callable[[], Tensor], states: Sequence[Tensor]) -> Tensor:
        if self._refused:
            return step()
        if shape not in self._captured:
            try:
                self._captured[shape] = self._capture(step, states)
            except RuntimeError as error:
                warnings.warn(f"the decode step runs without a CUDA graph and is slower: {error}", stacklevel=2)
                self._refused = True
                return step()
        graph, output = self._captured[shape]
        graph.replay()
        return output

    def _capture(self, step: Callable[[], Tensor], states: Sequence[Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Run the step once eagerly, restore the states that it advanced, then record it."""
        before = [state.clone() for state in states]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        for state, value in zip(states, before, strict=True):
            state.copy_(value)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = step()
        self._pool = graph.pool()
        return graph, output


def _graph_quantum(longest: int) -> int:
    """Rounded up to one of four spans per octave, since each span needs its own graph."""
    return max(2 * _SPAN_QUANTUM, (1 << longest.bit_length()) >> 3)


def _rounded_up(number: int, quantum: int) -> int:
    return -(-number // quantum) * quantum
