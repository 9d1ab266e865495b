"""Tokens per second of the embedded engine, of `generate` and of continuous batching in transformers.

The same model with random weights and the same requests: prompts of one length, lognormal response lengths set with
max_new_tokens (no EOS), sampling at temperature 1 with log-probabilities. The three take turns, `--repeats` times, each
after a warm-up; only tokens within max_new_tokens count.

    python benchmarks/embedded_speed.py                                            # tiny model, CPU, 32 slots
    python benchmarks/embedded_speed.py --model qwen2-0.5b --device cuda --slots 256 --requests 1024 \
        --mean-length 512 --max-length 2048 --repeats 1 --beside
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from sortedrl.core.engine import Request, RequestFinished, Tokens
from sortedrl.core.rollout import Prompt
from sortedrl.engines.embedded.engine import EmbeddedEngine


@dataclass(frozen=True, slots=True)
class Workload:
    requests: tuple[Request, ...]
    slots: int
    max_length: int

    @property
    def tokens(self) -> int:
        return sum(request.max_new_tokens for request in self.requests)

    def shortened(self, tokens: int) -> Workload:
        """One batch of short requests for warm-up."""
        few = tuple(r._replace(max_new_tokens=min(r.max_new_tokens, tokens)) for r in self.requests[: self.slots])
        return replace(self, requests=few)


def tiny_llama() -> PreTrainedModel:
    """About a million parameters."""
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=320,
        max_position_embeddings=4096,
    )
    return LlamaForCausalLM(config)  # type: ignore[no-untyped-call]


def qwen2_half_billion() -> PreTrainedModel:
    """The shape of Qwen2-0.5B."""
    config = Qwen2Config(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151936,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config)  # type: ignore[no-untyped-call]


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "tiny-llama": tiny_llama,
    "qwen2-0.5b": qwen2_half_billion,
}


def make_workload(args: argparse.Namespace, vocabulary_size: int) -> Workload:
    """Lognormal lengths with the given mean before truncation at the limit."""
    rng = random.Random(args.seed)
    mu = math.log(args.mean_length) - args.sigma**2 / 2
    longest = args.max_length - args.prompt_length
    requests = []
    for index in range(args.requests):
        prompt = [rng.randrange(vocabulary_size) for _ in range(args.prompt_length)]
        length = min(max(round(rng.lognormvariate(mu, args.sigma)), 1), longest)
        requests.append(
            Request(
                id=index, prompt=Prompt(str(index), prompt), prefix=(), max_new_tokens=length, seed=rng.getrandbits(62)
            )
        )
    return Workload(tuple(requests), args.slots, args.max_length)


def run_embedded(engine: EmbeddedEngine, work: Workload) -> int:
    engine.submit(work.requests)
    finished = made = 0
    while finished < len(work.requests):
        for change in engine.poll():
            if isinstance(change, Tokens):
                made += len(change.segment)
            elif isinstance(change, RequestFinished):
                finished += 1
    return made


class LogprobRecorder(LogitsProcessor):
    """Log-probabilities of sampled tokens without keeping the logits of every step."""

    def __init__(self) -> None:
        self.recorded: list[Tensor] = []
        self._previous: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._previous is not None:
            self.recorded.append(self._previous.gather(1, input_ids[:, -1:]))
        self._previous = scores.float().log_softmax(-1)
        return scores


def run_generate(model: PreTrainedModel, work: Workload) -> int:
    """Static batches of `slots`, in order; a batch runs until its longest response is done."""
    made = 0
    for start in range(0, len(work.requests), work.slots):
        batch = work.requests[start : start + work.slots]
        longest = max(request.max_new_tokens for request in batch)
        prompts = torch.tensor([list(request.prompt.tokens) for request in batch], device=model.device)
        generated = model.generate(  # type: ignore[operator]
            prompts,
            attention_mask=torch.ones_like(prompts),
            generation_config=_sampling_config(longest),
            logits_processor=LogitsProcessorList([LogprobRecorder()]),
        )
        width = generated.shape[1] - prompts.shape[1]
        made += sum(min(request.max_new_tokens, width) for request in batch)
    return made


def run_continuous_batching(model: PreTrainedModel, work: Workload) -> int:
    """The manager of transformers, one max_new_tokens per request."""
    longest = max(request.max_new_tokens for request in work.requests)
    prompt = max(len(request.prompt.tokens) for request in work.requests)
    page = 256
    pages_per_request = -(-(prompt + longest) // page)
    config = transformers.ContinuousBatchingConfig(
        return_logprobs=True,
        max_requests_per_batch=work.slots,
        num_blocks=work.slots * pages_per_request,
        max_batch_tokens=work.slots + 4 * prompt,
        allow_block_sharing=False,
        seed=0,
    )
    manager = model.init_continuous_batching(  # type: ignore[operator]
        generation_config=_sampling_config(longest), continuous_batching_config=config
    )
    manager.start()
    made = 0
    try:
        for request in work.requests:
            manager.add_request(list(request.prompt.tokens), max_new_tokens=request.max_new_tokens, eos_token_id=-1)
        finished = 0
        while finished < len(work.requests):
            result = manager.get_result(timeout=5)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("continuous batching stopped before all requests were done")
                continue
            if result.is_finished():
                if result.error is not None:
                    raise RuntimeError(result.error)
                made += len(result.generated_tokens)
                finished += 1
    finally:
        manager.stop(block=True)
    return made


def _sampling_config(longest: int) -> GenerationConfig:
    return GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=longest,
        eos_token_id=None,
        pad_token_id=0,
        use_cache=True,
    )


@dataclass(frozen=True, slots=True)
class Turn:
    """CPU seconds on a shared machine; wall-clock seconds on a GPU."""

    tokens_per_second: float
    tokens_per_cpu_second: float


def measure(
    contenders: dict[str, Callable[[Workload], int]], work: Workload, repeats: int, synchronize: Callable[[], None]
) -> dict[str, list[Turn]]:
    """The interleaved measurements of each contender."""
    for name, contender in contenders.items():
        # Let the embedded engine see all its shapes: on CUDA it captures one graph per shape.
        contender(work if name == "embedded" else work.shortened(8))
    turns: dict[str, list[Turn]] = {name: [] for name in contenders}
    for number in range(1, repeats + 1):
        for name, contender in contenders.items():
            synchronize()
            start, cpu_start = time.perf_counter(), time.process_time()
            made = contender(work)
            synchronize()
            seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
            if made != work.tokens:
                raise RuntimeError(f"{name} generated {made} tokens instead of {work.tokens}")
            turns[name].append(Turn(made / seconds, made / cpu_seconds))
            print(f"  turn {number}  {name:<20} {turns[name][-1].tokens_per_second:>9,.0f} tok/s", flush=True)
    return turns


def print_table(turns: dict[str, list[Turn]]) -> None:
    wall = {name: [turn.tokens_per_second for turn in of] for name, of in turns.items()}
    cpu = {name: statistics.median(turn.tokens_per_cpu_second for turn in of) for name, of in turns.items()}
    ours = statistics.median(wall["embedded"])
    print(f"\n{'':<20} {'tok/s':>9} {'min':>9} {'max':>9} {'embedded':>9} {'tok/CPU-s':>10} {'embedded':>9}")
    for name, rates in wall.items():
        median = statistics.median(rates)
        print(
            f"{name:<20} {median:>9,.0f} {min(rates):>9,.0f} {max(rates):>9,.0f} {ours / median:>8.2f}x "
            f"{cpu[name]:>10,.0f} {cpu['embedded'] / cpu[name]:>8.2f}x"
        )


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare the speed of the embedded engine with transformers.")
    parser.add_argument("--model", choices=MODELS, default="tiny-llama")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--mean-length", type=float, default=128)
    parser.add_argument("--sigma", type=float, default=1.0, help="of the logarithm of the length")
    parser.add_argument("--prompt-length", type=int, default=64)
    parser.add_argument("--max-length", type=int, default=1024, help="prompt plus response tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--beside",
        nargs="*",
        choices=("generate", "continuous-batching"),
        default=("generate", "continuous-batching"),
        help="what to compare the embedded engine with; nothing if no name follows",
    )
    parser.add_argument("--json", type=Path, help="write the metrics to this file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parsed(arguments)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    model: Any = MODELS[args.model]()
    model = model.to(device=args.device, dtype=dtype).eval()
    work = make_workload(args, model.config.vocab_size)
    engine = EmbeddedEngine(model, slots=args.slots, eos_token_ids=(), max_length=args.max_length)
    contenders: dict[str, Callable[[Workload], int]] = {"embedded": partial(run_embedded, engine)}
    if "generate" in args.beside:
        contenders["generate"] = partial(run_generate, model)
    if "continuous-batching" in args.beside and not hasattr(transformers, "ContinuousBatchingConfig"):
        print(f"transformers {transformers.__version__} has no continuous batching: skipped")
    elif "continuous-batching" in args.beside:
        contenders["continuous-batching"] = partial(run_continuous_batching, model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{args.model}, {parameters / 1e6:.1f} M parameters, {args.device}, {dtype}, {args.slots} slots, "
        f"{len(work.requests)} requests, {work.tokens} tokens"
    )
    synchronize = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    turns = measure(contenders, work, args.repeats, synchronize)
    print_table(turns)
    if args.json is not None:
        run_metrics = {
            "arguments": {**vars(args), "json": str(args.json)},
            "parameters": parameters,
            "tokens": work.tokens,
            "machine": torch.cuda.get_device_name() if args.device == "cuda" else platform.processor(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "turns": {name: [asdict(turn) for turn in of] for name, of in turns.items()},
        }
        args.json.write_text(json.dumps(run_metrics, indent=2) + "\n")


if __name__ == "__main__":
    main()
