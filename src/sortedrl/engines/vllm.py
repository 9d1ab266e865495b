"""vLLM in this process, on one device: the engine for real models on one GPU. docs/engines.md has the options.

    submit -> vLLM's own queue -> vLLM's running batch (RequestStarted) -> steps -> RequestFinished

It uses vLLM's engine core, not `LLM.generate`: token ids in; token ids and the log-probabilities they were sampled with
(after temperature and top-p) out; no detokenization. Running, waiting and preempted requests are read from vLLM's
scheduler after every step. Tokens are delivered when a request finishes or is aborted.

- **Weights** are copied in place. vLLM does not update the output layer of a model with tied embeddings unless it is
  named, so it always is. The prefix cache holds KV of the old weights, so every weight update resets it, unless
  `reuse_kv_cache` keeps it (shared.py).
- **Seeds** cost one kernel launch per row, so they are used only with `seeded=True`. A resumed request then gets a new
  seed, because vLLM would replay the noise from position 0.
- **Drafts** (`speculative_config`): a step may yield several tokens per request, each with its own log-probability
  under the policy. What follows an EOS token, a limit or a stop string within a step is dropped (speculative.py).

Works with vLLM 0.25.1 and 0.32.0. `vllm` is imported when the first engine is created.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.engine import (
    Change,
    EngineDied,
    EngineInfo,
    Request,
    RequestFinished,
    RequestPreempted,
    RequestStarted,
)
from sortedrl.core.seeds import derive_seed
from sortedrl.engines.shared import Decoding, KVCacheReuse, LocalEngine, refusal, require_empty, with_output_layer
from sortedrl.engines.speculative import DraftCounts, check_speculative_config, own_drafter, require_exact_checks
from sortedrl.settings.install_hint import install_hint

OLDEST_VLLM = (0, 25)
# Options of vLLM that this engine sets itself, and what to set instead.
_OWN_OPTIONS = {
    "max_num_seqs": ("it must agree with the slots that the scheduler counts", "Use slots (--slots) instead."),
    "logprobs_mode": ("log-probabilities must be those that tokens were sampled with", "Leave it out."),
}
_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
_SEED_BITS = 63


@dataclass(slots=True, eq=False, kw_only=True)
class _Inside(Decoding):
    """A request in vLLM under its vLLM request id."""

    name: str
    prefix: list[int]

    def add_several(self, tokens: list[int], logprobs: list[float]) -> None:
        """The tokens of one step, up to the one that completes a stop string."""
        if self.stop_watch is None:
            self.tokens += tokens
            self.logprobs += logprobs
            return
        for token, logprob in zip(tokens, logprobs, strict=True):
            self.tokens.append(token)
            self.logprobs.append(logprob)
            if self.ends_with_stop_string():
                return


class VllmEngine(LocalEngine):
    """See the module docstring. `max_length` bounds prompt plus response tokens.

    `options` are passed to vLLM's EngineArgs: gpu_memory_utilization, dtype, load_format, enforce_eager ...
    `tokenizer` is only needed for stop strings. `draft_up_to`: draft only while at most so many requests run.
    """

    copies_weights = True

    def __init__(
        self,
        model: str,
        *,
        slots: int,
        eos_token_ids: Iterable[int],
        max_length: int,
        tokenizer: Any = None,
        seeded: bool = False,
        enable_sleep_mode: bool = False,
        reuse_kv_cache: bool = False,
        draft_up_to: int | None = None,
        **options: Any,
    ) -> None:
        if enable_sleep_mode and reuse_kv_cache:
            both, why = "enable_sleep_mode, reuse_kv_cache", "a sleeping engine frees its KV cache"
            raise ConfigurationError("engine_options", both, why, "Leave one out.")
        _refuse(options)
        check_speculative_config(options, seeded=seeded, enable_sleep_mode=enable_sleep_mode)
        super().__init__(tokenizer)
        self.slots = slots
        self.inside_seconds: float = 0.0
        self.reused_kv_tokens = 0  # of resumed requests: tokens whose KV was cached, so they were not prefilled again
        self._eos = sorted(set(eos_token_ids))
        self._max_length = max_length
        self._seeded = seeded
        self._can_sleep = enable_sleep_mode
        self.kv_cache_reuse = KVCacheReuse(keep=reuse_kv_cache)
        self._asleep: list[str] = []  # parts of memory that are freed
        self._has_weights = True
        self._made = 0  # requests so far: vLLM's request ids must not repeat
        self._inside: dict[str, _Inside] = {}  # by vLLM request id
        self._name_of: dict[int, str] = {}  # by request id
        self._running: set[str] = set()
        self._outputs: Sequence[Any] = ()  # of the last step
        self._followed: list[Any] = []  # vLLM's running batch at the last check
        self._llm = _started_vllm(
            model=model,
            max_num_seqs=slots,
            max_model_len=max_length,
            logprobs_mode="processed_logprobs",  # of the sampling distribution
            skip_tokenizer_init=True,
            disable_log_stats=True,
            enable_sleep_mode=enable_sleep_mode,
            **options,
        )
        self._core = self._llm.engine_core  # vLLM's in-process client
        self._scheduler = self._core.engine_core.scheduler
        self._tasks = self._core.get_supported_tasks()
        self._vocabulary = int(self._llm.model_config.get_vocab_size())
        # The drafter is None without drafts, and in vLLM's newer runner.
        self.drafter, device = self._core.collective_rpc(_drafter_and_device)[0]
        if self.drafter is not None and options.get("load_format") != "dummy":
            require_exact_checks(device)
        self._own_drafter = own_drafter(self.drafter, draft_up_to)
        self.draft_counts = DraftCounts() if options.get("speculative_config") else None
        if self._own_drafter is not None:
            self.draft_counts = self._own_drafter.counts

    def submit(self, requests: Sequence[Request]) -> None:
        self._require_usable(requests, self._name_of)
        self._require_weights()
        self._raise_if_dead()
        self._wake()
        for request in requests:
            reason = refusal(request, self._max_length, self._vocabulary)
            if reason is None:
                reason = self._add(request)
            if reason is not None:
                self._fail(request, reason)

    def poll(self, until: float | None = None) -> list[Change]:
        if not self._unreported:
            self._raise_if_dead()
        while self._inside and not self._unreported and (until is None or self.now() < until):
            self._step()
        return self._report(until, is_idle=not self._inside)

    def abort(self, ids: Sequence[int]) -> list[Change]:
        leaving = [self._inside[self._name_of[id]] for id in ids if id in self._name_of]
        for inside in leaving:
            self._hand_out(inside, "aborted")
        self._remove(leaving)
        return self._report()

    def update_weights(self, weights: Mapping[str, Any] | Iterable[tuple[str, Any]] | None, version: int) -> None:
        """Copy the weights into vLLM's model. None: only the version has changed."""
        require_empty(len(self._inside), f"weight update to version {version}")
        if weights is None:
            self._require_weights()
        self._drain()
        self._wake(weights_only=weights is not None)
        if weights is not None:
            is_tied = bool(getattr(self._llm.model_config.hf_text_config, "tie_word_embeddings", False))
            named = with_output_layer(weights, is_tied=is_tied)
            try:
                self._core.collective_rpc("reload_weights", kwargs={"weights_iterator": named})
            except Exception as error:
                self._died = f"the weight update to version {version} failed halfway: {error}"
                raise EngineDied(self._died) from error
            self._has_weights = True
            self._wake()
        if not self.kv_cache_reuse.survives_update_to(version):
            with self._in_vllm():
                if not self._core.reset_prefix_cache():
                    raise RuntimeError("it did not reset its prefix cache, and stale KV would be used")
        self.version = version

    def sleep(self) -> None:
        """Free GPU memory for the learner until the next `update_weights` or `submit`. The engine must be empty."""
        self._sleep(keep_weights=True)

    def sleep_until_update(self) -> None:
        """Free GPU memory until the next `update_weights`, without a copy of the weights. Nothing may come first."""
        self._sleep(keep_weights=False)

    def close(self) -> None:
        self._core.shutdown()

    def info(self) -> EngineInfo:
        config = self._llm.vllm_config
        return EngineInfo(
            kv_tokens=int(config.cache_config.num_gpu_blocks * config.cache_config.block_size),
            prefill_tokens_per_step=int(config.scheduler_config.max_num_batched_tokens),
            vocabulary=self._vocabulary,
        )

    # Requests in

    def _add(self, request: Request) -> str | None:
        """Add the request to vLLM; the reason if vLLM refuses it."""
        from vllm.inputs.engine import tokens_input

        self._made += 1
        inside = _Inside(
            name=f"{request.id}-{self._made}",
            request=request,
            prefix=request.prefix_tokens,
            stop_watch=self._stop_watches.of(request),
        )
        context = [*request.prompt.tokens, *inside.prefix]
        tokens = tokens_input(context, cache_salt=self.kv_cache_reuse.salt(request, self.version))
        with self._in_vllm():
            try:
                core_request = self._llm.input_processor.process_inputs(
                    inside.name, tokens, self._parameters(request, len(context)), self._tasks
                )
            except ValueError as error:
                return f"vLLM refused it: {error}"
            self._core.add_request(core_request)
        self._inside[inside.name] = inside
        self._name_of[request.id] = inside.name
        if self._own_drafter is not None:
            self._own_drafter.expect(request.prompt.tokens)
        return None

    def _parameters(self, request: Request, context: int) -> Any:
        from vllm import SamplingParams

        sampling = request.sampling
        seed = derive_seed(request.seed, request.prefix_length) % (1 << _SEED_BITS) if self._seeded else None
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=min(request.max_new_tokens, self._max_length - context),
            ignore_eos=True,  # EOS tokens are given explicitly and override the model's configuration
            stop_token_ids=[] if sampling.ignore_eos else self._eos,
            logprobs=0,
            seed=seed,
            detokenize=False,
        )

    # Steps

    def _step(self) -> None:
        """Run one step of vLLM and report its changes: preemptions, starts, new tokens, ends."""
        self._raise_if_dead()
        began = self.now()
        with self._in_vllm():  # includes freeing the objects of the last step
            self._outputs = self._core.get_output().outputs
        if self.draft_counts is not None and self._own_drafter is None:
            self.draft_counts.add([output.new_token_ids for output in self._outputs])
        ended = self._take(self._outputs)
        self._follow_scheduler(began, {output.request_id for output in ended})
        for output in ended:
            self._end(output)

    def _take(self, outputs: Sequence[Any]) -> list[Any]:
        """Store the tokens of a step; return the outputs of the requests that it ended."""
        ended = []
        for output in outputs:  # runs once per token: most of our overhead per step
            inside = self._inside.get(output.request_id)
            if inside is None:  # aborted while the step ran
                continue
            made = output.new_token_ids
            if len(made) == 1:
                inside.tokens.append(made[0])
                inside.logprobs.append(output.new_logprobs.logprobs.item(0))
            elif made:
                inside.add_several(made, output.new_logprobs.logprobs[:, 0].tolist())
            if output.prefill_stats is not None and inside.prefix:  # with the first token of a request
                self.reused_kv_tokens += output.prefill_stats.num_cached_tokens
            if output.finish_reason is not None or (inside.stop_watch is not None and inside.ends_with_stop_string()):
                ended.append(output)
        return ended

    def _follow_scheduler(self, at: float, ended: set[str]) -> None:
        """How the step's schedule changed the running batch, before some requests ended."""
        if self._scheduler.running == self._followed and ended <= self._running:  # most steps
            return
        self._followed = list(self._scheduler.running)
        running = {request.request_id for request in self._followed}
        running |= ended
        for name in self._running - running:
            inside = self._inside.get(name)
            if inside is not None:
                recompute = len(inside.request.prompt.tokens) + len(inside.prefix) + len(inside.tokens)
                self._unreported.append(RequestPreempted(inside.request.id, at, recompute))
        for inside in self._inside.values():  # in the order of submission
            if inside.name in running and inside.name not in self._running:
                self._unreported.append(RequestStarted(inside.request.id, at))
        self._running = running & self._inside.keys()

    def _end(self, output: Any) -> None:
        inside = self._inside[output.request_id]
        reason = "stop" if inside.ends_with_stop_string() else str(output.finish_reason)
        self._hand_out(inside, "finished")
        self._remove([inside], abort=output.finish_reason is None)
        if reason in ("stop", "length"):
            self._unreported.append(RequestFinished(inside.request.id, self.now(), truncated=reason == "length"))
        else:
            self._fail(inside.request, f"vLLM ended it: {reason}")

    def _hand_out(self, inside: _Inside, source: str) -> None:
        self._deliver(inside)
        if self._own_drafter is not None:
            self._own_drafter.learn(inside.request.prompt.tokens, [*inside.prefix, *inside.tokens], source)

    def _remove(self, leaving: Sequence[_Inside], *, abort: bool = True) -> None:
        if abort and self._died is None:
            with self._in_vllm():
                self._core.abort_requests([inside.name for inside in leaving])
        for inside in leaving:
            del self._inside[inside.name]
            del self._name_of[inside.request.id]
            self._running.discard(inside.name)

    def _drain(self) -> None:
        """Wait for steps in flight: they run under the old weights."""
        self._raise_if_dead()
        core = self._core.engine_core
        with self._in_vllm():
            while core.scheduler.has_requests() or core.batch_queue:
                self._core.get_output()
        self._running.clear()
        self._followed = []

    @contextmanager
    def _in_vllm(self) -> Iterator[None]:
        """Counts the time. An error ends the engine, because vLLM's state is then unknown."""
        began = self.now()
        try:
            yield
        except Exception as error:
            self._died = f"vLLM stopped working: {error}"
            raise EngineDied(self._died) from error
        finally:
            self.inside_seconds += self.now() - began

    # Weights and memory

    def _sleep(self, *, keep_weights: bool) -> None:
        if not self._can_sleep or self._asleep:
            return
        require_empty(len(self._inside), "sleep")
        self._drain()
        with self._in_vllm():
            self._core.sleep(1 if keep_weights else 2)  # vLLM's level 2 keeps no weights
        self._asleep = ["weights", "kv_cache"]
        self._has_weights = keep_weights

    def _require_weights(self) -> None:
        if not self._has_weights:
            raise RuntimeError("the engine has dropped its weights (sleep_until_update): update_weights comes first")

    def _wake(self, *, weights_only: bool = False) -> None:
        """Allocate the memory again: each part once, since vLLM fails if it is woken twice."""
        for part in [part for part in self._asleep if part == "weights" or not weights_only]:
            with self._in_vllm():
                self._core.wake_up([part])
            self._asleep.remove(part)


def _refuse(options: Mapping[str, Any]) -> None:
    for name in options.keys() & _OWN_OPTIONS.keys():
        why, fix = _OWN_OPTIONS[name]
        raise ConfigurationError("engine_options", f"{name} {options[name]}", why, fix)
    for name in _PARALLEL:
        if options.get(name, 1) != 1:
            why = "vLLM in this process runs on one GPU: weights are copied in place, in memory"
            fix = "Start a vLLM server with it, and use --engine vllm-server."
            raise ConfigurationError("engine_options", f"{name} {options[name]}", why, fix)


def _drafter_and_device(worker: Any) -> tuple[Any, Any]:
    return getattr(worker.model_runner, "drafter", None), worker.model_runner.device


def _started_vllm(**arguments: Any) -> Any:
    # In another process, vLLM's scheduler could not be read and weights would have to be sent.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        import vllm
    except ImportError:
        raise ImportError(f"vLLM is not installed: {install_hint('vllm')}", name="vllm") from None
    from vllm import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    found = tuple(int(part) for part in vllm.__version__.split(".")[:2])
    if found < OLDEST_VLLM:
        raise RuntimeError(f"vLLM {vllm.__version__} is too old: 0.25.1 and 0.32.0 work")
    # vLLM's default tokens per step depends on the usage context: others prefill 2048 at a time on any GPU.
    return LLMEngine.from_engine_args(EngineArgs(**arguments), usage_context=UsageContext.LLM_CLASS)
