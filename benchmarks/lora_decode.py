"""What would adapter-only weight updates cost? Seconds per decode step of vLLM with a LoRA adapter and without one.

    python benchmarks/lora_decode.py --shape 8b --out OUT            one GPU, 80 s
    python benchmarks/lora_decode.py --shape tiny --out OUT          a trial on a CPU

Today a LoRA learner sends merged weights, and the engine knows nothing of adapters. An update of the adapter alone is
smaller (printed: bytes of both), but every step then computes base and adapter apart. Each round makes a fresh adapter
under a new name, because vLLM's prefix cache depends on the name, and times its loading with the first token. Rounds of
both kinds take turns. Results go to OUT/lora_decode.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

HERE = Path(__file__).parent
SHAPES = {"8b": "llama-3.1-8b", "1.5b": "qwen2.5-1.5b", "tiny": "tiny"}
RANK = 16
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(config: Any, folder: Path, seed: int) -> int:
    """A random adapter of all linear layers in peft's format; its bytes."""
    torch.manual_seed(seed)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    tensors = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in TARGETS:
            outputs, inputs = module.weight.shape
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(RANK, inputs).bfloat16() / inputs**0.5
            tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(outputs, RANK).bfloat16() / 100
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": TARGETS, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(about | {"task_type": "CAUSAL_LM"}))
    return sum(tensor.nbytes for tensor in tensors.values())


def main() -> int:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("h200"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    model, on_gpu = HERE / "shapes" / SHAPES[options.shape], torch.cuda.is_available()
    config = AutoConfig.from_pretrained(model)
    began = time.perf_counter()

    def record(**fields: Any) -> None:
        line = json.dumps({"shape": options.shape, "at": round(time.perf_counter() - began, 1), **fields})
        print(line, flush=True)
        with (options.out / "lora_decode.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    llm = LLM(
        str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_lora=True,
        max_lora_rank=RANK,
        max_loras=1,
        max_num_seqs=options.slots,
        max_model_len=512,
        dtype="bfloat16" if on_gpu else "float32",
        disable_log_stats=True,
        **({"gpu_memory_utilization": 0.6} if on_gpu else {"enforce_eager": True, "kv_cache_memory_bytes": 2**28}),
    )

    def seconds(tokens: int, adapter: LoRARequest | None) -> float:
        prompts: Any = [{"prompt_token_ids": [1 + i % 50] * 16} for i in range(options.slots)]
        parameters = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        llm.generate(prompts, parameters, lora_request=adapter, use_tqdm=False)
        return time.perf_counter() - start

    with tempfile.TemporaryDirectory() as folder:
        for turn in range(options.rounds + 1):  # the first one warms up
            path = Path(folder) / str(turn)
            size = write_adapter(config, path, turn)
            for kind, adapter in (("merged", None), ("adapter", LoRARequest(f"version-{turn}", turn + 1, str(path)))):
                first = seconds(1, adapter)
                again = seconds(1, adapter)
                step = (seconds(options.tokens, adapter) - again) / (options.tokens - 1)
                if turn:
                    record(kind=kind, round=turn, load_seconds=first - again, step_ms=1000 * step, adapter_bytes=size)
    return 0


if __name__ == "__main__":
    sys.exit(main())
