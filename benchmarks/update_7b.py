"""One update of a model with 7B parameters on one GPU: peak memory and seconds, as one line of JSON per variant.

    python benchmarks/update_7b.py --train full     all weights, the learner's own AdamW: 12 bytes per weight
                                                    (bf16 weight, gradient and first moment, fp32 second
                                                    moment, the 16 bits of the fp32 weight that bf16 lacks)
    python benchmarks/update_7b.py --train lora     bf16 base, fp32 adapters on all linear layers
    python benchmarks/update_7b.py --shape tiny --device cpu
    python benchmarks/update_7b.py --shape llama-8b --rollouts 48 --max-response-tokens 4096 \
        --variants recompute keep compile keep+compile          what makes the learner faster

Weights and tokens are random; lengths are lognormal as in long reasoning, truncated at the limit. The first update is a
warm-up, and the later ones are timed. If memory runs out, the result is `"fits": false` with the memory requested.
Variants run in turn, each with a new model. `keep`: micro-batches of `--kept-tokens` keep their activations instead of
recomputing them; longer rollouts are recomputed. `compile`: torch.compile of each layer, of the log-probabilities and
of the optimizer step. `--profile` adds an update under PyTorch's profiler: GPU seconds by kind of kernel.
`--alternate-cudnn` allows cuDNN's attention in every second update, from the second one on, which the learner excludes.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import resource
import sys
import time
from collections import Counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config

from sortedrl.core.batch import Batch
from sortedrl.core.rollout import Prompt, Rollout, Segment
from sortedrl.learner.learner import Learner
from sortedrl.learner.settings import LearnerSettings

GIB = 2**30
SHAPES: dict[str, PreTrainedConfig] = {
    "qwen2-7b": Qwen2Config(
        vocab_size=152_064,
        hidden_size=3584,
        intermediate_size=18_944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=32_768,
    ),
    "llama-8b": LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=32_768,
    ),
    "tiny": Qwen2Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    ),
}

VARIANTS = ("recompute", "keep", "compile", "keep+compile")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2-7b")
    parser.add_argument("--layers", type=int, help="default: that of the shape")
    parser.add_argument("--train", choices=("full", "lora"), default="full")
    parser.add_argument("--lora-rank", type=int, default=32)
    parser.add_argument("--algorithm", choices=("reinforce++", "ppo"), default="reinforce++")
    parser.add_argument("--kl-coefficient", type=float, default=0.0, help="above 0, a reference model is kept")
    parser.add_argument("--rollouts", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--mean-response-tokens", type=int, default=1024)
    parser.add_argument("--max-response-tokens", type=int, default=8192)
    parser.add_argument("--tokens-per-micro-batch", type=int, default=16_384)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["recompute"])
    parser.add_argument("--kept-tokens", type=int, default=4096)
    parser.add_argument("--timed-updates", type=int, default=1)
    parser.add_argument("--alternate-cudnn", action="store_true", help="in every second update, for a comparison")
    parser.add_argument("--profile", action="store_true", help="one more update, under PyTorch's profiler")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def rollouts(options: argparse.Namespace, vocabulary: int, version: int) -> list[Rollout]:
    """Random tokens with the log-probability that a uniform model gives them."""
    source = random.Random(options.seed + version)
    out = []
    for index in range(options.rollouts):
        length = int(source.lognormvariate(math.log(options.mean_response_tokens) - 0.5, 1.0))
        length = min(max(length, 1), options.max_response_tokens)
        segment = Segment(source.choices(range(vocabulary), k=length), [-math.log(vocabulary)] * length, version)
        out.append(
            Rollout(
                id=index,
                prompt=Prompt(str(index), source.choices(range(vocabulary), k=options.prompt_tokens)),
                index_in_group=0,
                cohort=version,
                seed=index,
                loaded_at_update=version,
                segments=[segment],
                reward=float(source.random() < 0.5),
            )
        )
    return sorted(out, key=len)


def peak_gib(device: str) -> float:
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated() / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


KERNELS = {  # the first kind that occurs in a kernel's name; the rest is "other"
    "attention": ("flash", "fmha", "attention"),
    "matrix multiplications": ("gemm", "nvjet", "cutlass", "cublas", "splitk", "xmma"),
    "compiled": ("triton",),
    "copies": ("memcpy", "memset"),
    "elementwise and reductions": ("elementwise", "reduce", "softmax", "index", "scatter", "gather", "cat", "foreach"),
}


def kind_of(kernel: str) -> str:
    name = kernel.lower()
    return next((kind for kind, parts in KERNELS.items() if any(part in name for part in parts)), "other")


def profiled(learner: Learner, batch: list[Rollout], version: int, device: str) -> dict[str, Any]:
    """Seconds by kind of kernel, and of the optimizer step, which are part of them."""
    activity = torch.profiler.ProfilerActivity
    on_gpu = device.startswith("cuda")
    step, of_optimizer = learner._optimizer.step, 0.0

    def timed_step(learning_rate: float, gradient_scale: float) -> None:
        nonlocal of_optimizer
        if on_gpu:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        step(learning_rate, gradient_scale)
        if on_gpu:
            torch.cuda.synchronize()
        of_optimizer += time.perf_counter() - begin

    learner._optimizer.step = timed_step  # type: ignore[method-assign]
    with torch.profiler.profile(activities=[activity.CUDA if on_gpu else activity.CPU]) as profile:
        begin = time.perf_counter()
        learner.step(Batch(version, version, version, tuple(batch)))
        whole = time.perf_counter() - begin
    seconds: Counter[str] = Counter()
    longest: Counter[str] = Counter()
    for event in profile.key_averages():
        of_event = (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6
        seconds[kind_of(event.key)] += of_event
        longest[event.key[:80]] += of_event
    return {
        "profiled_seconds": round(whole, 2),
        "seconds_by_kind": {kind: round(value, 2) for kind, value in seconds.most_common()},
        "longest_kernels": {kernel: round(value, 2) for kernel, value in longest.most_common(12)},
        "seconds_of_optimizer": round(of_optimizer, 3),
    }


def measured(options: argparse.Namespace, variant: str, result: dict[str, Any]) -> None:
    """Fills `result` step by step, so that measurements before running out of memory are kept."""
    config = SHAPES[options.shape]
    if options.layers:
        config.num_hidden_layers = options.layers
    torch.manual_seed(options.seed)
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.bfloat16
        )
    result["weights"] = sum(parameter.numel() for parameter in model.parameters())
    keeps = "keep" in variant
    learner = Learner(
        model,
        LearnerSettings(
            algorithm=options.algorithm,
            kl_coefficient=options.kl_coefficient,
            tokens_per_micro_batch=options.kept_tokens if keeps else options.tokens_per_micro_batch,
            gradient_checkpointing=True,
            recompute_above_tokens=options.kept_tokens if keeps else 0,
            compile_layers="compile" in variant,
            bf16=True,
            lora_rank=options.lora_rank if options.train == "lora" else 0,
        ),
    )
    result["trained_weights"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if options.device.startswith("cuda"):
        result["at_rest_gib"] = round(torch.cuda.memory_allocated() / GIB, 2)
    seconds, tokens, trained = 0.0, 0, 0.0
    speeds: list[int] = []
    for version in range(1 + options.timed_updates):
        batch = rollouts(options, config.vocab_size, version)
        if options.alternate_cudnn:
            torch.backends.cuda.enable_cudnn_sdp(version % 2 == 1)
        begin = time.perf_counter()
        metrics = learner.step(
            Batch(version, version, version, tuple(batch))
        )  # it reads results back at the end, so the device has finished
        took = time.perf_counter() - begin
        if not version:
            result["seconds_of_first_update"] = round(took, 2)
            continue
        seconds += took
        tokens_of_update = sum(len(rollout) + len(rollout.prompt.tokens) for rollout in batch)
        tokens += tokens_of_update
        speeds.append(round(tokens_of_update / took))
        trained += metrics["tokens_trained"]
    begin = time.perf_counter()
    published = sum(weight.nbytes for _, weight in learner.weights())
    result |= {
        "seconds_per_update": round(seconds / options.timed_updates, 2),
        "tokens_per_second": round(tokens / seconds),
        "tokens_per_second_of_updates": speeds,
        "trained_tokens_per_update": round(trained / options.timed_updates),
        "published_gib": round(published / GIB, 2),
        "seconds_to_merge_weights": round(time.perf_counter() - begin, 2),
        **{
            name: round(metrics[name], 6)
            for name in ("padding_fraction", "padding_saved", "micro_batches", "mismatch_kl", "grad_norm")
        },
    }
    if options.profile:
        batch = rollouts(options, config.vocab_size, options.timed_updates)
        result |= profiled(learner, batch, options.timed_updates, options.device)


def main() -> int:
    options = arguments()
    for variant in options.variants:
        result: dict[str, Any] = {
            **vars(options),
            "variant": variant,
            "torch": torch.__version__,
            "optimizer_bytes_per_weight": 12 if options.train == "full" else 16,
            "fits": True,
        }
        try:
            measured(options, variant, result)
        except torch.OutOfMemoryError as failure:
            result |= {"fits": False, "failure": str(failure).splitlines()[0]}
        result["peak_gib"] = round(peak_gib(options.device), 2)
        print(json.dumps(result), flush=True)
        gc.collect()
        if options.device.startswith("cuda"):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    return 0


if __name__ == "__main__":
    sys.exit(main())
