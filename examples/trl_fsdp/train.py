"""GRPO on several GPUs with weights that are sharded over them.

    accelerate launch --config_file fsdp2.yaml train.py --model MODEL                       # vLLM on every GPU
    accelerate launch --config_file fsdp2.yaml train.py --model MODEL --servers URL URL     # vLLM servers elsewhere

`zero3.yaml` does the same with DeepSpeed. docs/many_gpus.md has the commands for the servers and for several nodes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig

from sortedrl.engines.servers.base import ServerPool
from sortedrl.engines.servers.vllm import VllmServerEngine
from sortedrl.integrations.trl import SortedGRPOTrainer


def brief(completion_ids: list[list[int]], **columns: object) -> list[float]:
    """Replace it with your reward."""
    return [-float(len(ids)) for ids in completion_ids]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--servers", nargs="*", default=[], help="addresses: rank 0 generates there for all ranks")
    parser.add_argument("--engine", default="vllm", help="without servers, on every rank: vllm or your.module:factory")
    parser.add_argument("--slots", type=int, help="of each engine (vLLM max_num_seqs); default: all hold an update")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=2048, help="of a response, at most")
    parser.add_argument("--output", type=Path, default=Path("trl-fsdp"))
    parser.add_argument("--resume", help="a checkpoint")
    options = parser.parse_args()
    vllm_is_here = options.engine == "vllm" and not options.servers
    tokenizer = AutoTokenizer.from_pretrained(options.model)

    args = GRPOConfig(
        output_dir=str(options.output),
        max_steps=options.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=16,
        num_generations=8,
        max_completion_length=options.tokens,
        save_steps=50,
        logging_steps=1,
        bf16=torch.cuda.is_available(),
        **{"vllm_max_model_length": options.tokens + 256} if vllm_is_here else {},
        report_to="none",
    )

    def servers() -> ServerPool:  # called on rank 0, which generates for all ranks
        eos, slots = [tokenizer.eos_token_id], options.slots or args.generation_batch_size // len(options.servers)
        return ServerPool([VllmServerEngine(url, slots=slots, eos_token_ids=eos) for url in options.servers])

    trainer = SortedGRPOTrainer(
        model=options.model,
        reward_funcs=brief,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": f"Count from {i} to {2 * i}."} for i in range(1, 1000)]),
        processing_class=tokenizer,
        engine=servers if options.servers else options.engine,
        slots=None if options.servers else options.slots,
    )
    trainer.train(resume_from_checkpoint=options.resume)


if __name__ == "__main__":
    main()
