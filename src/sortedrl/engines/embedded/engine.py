"""The embedded engine: continuous batching over a Hugging Face causal LM, in this process, on CPU or CUDA.

    submit -> queue -> a free slot (RequestStarted) -> prefill -> decode steps -> RequestFinished, the slot is free

The next request in the queue takes a freed slot immediately; its row in the decoder is chosen at prefill. Waiting
contexts are prefilled together: before the next step on a CPU; after a few steps on a GPU, where a prefill costs about
the same for one context as for eight. Tokens are delivered when a request finishes or is aborted.

Slots are the maximum batch size (vLLM max_num_seqs, SGLang max_running_requests).

A rollout's tokens depend only on its seed and the weights (sampling.py, decoder.py). KV cache is never shared between
requests and never outlives one, and weights change only while the engine is empty: stale KV is never read.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sortedrl.core.configuration import checked_slots
from sortedrl.core.engine import Change, EngineDied, EngineInfo, Request, RequestFinished, RequestStarted
from sortedrl.core.errors import first_sentences
from sortedrl.engines.embedded.decoder import SlotDecoder
from sortedrl.engines.shared import Decoding, LocalEngine, refusal, require_empty

_PREFILL_TOKENS = 4096  # per forward pass, including padding
_PREFILL_TOKENS_ON_GPU = 32768
_PATIENCE_ON_GPU_STEPS = 8
_NO_ROW = -1


@dataclass(slots=True, eq=False, kw_only=True)
class _Running(Decoding):
    """A request in a slot. `context` is its prompt and prefix."""

    context: list[int]
    max_new_tokens: int
    row: int = _NO_ROW  # until its prefill

    def __len__(self) -> int:
        return len(self.context) + len(self.tokens)


class _DecodedRows:
    """The requests with a row, from one prefill to the next, and the tokens that they got since.

    Tokens are kept by step. A request gets its own when it may have ended: to append one to each request at each step
    takes as long as a step of a small model on a GPU.
    """

    def __init__(self, running: Iterable[_Running]) -> None:
        self._running = {one.row: one for one in running}  # in the order of admission
        self._lengths = [0] * (max(self._running) + 1)
        for row, one in self._running.items():
            self._lengths[row] = len(one)
        self._given = dict.fromkeys(self._running, 0)  # steps whose tokens a request has got
        self._tokens: list[list[int]] = []  # by step and row
        self._logprobs: list[list[float]] = []
        self.has_top_p = any(one.request.sampling.top_p < 1 for one in self._running.values())
        self._has_stop_strings = any(one.stop_watch is not None for one in self._running.values())
        self._steps_to_limit = min(one.max_new_tokens - len(one.tokens) for one in self._running.values())

    def lengths(self) -> list[int]:
        """The context length of each row, 0 if it has no request."""
        steps = len(self._tokens)
        return [length and length + steps for length in self._lengths]

    def add(self, tokens: list[int], logprobs: list[float], eos: frozenset[int]) -> list[_Running]:
        """Add a step. Returns the requests that it may have ended, in the order of admission, with their tokens."""
        self._tokens.append(tokens)
        self._logprobs.append(logprobs)
        if self._has_stop_strings or len(self._tokens) >= self._steps_to_limit:
            found = list(self._running.values())
        elif eos.isdisjoint(tokens):
            return []
        else:
            found = [one for row, one in self._running.items() if tokens[row] in eos]
        for one in found:
            self.give(one)
        return found

    def give(self, running: _Running) -> None:
        """Append the tokens that it has not got yet."""
        row, given = running.row, self._given[running.row]
        running.tokens += [tokens[row] for tokens in self._tokens[given:]]
        running.logprobs += [logprobs[row] for logprobs in self._logprobs[given:]]
        self._given[row] = len(self._tokens)

    def give_all(self) -> None:
        for one in self._running.values():
            self.give(one)

    def leave(self, running: _Running) -> None:
        del self._running[running.row]
        self._lengths[running.row] = 0


class EmbeddedEngine(LocalEngine):
    """See the module docstring. `max_length` bounds prompt plus response tokens.

    `model` may be the learner's module: `update_weights(None, version)` then signals that its weights have changed.
    `tokenizer` is only needed for stop strings.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int,
        eos_token_ids: Iterable[int],
        max_length: int,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        if max_length < 2:
            raise ValueError(f"max_length = {max_length}: it must be at least 2, for a prompt and a response token")
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if limit is not None and max_length > limit:
            raise ValueError(
                f"max_length = {max_length}, but the model supports only {limit} positions: use at most {limit}"
            )
        super().__init__(tokenizer)
        self.slots = checked_slots(slots)
        self._model = model
        self._max_length = max_length
        self._vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self._eos = frozenset(eos_token_ids)
        self._decoder = SlotDecoder(model, slots=slots, max_length=max_length)
        on_cpu = self._decoder.device.type == "cpu"
        self._prefill_tokens = _PREFILL_TOKENS if on_cpu else _PREFILL_TOKENS_ON_GPU
        self._patience_steps = 0 if on_cpu else _PATIENCE_ON_GPU_STEPS
        self._queue: deque[Request] = deque()
        self._running: dict[int, _Running] = {}  # by request id
        self._waiting: list[_Running] = []  # for prefill, in the order of admission
        self._steps_waited = 0  # by requests waiting for prefill
        self._rows: _DecodedRows | None = None  # None: read them before the next step
        self._vacated = False  # rows became free since the last arrangement

    def info(self) -> EngineInfo:
        return EngineInfo(vocabulary=int(self._model.config.get_text_config().vocab_size))

    def submit(self, requests: Sequence[Request]) -> None:
        self._raise_if_dead()
        self._require_usable(requests, {request.id for request in self._queue} | self._running.keys())
        for request in requests:
            reason = refusal(request, self._max_length, self._vocabulary)
            if reason is None:
                self._queue.append(request)
            else:
                self._fail(request, reason)

    def poll(self, until: float | None = None) -> list[Change]:
        self._raise_if_dead()
        self._admit()
        try:
            while self._running and not self._unreported and (until is None or self.now() < until):
                self._advance()
        except RuntimeError as error:  # a lack of memory has a type of its own on a GPU only
            if not (isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)):
                raise
            self._died = (  # in the middle of a step: rows of the decoder may be half written
                f"the embedded engine ran out of memory ({first_sentences(error)}) for contexts of up to "
                f"{max(map(len, self._running.values()))} tokens. Free memory on {self._decoder.device}, or start "
                f"again with fewer slots than {self.slots} or a lower max_response_tokens"
            )
            raise EngineDied(self._died) from error
        return self._report(until, is_idle=not self._running)

    def abort(self, ids: Sequence[int]) -> list[Change]:
        self._raise_if_dead()
        unwanted = set(ids)
        self._queue = deque(request for request in self._queue if request.id not in unwanted)
        stopped = [running for id, running in self._running.items() if id in unwanted]
        for running in stopped:
            if self._rows is not None and running.row != _NO_ROW:
                self._rows.give(running)
            self._deliver(running)
        self._release(stopped)
        return self._report()

    def update_weights(self, weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | None, version: int) -> None:
        """Copy the weights into the model. None: it is the learner's module and already has them."""
        self._raise_if_dead()
        require_empty(len(self._running) + len(self._queue), f"weight update to version {version}")
        if weights is not None:
            copy_weights(self._model, dict(weights))
        self._decoder.follow_weights()
        self.version = version

    def _admit(self) -> None:
        """Fill free slots with waiting requests in submission order."""
        while self._queue and len(self._running) < self.slots:
            request = self._queue.popleft()
            context = [*request.prompt.tokens, *request.prefix_tokens]
            running = _Running(
                request=request,
                context=context,
                max_new_tokens=min(request.max_new_tokens, self._max_length - len(context)),
                stop_watch=self._stop_watches.of(request),
            )
            self._running[request.id] = running
            self._waiting.append(running)
            self._unreported.append(RequestStarted(request.id, self.now()))

    def _advance(self) -> None:
        """Prefill if due, then one decode step; slots of finished requests are refilled immediately."""
        self._prefill_when_due()
        if self._rows is None:
            self._rows = _DecodedRows(running for running in self._running.values() if running.row != _NO_ROW)
        tokens, logprobs = self._decoder.step(self._rows.lengths(), cut=self._rows.has_top_p)
        finished = []
        for running in self._rows.add(tokens, logprobs, self._eos):
            is_eos = running.tokens[-1] in self._eos and not running.request.sampling.ignore_eos
            ended = is_eos or running.ends_with_stop_string()
            if ended or len(running.tokens) == running.max_new_tokens:
                self._deliver(running)
                self._unreported.append(RequestFinished(running.request.id, self.now(), truncated=not ended))
                finished.append(running)
        if finished:
            self._release(finished)
            self._admit()

    def _prefill_when_due(self) -> None:
        """On a GPU, requests wait a few steps to be prefilled together, unless half of the slots are waiting."""
        waiting = self._waiting
        patient = self._steps_waited < self._patience_steps and 2 * len(waiting) < len(self._running)
        if waiting and patient:
            self._steps_waited += 1
            return
        self._steps_waited = 0
        if waiting or self._vacated:
            self._arrange()
        if waiting:
            # The decode step processes the last token of each context.
            prefixes = {running.row: running.context[:-1] for running in waiting}
            for rows in _prefill_batches(prefixes, self._prefill_tokens):
                self._decoder.prefill(rows, [prefixes[row] for row in rows])
            self._decoder.begin({running.row: (running.request, running.context) for running in waiting})
            self._waiting = []

    def _arrange(self) -> None:
        """Assign rows to new requests, and group contexts of similar length for the decoder."""
        if self._rows is not None:
            self._rows.give_all()
            self._rows = None
        lengths = {id: len(running) for id, running in self._running.items()}
        rows = {id: running.row for id, running in self._running.items() if running.row != _NO_ROW}
        arranged = rows_by_length(lengths, rows, self._decoder.blocks(len(lengths)))
        moved = [id for id, row in rows.items() if row != arranged[id]]
        if moved:
            longest = max(lengths[id] for id in moved)
            self._decoder.move({rows[id]: arranged[id] for id in moved}, longest)
        for id, running in self._running.items():
            running.row = arranged[id]
        self._vacated = False

    def _release(self, leaving: Sequence[_Running]) -> None:
        for running in leaving:
            del self._running[running.request.id]
            if self._rows is not None and running.row != _NO_ROW:
                self._rows.leave(running)
        rows = [running.row for running in leaving if running.row != _NO_ROW]
        if len(rows) < len(leaving):
            self._waiting = [running for running in self._waiting if running.request.id in self._running]
        if rows:
            self._decoder.clear(rows)
            self._vacated = True


def rows_by_length(lengths: Mapping[int, int], rows: Mapping[int, int], blocks: Sequence[range]) -> dict[int, int]:
    """One row per request: the longest contexts in the first block of rows, the next in the second ...

    A request that is already in the right block keeps its row of `rows`; new requests are only in `lengths`.
    """
    by_length = iter(sorted(lengths, key=lambda id: -lengths[id]))
    arranged: dict[int, int] = {}
    for block in blocks:
        members = list(islice(by_length, len(block)))
        staying = {id: rows[id] for id in members if rows.get(id) in block}
        free = iter(sorted(set(block) - set(staying.values())))
        arranged.update({id: staying[id] if id in staying else next(free) for id in members})
    return arranged


def _prefill_batches(contexts: Mapping[int, Sequence[int]], token_budget: int) -> list[list[int]]:
    """Rows to prefill together: within the token limit when padded, none shorter than half of the longest."""
    batches: list[list[int]] = []
    longest = 0
    for row, context in sorted(contexts.items(), key=lambda item: -len(item[1])):
        if not context:
            continue
        if batches and 2 * len(context) >= longest and (len(batches[-1]) + 1) * longest <= token_budget:
            batches[-1].append(row)
        else:
            batches.append([row])
            longest = len(context)
    return batches


def copy_weights(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """Copy all weights into the model in place. Nothing is copied unless every name and shape matches.

    Tied weights (names that share a tensor) may be given once; if given twice, they must be equal.
    """
    targets = model.state_dict()
    faults = [f"it has no {name}" for name in sorted(weights.keys() - targets.keys())]
    given = {targets[name].data_ptr(): name for name in weights if name in targets}
    for name, target in targets.items():
        twin = given.get(target.data_ptr())
        if twin is None:
            faults.append(f"{name} was not given")
        elif name in weights and weights[name].shape != target.shape:
            faults.append(f"{name} has shape {tuple(weights[name].shape)}, in the model {tuple(target.shape)}")
        elif name in weights and twin != name and not torch.equal(weights[name], weights[twin]):
            faults.append(f"{name} and {twin} are tied, but their new values differ")
    if faults:
        shown = "; ".join(faults[:3]) + ("; ..." if len(faults) > 3 else "")
        raise ValueError(f"{len(faults)} of the weights do not fit {type(model).__name__}: {shown}")
    with torch.no_grad():
        for name, weight in weights.items():
            targets[name].copy_(weight)
